"""The methods on six real domains: `python benchmarks/das6_mini.py --root FOLDER` makes docs/results.md.

FOLDER holds corpora/<domain>, endtasks/<domain> and general, each with {train,valid,test}.jsonl.gz (dev for
end tasks). What is finished below --runs is not run again: a killed start goes on with the same command."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import claims
from measuring import ROOT

from cpt import report
from cpt.reporting.comparison import tables
from cpt.reporting.comparison.groups import ComparedRuns, sections
from cpt.reporting.comparison.runs import Run, find_runs, measure_runs
from cpt.reporting.page import Block, markdown

RESULTS, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "results.md"
BEGIN, END = "<!-- made by benchmarks/das6_mini.py -->", "<!-- end of what is made -->"
SEEDS, ORDERS = "seed=0,1,2", ("0", "1")
SWEEPS = (
    ["method=ncl,one,joint,das,migu,ewc,kd,derpp,adapter,lora,demix,hat"],
    ["method=replay", "method.mixture.past=0.01,0.05,0.25"],
    ["method=kd,replay", "mask=migu"],
    ["method=das", "method.acts_on=gradient"],
    ["method=migu", "method.mask.acts_on=update"],
    ["method=das", "method.contrast=0", "method.acts_on=update,gradient"],
    ["method=none"],
)
PRIVATE = ("loading", "versions")  # of scores.json: not a result, or with a path in it


def main() -> None:
    options = arguments()
    if not options.report_only:
        swept(options)
    runs = finished(options.runs)
    RESULTS.mkdir(parents=True, exist_ok=True)
    report.main([str(options.runs), "--out", str(RESULTS), "--name", "comparison"])
    (section,) = sections(runs, by_order=False, baseline="ncl")
    raw(runs)
    PAGE.write_text(page(section), encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="the data; see above")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "das6_mini", help="the run folders")
    parser.add_argument("--jobs", type=int, help="runs at once (default: a fair share of the machine)")
    parser.add_argument("--report-only", action="store_true", help="no runs, only the pages")
    options = parser.parse_args()
    if options.root is None and not options.report_only:
        parser.error("--root is needed, or --report-only")
    return options


def swept(options: argparse.Namespace) -> None:
    """Every sweep, also after one with a job that failed; exits if one did."""
    failed = []
    for order, sweep in product(ORDERS, SWEEPS):
        given = [f"name={options.runs.name}", f"domains.root={options.root}", f"order={order}", SEEDS]
        jobs = [f"hydra.launcher.jobs={options.jobs}"] * (options.jobs is not None)
        line = [sys.executable, "run.py", "-m", "experiment=das6_mini", *given, *jobs, *sweep]
        failed += [line] * bool(subprocess.run(line, cwd=ROOT, check=False).returncode)
    if failed:
        sys.exit(f"{len(failed)} sweeps have jobs that failed; the same command tries them again")


def finished(folder: Path) -> list[Run]:
    scores, _ = find_runs([folder])
    runs = [Run(folder=path, scores=each) for path, each in scores.items() if each.run["finished"]]
    return measure_runs(runs, domains=())


def raw(runs: Sequence[Run]) -> None:
    """The scores of every run, a line each."""
    lines = [json.dumps(kept(run)) for run in sorted(runs, key=lambda run: run.folder.name)]
    (RESULTS / "scores.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def kept(run: Run) -> dict:
    data = json.loads((run.folder / "scores.json").read_text(encoding="utf-8"))
    return {key: value for key, value in data.items() if key not in PRIVATE}


def page(section: ComparedRuns) -> str:
    """docs/results.md with its tables made anew; the prose around them stays."""
    old = PAGE.read_text(encoding="utf-8")
    before, rest = old.split(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts(section)) + f"\n\n{END}{rest.split(END)[1]}"


def parts(section: ComparedRuns) -> Iterator[str]:
    yield told(section)
    head = ("claim", "difference [95 % interval]", "pairs", "p", "verdict")
    claimed = Block(title="What the papers claim", head=head, cells=claims.rows(section), words=2)
    differences, tasks = tables.tabulate_differences(section), tables.tabulate_tasks(section)
    for block in (claimed, tables.tabulate_main(section, domains=()), differences, tasks):
        yield markdown(block, picture="")


def told(section: ComparedRuns) -> str:
    """What was run, from the runs themselves."""
    runs = [run.scores for run in section.runs]
    first = next(scores for scores in runs if len(scores.seen) > 1)
    orders = {tuple(scores.run["order"]) for scores in runs}
    listed = "\n".join(f"* {' → '.join(order)}" for order in sorted(orders, reverse=True))
    tokens = f"{first.seen[1]:,} tokens a domain, {sum(first.scored):,} scored positions in the test texts"
    return f"{len(runs)} runs of {len(section.groups)} groups; {tokens}. Orders:\n\n{listed}"


if __name__ == "__main__":
    main()
