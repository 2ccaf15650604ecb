"""Make a W&B workspace that compares runs: `python -m cpt.contrib.wandb_tools.workspace ENTITY PROJECT`.

Needs the package wandb-workspaces."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cpt.core.errors import readable
from cpt.core.output import run_program

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

# In a run's config: what its perplexities depend on, the method with what is laid over it, and both in one.
MEASURED, LABEL, GROUP = "cpt.measured", "cpt.label", "cpt.group"
APART = (
    "Perplexities are comparable within one group of `cpt.measured` alone: filter the runs on the left to "
    "one before you read planes and bars. Bits per byte of causal models on one text are comparable across."
)
QUALITY, FORGOTTEN, DRIFT, WORK = "LC/perplexity", "FG/nats", "general_drift/nats", "cost/flops"
ENDTASKS, LOST = "endtask/MF1", "endtask/forget_rate"
IMAGES = ("matrix_image", "stages_image", "endtasks_image", "modules_image")
TOKENS = "train/tokens"
TABLES = ("matrix", "scores")


def build_workspace(entity: str, project: str) -> Workspace:
    """The workspace, not saved yet: runs grouped by what their perplexities depend on and by method, the best
    average perplexity first."""
    import wandb_workspaces.reports.v2 as panels
    from wandb_workspaces import workspaces

    shown = (QUALITY, FORGOTTEN, DRIFT, ENDTASKS, LOST, WORK, "cost/seconds", "cost/memory", "cost/stored")
    runset = workspaces.RunsetSettings(
        order=[workspaces.Ordering(workspaces.Summary(QUALITY), ascending=True)],
        groupby=[workspaces.Config(MEASURED), workspaces.Config(LABEL)],
        pinned_columns=["run:displayName", *(f"summary:{name}" for name in shown)],
    )
    quality, forgotten, work = map(panels.SummaryMetric, (QUALITY, FORGOTTEN, WORK))
    grouped = {"groupby": panels.Config(GROUP), "groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    bars = (QUALITY, FORGOTTEN, DRIFT, ENDTASKS, LOST)
    learned = "Mean perplexity on the domains learned so far"
    sections = {
        "Comparison": [
            panels.MarkdownPanel(markdown=APART),
            panels.ScatterPlot(title="Forgetting against average perplexity", x=quality, y=forgotten),
            panels.ScatterPlot(title="Average perplexity against compute", x=work, y=quality, log_x=True),
            *(panels.BarPlot(title=name, metrics=[name], **grouped) for name in bars),
        ],
        "Over the stages": [
            panels.LinePlot(title=learned, x="stage", y=["stages/learned"]),
            panels.LinePlot(title="Perplexity on each text", x="stage", metric_regex="^ppl/[^/]+$"),
            panels.LinePlot(title="End tasks", x="stage", metric_regex="^tasks/[^/]+$"),
            panels.LinePlot(title="Tokens read", x="stage", y=["stages/tokens"]),
        ],
        "Runs": [
            *(panels.MediaBrowser(title=name, media_keys=[name]) for name in (*IMAGES, "report")),
            *(panels.WeavePanelSummaryTable(table_name=name) for name in TABLES),
        ],
        "Training": [
            panels.LinePlot(title="Loss", x=TOKENS, y=["train/loss"]),
            panels.LinePlot(title="Learning rate", x=TOKENS, y=["train/lr"]),
        ],
    }
    opened = ("Comparison", "Over the stages")
    made = [workspaces.Section(name=n, panels=each, is_open=n in opened) for n, each in sections.items()]
    about = {"entity": entity, "project": project, "name": "cpt: comparison"}
    return workspaces.Workspace(sections=made, runset_settings=runset, **about)


def main(arguments: Sequence[str]) -> int:
    """Makes and saves the workspace; prints its address."""
    about = "Makes a W&B workspace that compares runs."
    parser = argparse.ArgumentParser(prog="python -m cpt.contrib.wandb_tools.workspace", description=about)
    parser.add_argument("entity", help="W&B user or team")
    parser.add_argument("project", help="W&B project that holds the runs")
    given = parser.parse_args(arguments)
    with readable():
        if find_spec("wandb_workspaces") is None:
            raise ValueError("needed is the package wandb-workspaces; pip install -e '.[dashboard]'")
        print(build_workspace(given.entity, given.project).save().url)
    return 0


if __name__ == "__main__":
    run_program(main)
