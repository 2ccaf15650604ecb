"""Seconds and bytes of the comparison of many runs: `python -m cpt.report` over synthetic run folders."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import numpy as np

from cpt.evaluation.scores import Scores

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import ROOT, measure_foreign_cores, save, summarize_times

METHODS = ("ncl", "one", "joint", "das", "migu", "ewc", "kd", "derpp", "replay", "lora", "demix", "hat")
ORDERS, SEEDS, TASK_SEEDS, EXAMPLES = 2, 10, 5, 500
TARGETS = {"seconds": 10, "html_bytes": 5_000_000}


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as top:
        write_runs(Path(top), runs=options.runs, domains=options.domains, predictions=options.predictions)
        foreign = measure_foreign_cores()
        seconds = [time_report(Path(top)) for _ in range(options.repeats)]
        page = Path(top) / "comparison.html"
        sizes = {path.suffix[1:]: path.stat().st_size for path in sorted(page.parent.glob("comparison.*"))}
    results = {
        "work": {"runs": options.runs, "domains": options.domains, "predictions": options.predictions},
        "seconds": {**summarize_times(seconds), "raw": seconds},
        "bytes": sizes,
        "targets": TARGETS,
        "foreign_cores_at_the_start": foreign,
    }
    print(json.dumps({key: results[key] for key in ("work", "seconds", "bytes")}, indent=1))
    print(save("report", results, out=options.out))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--domains", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--predictions", action="store_true", help="with files of end-task predictions")
    parser.add_argument("--out")
    return parser.parse_args()


def time_report(top: Path) -> float:
    """Wall seconds of the command, the start of Python included."""
    start_time = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cpt.report", str(top)]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start_time


def list_choices() -> Iterator[tuple[str, str, int, int]]:
    """Method, mask, order, seed: all methods with the first mask before any with the second."""
    for mask, seed, order, method in product(("none", "migu"), range(SEEDS), range(ORDERS), METHODS):
        yield method, mask, order, seed


def write_runs(top: Path, *, runs: int, domains: int, predictions: bool) -> None:
    """Writes so many run folders, with all that a comparison reads."""
    draw = np.random.default_rng(0)
    for number, (method, mask, order, seed) in enumerate(islice(list_choices(), runs)):
        folder = top / f"{number:03d}"
        folder.mkdir()
        names = [f"domain_{index:02d}" for index in range(domains)]
        learned = names if order == 0 else names[::-1]
        scores = make_scores(learned, draw=draw, method=method, mask=mask, seed=seed)
        scores.save(folder / "scores.json")
        (folder / "config.yaml").write_text(make_config(order=order, seed=seed, method=method))
        if predictions:
            write_predictions(folder, scores, draw=draw)


def make_scores(
    learned: list[str], *, draw: np.random.Generator, method: str, mask: str, seed: int
) -> Scores:
    rows = ["base", *learned]
    count = len(learned)
    run = {
        "name": "synthetic",
        "method": method,
        "mask": mask,
        "replay": "none",
        "variant": "",
        "seed": seed,
        "model": "tiny",
        "order": learned,
        "finished": True,
        "objective": "masked",
    }
    nll = draw.normal(4, 0.2, size=(len(rows), count + 1))
    weights = dict.fromkeys(rows[:4], 0.25)  # of the heaviest parts
    parts = dict.fromkeys(learned, weights)
    flops = draw.integers(10**12, 4 * 10**12, size=count).tolist()
    scores = Scores(
        domains=[*learned, "general"],
        rows=rows,
        nll=nll.tolist(),
        tokens=[40_000] * (count + 1),
        bytes=[160_000] * (count + 1),
        scored=[6_000] * (count + 1),
        run=run,
        texts={name: {"hash": name, "documents": {"test": 200}} for name in [*learned, "general"]},
        config_hash="0" * 16,
        versions={},
        modules=[parts if method == "demix" else {}] * len(rows),
        tokens_read=[0] + [100_000] * count,
        flops=[0, *flops],
        memory=[10**9] * len(rows),
        trained=[0] + [10**6] * count,
        stored=[index * 10**6 for index in range(len(rows))],
        activity_seconds={"learn": {name: float(draw.uniform(50, 90)) for name in learned}},
        endtasks=make_endtasks(learned, draw=draw, rows=len(rows)),
        alone=method == "one",
    )
    scores.measure()
    return scores


def make_endtasks(learned: list[str], *, draw: np.random.Generator, rows: int) -> dict:
    unscored = [[[None] * TASK_SEEDS for _ in learned]] * (rows - 1)
    last = draw.uniform(0.6, 0.8, size=(len(learned), TASK_SEEDS)).tolist()
    return {
        "when": "last",
        "tasks": learned,
        "seeds": list(range(TASK_SEEDS)),
        "hash": "0",
        "metric": dict.fromkeys(learned, "macro_f1"),
        "classes": dict.fromkeys(learned, 4),
        "examples": dict.fromkeys(learned, EXAMPLES),
        "scores": dict.fromkeys(("macro_f1", "micro_f1", "accuracy"), [*unscored, last]),
        "seconds": 60.0,
    }


def make_config(**choice: int | str) -> str:
    """As long as a real one."""
    choice_lines = "\n".join(f"{key}: {value}" for key, value in choice.items() if key != "method")
    setting_lines = "\n".join(f"  setting_{number}: {number}" for number in range(120))
    return f"{choice_lines}\nmethod:\n  name: {choice['method']}\ntrainer:\n{setting_lines}\n"


def write_predictions(folder: Path, scores: Scores, *, draw: np.random.Generator) -> None:
    import pyarrow
    from pyarrow import parquet

    last = folder / "endtasks" / f"{len(scores.rows) - 1:03d}-{scores.rows[-1]}"
    last.mkdir(parents=True)
    names = np.array(["a", "b", "c", "d"])
    for task, seed in product(scores.endtasks["tasks"], scores.endtasks["seeds"]):
        columns = {
            "id": [str(index) for index in range(EXAMPLES)],
            "label": names[draw.integers(4, size=EXAMPLES)],
        }
        columns["prediction"] = names[draw.integers(4, size=EXAMPLES)]
        parquet.write_table(pyarrow.table(columns), last / f"{task}-{seed}.parquet")


if __name__ == "__main__":
    main()
