"""Whole runs on supervised tasks: every kind of method learns answers, and the matrix is of the answers."""

import math

import pytest

from tests.runs.reading import told_by
from tests.support.campaign import run_few
from tests.support.task_fixtures import write_tasks

METHODS = [
    "method=ncl",
    "method=derpp",
    "method=ewc",
    "method=lora",
    "replay=past",
    "replay=general",
    "method=kd",
]


@pytest.mark.parametrize("given", run_few(METHODS, ["replay=past"]))
def test_answers_are_learned_in_a_sequence(given, small, small_gpt2, start, tmp_path):
    tasks = ["domains=tasks", "model.length=64"]
    tasks.append(f"domains.root={write_tasks(tmp_path, ('law', 'food'), train=80, test=20)}")
    with pytest.raises(ValueError, match="a masked model writes no answers"):
        start(small(*tasks), tmp_path / "masked")
    start(small_gpt2(*tasks, given, "trainer.steps=12", "optim.lr=1e-2"), tmp_path / "run")
    scores = told_by(tmp_path / "run")
    assert scores["domains"] == ["food", "law", "general"] and len(scores["rows"]) == 3
    assert scores["scored"][0] == scores["tokens"][0]
    assert 20 * len("long") <= scores["bytes"][0] <= 20 * len("short")
    assert all(math.isfinite(value) for row in scores["nll"] for value in row)
    assert scores["nll"][-1][0] < scores["nll"][0][0] - 0.5
