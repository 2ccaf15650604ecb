"""`python -m cpt.report FOLDER…`: compare the finished runs below folders."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from cpt.core.config import digest
from cpt.core.output import run_program
from cpt.reporting import compare, comparison_figures, load_runs, run_page
from cpt.reporting.csv_export import export_csv
from cpt.reporting.example_contrasts import contrast_examples
from cpt.reporting.findings import build_findings, build_tiles, list_conditions
from cpt.reporting.formats import label_run
from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.page import LEGENDS, Block, align_columns, write_page, write_pictures
from cpt.reporting.published import read_published, tabulate_published
from cpt.reporting.sections import RunSection, build_sections
from cpt.reporting.tex import write_tables

BASELINE = "ncl"
LC_COLUMNS = 8  # of the differences in a console: up to those of LC
MAX_NAME = 80  # characters of a file's name that say which runs are in it


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. Allowed: what --help lists")


def report_parser() -> Parser:
    made = Parser(prog="python -m cpt.report", description="Compares the finished runs below folders.")
    give = made.add_argument
    give("folders", nargs="*", type=Path, metavar="FOLDER", help="where to look for runs, at any depth")
    give("--baseline", help=f"the group that others are compared with (default: {BASELINE})")
    filters = ", ".join(load_runs.FILTERS)
    give("--where", nargs="+", default=[], metavar="KEY=VALUE,…", help=f"only these runs: {filters}")
    give("--curve", metavar="KEY", help="learned against forgotten over a setting, as method.strength")
    shipped = "published numbers to compare with: das6, standard_cl, long_sequence, or a file"
    give("--published", metavar="NAME", help=shipped)
    give("--by", choices=("order",), help="a group per order, not over all orders")
    give("--out", type=Path, metavar="FOLDER", help="where to write (default: the first folder)")
    told = "instead of comparing: the pictures of each run's page and of the comparison as PNG, SVG and PDF"
    give("--figures", type=Path, metavar="FOLDER", help=told)
    tables = "also write TeX tables: main, end tasks, orders, matrices, settings"
    give("--tex", type=Path, metavar="FOLDER", help=tables)
    named = "comparison; with --where comparison_KEY-VALUE"
    give("--name", help=f"base name of the written files (default: {named})")
    return made


def main(arguments: Sequence[str]) -> int:
    """Gives the exit code: 1 if something is wrong or could not be read, 2 without a finished run."""
    try:
        return compare_folders(report_parser().parse_args(arguments))
    except BrokenPipeError:  # cpt.core.output
        raise
    except (ValueError, OSError) as error:
        print(f"cpt: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def compare_folders(given: argparse.Namespace) -> int:
    published = read_published(given.published) if given.published else []
    found = load_runs.find_runs(given.folders)
    finished = load_runs.filter_runs([run for run in found.runs if run.scores.run["finished"]], given.where)
    unfinished = [run for run in found.runs if not run.scores.run["finished"]]
    counts = {"unfinished": len(unfinished), "unreadable": len(found.damaged), "started": len(found.started)}
    existing = [folder for folder in given.folders if folder.is_dir()]
    if not existing or not (finished or any(counts.values())):
        places = f"FOLDER={','.join(map(str, given.folders))} is invalid: no run below it"
        why = places if given.folders else "FOLDER is missing"
        print(f"cpt: {why}. Allowed: run folders, or folders that hold them", file=sys.stderr)
        return 2

    sections = build_sections(
        load_runs.measure_runs(finished), by_order=given.by == "order", baseline=given.baseline or BASELINE
    )
    names = {name for section in sections for group in section.groups for name in (group.name, group.label)}
    if given.baseline and sections and given.baseline not in names:
        raise ValueError(f"--baseline {given.baseline} is invalid. Allowed: {', '.join(sorted(names))}")
    if given.figures:
        code = export_figures(finished, sections, given.figures)
        wrong = [*found.damaged, *["no finished run"] * (not finished)]
        print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
        return code or int(bool(wrong))
    heading = [Block(lines=[LEGENDS["sections"].format(count=len(sections))])] * (len(sections) > 1)
    blocks, failed = [], list[str]()
    for number, section in enumerate(sections, start=1):
        own = [build_tiles(section)]
        own += [comparison_figures.build_setting_curve(sections, section, given.curve)] if given.curve else []
        own += [*comparison_figures.build_figures(section), build_findings(section)]
        own += [compare.tabulate_main(section), *compare.tabulate_all(section)]
        own += [list_conditions(section)]
        if len(sections) > 1:
            for at, block in enumerate(own):
                title = f"{block.title or section.title} (section {number})"
                own[at] = replace(block, title=title, name=f"section_{number}-{block.name}")
        blocks += own
        failed += contrast_examples(section).unreadable
    states = [
        [str(run.folder), label_run(run.scores.run), str(run.scores.run["seed"]), run.scores.state]
        for run in unfinished
    ]
    states += [[str(folder), "–", "–", "started, nothing measured yet"] for folder in found.started]
    head = ("folder", "method", "seed", "state")
    aside = [Block(title="Unfinished runs", head=head, cells=states, num_word_columns=4)]
    aside += [tabulate_published(sections, published)] * bool(published)
    unread = Block(title="Runs that could not be read", lines=[*found.damaged, *failed])

    name = "comparison"
    if given.where:  # does not replace the comparison of all runs
        chosen = re.sub(r"[^A-Za-z0-9.+_-]+", ".", "_".join(given.where).replace("=", "-"))
        name = f"comparison_{chosen if len(chosen) <= MAX_NAME else digest(list(given.where))[:16]}"
    stem = (given.out or existing[0]) / (given.name or name)
    stem.parent.mkdir(parents=True, exist_ok=True)
    shown = [*heading, *blocks, *aside, unread]
    page = write_page(shown, title="Comparison of runs", stem=stem, vectors=True)
    if sections:
        export_csv(sections, stem.with_name(f"{stem.name}.csv"))
    if given.tex:
        write_tables(sections, given.tex)

    told = list(heading)
    for section in sections:
        differences = compare.tabulate_differences(section)
        cells = [row[:LC_COLUMNS] for row in differences.cells]
        first = replace(differences, head=differences.head[:LC_COLUMNS], cells=cells, facets=())
        told += [build_tiles(section), build_findings(section)]
        told += [compare.tabulate_brief(section), first, list_conditions(section)]
    for block in [*told, *aside]:
        table = [align_columns(block)] if block.cells else []
        if block.lines or table:
            print("\n".join([*[block.title] * bool(block.title), *table, *block.lines]), end="\n\n")
    print(page, *[given.tex] * bool(given.tex), sep="\n")
    print(*found.damaged, *failed, sep="\n", end="\n" * bool(found.damaged or failed), file=sys.stderr)
    if not finished:
        counted = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        print(f"no finished run below {', '.join(map(str, given.folders))}: {counted}", file=sys.stderr)
        return 2
    return int(bool(found.damaged or failed))


def export_figures(runs: Sequence[MeasuredRun], sections: Sequence[RunSection], folder: Path) -> int:
    """Writes RUN-NAME and comparison-NAME as PNG, SVG and PDF. Gives the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [run.folder.resolve().name for run in runs]
    if len({*names, "comparison"}) <= len(names):  # two folders of one name
        top = os.path.commonpath([run.folder.resolve().parent for run in runs])
        names = ["_".join(run.folder.resolve().relative_to(top).parts) for run in runs]
        seen = Counter(["comparison"])
        for place, name in enumerate(names):
            seen[name] += 1
            names[place] += f"-{seen[name]}" * (seen[name] > 1)
    built = (run_page.build_blocks(run.folder, run.scores) for run in runs)
    pages = dict(zip(names, built, strict=True))
    several = [comparison_figures.build_figures(section) for section in sections if len(section.runs) > 1]
    pages |= {"comparison": [block for blocks in several for block in blocks]}
    for stem, page in pages.items():
        shown = [block for block in page if block.picture]
        for name in write_pictures(shown, stem=folder / stem, vectors=True):
            print(folder / f"{name}.pdf")
    return 0 if runs else 2


if __name__ == "__main__":
    run_program(main)
