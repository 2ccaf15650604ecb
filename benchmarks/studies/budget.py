"""How often a budget of drift holds, and what it costs in learning: `python benchmarks/studies/budget.py
--root FOLDER` makes results/budget.json.

FOLDER holds corpora/<domain> and general with {train,valid,test}.jsonl.gz, of which the first documents are
read. For each seed, in one process, the domains of DAS are learned by a small model: with the budget, and at
fixed shares of the rate without one. A budget is steered by validation text; whether it held is read from the
last row of the matrix, on test text. Reports are not written."""

import argparse
import gzip
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir

from cpt.core.config import CONF
from cpt.evaluation.scores import Scores

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import save

NUM_DOCUMENTS = {"train": 300, "valid": 80, "test": 200}  # documents of each text
GENERAL = {"train": 2000}
SIZES = [
    "model.max_seq_length=64",
    "model.vocab_size=2048",
    "model.config.hidden_size=64",
    "model.config.intermediate_size=96",
    "model.config.num_attention_heads=2",
    "model.pretraining.steps=1000",
    "trainer.batch_size=16",
    "trainer.eval_batch_size=128",
    "trainer.importance_samples=16",
    "trainer.checkpoint_every_n_steps=100000",
    "domains.held_out.max_documents=200",
]
HELD = 0.95  # of the seeds
RATES = (1 / 20, 1 / 24, 1 / 32)  # the first broke the budget in 18 of 20 seeds


def main() -> None:
    options = read_arguments()
    work = Path(tempfile.mkdtemp()) if options.work is None else options.work
    copy_documents(options.root, work / "texts")
    settings = {f"rate x {rate:g}": rate for rate in options.rates} | {"budget": 1.0}
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for name, rate in settings.items():
            rows.append({"seed": seed, "setting": name} | learn(options, work, name, rate, seed))
            print(rows[-1], flush=True)

        recorded_options = {
            name: value for name, value in vars(options).items() if name not in ("root", "work", "out")
        }
        summary = sum_up(rows, seeds=seed + 1, general=options.general, past=options.past)
        save(
            "budget",
            {"options": recorded_options | {"seeds": seed + 1}, "settings": summary, "rows": rows},
            out=options.out,
        )
        for line in describe(summary):
            print(line, flush=True)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the data; see above")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40, help="of each domain")
    parser.add_argument("--general", type=float, default=0.02, help="nats")
    parser.add_argument("--past", type=float, default=0.05, help="nats")
    parser.add_argument("--tokens", type=int, default=6000, help="of each text, at a look")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="fixed ones, of the default")
    parser.add_argument("--given", nargs="*", default=[], help="options of all runs")
    parser.add_argument("--work", type=Path, help="where texts, base and runs lie; default: a new folder")
    parser.add_argument("--out", help="default: results/budget.json")
    return parser.parse_args()


def copy_documents(root: Path, into: Path) -> None:
    """The first documents of each text."""
    for folder in [*sorted((root / "corpora").iterdir()), root / "general"]:
        target = into / folder.relative_to(root)
        target.mkdir(parents=True, exist_ok=True)
        num_documents = NUM_DOCUMENTS
        if folder.name == "general":
            num_documents = NUM_DOCUMENTS | GENERAL
        for split, count in num_documents.items():
            with gzip.open(folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
                lines = list(islice(file, count))
            with gzip.open(target / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
                file.writelines(lines)


def learn(options: argparse.Namespace, work: Path, name: str, rate: float, seed: int) -> dict[str, Any]:
    """One run: what it learned, and by how much other text rose."""
    from cpt.reporting import run_page
    from cpt.train import train

    run_page.write_report = lambda *arguments: None  # pictures take longer than the learning
    bounds = []
    if name == "budget":
        bounds = ["budget=drift", f"budget.general={options.general}", f"budget.past={options.past}"]
    overrides = [
        "domains=das6",
        f"domains.root={work / 'texts'}",
        f"cache_dir={work / 'cache'}",
        *SIZES,
        f"seed={seed}",
        f"trainer.steps={options.steps}",
        f"optim.lr={2e-3 * rate}",
        "logger=none",
        f"monitor.max_tokens={options.tokens}",
        *bounds,
        *options.given,
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides)

    folder = work / "run"
    start_time = time.process_time()
    shutil.rmtree(folder, ignore_errors=True)
    train(cfg, run_dir=folder)
    scores = Scores.load(folder / "scores.json")
    return measure(scores) | {"seconds": round(time.process_time() - start_time, 1)}


def measure(scores: Scores) -> dict[str, float]:
    """Of the test text, in the mean: nats gained on each domain by its own stage, and by the end; nats that
    the general text and past domains rose by at the last row."""
    metrics = {name: metric["nats"] for name, metric in scores.metrics.items()}
    just_learned = list(scores.diagonal.values())
    base = [scores.matrix[0, scores.domains.index(name)] for name in scores.learned]
    return {
        "learned": float(np.mean(base) - np.mean(just_learned)),
        "kept": float(np.mean(base) - metrics["LC"]),
        "general": float(metrics["general_drift"]),
        "past": float(metrics["FG"]),
    }


def sum_up(rows: list[dict], *, seeds: int, general: float, past: float) -> dict[str, dict[str, float]]:
    """By setting: in which share of the seeds both bounds held, and means; what it learned over the best
    fixed setting that held in 95 % of them."""
    summary: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["setting"] for row in rows):
        setting_rows = [row for row in rows if row["setting"] == name]
        within_bounds = [row["general"] <= general and row["past"] <= past for row in setting_rows]
        figures = {"held": float(np.mean(within_bounds))}
        for key in ("learned", "kept", "general", "past"):
            figures[key] = float(np.mean([row[key] for row in setting_rows]))
        for key in ("general", "past"):
            figures[f"most {key}"] = max(row[key] for row in setting_rows)
        figures["seeds"] = seeds
        summary[name] = figures

    fixed = [figures for name, figures in summary.items() if name != "budget" and figures["held"] >= HELD]
    for key in ("learned", "kept"):
        best = max((figures[key] for figures in fixed), default=float("nan"))
        summary["budget"][f"{key} over the best fixed"] = summary["budget"][key] / best
    return summary


def describe(summary: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for name, figures in summary.items():
        yield f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items())


if __name__ == "__main__":
    main()
