"""Whole runs on supervised tasks: every kind of method learns answers, and the matrix is of the answers."""

import json
import math

import pytest

from tests.conftest import VOCABULARIES, sentences

TASKS = ("law", "food")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Two tasks and general text: which word a made-up text has."""
    root = tmp_path_factory.mktemp("tasks")
    for seed, name in enumerate(TASKS):
        for split, count in (("train", 80), ("test", 20)):
            (root / name).mkdir(exist_ok=True)
            made = sentences(VOCABULARIES[name], count=count, seed=10 * seed + (split == "test"))
            rows = [{"text": text, "label": "long" if len(text) > 110 else "short"} for text in made]
            (root / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "general").mkdir()
    general = sentences(VOCABULARIES["general"], count=120, seed=0)
    (root / "general" / "all.txt").write_text("\n".join(general))
    return root


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
