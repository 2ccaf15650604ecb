"""Whether the KL divergence from the base on the new text tells what is forgotten of other text:
`python benchmarks/studies/divergence.py` makes results/divergence.json, and table and figure of
docs/studies/divergence.md; with `--report-only` these alone.

The demo's domains are learned by a small encoder and a small decoder, with several methods, rates and seeds,
in one process. After each stage the divergence is measured on the test text of its domain, and on that of
others. What other text has lost is regressed on it over runs, as in section 4 of arXiv 2509.04259, which
takes a polynomial of degree 2. Reports are not written."""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from study import IMAGES, PAGES, check_page, write_section

from cpt.core.config import CONF
from cpt.evaluation.scores import Scores

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import ROOT, round_numbers, save

MODELS = {"encoder": "tiny_modernbert", "decoder": "tiny_gpt2"}
METHODS = ("ncl", "replay", "ewc", "kd", "ema", "lora")
WITHOUT_MEMORY = ("ncl", "ema", "lora")  # neither old text, nor importances of it, nor a teacher
RATES = (0.25, 1.0, 3.0)  # of the default rate of a method
SETTINGS = ("seed", "model", "method", "rate")
RESULTS = ROOT / "benchmarks" / "results" / "divergence.json"
FIGURE = IMAGES / "divergence.png"
NUM_DRAWS = 2000  # of the bootstrap over runs
DEGREE = 2
MIN_RUNS = 6  # of a fit
PREDICTORS = ("kl_new", "kl_general", "learned")
OUTCOMES = {
    "general": "general text, rise since the base",
    "past": "earlier domains, rise since their stage",
}
SHORT_NAMES = {
    "kl_new": "KL",
    "kl_general": "KL on general text",
    "learned": "learned",
    "general": "general",
    "past": "earlier",
}


@dataclass(frozen=True)
class StageResult:
    """What a run has measured after a stage, on test text, in nats per scored token."""

    stage: int  # from 1
    kl_new: float  # KL(base || model) on the text of the stage
    kl_general: float
    learned: float  # fall of the loss on the text of the stage, since the base
    general: float  # rise of the loss on general text, since the base
    past: float | None  # mean rise on earlier domains, each since its own stage; None in the first stage


def main() -> None:
    options = read_arguments()
    check_page(PAGES / "divergence.md", "divergence")
    if not options.report_only:
        run_all(options)
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    summary = list(summarize(results["runs"]))
    RESULTS.write_text(json.dumps(round_numbers({**results, "summary": summary}), indent=1) + "\n")
    draw(results["runs"], FIGURE)
    write_section(PAGES / "divergence.md", "divergence", [format_summary(summary)])
    print(format_summary(summary))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of each domain")
    parser.add_argument("--tokens", type=int, default=6000, help="of each test text that are scored")
    parser.add_argument("--minutes", type=float, default=30, help="after which no further run is started")
    parser.add_argument("--work", type=Path, help="where the base and the runs are; default: a new folder")
    parser.add_argument("--report-only", action="store_true", help="no runs: only tables and figure")
    return parser.parse_args()


def run_all(options: argparse.Namespace) -> None:
    """Trains the runs that are missing, or as many as the minutes allow, seed by seed; saves after each."""
    work = Path(tempfile.mkdtemp()) if options.work is None else options.work
    start_time = time.monotonic()
    recorded_options = {"steps": options.steps, "tokens": options.tokens}
    runs = read_runs(recorded_options)
    finished = [(run["seed"], run["model"], run["method"], run["rate"]) for run in runs]
    for values in product(range(options.seeds), MODELS, METHODS, RATES):
        if values in finished:
            continue
        settings = dict(zip(SETTINGS, values, strict=True))
        if time.monotonic() - start_time > 60 * options.minutes:
            return
        stages = train_run(options, work, settings)
        runs.append({**settings, "stages": [asdict(stage) for stage in stages]})
        print(runs[-1], flush=True)
        save("divergence", {"options": recorded_options, "runs": runs}, out=str(RESULTS))


def read_runs(recorded_options: Mapping[str, int]) -> list[dict[str, Any]]:
    """The runs that an earlier call with the same options has saved."""
    if not RESULTS.exists():
        return []
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results["runs"] if results["options"] == recorded_options else []


def train_run(options: argparse.Namespace, work: Path, settings: Mapping[str, Any]) -> list[StageResult]:
    """What a run measured after each of its stages."""
    from cpt.reporting import run_page
    from cpt.train import train

    run_page.write_report = lambda *arguments: None  # pictures take longer than the training
    overrides = [
        f"model={MODELS[settings['model']]}",
        f"method={settings['method']}",
        f"seed={settings['seed']}",
        f"cache_dir={work / 'cache'}",
        f"trainer.steps={options.steps}",
        f"eval.max_tokens={options.tokens}",
        "divergence=base",
        "logger=none",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        default_rate = compose("config", overrides).optim.lr
        cfg = compose("config", [*overrides, f"optim.lr={default_rate * settings['rate']}"])

    folder = work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    train(cfg, run_dir=folder)
    return list(read_stages(Scores.load(folder / "scores.json")))


def read_stages(scores: Scores) -> Iterator[StageResult]:
    """The results of each stage of a run with its divergences."""
    matrix = scores.matrix
    columns = {text: column for column, text in enumerate(scores.domains)}
    for stage, text in enumerate(scores.rows[1:], start=1):
        past = None
        if stage > 1:
            rises = []
            for earlier, earlier_text in enumerate(scores.rows[1:stage], start=1):
                column = columns[earlier_text]
                rises.append(matrix[stage, column] - matrix[earlier, column])
            past = float(np.mean(rises))
        kl = scores.divergence["kl"][stage]
        yield StageResult(
            stage=stage,
            kl_new=kl[text][0],
            kl_general=kl["general"][0],
            learned=float(matrix[0, columns[text]] - matrix[stage, columns[text]]),
            general=float(matrix[stage, columns["general"]] - matrix[0, columns["general"]]),
            past=past,
        )


def summarize(runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The fit of each outcome on each predictor, by model and stage; of what earlier domains lost also among
    the methods that keep nothing of them."""
    num_stages = len(runs[0]["stages"])
    for model, stage, outcome in product(MODELS, range(1, num_stages + 1), OUTCOMES):
        results = select_results(runs, model, stage, METHODS)
        if len(results) < MIN_RUNS or results[0][outcome] is None:
            continue
        for predictor in PREDICTORS:
            fit = {"model": model, "stage": stage, "outcome": outcome, "methods": "all"}
            yield {**fit, "predictor": predictor, **describe_fit(results, predictor, outcome)}
        if outcome == "past":
            results = select_results(runs, model, stage, WITHOUT_MEMORY)
            fit["methods"] = ", ".join(WITHOUT_MEMORY)
            if len(results) >= MIN_RUNS:
                yield {**fit, "predictor": "kl_new", **describe_fit(results, "kl_new", outcome)}


def select_results(
    runs: Sequence[Mapping[str, Any]], model: str, stage: int, methods: Sequence[str]
) -> list[dict[str, Any]]:
    """The distinct results of a stage, each with its method: in the first stage, methods that act on the past
    alone are the same run."""
    results: list[dict[str, Any]] = []
    seen_divergences: set[float] = set()
    for run in runs:
        result = run["stages"][stage - 1]
        is_chosen = run["model"] == model and run["method"] in methods
        if is_chosen and result["kl_new"] not in seen_divergences:
            seen_divergences.add(result["kl_new"])
            results.append({**result, "method": run["method"]})
    return results


def describe_fit(results: Sequence[Mapping[str, Any]], predictor: str, outcome: str) -> dict[str, Any]:
    """R² of a polynomial of the outcome on the predictor with its 95 % bootstrap interval over runs; the same
    where each method is predicted by the fit of the others; Spearman's rank correlation."""
    x = np.array([result[predictor] for result in results])
    y = np.array([result[outcome] for result in results])
    methods = np.array([result["method"] for result in results])
    return {
        "runs": len(results),
        "r2": r_squared(x, y),
        "r2_interval": draw_interval(r_squared, x, y),
        "r2_other_methods": predict_other_methods(x, y, methods),
        "spearman": spearman(x, y),
        "spearman_interval": draw_interval(spearman, x, y),
    }


def r_squared(x: np.ndarray, y: np.ndarray) -> float:
    """1 - residual over total sum of squares, of a polynomial of DEGREE."""
    residuals = y - np.polyval(np.polyfit(x, y, DEGREE), x)
    return float(1 - np.square(residuals).sum() / np.square(y - y.mean()).sum())


def predict_other_methods(x: np.ndarray, y: np.ndarray, methods: np.ndarray) -> float:
    """R² of predictions for the runs of each method by a fit to those of all others; below 0 they are worse
    than the mean of y."""
    predicted = np.empty_like(y)
    for method in np.unique(methods):
        is_held_out = methods == method
        fit = np.polyfit(x[~is_held_out], y[~is_held_out], DEGREE)
        predicted[is_held_out] = np.polyval(fit, x[is_held_out])
    return float(1 - np.square(y - predicted).sum() / np.square(y - y.mean()).sum())


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """The correlation of the ranks; without ties, as of measured numbers."""
    ranks = [values.argsort().argsort() for values in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


def draw_interval(
    measure: Callable[[np.ndarray, np.ndarray], float], x: np.ndarray, y: np.ndarray
) -> list[float]:
    """The 2.5 and 97.5 percentiles over draws of runs."""
    generator = np.random.default_rng(0)
    values = []
    for _ in range(NUM_DRAWS):
        drawn = generator.integers(len(x), size=len(x))
        if len(np.unique(x[drawn])) > DEGREE:  # else the polynomial is not determined
            values.append(measure(x[drawn], y[drawn]))
    return np.percentile(values, [2.5, 97.5]).tolist()


def format_summary(summary: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of the fits on what the new text says."""
    lines = [
        "| model, stage | outcome | predictor, methods (runs) | R² | R², other methods | rank correlation |",
        "| :-- | :-- | :-- | :-- | --: | :-- |",
    ]
    for fit in summary:
        if fit["predictor"] == "kl_general":
            continue
        low, high = fit["r2_interval"]
        rank_low, rank_high = fit["spearman_interval"]
        cells = [
            f"{fit['model']}, {fit['stage']}",
            SHORT_NAMES[fit["outcome"]],
            f"{SHORT_NAMES[fit['predictor']]}, {fit['methods']} ({fit['runs']})",
            f"{fit['r2']:.2f} [{low:.2f}, {high:.2f}]",
            f"{fit['r2_other_methods']:.2f}",
            f"{fit['spearman']:.2f} [{rank_low:.2f}, {rank_high:.2f}]",
        ]
        lines.append(f"| {' | '.join(cells)} |".replace("-", "−"))
    return "\n".join(lines)


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws what other text lost against the divergence on the new text, a point for each run after its
    last stage; a color for each method."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.4), layout="constrained")
    axes = figure.subplots(2, len(MODELS), squeeze=False)
    for column, model in enumerate(MODELS):
        chosen = [run for run in runs if run["model"] == model]
        for row, outcome in enumerate(OUTCOMES):
            panel = axes[row, column]
            for number, method in enumerate(METHODS):
                results = [run["stages"][-1] for run in chosen if run["method"] == method]
                panel.scatter(
                    [result["kl_new"] for result in results],
                    [result[outcome] for result in results],
                    color=colormaps["tab10"](number),
                    label=method,
                    s=22,
                )
            panel.axhline(0, color="gray", linewidth=0.6)
            panel.set(
                title=f"{model}, after the last stage",
                xlabel="KL(base || model) on the new text, nats",
                ylabel=OUTCOMES[outcome],
            )
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
