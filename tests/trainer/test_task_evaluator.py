"""The tasks of a run are asked after its stages: the second matrix, whatever happens on the way."""

import json
import shutil

import pytest
import torch

from cpt.evaluation import predictions
from cpt.evaluation.predictions import ANSWER_COLUMNS, SOURCE, answers_file, answers_of, load_predictions
from cpt.evaluation.task_metrics import MEASURES
from cpt.trainer import loop
from cpt.trainer.evaluators import TaskEvaluator
from cpt.trainer.plan import make_plan
from tests.support.task_fixtures import write_tasks

TASKS = ("food", "law")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("asked"), TASKS, train=60, test=24)


@pytest.fixture
def asked(small_gpt2, tasks, start):
    def run(folder, *overrides):
        given = ["domains=tasks", f"domains.root={tasks}", "model.length=64"]
        given += ["answers.tokens=4"] * ("answers=none" not in overrides)
        start(small_gpt2(*given, *overrides), folder)
        return json.loads((folder / "scores.json").read_text())

    return run


def read(folder, task):
    """What a stage's file says."""
    return answers_of(*load_predictions(answers_file(folder, task), ANSWER_COLUMNS, optional=[SOURCE]))


def bits(folder):
    state = torch.load(next((folder / "stages").iterdir()), weights_only=True)
    return {name: value.numpy().tobytes() for name, value in state.items()}


def test_the_matrix_of_scores_is_of_the_files(asked, tmp_path):
    scores = asked(tmp_path)
    answers = scores["answers"]
    assert list(answers["tasks"]) == list(TASKS) and scores["rows"] == ["base", *TASKS]
    assert set(answers["metrics"]) == {"AP", "LA", "BWT", "F", "FWT"} == set(answers["intervals"])
    for task, told in answers["tasks"].items():
        assert told["examples"] == 24 and told["chance"] == 0.5 <= told["majority"] <= 1
        assert list(told["measures"])[0] == "accuracy_ranked"
        for row, name in enumerate(scores["rows"]):
            found = read(tmp_path / "answers" / f"{row:03d}-{name}", task)
            for measure, values in told["measures"].items():
                each = MEASURES[measure].compute(found)
                known = each[each == each]
                assert values[row] == (pytest.approx(known.mean()) if len(known) else None)
    page = (tmp_path / "report.md").read_text()
    assert "Answers to each task" in page and "AP" in page


def test_asking_changes_no_bit_and_a_finished_run_is_asked_later(asked, tmp_path):
    plain = asked(tmp_path / "run", "answers=none", "keep_stages=true")
    assert plain["answers"] == {}
    whole = bits(tmp_path / "run")
    later = asked(tmp_path / "run", "keep_stages=true")
    assert later["nll"] == plain["nll"] and bits(tmp_path / "run") == whole
    at_once = asked(tmp_path / "once", "keep_stages=true")
    assert bits(tmp_path / "once") == whole and at_once["nll"] == plain["nll"]
    without_time = [{k: v for k, v in each["answers"].items() if k != "seconds"} for each in (later, at_once)]
    assert without_time[0] == without_time[1]


def test_stages_that_are_not_due_are_missing(asked, tmp_path):
    answers = asked(tmp_path, "answers.when=last", "answers.written=false", "answers.most=5")["answers"]
    assert set(answers["metrics"]) == {"AP"} == set(answers["intervals"])
    for told in answers["tasks"].values():
        assert told["examples"] == 5 and list(told["measures"]) == ["accuracy_ranked", "accuracy_ranked_mean"]
        assert [value is None for value in told["measures"]["accuracy_ranked"]] == [False, True, False]
    assert (
        asked(tmp_path, "answers.when=every:2", "answers.written=false", "answers.most=5")["answers"][
            "metrics"
        ]
        == answers["metrics"]
    )
    each = asked(tmp_path / "each", "answers.written=false", "answers.most=5")["answers"]
    for found in ("metrics", "intervals"):
        assert each[found]["AP"] == answers[found]["AP"]
    assert set(each["metrics"]) == {"AP", "LA", "BWT", "F", "FWT"}


def test_killed_between_two_tasks_it_goes_on(asked, tmp_path, monkeypatch):

    whole = asked(tmp_path / "whole")["answers"]
    save, seen = predictions.save_predictions, []

    def deadly(path, *args, **kwargs):
        save(path, *args, **kwargs)
        seen.append(path)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(predictions, "save_predictions", deadly)
    with pytest.raises(BaseException):  # noqa: B017, PT011  (Lightning ends the process in its own way)
        asked(tmp_path / "run")
    monkeypatch.undo()
    asks, ask = [], TaskEvaluator.ask

    def counted(self, number, task, *args, **kwargs):
        asks.append(task)
        ask(self, number, task, *args, **kwargs)

    monkeypatch.setattr(TaskEvaluator, "ask", counted)
    found = asked(tmp_path / "run")["answers"]
    assert len(asks) == 3 and found["tasks"] == whole["tasks"] and found["metrics"] == whole["metrics"]


def test_a_damaged_file_is_made_again(asked, tmp_path):
    whole = asked(tmp_path, "keep_stages=true")["answers"]
    damaged = next((tmp_path / "answers" / "001-food").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:100])
    scores = json.loads((tmp_path / "scores.json").read_text())
    scores["answers"]["digest"] = "other"
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    assert asked(tmp_path, "keep_stages=true")["answers"]["tasks"] == whole["tasks"]


@pytest.mark.parametrize("method", ["lora method.per_domain=true", "joint", "one", "hat"])
def test_methods_answer_with_the_part_of_a_task(method, asked, tmp_path):
    scores = asked(tmp_path, *f"method={method}".split(), "trainer.steps=2")
    for told in scores["answers"]["tasks"].values():
        assert all(0 <= value <= 1 for value in told["measures"]["accuracy_ranked"])
    assert loop.RunDir(tmp_path).lost(full=True) == []


def test_a_part_answers_its_own_task_and_the_base_what_has_not_been_learned(asked, tmp_path):
    asked(tmp_path, "method=lora", "method.per_domain=true", "optim.lr=0.05")
    rows = [tmp_path / "answers" / name for name in ("000-base", "001-food", "002-law")]
    food, law = ([read(row, task) for row in rows] for task in TASKS)
    assert food[1] == food[2] != food[0]
    assert law[0] == law[1] != law[2]


def test_open_answers_that_are_not_written_are_not_asked_and_told(asked, tmp_path, caplog):
    caplog.set_level("INFO")
    scores = asked(tmp_path, "domains.choices=none", "answers.written=false", "trainer.steps=1")
    assert scores["answers"] == {} and scores["run"]["finished"]
    assert "answers.written=false: food, law, whose answers are open, is not asked" in caplog.messages


def test_a_task_is_known_by_what_is_asked_for(asked, tmp_path):
    given = ["domains.choices=none", "answers.when=last", "order=[food]", "trainer.steps=1"]
    tasks = asked(tmp_path, *given)["answers"]["tasks"]
    assert list(tasks["food"]["measures"])[0] == "rouge_l"
    path = answers_file(tmp_path / "answers" / "001-food", "food")
    before, written = path.stat().st_mtime_ns, tasks["food"]["measures"]["edit_similarity"]
    wanted = [*given, "answers.measures={food: edit_similarity, law: sari}"]
    tasks = asked(tmp_path, *wanted)["answers"]["tasks"]
    assert list(tasks["food"]["measures"])[0] == "edit_similarity"
    assert tasks["food"]["measures"]["edit_similarity"] == written
    assert path.stat().st_mtime_ns == before, "what is there is not asked again"
    answers = asked(tmp_path, *given, "answers.measures={food: sari}")["answers"]
    assert path.stat().st_mtime_ns != before, "the sources have to be kept"
    found = read(path.parent, "food")
    assert found.sources and all(" " in text and "\n" not in text for text in found.sources)
    expected = MEASURES["sari"].compute(found).mean()
    assert answers["metrics"]["AP"] == pytest.approx(expected) and 0 < expected < 1
    assert "SARI" in (tmp_path / "report.md").read_text()


def test_a_measure_of_choices_where_there_are_none(asked, tmp_path):
    with pytest.raises(ValueError, match=r"answers.measures.law=accuracy_ranked is of choices, and its answ"):
        asked(tmp_path, "domains.choices=none", "answers.measures={law: accuracy_ranked}", "trainer.steps=1")


def test_the_tasks_of_trace_are_known_by_its_measures(small_gpt2, tmp_path):
    names = ["C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten"]
    for name in names:
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            rows = [{"prompt": f"Question {number}", "answer": f"A{number}"} for number in range(3)]
            (tmp_path / name / f"{split}.json").write_text(json.dumps(rows))
    given = ["domains=tasks", f"domains.root={tmp_path}", "domains.format=trace", "answers=trace"]
    known_by = make_plan(small_gpt2(*given)).answers.known_by
    assert set(known_by) == set(names) and known_by["20Minuten"] == "sari"
    shutil.rmtree(tmp_path / "FOMC")
    with pytest.raises(ValueError, match=r"answers.measures.FOMC is not known; allowed: 20Minuten, C-STANCE"):
        make_plan(small_gpt2(*given))
