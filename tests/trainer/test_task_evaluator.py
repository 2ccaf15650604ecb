"""The tasks of a run are asked after its stages: the second matrix, whatever happens on the way."""

import pytest

from cpt.evaluation import predictions
from cpt.evaluation.predictions import ANSWER_COLUMNS, SOURCE, answers_file, answers_of, load_predictions
from cpt.evaluation.task_metrics import MEASURES
from cpt.trainer.evaluators import TaskEvaluator
from cpt.trainer.plan import make_plan
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
        given = ["domains=tasks", f"domains.root={place / 'tasks'}", "model.length=64", "keep_stages=true"]
        given += ["answers.tokens=4"] * ("answers=none" not in overrides)
        start(small_gpt2(*given, "trainer.steps=4", *overrides), folder)
        return told_by(folder)

    return run


@pytest.fixture
def whole(asked, place):
    """A run that nothing interrupted."""
    if not (place / "run").exists():
        asked(place / "run")
    return place / "run"


def read(folder, task):
    return answers_of(*load_predictions(answers_file(folder, task), ANSWER_COLUMNS, optional=[SOURCE]))


def test_the_matrix_of_scores_is_of_the_files(whole, small, place, start, tmp_path):
    with pytest.raises(ValueError, match="a masked model writes no answers"):
        start(small("domains=tasks", f"domains.root={place / 'tasks'}", "model.length=64"), tmp_path)
    scores = told_by(whole)
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
    assert "Answers to each task" in (whole / "report.md").read_text()


def test_asking_changes_no_bit_and_a_finished_run_is_asked_later(asked, whole, tmp_path, monkeypatch):
    """What is damaged is asked again, and after a kill between two tasks the others alone are."""
    assert asked(tmp_path, "answers=none")["answers"] == {}
    assert_same_bits(tmp_path, whole)
    save, saved, asks, ask = predictions.save_predictions, [], [], TaskEvaluator.ask

    def deadly(path, *args, **kwargs):
        save(path, *args, **kwargs)
        saved.append(path)
        if len(saved) == 3:
            raise KeyError("killed")

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(predictions, "save_predictions", deadly)
        asked(tmp_path)
    saved[0].write_bytes(saved[0].read_bytes()[:100])
    monkeypatch.setattr(
        TaskEvaluator, "ask", lambda self, *given, **how: asks.append(given) or ask(self, *given, **how)
    )
    later, expected = asked(tmp_path)["answers"], told_by(whole)["answers"]
    assert len(asks) == 4 and later | {"seconds": 0} == expected | {"seconds": 0}
    assert_same_bits(tmp_path, whole)


def test_stages_that_are_not_due_are_missing(asked, tmp_path):
    few = ["answers.written=false", "answers.most=5"]
    answers = asked(tmp_path, "answers.when=last", *few)["answers"]
    assert set(answers["metrics"]) == {"AP"} == set(answers["intervals"])
    for told in answers["tasks"].values():
        assert told["examples"] == 5 and list(told["measures"]) == ["accuracy_ranked", "accuracy_ranked_mean"]
        assert [value is None for value in told["measures"]["accuracy_ranked"]] == [False, True, False]
    each = asked(tmp_path, *few)["answers"]
    assert each["metrics"]["AP"] == answers["metrics"]["AP"] and set(each["metrics"]) == METRICS


@pytest.mark.campaign
@pytest.mark.parametrize("method", ["joint", "hat"])
def test_methods_answer_with_the_part_of_a_task(method, asked, tmp_path):
    for told in asked(tmp_path, f"method={method}", "trainer.steps=2")["answers"]["tasks"].values():
        assert all(0 <= value <= 1 for value in told["measures"]["accuracy_ranked"])


def test_a_part_answers_its_own_task_and_the_base_what_has_not_been_learned(asked, tmp_path):
    asked(tmp_path, "method=lora", "method.per_domain=true", "optim.lr=0.05")
    rows = [tmp_path / "answers" / name for name in ("000-base", "001-food", "002-law")]
    food, law = ([read(row, task) for row in rows] for task in TASKS)
    assert food[1] == food[2] != food[0]
    assert law[0] == law[1] != law[2]


def test_a_task_is_known_by_what_is_asked_for(asked, tmp_path):
    given = ["domains.choices=none", "answers.when=last", "order=[food]", "trainer.steps=1"]
    unasked = asked(tmp_path / "unasked", *given, "answers.written=false")
    assert unasked["answers"] == {} and unasked["run"]["finished"]
    with pytest.raises(ValueError, match=r"answers.measures.food=accuracy_ranked is of choices"):
        asked(tmp_path / "refused", *given, "answers.measures={food: accuracy_ranked}")
    measures = asked(tmp_path, *given)["answers"]["tasks"]["food"]["measures"]
    path = answers_file(tmp_path / "answers" / "001-food", "food")
    before, written = path.stat().st_mtime_ns, measures["edit_similarity"]
    assert list(measures)[0] == "rouge_l"
    known = ["answers.measures={food: edit_similarity, law: sari}"]
    measures = asked(tmp_path, *given, *known)["answers"]["tasks"]["food"]["measures"]
    assert list(measures)[0] == "edit_similarity" and measures["edit_similarity"] == written
    assert path.stat().st_mtime_ns == before, "what is there is not asked again"
    answers = asked(tmp_path, *given, "answers.measures={food: sari}")["answers"]
    assert path.stat().st_mtime_ns != before, "the sources have to be kept"
    found = read(path.parent, "food")
    assert found.sources and 0 < answers["metrics"]["AP"] < 1
    assert answers["metrics"]["AP"] == pytest.approx(MEASURES["sari"].compute(found).mean())


def test_the_tasks_of_trace_are_known_by_its_measures(small_gpt2, tmp_path):
    names = ["C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten"]
    for name in names:
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            (tmp_path / name / f"{split}.json").write_text('[{"prompt": "Question", "answer": "A"}]')
    given = ["domains=tasks", f"domains.root={tmp_path}", "domains.format=trace", "answers=trace"]
    known_by = make_plan(small_gpt2(*given)).answers.known_by
    assert set(known_by) == set(names) and known_by["20Minuten"] == "sari"
