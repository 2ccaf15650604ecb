"""A comparison of runs on W&B: `python -m cpt.report FOLDER --wandb` logs it, a run of job type `comparison`.

W&B's own charts show means and deviations of groups of runs. The paired tests, their p-values and the
intervals are in this run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any

import wandb
import yaml
from pandas import DataFrame
from PIL import Image

from cpt.loggers.wandb_environment import (
    WandbLabels,
    WandbPlace,
    draw_identifier,
    files_in,
    read_run_identifier,
    store_identifier,
)
from cpt.loggers.wandb_run import LARGEST_REPORT, check_settings, describe_place, open_wandb
from cpt.reporting.contrasts import find_contrasts, find_spreads
from cpt.reporting.frames import replace_non_finite
from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.measures import COST_MEASURES, MEASURES, TESTED_MEASURES, select_measured
from cpt.reporting.page import Block
from cpt.reporting.sections import RunSection

log = logging.getLogger(__name__)
JOB_TYPE = "comparison"
CHARTS = {"LC/perplexity": "final perplexity", "FG/nats": "forgetting (nats)"}  # bars of the groups' means


def log_comparison(
    sections: Sequence[RunSection], blocks: Sequence[Block], *, page: Path, destination: WandbPlace
) -> str:
    """Logs the tables, the figures of `blocks` and the page of a comparison; gives its address, or how it is
    sent. A comparison that is logged again is the same run on W&B: its identifier is stored next to the page.

    Raises ValueError for what W&B refuses."""
    check_settings(destination)
    identifier_file = f"{page.stem}.wandb_id"
    identifier = read_run_identifier(page.parent, file_name=identifier_file) or draw_identifier()
    store_identifier(page.parent, identifier, file_name=identifier_file)

    groups: list[str] = []
    for section in sections:
        groups += [group.name for group in section.groups]
    labels = WandbLabels(name=page.stem, group=name_runs(sections), job_type=JOB_TYPE)
    config = {"cpt": {"compared": list_compared(sections), "groups": groups}}
    folder = page.parent.absolute()
    with files_in(folder):
        run = open_wandb(
            identifier, folder, destination=destination, labels=labels.obey_environment(), config=config
        )
        is_failed = True
        try:
            run.summary.update(summarize(sections))
            run.log(make_tables(sections))
            run.log(make_charts(sections))
            run.log(make_media(blocks, page=page))
            is_failed = False
        finally:
            run.finish(exit_code=int(is_failed))
    return describe_place(run)


def name_runs(sections: Sequence[RunSection]) -> str:
    """The `name` that the compared runs have in common, which is their group on W&B; empty if they differ."""
    names = set()
    for section in sections:
        names |= {run.scores.run["name"] for run in section.runs}
    return names.pop() if len(names) == 1 else ""


def list_compared(sections: Sequence[RunSection]) -> list[str]:
    """The identifiers on W&B of the compared runs that have one."""
    identifiers = []
    for section in sections:
        for run in section.runs:
            identifier = read_run_identifier(run.folder)
            if identifier:
                identifiers.append(identifier)
    return identifiers


def find_project(runs: Sequence[MeasuredRun]) -> str | None:
    """The W&B project of the first run's config; None if it names none or cannot be read."""
    if not runs:
        return None
    try:
        config = yaml.safe_load((runs[0].folder / "config.yaml").read_text(encoding="utf-8"))
        project = config["logger"]["project"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
    return project if isinstance(project, str) else None


def summarize(sections: Sequence[RunSection]) -> dict[str, float | str]:
    """For a table of runs: how many groups and runs there are, and of the first section the best group."""
    summary: dict[str, float | str] = {
        "comparison/groups": sum(len(section.groups) for section in sections),
        "comparison/runs": sum(len(section.runs) for section in sections),
    }
    if sections and sections[0].groups:
        best = sections[0].groups[0]  # the best LC is first
        summary["comparison/best"] = best.name
        for key in CHARTS:
            mean = best.mean(key)
            if mean is not None and isfinite(mean):
                summary[f"comparison/best/{key}"] = mean
    return summary


def make_tables(sections: Sequence[RunSection]) -> dict[str, wandb.Table]:
    """`groups`: every measure of every group; `differences`: from the baseline, with p-values."""
    return {
        "comparison/groups_table": make_wandb_table(tabulate_groups(sections)),
        "comparison/differences_table": make_wandb_table(tabulate_tests(sections)),
    }


def make_wandb_table(frame: DataFrame) -> wandb.Table:
    return wandb.Table(columns=[*frame], data=replace_non_finite(frame).to_numpy().tolist())


def tabulate_groups(sections: Sequence[RunSection]) -> DataFrame:
    """A row for each section, group and measure: the mean over runs, its deviation and 95 % interval."""
    rows: list[Mapping[str, Any]] = []
    for number, section in enumerate(sections, start=1):
        for measure in select_measured(section, [*MEASURES, *COST_MEASURES]):
            spreads = find_spreads(section, measure.key)
            for group in section.groups:
                spread = spreads.get(group.name)
                if spread is None:
                    continue
                rows.append(
                    {
                        "section": number,
                        "texts": section.title,
                        "group": group.name,
                        "method": group.label,
                        "model": group.model,
                        "measure": measure.key,
                        "higher_is_better": measure.higher_is_better,
                        "runs": spread.n,
                        "mean": spread.mean,
                        "sd": spread.sd,
                        "low": spread.low,
                        "high": spread.high,
                    }
                )
    return DataFrame(rows)


def tabulate_tests(sections: Sequence[RunSection]) -> DataFrame:
    """A row for each section, measure and group with a baseline: the paired difference, its 95 % interval,
    and the p-values of the sign-flip test and the t test, also corrected by Holm's procedure."""
    columns = ["section", "group", "baseline", "measure", "pairs", "difference", "low", "high"]
    columns += ["p", "p_holm", "p_t", "p_t_holm"]
    rows = []
    for number, section in enumerate(sections, start=1):
        for measure in select_measured(section, TESTED_MEASURES):
            for name, contrast in find_contrasts(section, measure.key).items():
                baseline = section.baselines[name].name
                rows.append(
                    [
                        number,
                        name,
                        baseline,
                        measure.key,
                        contrast.n,
                        contrast.mean,
                        contrast.low,
                        contrast.high,
                        contrast.p,
                        contrast.p_holm,
                        contrast.p_t,
                        contrast.p_t_holm,
                    ]
                )
    return DataFrame(rows, columns=columns)


def make_charts(sections: Sequence[RunSection]) -> dict[str, Any]:
    """A bar chart of the groups' means for each of CHARTS that some run of the first section has."""
    if not sections:
        return {}
    charts = {}
    section = sections[0]
    for measure in select_measured(section, MEASURES):
        if measure.key not in CHARTS:
            continue
        spreads = find_spreads(section, measure.key)
        means = [[name, spread.mean] for name, spread in spreads.items() if isfinite(spread.mean)]
        table = wandb.Table(columns=["group", "mean"], data=means)
        title = CHARTS[measure.key]
        charts[f"comparison/{measure.key}"] = wandb.plot.bar(table, "group", "mean", title=title)
    return charts


def make_media(blocks: Sequence[Block], *, page: Path) -> dict[str, wandb.Image | wandb.Html]:
    """The figures of the page by their names, and the page itself unless it is too large for a panel."""
    media: dict[str, wandb.Image | wandb.Html] = {}
    for block in blocks:
        if block.picture:
            name = block.name or block.title
            picture = Image.open(BytesIO(block.picture))
            media[f"comparison/figures/{name}"] = wandb.Image(picture, caption=block.title)
    if page.stat().st_size <= LARGEST_REPORT:
        media["comparison/page"] = wandb.Html(page.read_text(encoding="utf-8"), inject=False)
    return media
