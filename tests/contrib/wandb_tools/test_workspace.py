"""The W&B workspace made by code."""

import re
import warnings

import pytest

from cpt.contrib.wandb_tools import workspace as program
from cpt.loggers.wandb import pictures
from cpt.reporting.frames import stage_points, summarize_scores, tabulate, task_points
from tests.support.tracked import scores


@pytest.fixture(scope="module")
def workspace():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, about pydantic
        pytest.importorskip("wandb_workspaces.workspaces", reason="wandb-workspaces is not installed")
        import wandb_workspaces.reports.v2  # noqa: F401
    return program.build_workspace("me", "p")


def panels_of(workspace):
    return [panel for section in workspace.sections for panel in section.panels]


def test_the_workspace_shows_what_there_is(workspace):
    made, points = scores(), []
    curves = {key for row in [stage_points(made, 2), *task_points(made)] for key in row}
    for panel in panels_of(workspace):
        points += getattr(panel, "metrics", None) or []
        axes = [getattr(panel, name, 0) for name in ("x", "y")]
        points += [axis.name for axis in axes if hasattr(axis, "name")]
        points += axes[1] if isinstance(axes[1], list) else []
    assert len(points) >= 11 and set(points) <= curves | {*summarize_scores(made), "train/loss", "train/lr"}
    lines = {panel.x for panel in panels_of(workspace) if type(panel).__name__ == "LinePlot"}
    assert lines == {"stage", "train/tokens"}
    assert set(program.IMAGES) == set(pictures(made)) and set(program.TABLES) <= set(tabulate(made))
    assert workspace._to_model().model_dump_json()
    given = [panel.metric_regex for panel in panels_of(workspace) if getattr(panel, "metric_regex", None)]
    assert len(given) == 2
    for pattern in given:
        assert [name for name in ("ppl/law", "ppl/a%2Fb", "tasks/law") if re.search(pattern, name)]
        assert not any(re.search(pattern, name) for name in summarize_scores(scores()))
