"""Tuned and default methods on six domains: `python benchmarks/studies/das6_tuned.py --root FOLDER`.

Each method has twelve trials over its own search space and the learning rate, on validation text
(`python -m cpt.tune`), then three runs on test text. The rows of the defaults are those published by
das6_mini.py. Writes its part of docs/studies/das6.md; the data are those of das6_mini.py. Rerun to resume."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import study

from cpt.evaluation.statistics import compare_pairs
from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.page import Block, format_markdown

METHODS = "ncl,das,ewc,migu,kd,replay,derpp"
COMMAND = [
    "experiment=das6_mini",
    f"method={METHODS}",
    "optim.lr=tag(log,interval(3e-4,5e-3))",
    "--budget",
    "12",
    "--seeds",
    "3",
]
TUNING = study.SCORES / "das6_tuning.json"
Values = dict[str, dict[tuple, Mapping[str, float]]]  # by method, then by order and seed


def main() -> None:
    options = study.read_arguments("das6_tuned", str(__doc__))
    study.check_page(study.PAGES / "das6.md", "das6_tuned")
    defaults_folder = options.runs / "default"
    default_scores = study.read_scores(study.SCORES / "das6_mini.jsonl.gz")
    study.restore_runs(default_scores, defaults_folder, "das6_mini", list)
    if options.published:
        published = study.read_scores(study.SCORES / "das6_tuned.jsonl.gz")
        study.restore_runs(published, options.runs / "final", "das6_mini", list)
    elif not options.report_only:
        overrides = [f"name={options.runs.name}", f"domains.root={options.root}"]
        line = [sys.executable, "-m", "cpt.tune", *COMMAND, *overrides]
        subprocess.run(line, cwd=study.ROOT, check=True)

    final = study.find_finished(options.runs / "final")
    if not options.published:
        study.write_scores(study.SCORES / "das6_tuned.jsonl.gz", final)
        shutil.copy(options.runs / "tuning-searches.png", study.IMAGES / "das6-tuning.png")
        TUNING.write_text(json.dumps(read_searches(options.runs / "tuning.json"), indent=1) + "\n", "utf-8")

    tuned = collect_values(final)
    plain = [run for run in study.find_finished(defaults_folder) if not run.scores.run["variant"]]
    default: Values = {}
    for method, values in collect_values(plain).items():
        if method in tuned:
            default[method] = {pair: values[pair] for pair in tuned[method]}
    searches = json.loads(TUNING.read_text(encoding="utf-8"))
    study.write_section(study.PAGES / "das6.md", "das6_tuned", parts(searches, default, tuned))


def read_searches(path: Any) -> dict[str, Any]:
    """The searches of tuning.json, without the final runs and their folders."""
    searches = json.loads(path.read_text(encoding="utf-8"))
    for search in searches["methods"]:
        search.pop("runs", None)
    return searches


def collect_values(runs: Sequence[MeasuredRun]) -> Values:
    """The measures of the runs without another mask or replay."""
    values: Values = {}
    for run in runs:
        if run.scores.run["mask"] == run.scores.run["replay"] == "none":
            values.setdefault(run.scores.run["method"], {})[run.pair] = run.values
    return values


def parts(searches: Mapping[str, Any], default: Values, tuned: Values) -> Iterator[str]:
    """The table of default and tuned methods, the lowest tuned perplexity first."""
    by_name = {search["name"]: search for search in searches["methods"]}
    default_means = mean_perplexities(default)
    tuned_means = mean_perplexities(tuned)
    default_ranks = sorted(default_means, key=default_means.__getitem__)
    tuned_ranks = sorted(tuned_means, key=tuned_means.__getitem__)
    cells = []
    for name in tuned_ranks:
        scored_trials = [trial for trial in by_name[name]["trials"] if trial["score"]]
        best = min(scored_trials, key=lambda trial: trial["score"])
        perplexities = f"{default_means[name]:.2f} → {tuned_means[name]:.2f}"
        difference = show_difference(default[name], tuned[name], "LC/perplexity", 2)
        cells.append(
            [
                name,
                format_options(best["values"]),
                f"{perplexities}: {difference}",
                f"{default_ranks.index(name) + 1} → {tuned_ranks.index(name) + 1}",
                show_difference(default[name], tuned[name], "FG/nats", 3),
                show_difference(default[name], tuned[name], "endtask/MF1", 1),
            ]
        )
    head = ["method", "tuned values", "LC", "rank", "Δ forgetting, nats", "Δ macro-F1, points"]
    yield format_markdown(Block(head=head, cells=cells, num_word_columns=2), picture="")


def mean_perplexities(values: Values) -> dict[str, float]:
    """The mean final perplexity of each method over its runs."""
    means = {}
    for name, runs in values.items():
        means[name] = fmean(run["LC/perplexity"] for run in runs.values())
    return means


def format_options(overrides: Sequence[str]) -> str:
    """`lr 0.001, strength 3`: the options of a trial, without their sections."""
    options = []
    for override in overrides:
        key, value = override.split("=")
        options.append(f"{key.rpartition('.')[2]} {float(value):.3g}")
    return ", ".join(options)


def show_difference(default: Mapping, tuned: Mapping, key: str, digits: int) -> str:
    """`-1.2 [-1.5, -0.9]`: the mean change of the pairs with its 95 % interval."""
    difference = compare_pairs(
        {pair: run.get(key) for pair, run in tuned.items()},
        {pair: run.get(key) for pair, run in default.items()},
    )
    bounds = (difference.mean, difference.low, difference.high)
    mean, low, high = (f"{study.scale(key) * bound:+.{digits}f}" for bound in bounds)
    return f"{mean} [{low}, {high}]"


if __name__ == "__main__":
    main()
