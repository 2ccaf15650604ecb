"""Training tokens/s beside other programs in one run, for a masked, a causal and an encoder-decoder model:
the table and the figure of docs/studies/performance.md.

The subjects take turns, as in throughput.py. LLaMA-Factory takes part (causal model only) where it is
installed: `--add` measures further models in another environment and keeps those that are published."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.ground import make_parser
from common.measuring import RESULTS, ROOT, compare_times, describe_machine, save
from common.stage import collect_times, join_sessions, prepare
from common.subjects import TrainingSetup
from throughput import compare_losses, measure_subjects, summarize

PAGE = ROOT / "docs" / "studies" / "performance.md"
FIGURE = ROOT / "docs" / "images" / "side-by-side.png"
FILE = RESULTS / "side_by_side.json"
BEGIN = "<!-- generated: side_by_side -->\n"
END = "<!-- end: side_by_side -->"
SHAPES = {"roberta": "masked (RoBERTa)", "gpt2": "causal (GPT-2)", "t5": "spans (T5)"}
LABELS = {
    "hf": "Hugging Face `Trainer`",
    "hf, bf16": "`Trainer`, bf16",
    "llama-factory": "LLaMA-Factory, `pt`",
    "dense": "PyTorch loop",
    "cpt, quick dropout": "cpt, `ncl`",
    "cpt, bf16, quick dropout": "cpt, `ncl`, bf16-mixed",
    "cpt, das": "cpt, `das`",
    "cpt, migu": "cpt, `migu`",
    "cpt, ewc": "cpt, `ewc`",
    "cpt, lora": "cpt, `lora`",
}
REFERENCE = "hf"


def measure(shape: str, *, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model: tokens/s, and the ratios to the Trainer, paired round by round."""
    names = [name for name in LABELS if name != "llama-factory"]
    if shape == "gpt2" and find_spec("llamafactory"):
        names.append("llama-factory")
    setup = TrainingSetup(
        threads=options.threads,
        rounds=options.repeats,
        chunk=options.steps,
        cache=options.cache,
        batch=options.batch,
        length=options.length,
        fused=False,
        equal=False,
        shape=shape,
    )
    check = replace(setup, rounds=1, chunk=10, equal=True)
    check.build_workload()  # fills the cache
    setup.build_workload()

    equal = compare_losses(measure_subjects(check, ["cpt", "hf", "dense"], patience=0.0)["reports"])
    sessions = [measure_subjects(setup, names, patience=options.patience) for _ in range(options.casts)]
    run = join_sessions(sessions)
    figures = summarize(run, setup, ours="cpt, quick dropout")
    wall = collect_times(run["chunks"], figures["rounds"], "wall")
    ratios = {}
    for name, durations in wall.items():
        if name != REFERENCE:
            ratios[name] = compare_times(durations, wall[REFERENCE])
    return {
        **figures,
        "options": {name: value for name, value in vars(options).items() if name not in ("cache", "out")},
        "machine": describe_machine(),
        "equal_work": equal,
        "over_trainer": ratios,
        "chunks": run["chunks"],
    }


def format_table(shapes: Mapping[str, Mapping[str, Any]]) -> str:
    """Tokens/s and the ratio to the Trainer with its interval, by program and model."""
    measured_shapes = [shape for shape in SHAPES if shape in shapes]
    heads = " | ".join(SHAPES[shape] for shape in measured_shapes)
    lines = [f"| tokens/s (ratio to the `Trainer`) | {heads} |"]
    lines.append(f"| :-- |{' :-- |' * len(measured_shapes)}")
    for name, label in LABELS.items():
        cells = []
        for shape in measured_shapes:
            speeds = shapes[shape]["tokens_per_s"]
            ratios = shapes[shape]["over_trainer"]
            ratio = "1"
            if name in ratios:
                ratio = "{median:.2f} [{low:.2f}, {high:.2f}]".format(**ratios[name])
            cells.append(f"{speeds[name]:,.0f} ({ratio})" if name in speeds else "–")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(shapes: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Bars of the ratios to the Trainer with their intervals, a panel per model."""
    measured_shapes = [shape for shape in SHAPES if shape in shapes]
    figure, panels = plt.subplots(
        1,
        len(measured_shapes),
        figsize=(3.4 * len(measured_shapes) + 2, 3.6),
        sharey=True,
        squeeze=False,
    )
    names = [name for name in LABELS if name != REFERENCE][::-1]
    for shape, axes in zip(measured_shapes, panels[0], strict=True):
        ratios = shapes[shape]["over_trainer"]
        for position, name in enumerate(names):
            if name in ratios:
                ratio = ratios[name]
                interval = [[ratio["median"] - ratio["low"]], [ratio["high"] - ratio["median"]]]
                color = "#0072b2" if name.startswith("cpt") else "#999999"
                axes.barh(position, ratio["median"], xerr=interval, color=color)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title(SHAPES[shape], fontsize=10)
        axes.set_xlabel("tokens/s over the Trainer")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(names)), [LABELS[name].replace("`", "") for name in names])
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = make_parser(__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=3, help="timed steps per chunk")
    parser.add_argument("--repeats", type=int, default=8, help="chunks per subject and cast")
    parser.add_argument("--casts", type=int, default=1, help="times that all subjects are started anew")
    parser.add_argument("--length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--add", action="store_true", help="keep the published models that are not measured")
    parser.add_argument("--published", action="store_true", help="measure nothing: write table and figure")
    options = parser.parse_args()

    path = Path(options.out or FILE)
    is_kept = path.exists() and (options.add or options.published)
    if options.published and not path.exists():
        parser.error(f"--published is invalid: {path} does not exist; measure first")
    shapes: dict[str, Any] = json.loads(path.read_text())["shapes"] if is_kept else {}

    prepare(options.threads)
    measured = [] if options.published else options.shapes
    for shape in measured:
        shapes[shape] = measure(shape, options=options)
        save("side_by_side", {"shapes": shapes}, out=options.out)
        print(format_table(shapes), flush=True)

    if path == FILE:
        before, _, remainder = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        page_text = f"{before}{BEGIN}\n{format_table(shapes)}\n\n{END}{remainder.partition(END)[2]}"
        PAGE.write_text(page_text, encoding="utf-8")
        draw(shapes, FIGURE)


if __name__ == "__main__":
    main()
