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
from cpt.reporting.heat_tables import build_heat_tables, tabulate_headline
from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.page import LEGENDS, Block, align_columns, write_page, write_pictures
from cpt.reporting.page_head import describe_comparison_head
from cpt.reporting.published import read_published, tabulate_published
from cpt.reporting.sections import BASELINE, RunSection, build_sections, check_baseline
from cpt.reporting.tex import write_tables

LC_COLUMNS = 8  # of the differences in a console: up to those of LC
RUN_PAGE = "report.html"
COMPARISON = "comparison"  # the name of its own pictures
MAX_NAME = 80  # characters of a file's name that say which runs are in it


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. Allowed: what --help lists")


def build_parser() -> Parser:
    parser = Parser(prog="python -m cpt.report", description="Compares the finished runs below folders.")
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="where to look for runs, at any depth")
    add("--baseline", help=f"the group that others are compared with (default: {BASELINE})")
    filters = ", ".join(load_runs.FILTERS)
    add("--where", nargs="+", default=[], metavar="KEY=VALUE,…", help=f"only these runs: {filters}")
    add("--curve", metavar="KEY", help="learned against forgotten over a setting, as method.strength")
    published = "published numbers to compare with: das6, standard_cl, long_sequence, or a file"
    add("--published", metavar="NAME", help=published)
    add("--by", choices=("order",), help="a group per order, not over all orders")
    add("--out", type=Path, metavar="FOLDER", help="where to write (default: the first folder)")
    pictures = "the pictures of each run's page and of the comparison as PNG, SVG and PDF"
    add("--figures", type=Path, metavar="FOLDER", help=f"instead of comparing: {pictures}")
    tables = "also write TeX tables: main, end tasks, orders, matrices, settings"
    add("--tex", type=Path, metavar="FOLDER", help=tables)
    default_name = "comparison; with --where comparison_KEY-VALUE"
    add("--name", help=f"base name of the written files (default: {default_name})")
    add(
        "--wandb", action="store_true", help="also log the comparison to W&B, as a run of job type comparison"
    )
    add("--project", help="with --wandb: the W&B project (default: that of the runs)")
    add("--entity", help="with --wandb: W&B user or team")
    add("--mode", choices=("auto", "online", "offline"), help="with --wandb (default: auto, as logger.mode)")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if something is wrong or could not be read, 2 without a finished run."""
    try:
        return compare_folders(build_parser().parse_args(arguments))
    except BrokenPipeError:  # cpt.core.output
        raise
    except (ValueError, OSError) as error:
        print(f"cpt: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def compare_folders(options: argparse.Namespace) -> int:
    """Writes and prints what the options ask for of the runs below their folders: a comparison, figures, TeX.
    Returns the exit code: 1 if a run could not be read, 2 without a finished run."""
    check_output_options(options)
    published = read_published(options.published) if options.published else []
    runs = load_runs.find_runs(options.folders)
    finished = load_runs.filter_runs([run for run in runs.runs if run.scores.run["finished"]], options.where)
    unfinished = [run for run in runs.runs if not run.scores.run["finished"]]
    counts = {"unfinished": len(unfinished), "unreadable": len(runs.damaged), "started": len(runs.started)}
    existing = [folder for folder in options.folders if folder.is_dir()]
    if not existing or not (finished or any(counts.values())):
        if options.folders:
            problem = f"FOLDER={','.join(map(str, options.folders))} is invalid: no run below it"
        else:
            problem = "FOLDER is missing"
        allowed = "run folders, or folders that hold them (links in them are not followed)"
        print(f"cpt: {problem}. Allowed: {allowed}", file=sys.stderr)
        return 2

    sections = build_sections(
        load_runs.measure_runs(finished),
        by_order=options.by == "order",
        baseline=options.baseline or BASELINE,
    )
    if options.baseline:  # before anything is written
        check_baseline(options.baseline, sections, given=f"--baseline {options.baseline}")

    if options.figures:
        code = export_figures(finished, sections, options.figures)
        problems = list(runs.damaged)
        if not finished:
            problems.append("no finished run")
        print_errors(problems)
        return code or int(bool(problems))

    # Without a finished run the page lists the runs and their progress.
    heading = []
    if len(sections) > 1:
        heading.append(Block(lines=[LEGENDS["sections"].format(count=len(sections))]))
    blocks, failed = build_comparison_blocks(sections, curve=options.curve)
    further_blocks = [tabulate_unfinished(unfinished, runs.started)]
    if published:
        further_blocks.append(tabulate_published(sections, published))
    unread = Block(title="Runs that could not be read", lines=[*runs.damaged, *failed])

    if is_one_run(existing) and not asks_for_comparison(options):
        page = existing[0] / RUN_PAGE
    else:
        stem = (options.out or existing[0]) / (options.name or choose_comparison_name(options.where))
        stem.parent.mkdir(parents=True, exist_ok=True)
        page = write_page(
            [*heading, *blocks, *further_blocks, unread],
            title="Comparison of runs",
            stem=stem,
            head=describe_comparison_head(sections, stem=stem.name),
            with_vectors=True,
        )
        if sections:
            export_csv(sections, stem.with_name(f"{stem.name}.csv"))
    if options.tex:
        write_tables(sections, options.tex)

    print_blocks([*heading, *build_summary(sections), *further_blocks])
    if page.exists():
        print(page)
    if options.tex:
        print(options.tex)
    if options.wandb and sections:
        send_to_wandb(sections, blocks, finished, page=page, options=options)
    problems = [*runs.damaged, *failed]
    print_errors(problems)
    if not finished:
        counted = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        print(f"no finished run below {', '.join(map(str, options.folders))}: {counted}", file=sys.stderr)
        return 2
    return int(bool(problems))


def is_one_run(folders: Sequence[Path]) -> bool:
    """Whether the folders are that of one run, which has a page of its own and nothing to compare it with."""
    return len(folders) == 1 and (folders[0] / "scores.json").is_file()


def asks_for_comparison(options: argparse.Namespace) -> bool:
    """Whether an option is of the files of a comparison: where they are, or what is in them."""
    return any([options.out, options.name, options.curve, options.published, options.wandb])


def check_output_options(options: argparse.Namespace) -> None:
    """Raises ValueError for an option of W&B without --wandb, and for one of a comparison where none is
    written."""
    for name in ("project", "entity", "mode"):
        if getattr(options, name) and not options.wandb:
            raise ValueError(f"--{name} is without effect. Allowed: with --wandb")
    for name in ("wandb", "tex", "out", "name", "curve", "published"):
        if options.figures and getattr(options, name):
            raise ValueError(
                f"--{name} is invalid with --figures, which writes no comparison. Allowed: one of them"
            )


def send_to_wandb(
    sections: Sequence[RunSection],
    blocks: Sequence[Block],
    runs: Sequence[MeasuredRun],
    *,
    page: Path,
    options: argparse.Namespace,
) -> None:
    """Logs the comparison to W&B, and prints where it is. Raises ValueError for what W&B refuses."""
    from cpt.loggers.wandb_comparison import find_project, log_comparison  # a second to import
    from cpt.loggers.wandb_environment import WandbPlace, check_environment

    check_environment()
    destination = WandbPlace(
        mode=options.mode or "auto", project=options.project or find_project(runs), entity=options.entity
    )
    print(f"W&B: {log_comparison(sections, blocks, page=page, destination=destination)}")


def build_comparison_blocks(
    sections: Sequence[RunSection], *, curve: str | None
) -> tuple[list[Block], list[str]]:
    """The blocks of the page, section by section, and a message for each run whose examples cannot be
    read."""
    blocks = []
    failed: list[str] = []
    for number, section in enumerate(sections, start=1):
        section_blocks = [build_tiles(section), tabulate_headline(section), build_findings(section)]
        section_blocks += build_heat_tables(section)
        if curve:
            section_blocks.append(comparison_figures.build_setting_curve(sections, section, curve))
        for figure in comparison_figures.build_figures(section):
            section_blocks.append(replace(figure, section=section.title))
        section_blocks += [compare.tabulate_main(section), *compare.tabulate_all(section)]
        section_blocks.append(list_conditions(section))
        if len(sections) > 1:
            section_blocks = [number_block(block, section, number) for block in section_blocks]
        blocks += section_blocks
        failed += contrast_examples(section).unreadable
    return blocks, failed


def number_block(block: Block, section: RunSection, number: int) -> Block:
    """A block with the number of its section in title and name."""
    title = f"{block.title or section.title} (section {number})"
    return replace(block, title=title, name=f"section_{number}-{block.name}")


def tabulate_unfinished(unfinished: Sequence[MeasuredRun], started: Sequence[Path]) -> Block:
    """The table of runs that are not finished, and of `started` ones that have measured nothing."""
    cells = []
    for run in unfinished:
        cells.append(
            [str(run.folder), label_run(run.scores.run), str(run.scores.run["seed"]), run.scores.state]
        )
    for folder in started:
        cells.append([str(folder), "–", "–", "started, nothing measured yet"])
    head = ("folder", "method", "seed", "state")
    return Block(title="Unfinished runs", head=head, cells=cells, num_word_columns=4)


def choose_comparison_name(filters: Sequence[str]) -> str:
    """The base name of the files: a comparison of some runs does not replace that of all."""
    if not filters:
        return "comparison"
    chosen = re.sub(r"[^A-Za-z0-9.+_-]+", ".", "_".join(filters).replace("=", "-"))
    if len(chosen) > MAX_NAME:
        chosen = digest(list(filters))[:16]
    return f"comparison_{chosen}"


def build_summary(sections: Sequence[RunSection]) -> list[Block]:
    """The blocks of the console."""
    blocks = []
    for section in sections:
        differences = compare.tabulate_differences(section)
        cells = [row[:LC_COLUMNS] for row in differences.cells]
        blocks += [
            build_tiles(section),
            build_findings(section),
            compare.tabulate_brief(section),
            replace(differences, head=differences.head[:LC_COLUMNS], cells=cells, facets=()),
            list_conditions(section),
        ]
    return blocks


def print_blocks(blocks: Sequence[Block]) -> None:
    for block in blocks:
        if not block.cells and not block.lines:
            continue
        lines = []
        if block.title:
            lines.append(block.title)
        if block.cells:
            lines.append(align_columns(block))
        print("\n".join([*lines, *block.lines]), end="\n\n")


def print_errors(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def export_figures(runs: Sequence[MeasuredRun], sections: Sequence[RunSection], folder: Path) -> int:
    """Writes RUN-NAME and comparison-NAME as PNG, SVG and PDF. Returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {}
    for name, run in zip(make_distinct_names(runs), runs, strict=True):
        pages[name] = run_page.build_blocks(run.folder, run.scores)
    comparison: list[Block] = []
    for section in sections:
        if len(section.runs) > 1:
            comparison += comparison_figures.build_figures(section)
    pages[COMPARISON] = comparison

    for stem, page in pages.items():
        pictures = [block for block in page if block.picture]
        for name in write_pictures(pictures, stem=folder / stem, with_vectors=True):
            print(folder / f"{name}.pdf")
    return 0 if runs else 2


def make_distinct_names(runs: Sequence[MeasuredRun]) -> list[str]:
    """The names of the runs' folders; where two have one name, or one that of the comparison's pictures, all
    with the folders above them, and a number if this is still not distinct."""
    folders = [run.folder.resolve() for run in runs]
    names = [folder.name for folder in folders]
    if COMPARISON not in names and len(set(names)) == len(names):
        return names

    common = os.path.commonpath([folder.parent for folder in folders])
    names = []
    num_uses = Counter([COMPARISON])
    for folder in folders:
        name = "_".join(folder.relative_to(common).parts)
        num_uses[name] += 1
        names.append(f"{name}-{num_uses[name]}" if num_uses[name] > 1 else name)
    return names


if __name__ == "__main__":
    run_program(main)
