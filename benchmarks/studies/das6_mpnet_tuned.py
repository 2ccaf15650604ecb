"""Tuned and default methods with real weights:
`python benchmarks/studies/das6_mpnet_tuned.py --root FOLDER --model FOLDER`.

Each method has four trials over its own search space on validation text (`python -m cpt.tune`), of which the
first has the default values, then one run on test text. The model of each first trial, which a run of the
defaults would give again bit for bit, is scored on test text, too. Writes its part of
docs/studies/real-encoder.md; data and weights are those of das6_mini.py. Rerun to resume."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import study
from das6_tuned import METHODS, format_options, read_searches

from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.page import Block, format_markdown

BUDGET = 4
SIZE = ["trainer.steps=8", "trainer.importance_samples=64", "eval.max_tokens=6000", "eval.when=last"]
TUNING = study.SCORES / "das6_mpnet_tuning.json"
SCORES = study.SCORES / "das6_mpnet_tuned.jsonl.gz"
LC = "LC/perplexity"
FG = "FG/nats"


def main() -> None:
    options = study.read_arguments("das6_mpnet_tuned", str(__doc__))
    if options.model is None and not options.report_only:
        sys.exit("--model is needed, or --report-only, or --published")
    study.check_page(study.PAGES / "real-encoder.md", "das6_mpnet_tuned")
    if options.published:
        study.restore_runs(study.read_scores(SCORES), options.runs / "final", "das6_mpnet", list)
    elif not options.report_only:
        tune_methods(options)

    final = study.find_finished(options.runs / "final")
    if not options.published:
        study.write_scores(SCORES, final)
    searches = json.loads(TUNING.read_text(encoding="utf-8"))
    study.write_section(study.PAGES / "real-encoder.md", "das6_mpnet_tuned", parts(searches, final))


def tune_methods(options: argparse.Namespace) -> None:
    """Runs the searches, scores the model of each first trial on test text, and writes what was found."""
    overrides = ["experiment=das6_mpnet", "endtask=none", *SIZE, f"domains.root={options.root}"]
    overrides.append(f"model.name_or_path={options.model}")
    search_options = [
        f"name={options.runs.name}",
        f"method={METHODS}",
        "--budget",
        str(BUDGET),
        "--seeds",
        "1",
    ]
    subprocess.run(
        [sys.executable, "-m", "cpt.tune", *overrides, *search_options], cwd=study.ROOT, check=True
    )

    searches = read_searches(options.runs / "tuning.json")
    for search in searches["methods"]:
        if not search["trials"]:
            continue
        runs = find_trials(options.runs / "search" / search["name"], search["trials"])
        for trial, run in zip(search["trials"], runs, strict=True):
            trial["forgetting"] = run.values[FG]

        name = f"{options.runs.name}/default/{search['name']}"
        scoring_options = ["method=none", f"init_from={runs[0].folder}", f"name={name}"]
        scoring_options.append(f"hydra.run.dir=outputs/{name}")
        subprocess.run([sys.executable, "run.py", *overrides, *scoring_options], cwd=study.ROOT, check=True)
        (default_run,) = study.find_finished(options.runs / "default" / search["name"])
        search["default_on_test"] = default_run.values[LC]

    TUNING.write_text(json.dumps(searches, indent=1) + "\n", "utf-8")
    shutil.copy(options.runs / "tuning-searches.png", study.IMAGES / "das6-mpnet-tuning.png")


def find_trials(folder: Path, trials: Sequence[Mapping[str, Any]]) -> list[MeasuredRun]:
    """The runs of a search, by its trials."""
    by_score = {run.scores.optimized_metric: run for run in study.find_finished(folder)}
    return [by_score[trial["score"]] for trial in trials]


def parts(searches: Mapping[str, Any], final: Sequence[MeasuredRun]) -> Iterator[str]:
    """The table of default and tuned methods, the lowest tuned perplexity first."""
    by_name = {search["name"]: search for search in searches["methods"]}
    tuned = {}
    default = {}
    forgetting = {}
    for run in final:
        name = run.scores.run["method"]
        tuned[name] = run.values[LC]
        default[name] = by_name[name].get("default_on_test", run.values[LC])
        forgetting[name] = run.values[FG]

    default_ranks = sorted(default, key=default.__getitem__)
    tuned_ranks = sorted(tuned, key=tuned.__getitem__)
    cells = []
    for name in tuned_ranks:
        trials = by_name[name]["trials"]
        tuned_options = on_validation = "–"
        if trials:
            best = min(trials, key=lambda trial: trial["score"])
            tuned_options = format_options(best["values"])
            on_validation = f"{trials[0]['forgetting']:.3f} → {best['forgetting']:.3f}"
        cells.append(
            [
                name,
                tuned_options,
                f"{default[name]:.2f} → {tuned[name]:.2f}",
                f"{default_ranks.index(name) + 1} → {tuned_ranks.index(name) + 1}",
                f"{forgetting[name]:.3f}",
                on_validation,
            ]
        )
    head = ["method", "tuned values", "LC", "rank", "FG, nats, test text", "FG, nats, validation text"]
    yield format_markdown(Block(head=head, cells=cells, num_word_columns=2), picture="")


if __name__ == "__main__":
    main()
