"""What is kept of a probe, and what is not believed."""

import json

import pytest

from cpt.evaluation.probes.results import (
    check_probes,
    describe_task,
    last_value,
    path_of,
    pick_metric,
    read_results,
    save_results,
    tell_task,
)
from cpt.evaluation.scores import Scores
from tests.support.comparing import made
from tests.support.probing import probes, results

FOUND = results({"acc": 0.5, "acc_norm": 0.75}, digest="d")


def test_what_is_saved_is_read_if_it_is_of_these_settings(tmp_path):
    save_results(path_of(tmp_path, "a/b"), FOUND)
    assert [path.name for path in tmp_path.iterdir()] == ["a%2Fb.json"]
    assert read_results(path_of(tmp_path, "a/b"), digest="d") == FOUND
    assert read_results(path_of(tmp_path, "a/b"), digest="other") is None
    assert read_results(path_of(tmp_path, "c"), digest="d") is None


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", json.dumps(FOUND | {"metrics": {"acc": 3}})])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    path_of(tmp_path, "a").write_text(damage)
    assert read_results(path_of(tmp_path, "a"), digest="d") is None


def test_the_first_metric_is_shown_unless_another_is_chosen():
    assert pick_metric(FOUND, "a", None) == "acc" and pick_metric(FOUND, "a", "acc_norm") == "acc_norm"
    with pytest.raises(ValueError, match=r"^probe\.metrics\.a=f1; allowed: acc, acc_norm$"):
        pick_metric(FOUND, "a", "f1")


def test_a_row_that_was_not_measured_is_null_and_chance_is_of_accuracies():
    told = tell_task([FOUND, None], "acc_norm")
    assert told["values"] == [0.75, None] and told["errors"] == [0.1, None] and told["chance"] == 0.25
    assert last_value(told) == (0, 0.75) and last_value({"values": [None]}) is None
    assert tell_task([results({"brier": 0.1}, digest="d")], "brier")["chance"] is None


def test_a_task_is_told_with_what_decides_its_numbers():
    task = tell_task([FOUND], "acc")
    assert describe_task("a", task) == "a (acc, 0 shots, version 1.0)"
    several = task | {"shots": None, "limit": 0.5}
    assert describe_task("a", several) == "a (acc, shots differ, limit 0.5, version 1.0)"


def test_scores_without_probes_are_read_and_wrong_ones_are_refused(tmp_path):
    made().save(tmp_path / "scores.json")
    older = json.loads((tmp_path / "scores.json").read_text())
    del older["probes"], older["phases"]["probes"]
    (tmp_path / "scores.json").write_text(json.dumps(older))
    assert Scores.load(tmp_path / "scores.json").probes == {}
    check_probes({}, rows=[])
    check_probes(probes({"a": [0.5, 0.6]}), rows=["base", "law"])
    for wrong in (
        probes({"a": [0.5, 0.6, 0.7]}),
        probes({"a": ["half"]}),
        probes({"a": [0.5]}) | {"tasks": {"a": {}}},
        {"tasks": {}},
    ):
        with pytest.raises(ValueError, match="probes"):
            check_probes(wrong, rows=["base", "law"])
