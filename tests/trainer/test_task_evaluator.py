"""The tasks of a run are asked after its stages: the second matrix, whatever happens on the way."""

import pytest

from cpt.evaluation import predictions
from cpt.evaluation.predictions import ANSWER_COLUMNS, SOURCE, answers_file, answers_of, load_predictions
from cpt.evaluation.task_metrics import MEASURES
from cpt.trainer.evaluators import TaskEvaluator
from tests.runs.reading import assert_same_bits, told_by
from tests.support.task_fixtures import write_tasks

TASKS, METRICS = ("food", "law"), {"AP", "LA", "BWT", "F", "FWT"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("asked")
    (place / "tasks").mkdir()
    write_tasks(place / "tasks", TASKS, train=60, test=24)
    return place


@pytest.fixture
def asked(small_gpt2, place, start):
    def run(folder, *overrides):
        given = ["domains=tasks", f"domains.root={place / 'tasks'}", "model.max_seq_length=64"]
        given += ["answers.max_new_tokens=4"] * ("answers=none" not in overrides)
        start(small_gpt2(*given, "save_all_stages=true", "trainer.steps=4", *overrides), folder)
        return told_by(folder)

    return run


def read(folder, task):
    return answers_of(*load_predictions(answers_file(folder, task), ANSWER_COLUMNS, optional=[SOURCE]))


def test_the_matrix_of_scores_is_of_the_files_and_asking_changes_no_bit(asked, tmp_path, monkeypatch):
    """A finished run is asked later: what is damaged, and after a kill between two tasks the others alone."""
    whole, later = tmp_path / "whole", tmp_path / "later"
    scores = asked(whole)
    answers = scores["answers"]
    assert list(answers["tasks"]) == list(TASKS) and scores["rows"] == ["base", *TASKS]
    assert set(answers["metrics"]) == METRICS == set(answers["intervals"])
    for task, told in answers["tasks"].items():
        assert told["examples"] == 24 and told["chance"] == 0.5 <= told["majority"] <= 1
        assert list(told["measures"])[0] == "accuracy_ranked"
        for row, name in enumerate(scores["rows"]):
            found = read(whole / "answers" / f"{row:03d}-{name}", task)
            for measure, values in told["measures"].items():
                each = MEASURES[measure].compute(found)
                known = each[each == each]
                assert values[row] == (pytest.approx(known.mean()) if len(known) else None)
    assert asked(later, "answers=none")["answers"] == {}
    assert_same_bits(later, whole)
    save, saved, asks, ask = predictions.save_predictions, [], [], TaskEvaluator.ask

    def deadly(path, *args, **kwargs):
        save(path, *args, **kwargs)
        saved.append(path)
        if len(saved) == 3:
            raise KeyError("killed")

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(predictions, "save_predictions", deadly)
        asked(later)
    saved[0].write_bytes(saved[0].read_bytes()[:100])
    monkeypatch.setattr(TaskEvaluator, "ask", lambda *given, **how: asks.append(given) or ask(*given, **how))
    assert asked(later)["answers"] | {"seconds": 0} == answers | {"seconds": 0} and len(asks) == 4
    assert_same_bits(later, whole)


def test_stages_that_are_not_due_are_missing(asked, tmp_path):
    few = ["answers.written=false", "answers.max_documents=5"]
    answers = asked(tmp_path, "answers.when=last", *few)["answers"]
    assert set(answers["metrics"]) == {"AP"} == set(answers["intervals"])
    for told in answers["tasks"].values():
        assert told["examples"] == 5 and list(told["measures"]) == ["accuracy_ranked", "accuracy_ranked_mean"]
        assert [value is None for value in told["measures"]["accuracy_ranked"]] == [False, True, False]


def test_a_part_answers_its_own_task_and_the_base_what_has_not_been_learned(asked, tmp_path):
    asked(tmp_path, "method=lora", "method.per_domain=true", "optim.lr=0.05")
    rows = [tmp_path / "answers" / name for name in ("000-base", "001-food", "002-law")]
    food, law = ([read(row, task) for row in rows] for task in TASKS)
    assert food[1] == food[2] != food[0]
    assert law[0] == law[1] != law[2]
