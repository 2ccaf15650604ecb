"""`python -m cpt.report FOLDER…`: one comparison of the runs below any folders."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from cpt.core.config import digest
from cpt.core.output import run_program
from cpt.evaluation.scores import Scores
from cpt.reporting.comparison import tables
from cpt.reporting.comparison.across import build_heading
from cpt.reporting.comparison.album import build_pictures, draw_plane
from cpt.reporting.comparison.compute import tabulate_compute
from cpt.reporting.comparison.exports import KINDS, export_sections
from cpt.reporting.comparison.findings import build_findings
from cpt.reporting.comparison.groups import ComparedRuns, sections
from cpt.reporting.comparison.runs import (
    FILTERS,
    Run,
    check_domains,
    filter_runs,
    find_begun,
    find_runs,
    measure_runs,
    parse_filters,
)
from cpt.reporting.comparison.strengths import check_curve, show_strengths
from cpt.reporting.frames import label
from cpt.reporting.page import Block, align_columns, few, write_page

USUAL = "ncl"  # what is compared with where nothing else is asked for
LC = 8  # columns of the differences that a console shows: up to those of LC
LONGEST = 80  # characters of a file's name that say which runs are in it


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists what is allowed")


def parser() -> Parser:
    made = Parser(prog="python -m cpt.report", description="Compares the finished runs below folders.")
    give = made.add_argument
    give("folders", nargs="*", type=Path, metavar="FOLDER", help="where to look for runs, at any depth")
    give("--baseline", help=f"the group that others are compared with (default: {USUAL})")
    give(
        "--where", nargs="+", default=[], metavar="KEY=VALUE,…", help=f"only these runs: {', '.join(FILTERS)}"
    )
    give("--domains", metavar="NAME,…", help="metrics over these test texts and end tasks only")
    give("--curve", metavar="KEY", help="learned against forgotten over a setting, as method.strength")
    give("--by", choices=("order",), help="a group per order, not over all orders")
    give("--out", type=Path, metavar="FOLDER", help="where to write (default: the first folder)")
    give(
        "--name",
        help="base name of the written files (default: comparison; with --where comparison_KEY-VALUE)",
    )
    give("--export", default=",".join(KINDS), metavar="KIND,…", help=f"{', '.join(KINDS)}, or none")
    return made


@dataclass(frozen=True, kw_only=True)
class Found:
    """What lies below the folders: all runs, those that are compared, and what cannot be."""

    runs: Mapping[Path, Scores]
    finished: Sequence[Run]
    damaged: Sequence[str]
    begun: Sequence[Path]


def main(arguments: Sequence[str]) -> int:
    """What the command line asks for; gives the exit code: 1 if something is wrong or could not be read, 2 if
    there is no finished run."""
    try:
        return _run(parser().parse_args(arguments))
    except BrokenPipeError:  # cpt.core.output
        raise
    except (ValueError, OSError) as error:
        print(f"cpt: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _run(asked_for: argparse.Namespace) -> int:
    there = _find(asked_for)
    kinds = _kinds(asked_for.export)
    failed = bool(there.damaged)
    if any(folder.is_dir() for folder in asked_for.folders) and any((there.runs, there.damaged, there.begun)):
        failed |= _report(there, asked_for, kinds=kinds)
    if not there.finished:
        print(_nothing(there, asked_for.folders), file=sys.stderr)
        return 2
    return int(failed)


def _nothing(there: Found, folders: Sequence[Path]) -> str:
    places = ", ".join(map(str, folders)) or "(give a folder)"
    if not there.runs and not there.begun and all(": no such folder" in line for line in there.damaged):
        return f"no scores.json below {places}"
    counts = [
        (len(there.runs), "unfinished"),
        (len(there.damaged), "unreadable"),
        (len(there.begun), "begun"),
    ]
    told = ", ".join(f"{count} {name}" for count, name in counts if count)
    return f"no finished run below {places}: {told}"


def _find(asked_for: argparse.Namespace) -> Found:
    where = parse_filters(asked_for.where)
    runs, damaged = find_runs(asked_for.folders)
    finished = [
        Run(folder=folder, scores=scores) for folder, scores in runs.items() if scores.run["finished"]
    ]
    chosen = filter_runs(finished, where=where) if finished else []
    left_out = {run.folder for run in finished} - {run.folder for run in chosen}
    runs = {folder: scores for folder, scores in runs.items() if folder not in left_out}
    return Found(runs=runs, finished=chosen, damaged=damaged, begun=find_begun(asked_for.folders))


def _kinds(given: str) -> list[str]:
    kinds = [] if given == "none" else given.split(",")
    if wrong := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"--export {','.join(wrong)}; allowed: {', '.join(KINDS)}, none")
    return kinds


def _report(there: Found, asked_for: argparse.Namespace, *, kinds: Sequence[str]) -> bool:
    """Writes and prints the comparison; whether something of it could not be read."""
    domains = asked_for.domains.split(",") if asked_for.domains else []
    chosen = measure_runs(
        there.finished, domains=check_domains(domains, runs=there.finished) if there.finished else ()
    )
    compared = sections(chosen, by_order=asked_for.by == "order", baseline=asked_for.baseline or USUAL)
    check_baseline(compared, asked_for.baseline)
    if asked_for.curve:
        check_curve(asked_for.curve, chosen)
    bodies = [_build_section_blocks(section, domains=domains, curve=asked_for.curve) for section in compared]
    failed = [line for _, faults in bodies for line in faults]
    others = aside(there, chosen, failed=failed)
    above = build_heading(compared)
    blocks = [*above, *_number([body for body, _ in bodies]), *others]
    stem = (asked_for.out or _first_folder(asked_for.folders)) / (
        asked_for.name or name_files(asked_for.where)
    )
    stem.parent.mkdir(parents=True, exist_ok=True)
    page = write_page(blocks, title="Comparison of runs", stem=stem, vectors=True)
    beside = {block.title.lower().replace(" ", "_"): _plainly(block) for block in others if _plainly(block)}
    beside |= {"apart": list(above[0].lines)} if above else {}
    export_sections(compared, stem=stem, kinds=kinds if compared else [], beside=beside)
    _print(above, compared, others)
    print(page)
    print(*there.damaged, *failed, sep="\n", end="\n" * bool(there.damaged or failed), file=sys.stderr)
    return bool(failed)


def name_files(where: Sequence[str]) -> str:
    """What the written files are called: a comparison of some runs does not replace that of all."""
    if not where:
        return "comparison"
    chosen = re.sub(r"[^A-Za-z0-9.+_-]+", ".", "_".join(where).replace("=", "-"))
    return f"comparison_{chosen if len(chosen) <= LONGEST else digest(list(where))[:16]}"


def _plainly(block: Block) -> list:
    return [list(row) for row in block.cells] or list(block.lines)


def _first_folder(folders: Sequence[Path]) -> Path:
    return next((folder for folder in folders if folder.is_dir()), Path())


def check_baseline(compared: Sequence[ComparedRuns], baseline: str | None) -> None:
    """Raises ValueError if no group is called like the baseline that was asked for."""
    there = {name for section in compared for group in section.groups for name in (group.name, group.plain)}
    if baseline is not None and compared and baseline not in there:
        raise ValueError(f"--baseline {baseline}; there is: {', '.join(sorted(there))}")


def _number(bodies: Sequence[Sequence[Block]]) -> list[Block]:
    """The blocks of all sections; of several each title says of which it is."""
    if len(bodies) == 1:
        return list(bodies[0])
    return [
        replace(block, title=f"{block.title} (section {place})", name=f"section_{place}-{block.name}")
        for place, body in enumerate(bodies, start=1)
        for block in body
    ]


def _build_section_blocks(
    section: ComparedRuns, *, domains: Sequence[str], curve: str | None
) -> tuple[list[Block], list[str]]:
    """The blocks of a section, the curve that is asked for first, and a line for each file of predictions or
    answers that cannot be read."""
    examples, failed = tables.tabulate_examples(section)
    answers, unread = tables.tabulate_answers(section)
    main = tables.tabulate_main(section, domains=domains)
    others = [
        tables.tabulate_differences(section),
        tables.tabulate_ranks(section),
        tables.tabulate_tasks(section),
        tables.tabulate_probes(section),
        tables.tabulate_probe_differences(section),
        examples,
        *answers,
    ]
    curves = [show_strengths(section, curve)] if curve else []
    first = [build_findings(section), *curves, draw_plane(section), main]
    return [*first, *others, tabulate_compute(section), *build_pictures(section)], [*failed, *unread]


def aside(there: Found, chosen: Sequence[Run], *, failed: Sequence[str]) -> list[Block]:
    """What is not compared: unfinished runs, finished ones without the domains asked for, unreadable ones."""
    cells = [
        [str(folder), label(scores.run), str(scores.run["seed"]), scores.state]
        for folder, scores in there.runs.items()
        if not scores.run["finished"]
    ]
    cells += [[str(folder), "–", "–", "begun, nothing measured yet"] for folder in there.begun]
    head = ("folder", "method", "seed", "state")
    lines = [*there.damaged, *failed]
    compared = {run.folder for run in chosen}
    left_out = [run for run in there.finished if run.folder not in compared]
    without = [
        [str(run.folder), label(run.scores.run), str(run.scores.run["seed"]), few(run.scores.domains)]
        for run in left_out
    ]
    return [
        Block(title="Unfinished runs", head=head, cells=cells, words=4),
        Block(title="Runs without these domains", head=(*head[:3], "has"), cells=without, words=4),
        Block(title="Runs that could not be read", lines=lines),
    ]


def _print(above: Sequence[Block], compared: Sequence[ComparedRuns], others: Sequence[Block]) -> None:
    """The main tables without intervals, for a console."""
    for block in above:
        table = [align_columns(block)] if block.cells else []
        print("\n".join(filter(None, [block.title, *table, *block.lines])), end="\n\n")
    for section in compared:
        if (findings := build_findings(section)).lines:
            print("\n".join([findings.title, *findings.lines]), end="\n\n")
        main = tables.tabulate_main(section, domains=())
        print(
            "\n".join([main.title, align_columns(tables.tabulate_console(section)), *main.lines]), end="\n\n"
        )
        if (differences := tables.tabulate_differences(section)).cells:
            cells = [row[:LC] for row in differences.cells]
            first = Block(head=differences.head[:LC], cells=cells, words=2)
            print("\n".join([differences.title, align_columns(first), *differences.lines]), end="\n\n")
    for block in others:
        if block.cells:
            print("\n".join([block.title, align_columns(block)]), end="\n\n")


if __name__ == "__main__":
    run_program(main)
