"""What is offered for W&B beyond the runs: the workspace made by code, and the sweep."""

import re
import warnings

import pytest
import yaml

from cpt import dashboard
from cpt.reporting.run_table import choose_headlines, summarise_run
from cpt.reporting.tables import stage_row, tabulate, task_rows
from cpt.tracking.wandb_run import describe_run, pictures
from cpt.training.plan import make_plan
from tests.conftest import ROOT
from tests.tracking.test_sync import scores

MACROS = {"${env}", "${interpreter}", "${program}", "${args_no_hyphens}"}


@pytest.fixture(scope="module")
def sweep():
    return yaml.safe_load((ROOT / "docs" / "sweep.yaml").read_text())


def candidates(parameter):
    """Values that W&B may choose for a parameter."""
    return parameter.get("values") or [parameter["min"], parameter["max"]]


def test_each_parameter_of_the_sweep_is_a_valid_override(sweep, composed, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    fixed = [part for part in sweep["command"] if part not in MACROS]
    assert {"method", "optim.lr"} == set(sweep["parameters"])
    for name, parameter in sweep["parameters"].items():
        for value in candidates(parameter):
            cfg = composed(*fixed, f"{name}={value}")
            assert (cfg.method.name if name == "method" else cfg.optim.lr) == value
            assert cfg.domains.score_on == "valid"  # what is chosen on the test texts is no result
            assert (cfg.name, cfg.logger.wandb, cfg.logger.mode) == ("s1", True, "online")


def test_combinations_of_the_sweep_are_plans(sweep, composed):
    for end in (0, -1):
        chosen = [f"{name}={candidates(parameter)[end]}" for name, parameter in sweep["parameters"].items()]
        assert make_plan(composed(*chosen)).order


def test_the_sweep_runs_the_program_and_minimises_a_number_that_there_is(sweep):
    assert (ROOT / sweep["program"]).is_file()
    assert sweep["command"][:3] == ["${env}", "${interpreter}", "${program}"]
    assert sweep["command"][-1] == "${args_no_hyphens}"
    assert sweep["metric"]["name"] in summarise_run(scores())
    assert sweep["metric"]["goal"] == "minimize"
    for parameter in sweep["parameters"].values():
        assert all(not isinstance(value, str) or value.isidentifier() for value in candidates(parameter))


@pytest.fixture(scope="module")
def workspace():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, about pydantic
        pytest.importorskip("wandb_workspaces.workspaces", reason="wandb-workspaces is not installed")
        import wandb_workspaces.reports.v2  # noqa: F401
    return dashboard.build_workspace("me", "p")


def test_the_dashboard_shows_numbers_that_there_are(workspace):
    made = scores()
    curves = {key for row in [stage_row(made, 2), *task_rows(made)] for key in row} | set(summarise_run(made))
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


def test_patterns_of_the_dashboard_meet_the_curves(workspace):
    panels = [panel for section in workspace.sections for panel in section.panels]
    patterns = [panel.metric_regex for panel in panels if getattr(panel, "metric_regex", None)]
    assert len(patterns) == 2
    names = ["ppl/law", "ppl/a%2Fb", "tasks/law"]
    assert all([name for name in names if re.search(pattern, name)] for pattern in patterns)
    assert not any(re.search(pattern, name) for pattern in patterns for name in summarise_run(scores()))


def test_the_dashboard_groups_by_method_and_sorts_by_perplexity(workspace):
    (order,) = workspace.runset_settings.order
    assert (order.item.name, order.ascending) == ("LC/perplexity", True)
    assert [config.name for config in workspace.runset_settings.groupby] == ["cpt.measured", "cpt.label"]
    pinned = workspace.runset_settings.pinned_columns
    assert {name.removeprefix("summary:") for name in pinned[1:]} <= set(choose_headlines(scores()))


def test_what_the_dashboard_groups_by_tells_apart_what_cannot_be_compared():
    one, other = scores(), scores()
    other.conditions = {"length": 128}
    told = [describe_run(each) for each in (one, other)]
    assert [each["label"] for each in told] == ["das", "das"]
    for name in (dashboard.MEASURED, dashboard.GROUP):
        prefix, _, key = name.partition(".")
        assert prefix == "cpt"
        assert told[0][key] != told[1][key]
    assert all(each["group"].startswith("das | ") for each in told)


def test_the_dashboard_shows_pictures_and_tables_that_there_are(workspace):
    assert set(dashboard.IMAGES) == set(pictures(scores()))
    assert set(dashboard.TABLES) <= set(tabulate(scores()))
    assert workspace._to_model().model_dump_json()


def test_without_the_package_one_line_says_what_is_needed(monkeypatch, capsys):
    monkeypatch.setattr(dashboard, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        dashboard.main(["me", "p"])
    assert capsys.readouterr().err == (
        "cpt: needed is the package wandb-workspaces; pip install -e '.[dashboard]'\n"
    )
