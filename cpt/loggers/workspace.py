"""Make a W&B workspace that compares runs: `python -m cpt.loggers.workspace ENTITY PROJECT`.

Needs the package wandb-workspaces."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cpt.core.errors import readable_errors
from cpt.core.output import run_program
from cpt.core.run_command import format_install_command

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

# Keys in the config of a run on W&B: what its perplexities depend on, its method with mask and replay, both.
MEASURED = "cpt.measured"
LABEL = "cpt.label"
GROUP = "cpt.group"
# Metrics in the summary of a run on W&B.
PERPLEXITY = "LC/perplexity"
LEARNED = "learned/nats"
FORGETTING = "FG/nats"
GENERAL_DRIFT = "general_drift/nats"
CHAT_RISE = "chat/base_answer_rise"
FLOPS = "cost/flops"
ENDTASK_SCORE = "endtask/MF1"
ENDTASK_FORGETTING = "endtask/forget_rate"
ANSWER_SCORE = "answers/AP"
PINNED = (
    PERPLEXITY,
    LEARNED,
    FORGETTING,
    GENERAL_DRIFT,
    CHAT_RISE,
    ANSWER_SCORE,
    ENDTASK_SCORE,
    ENDTASK_FORGETTING,
    FLOPS,
    "cost/seconds",
    "cost/memory",
    "cost/stored",
)
BARS = (
    PERPLEXITY,
    LEARNED,
    FORGETTING,
    GENERAL_DRIFT,
    CHAT_RISE,
    ANSWER_SCORE,
    ENDTASK_SCORE,
    ENDTASK_FORGETTING,
)
# Options that most sweeps vary, as axes of a plot that ends in the results.
VARIED_OPTIONS = ("optim.lr", "trainer.steps", "replay.past_ratio", "method.r")
TOKENS = "train/tokens"
MEDIA = ("matrix_image", "stages_image", "endtasks_image", "modules_image", "report")
TABLES = ("matrix", "scores")
# What `python -m cpt.report FOLDER --wandb` logs (cpt/loggers/wandb_comparison.py).
COMPARISON_TABLES = ("comparison/differences_table", "comparison/groups_table")
COMPARISON_PAGE = "comparison/page"
NOTE = (
    "Perplexities are comparable within one group of `cpt.measured` alone: filter the runs on the left to "
    "one before you read planes and bars. Bits per byte of causal models on one text are comparable across. "
    "Bars are means with standard deviations: paired tests, p-values (Holm) and intervals are in the section "
    "**Tests**, which `python -m cpt.report FOLDER --wandb` fills."
)


def build_workspace(entity: str, project: str) -> Workspace:
    """The workspace, not saved yet: runs grouped by what their perplexities depend on and by method, the best
    average perplexity first."""
    from wandb_workspaces import workspaces

    runset = workspaces.RunsetSettings(
        order=[workspaces.Ordering(workspaces.Summary(PERPLEXITY), ascending=True)],
        groupby=[workspaces.Config(MEASURED), workspaces.Config(LABEL)],
        pinned_columns=["run:displayName", *(f"summary:{name}" for name in PINNED)],
    )
    return workspaces.Workspace(
        sections=[
            build_comparison_section(),
            build_tests_section(),
            build_stages_section(),
            build_training_section(),
            build_options_section(),
            build_runs_section(),
        ],
        runset_settings=runset,
        entity=entity,
        project=project,
        name="cpt: comparison",
    )


def build_comparison_section() -> Section:
    import wandb_workspaces.reports.v2 as panels
    from wandb_workspaces import workspaces

    perplexity = panels.SummaryMetric(PERPLEXITY)
    forgetting = panels.SummaryMetric(FORGETTING)
    flops = panels.SummaryMetric(FLOPS)
    bars = [
        panels.BarPlot(
            title=name,
            metrics=[name],
            groupby=panels.Config(GROUP),
            groupby_aggfunc="mean",
            groupby_rangefunc="stddev",
        )
        for name in BARS
    ]
    return workspaces.Section(
        name="Comparison",
        panels=[
            panels.MarkdownPanel(markdown=NOTE),
            panels.ScatterPlot(title="Forgetting against average perplexity", x=perplexity, y=forgetting),
            panels.ScatterPlot(title="Average perplexity against compute", x=flops, y=perplexity, log_x=True),
            *bars,
        ],
        is_open=True,
    )


def build_stages_section() -> Section:
    import wandb_workspaces.reports.v2 as panels
    from wandb_workspaces import workspaces

    mean_perplexity = "Mean perplexity on the domains learned so far"
    return workspaces.Section(
        name="Over the stages",
        panels=[
            panels.LinePlot(title=mean_perplexity, x="stage", y=["stages/mean_perplexity"]),
            panels.LinePlot(title="Perplexity on each text", x="stage", metric_regex="^ppl/[^/]+$"),
            panels.LinePlot(title="Loss on each text (nats)", x="stage", metric_regex="^nats/[^/]+$"),
            panels.LinePlot(
                title="Bits per byte on each text", x="stage", metric_regex="^bits_per_byte/[^/]+$"
            ),
            panels.LinePlot(title="End tasks", x="stage", metric_regex="^tasks/[^/]+$"),
            panels.LinePlot(
                title="Loss on held-out chats", x="stage", y=["stages/chat", "stages/chat_base_answers"]
            ),
            panels.LinePlot(title="KL(base || model)", x="stage", metric_regex="^kl/[^/]+$"),
            panels.LinePlot(title="Tokens read", x="stage", y=["stages/tokens"]),
        ],
        is_open=True,
    )


def build_runs_section() -> Section:
    import wandb_workspaces.reports.v2 as panels
    from wandb_workspaces import workspaces

    return workspaces.Section(
        name="Runs",
        panels=[
            *(panels.MediaBrowser(title=name, media_keys=[name]) for name in MEDIA),
            *(panels.WeavePanelSummaryTable(table_name=name) for name in TABLES),
        ],
        is_open=False,
    )


def build_training_section() -> Section:
    import wandb_workspaces.reports.v2 as panels
    from wandb_workspaces import workspaces

    return workspaces.Section(
        name="Training",
        panels=[
            panels.LinePlot(title="Loss", x=TOKENS, y=["train/loss"]),
            panels.LinePlot(title="Loss by part of the mixture", x=TOKENS, metric_regex="^train/lm_.+$"),
            panels.LinePlot(
                title="Loss on held-out text while training", x=TOKENS, metric_regex="^monitor/.+$"
            ),
            panels.LinePlot(title="Learning rate", x=TOKENS, y=["train/learning_rate"]),
            panels.LinePlot(title="Gradient norm", x=TOKENS, y=["train/grad_norm"], log_y=True),
            panels.LinePlot(title="Tokens per second", x=TOKENS, y=["train/tokens_per_s"]),
            panels.LinePlot(title="Peak memory (GB)", x=TOKENS, y=["train/memory_gb"]),
            panels.LinePlot(title="Stage", x=TOKENS, y=["train/stage"]),
            panels.LinePlot(title="Optimizer steps", x=TOKENS, y=["train/global_step"]),
        ],
        is_open=False,
    )


def build_tests_section() -> Section:
    """What the paired tests say, of runs of job type `comparison`."""
    import wandb_workspaces.reports.v2 as panels
    from wandb_workspaces import workspaces

    return workspaces.Section(
        name="Tests",
        panels=[
            *(panels.WeavePanelSummaryTable(table_name=name) for name in COMPARISON_TABLES),
            panels.MediaBrowser(title="Comparison", media_keys=[COMPARISON_PAGE]),
        ],
        is_open=True,
    )


def build_options_section() -> Section:
    """Which options lead to which result, and in what two runs differ."""
    import wandb_workspaces.reports.v2 as panels
    from wandb_workspaces import workspaces

    columns = [panels.ParallelCoordinatesPlotColumn(panels.Config(name)) for name in VARIED_OPTIONS]
    for metric in (LEARNED, FORGETTING, PERPLEXITY):
        columns.append(panels.ParallelCoordinatesPlotColumn(panels.SummaryMetric(metric)))
    return workspaces.Section(
        name="Options",
        panels=[
            panels.ParallelCoordinatesPlot(title="Options and results", columns=columns),
            panels.RunComparer(diff_only="split"),
        ],
        is_open=False,
    )


def main(arguments: Sequence[str]) -> int:
    """Makes and saves the workspace; prints its address."""
    parser = argparse.ArgumentParser(
        prog="python -m cpt.loggers.workspace", description="Makes a W&B workspace that compares runs."
    )
    parser.add_argument("entity", help="W&B user or team")
    parser.add_argument("project", help="W&B project that holds the runs")
    options = parser.parse_args(arguments)

    from cpt.loggers.wandb_run import is_logged_in  # a second to import

    with readable_errors():
        if find_spec("wandb_workspaces") is None:
            raise ValueError(
                "the package wandb-workspaces is not installed. "
                f"Allowed: after {format_install_command('dashboard')}"
            )
        if not is_logged_in():
            raise ValueError("not logged in to W&B, which keeps workspaces. Allowed: after `wandb login`")
        print(build_workspace(options.entity, options.project).save().url)
    return 0


if __name__ == "__main__":
    run_program(main)
