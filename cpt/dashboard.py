"""The comparison as a W&B workspace: `python -m cpt.dashboard ENTITY PROJECT`; needs wandb-workspaces."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cpt.core.errors import readable
from cpt.core.output import run_program

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import RunsetSettings, Section, Workspace

# In a run's config: what its perplexities depend on, the method with what is laid over it, and both in one.
MEASURED, LABEL, GROUP = "cpt.measured", "cpt.label", "cpt.group"
APART = (
    "Perplexities are comparable within one group of `cpt.measured` alone: filter the runs on the left to "
    "one before you read planes and bars. Bits per byte of causal models on one text are comparable across."
)
QUALITY, FORGOTTEN, DRIFT, WORK = "LC/perplexity", "FG/nats", "general_drift/nats", "cost/flops"
ENDTASKS, LOST = "endtask/MF1", "endtask/forget_rate"
IMAGES = ("matrix_image", "stages_image", "endtasks_image", "parts_image")
TOKENS = "train/tokens"
TABLES = ("losses", "endtasks", "costs", "metrics")


def build_workspace(entity: str, project: str) -> Workspace:
    """The workspace, not saved yet: runs grouped by what their perplexities depend on and by method, the best
    average perplexity first."""
    from wandb_workspaces.workspaces import Workspace

    sections = [build_comparison(), build_stages(), build_runs(), build_training()]
    return Workspace(
        entity=entity,
        project=project,
        name="cpt: comparison",
        sections=sections,
        runset_settings=order_runs(),
    )


def order_runs() -> RunsetSettings:
    """Which runs come first, how they are grouped, and which columns stay in sight."""
    from wandb_workspaces.workspaces import Config, Ordering, RunsetSettings, Summary

    shown = (QUALITY, FORGOTTEN, DRIFT, ENDTASKS, LOST, WORK, "cost/seconds", "cost/memory", "cost/stored")
    return RunsetSettings(
        order=[Ordering(Summary(QUALITY), ascending=True)],
        groupby=[Config(MEASURED), Config(LABEL)],
        pinned_columns=["run:displayName", *(f"summary:{name}" for name in shown)],
    )


def build_comparison() -> Section:
    """Forgetting against quality, quality against compute, and a bar per method."""
    from wandb_workspaces.reports.v2 import BarPlot, Config, MarkdownPanel, ScatterPlot, SummaryMetric
    from wandb_workspaces.workspaces import Section

    planes = [
        ScatterPlot(
            title="Forgetting against average perplexity",
            x=SummaryMetric(QUALITY),
            y=SummaryMetric(FORGOTTEN),
        ),
        ScatterPlot(
            title="Average perplexity against compute",
            x=SummaryMetric(WORK),
            y=SummaryMetric(QUALITY),
            log_x=True,
        ),
    ]
    bars = [
        BarPlot(
            title=name,
            metrics=[name],
            groupby=Config(GROUP),
            groupby_aggfunc="mean",
            groupby_rangefunc="stddev",
        )
        for name in (QUALITY, FORGOTTEN, DRIFT, ENDTASKS, LOST)
    ]
    return Section(name="Comparison", panels=[MarkdownPanel(markdown=APART), *planes, *bars], is_open=True)


def build_stages() -> Section:
    """The curves over the stages."""
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Section

    panels = [
        LinePlot(title="Mean perplexity on the domains learned so far", x="stage", y=["stages/learned"]),
        LinePlot(title="Perplexity on each text", x="stage", metric_regex="^ppl/[^/]+$"),
        LinePlot(title="End tasks", x="stage", metric_regex="^tasks/[^/]+$"),
        LinePlot(title="Tokens read", x="stage", y=["stages/tokens"]),
    ]
    return Section(name="Over the stages", panels=panels, is_open=True)


def build_runs() -> Section:
    """The pictures and tables of the runs chosen on the left."""
    from wandb_workspaces.reports.v2 import MediaBrowser, WeavePanelSummaryTable
    from wandb_workspaces.workspaces import Section

    pictures = [MediaBrowser(title=name, media_keys=[name]) for name in (*IMAGES, "report")]
    tables = [WeavePanelSummaryTable(table_name=name) for name in TABLES]
    return Section(name="Runs", panels=[*pictures, *tables])


def build_training() -> Section:
    """Loss and learning rate over the tokens of the run."""
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Section

    panels = [
        LinePlot(title=title, x=TOKENS, y=[f"train/{term}"])
        for title, term in (("Loss", "loss"), ("Learning rate", "lr"))
    ]
    return Section(name="Training", panels=panels)


def main(arguments: Sequence[str]) -> int:
    """Makes and saves the workspace; prints its address."""
    parser = argparse.ArgumentParser(prog="python -m cpt.dashboard", description=__doc__)
    parser.add_argument("entity", help="W&B user or team")
    parser.add_argument("project", help="W&B project that holds the runs")
    asked_for = parser.parse_args(arguments)
    with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
        if find_spec("wandb_workspaces") is None:
            raise ValueError("needed is the package wandb-workspaces; pip install -e '.[dashboard]'")
        print(build_workspace(asked_for.entity, asked_for.project).save().url)
    return 0


if __name__ == "__main__":
    run_program(main)
