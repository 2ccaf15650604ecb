"""Rates chosen on validation text, with the chat model of real_decoder.py:
`python benchmarks/studies/real_decoder_tuned.py --root FOLDER --model FOLDER`.

Each method has four trials of `python -m cpt.tune` over the rate, by the mean perplexity of all domains after
the last; the first has its default rate. The best one is then run on test text, with chats. Writes its
part of docs/studies/real-decoder.md; text and model are those of real_decoder.py, whose runs are those of
the default rates. Rerun to resume."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import study
from das6_tuned import read_searches
from real_decoder import CHANGES, EXPERIMENT, METHODS, find_run, format_change

from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.page import Block, format_markdown

NAME = "real_decoder_tuned"
PAGE = study.PAGES / "real-decoder.md"
TUNING = study.SCORES / "real_decoder_tuning.json"
SCORES = study.SCORES / f"{NAME}.jsonl.gz"
TUNED_METHODS = ("ncl", "lora")
BUDGET = 4
RATES = "tag(log,interval(3e-5,1e-3))"


def main() -> None:
    options = study.read_arguments(NAME, str(__doc__))
    if options.model is None and not options.report_only:
        sys.exit("--model is needed, or --report-only, or --published")
    study.check_page(PAGE, NAME)
    if options.published:
        study.restore_runs(study.read_scores(SCORES), options.runs / "final", EXPERIMENT, list)
    elif not options.report_only:
        tune_rates(options)

    final_runs = study.find_finished(options.runs / "final")
    if not options.published:
        study.write_scores(SCORES, final_runs)
    searches = json.loads(TUNING.read_text(encoding="utf-8"))
    study.write_section(PAGE, NAME, write_parts(searches, final_runs, read_default_runs()))


def tune_rates(options: argparse.Namespace) -> None:
    """Runs the searches and the final runs, and writes what the searches found."""
    command = [sys.executable, "-m", "cpt.tune", f"experiment={EXPERIMENT}", f"name={options.runs.name}"]
    command += [f"domains.root={options.root}", f"model.name_or_path={options.model}"]
    command += [f"method={','.join(TUNED_METHODS)}", f"optim.lr={RATES}"]
    command += ["--budget", str(BUDGET), "--seeds", "1", "hydra.launcher.jobs=1"]
    subprocess.run(command, cwd=study.ROOT, check=True)
    searches = read_searches(options.runs / "tuning.json")
    TUNING.write_text(json.dumps(searches, indent=1) + "\n", "utf-8")


def read_default_runs() -> dict[str, MeasuredRun]:
    """The published runs of real_decoder.py with the default rate, by method; only those of seed 0."""
    published = study.read_scores(study.SCORES / f"{EXPERIMENT}.jsonl.gz")
    with tempfile.TemporaryDirectory() as folder:
        study.restore_runs(published, Path(folder), EXPERIMENT, list)
        runs = {study.identify(run.scores.run): run for run in study.find_finished(Path(folder))}
    default_runs = {}
    for method in TUNED_METHODS:
        run = find_run(runs, METHODS[method])
        assert run is not None, f"real_decoder.py has no run of {method}"
        default_runs[method] = run
    return default_runs


def write_parts(
    searches: Mapping[str, Any], final_runs: Sequence[MeasuredRun], default_runs: Mapping[str, MeasuredRun]
) -> Iterator[str]:
    """The trials of each method, then what its default and its chosen rate change on test text."""
    searches_by_method = {search["name"]: search for search in searches["methods"]}
    trial_cells = []
    for method, search in searches_by_method.items():
        best_trial = min(search["trials"], key=lambda trial: trial["score"])
        for trial in sorted(search["trials"], key=read_rate):
            mark = "chosen" if trial is best_trial else ""
            trial_cells.append([method, f"{read_rate(trial):.1e}", f"{trial['score']:.2f}", mark])
    head = ["method", "rate", "perplexity on validation text", ""]
    yield format_markdown(Block(title="Trials of each method", head=head, cells=trial_cells), picture="")

    result_cells = []
    for run in final_runs:
        method = run.scores.run["method"]
        best_trial = min(searches_by_method[method]["trials"], key=lambda trial: trial["score"])
        runs_by_label = {
            "default": default_runs[method],
            f"chosen, {read_rate(best_trial):.1e}": run,
        }
        for label, measured_run in runs_by_label.items():
            changes = [format_change(measure(measured_run)) for measure in CHANGES.values()]
            result_cells.append([method, label, *changes])
    yield format_markdown(
        Block(
            title="Default and chosen rate on test text",
            head=["method", "rate", *CHANGES],
            cells=result_cells,
            num_word_columns=2,
        ),
        picture="",
    )


def read_rate(trial: Mapping[str, Any]) -> float:
    """The rate of a trial. What else was searched, as LoRA's multiplier before cpt.tune left it out, has no
    effect on a given rate."""
    values = dict(assignment.split("=") for assignment in trial["values"])
    return float(values["optim.lr"])


if __name__ == "__main__":
    main()
