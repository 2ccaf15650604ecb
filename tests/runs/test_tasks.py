"""Whole runs on supervised tasks: every kind of method learns answers, and the matrix is of the answers."""

import json
import math

import pytest

from tests.support.task_fixtures import write_tasks

TASKS = ("law", "food")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), TASKS, train=80, test=20)


@pytest.fixture
def run(small_gpt2, tasks, start, tmp_path):
    def made(*overrides):
        given = ["domains=tasks", f"domains.root={tasks}", "model.length=64", *overrides]
        start(small_gpt2(*given), tmp_path / "run")
        return json.loads((tmp_path / "run" / "scores.json").read_text())

    return made


METHODS = [
    "method=ncl",
    "method=derpp",
    "method=ewc",
    "method=lora",
    "replay=past",
    "replay=general",
    "method=kd",
]


@pytest.mark.parametrize("given", METHODS)
def test_answers_are_learned_in_a_sequence(run, given):
    scores = run(given, "trainer.steps=12", "optim.lr=1e-2" if given == "method=ncl" else "seed=0")
    assert scores["domains"] == [*sorted(TASKS), "general"]
    assert len(scores["rows"]) == 3
    assert scores["scored"][0] == scores["tokens"][0]
    assert 20 * len("long") <= scores["bytes"][0] <= 20 * len("short")
    assert all(math.isfinite(value) for row in scores["nll"] for value in row)
    if given == "method=ncl":
        assert scores["nll"][-1][0] < scores["nll"][0][0] - 1


def test_a_masked_model_cannot_answer(small, tasks, start, tmp_path):
    cfg = small("domains=tasks", f"domains.root={tasks}", "model.length=64")
    with pytest.raises(ValueError, match="a masked model writes no answers; allowed: a causal model"):
        start(cfg, tmp_path / "run")
