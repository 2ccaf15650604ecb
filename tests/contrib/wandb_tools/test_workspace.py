"""The W&B workspace made by code."""

import re
import warnings

import pytest

from cpt.contrib.wandb_tools import workspace as program
from cpt.loggers.wandb import describe_run, pictures
from cpt.reporting.frames import choose_headlines, stage_points, summarize_scores, tabulate, task_points
from tests.support.tracked import scores


@pytest.fixture(scope="module")
def workspace():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, about pydantic
        pytest.importorskip("wandb_workspaces.workspaces", reason="wandb-workspaces is not installed")
        import wandb_workspaces.reports.v2  # noqa: F401
    return program.build_workspace("me", "p")


def test_the_workspace_shows_numbers_that_there_are(workspace):
    made = scores()
    curves = {key for row in [stage_points(made, 2), *task_points(made)] for key in row} | set(
        summarize_scores(made)
    )
    panels = [panel for section in workspace.sections for panel in section.panels]
    points = [key for panel in panels for key in getattr(panel, "metrics", None) or []]
    for panel in panels:
        points += [
            axis.name for axis in (getattr(panel, "x", 0), getattr(panel, "y", 0)) if hasattr(axis, "name")
        ]
        points += panel.y if isinstance(getattr(panel, "y", None), list) else []
    assert len(points) >= 11
    assert set(points) <= curves | {"train/loss", "train/lr"}
    assert {panel.x for panel in panels if type(panel).__name__ == "LinePlot"} == {
        "stage",
        "train/tokens",
    }


def test_patterns_of_the_workspace_meet_the_curves(workspace):
    panels = [panel for section in workspace.sections for panel in section.panels]
    patterns = [panel.metric_regex for panel in panels if getattr(panel, "metric_regex", None)]
    assert len(patterns) == 2
    names = ["ppl/law", "ppl/a%2Fb", "tasks/law"]
    assert all([name for name in names if re.search(pattern, name)] for pattern in patterns)
    assert not any(re.search(pattern, name) for pattern in patterns for name in summarize_scores(scores()))


def test_the_workspace_groups_by_method_and_sorts_by_perplexity(workspace):
    (order,) = workspace.runset_settings.order
    assert (order.item.name, order.ascending) == ("LC/perplexity", True)
    assert [config.name for config in workspace.runset_settings.groupby] == ["cpt.measured", "cpt.label"]
    pinned = workspace.runset_settings.pinned_columns
    assert {name.removeprefix("summary:") for name in pinned[1:]} <= set(choose_headlines(scores()))


def test_what_the_workspace_groups_by_tells_apart_what_cannot_be_compared():
    one, other = scores(), scores()
    other.conditions = {"length": 128}
    told = [describe_run(each) for each in (one, other)]
    assert [each["label"] for each in told] == ["das", "das"]
    for name in (program.MEASURED, program.GROUP):
        prefix, _, key = name.partition(".")
        assert prefix == "cpt"
        assert told[0][key] != told[1][key]
    assert all(each["group"].startswith("das | ") for each in told)


def test_the_workspace_shows_pictures_and_tables_that_there_are(workspace):
    assert set(program.IMAGES) == set(pictures(scores()))
    assert set(program.TABLES) <= set(tabulate(scores()))
    assert workspace._to_model().model_dump_json()


def test_without_the_package_one_line_says_what_is_needed(monkeypatch, capsys):
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        program.main(["me", "p"])
    assert capsys.readouterr().err == (
        "cpt: needed is the package wandb-workspaces; pip install -e '.[dashboard]'\n"
    )
