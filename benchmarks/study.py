"""What the studies of docs/results.md share: sweeps that go on where they were killed, finished runs, pages.

A study is an experiment of conf/, learned by several methods; what is finished is not run again."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from measuring import ROOT
from omegaconf import DictConfig, OmegaConf

import cpt.core.naming  # noqa: F401  (registers the resolvers)
from cpt import report
from cpt.core.config import CONF, digest, plain_config
from cpt.reporting.load_runs import MeasuredRun, RunSection, build_sections, find_runs, measure_runs

RESULTS, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "results.md"
FEW = 10  # domains of which a folder can have the names
# Of scores.json: no result, or with a path in it; of similarities, which decided the order, N² numbers.
LEFT_OUT = ("loading", "versions", "similarity")


def read_arguments(name: str, about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--root", type=Path, help="the data; see above")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / name, help="the run folders")
    parser.add_argument("--jobs", type=int, help="runs at once (default: a fair share of the machine)")
    parser.add_argument("--report-only", action="store_true", help="no runs, only the pages")
    parser.add_argument(
        "--published", action="store_true", help="no runs, only the pages, of the scores that were published"
    )
    options = parser.parse_args()
    options.report_only |= options.published
    if options.root is None and not options.report_only:
        parser.error("--root is needed, or --report-only, or --published")
    return options


def make_study(
    options: argparse.Namespace,
    experiment: str,
    sweeps: Iterable[Sequence[str]],
    *,
    name: str,
    raw: str,
    parts: Callable[[RunSection], Iterable[str]],
    marked: str | None = None,
    name_orders: Callable[[Sequence[Sequence[str]]], Sequence[Any]] = list,
) -> None:
    """Runs what is missing of an experiment's sweeps, and makes its comparison's page, its scores and its
    section, marked by the program's name (default: the experiment's), anew. `name_orders` says what a config
    has as the order of each of the published runs, where it does not number them."""
    if options.published:
        restore_runs(RESULTS / raw, options.runs, experiment, name_orders)
    if not options.report_only:
        run_sweeps(options, experiment, sweeps)
    runs = find_finished(options.runs)
    write_results(options, runs, name=name, raw=raw)
    (section,) = build_sections(runs)
    write_section(marked or experiment, parts(section))


def run_sweeps(options: argparse.Namespace, experiment: str, sweeps: Iterable[Sequence[str]]) -> None:
    """Every sweep, also after one with a job that failed; exits if one did."""
    failed = 0
    for sweep in sweeps:
        given = [f"name={options.runs.name}", f"domains.root={options.root}"]
        jobs = [f"hydra.launcher.jobs={options.jobs}"] * (options.jobs is not None)
        line = [sys.executable, "run.py", "-m", f"experiment={experiment}", *given, *jobs, *sweep]
        failed += subprocess.run(line, cwd=ROOT, check=False).returncode != 0
    if failed:
        sys.exit(f"{failed} sweeps have jobs that failed; the same command tries them again")


def restore_runs(
    raw: Path, into: Path, experiment: str, name_orders: Callable[[Sequence[Sequence[str]]], Sequence[Any]]
) -> None:
    """Run folders of published scores, each with the config that gives such a run today."""
    published = [json.loads(line) for line in raw.read_text(encoding="utf-8").splitlines()]
    named = name_orders([each["run"]["order"] for each in published])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for found, order in zip(published, named, strict=True):
            scores = found | {"versions": {}, "loading": ""}
            run = scores["run"]
            chosen = [f"{name}={run[name]}" for name in ("method", "mask", "replay", "seed")]
            sections = ("trainer.", "optim.", "model.")  # all else is said of the method
            said = [each for each in run["variant"].split("; ") if each]
            chosen += [each if each.startswith(sections) else f"method.{each}" for each in said]
            cfg = compose(
                "config", [f"experiment={experiment}", f"name={into.name}", "domains.root=FOLDER", *chosen]
            )
            if not scores.get("conditions"):  # of the runs on six domains
                names = {"score_on": "domains", "length": "model", "mask_rate": "model"}
                scores["conditions"] = {name: cfg[group][name] for name, group in names.items()}
            orders = cfg.domains.orders or ()
            numbered = orders.items() if isinstance(orders, Mapping | DictConfig) else enumerate(orders)
            cfg.order = next((number for number, each in numbered if list(each) == run["order"]), order)
            place = "-".join(run["order"]) if len(run["order"]) <= FEW else digest(run["order"])
            folder = into / "_".join((*chosen, place)).replace("=", "-")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
            OmegaConf.save(OmegaConf.create(plain_config(cfg)), folder / "config.yaml")


def find_finished(folder: Path) -> list[MeasuredRun]:
    return measure_runs([run for run in find_runs([folder]).runs if run.scores.run["finished"]])


def write_results(options: argparse.Namespace, runs: Sequence[MeasuredRun], *, name: str, raw: str) -> None:
    """The comparison's page with its pictures, and the scores of every run, a line each."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    report.main([os.path.relpath(options.runs), "--out", str(RESULTS), "--name", name])
    if options.published:
        return
    lines = [json.dumps(keep_scores(run)) for run in sorted(runs, key=lambda run: run.folder.name)]
    (RESULTS / raw).write_text("\n".join(lines) + "\n", encoding="utf-8")


def keep_scores(run: MeasuredRun) -> Mapping:
    data = json.loads((run.folder / "scores.json").read_text(encoding="utf-8"))
    return {key: value for key, value in data.items() if key not in LEFT_OUT}


def write_section(program: str, parts: Iterable[str]) -> None:
    """Makes what stands between a study's marks in docs/results.md anew, at its end where there are none; the
    prose around them stays."""
    begin, end = f"<!-- made by benchmarks/{program}.py -->", f"<!-- end of what {program} made -->"
    text = PAGE.read_text(encoding="utf-8")
    before, rest = (text if begin in text else f"{text}\n{begin}\n{end}\n").split(begin)
    after = rest.split(end)[1]
    PAGE.write_text(f"{before}{begin}\n\n" + "\n\n".join(parts) + f"\n\n{end}{after}", encoding="utf-8")


def list_orders(runs: Sequence[MeasuredRun]) -> str:
    """The orders of the runs, a line each."""
    orders = {tuple(run.scores.run["order"]) for run in runs}
    return "\n".join(f"* {' → '.join(order)}" for order in sorted(orders, reverse=True))
