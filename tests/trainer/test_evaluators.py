"""Answers, benchmarks and end tasks after stages: on whose weights, and what a second start repeats."""

import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from cpt.core.preemption import Preempted
from cpt.evaluation import predictions
from cpt.evaluation.options import LMEvalOptions
from cpt.evaluation.predictions import (
    ANSWER_COLUMNS,
    SOURCE,
    answers_file,
    answers_of,
    endtask_file,
    load_predictions,
    save_predictions,
)
from cpt.evaluation.task_metrics import MEASURES
from cpt.train import is_done
from cpt.trainer import preflight
from cpt.trainer.finetune_evaluator import FinetuneEvaluator
from cpt.trainer.task_evaluator import TaskEvaluator
from tests.runs.reading import assert_same_bits, read_scores
from tests.support.endtask_fixtures import QUICK, write_task
from tests.support.harness_tasks import FakeHarness, sum_weights
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
        return read_scores(folder)

    return run


def read(folder, task):
    return answers_of(*load_predictions(answers_file(folder, task), ANSWER_COLUMNS, optional=[SOURCE]))


def test_the_matrix_of_scores_is_of_the_files_and_asking_changes_no_bit(asked, tmp_path, monkeypatch):
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


DROPOUT = "model.config.attn_pdrop=0.1"


@pytest.fixture
def probed(small_gpt2, start, tmp_path, monkeypatch):
    def harness(plan, precision):
        return FakeHarness(plan.benchmark) if plan.benchmark is not None else None

    monkeypatch.setattr(LMEvalOptions, "check_installed", lambda self: None)
    monkeypatch.setattr(preflight, "make_harness", harness)

    def go(*overrides, when="last", folder=tmp_path):
        asked = [f"benchmark.when={when}", "benchmark=lm_eval", "benchmark.tasks=[say,ask]"] if when else []
        start(small_gpt2("order=[law,food]", "trainer.steps=4", *asked, *overrides), folder)
        return read_scores(folder)

    return go


def times_of(folder):
    found = sorted((folder / "benchmarks").rglob("*.json"))
    return {str(path.relative_to(folder / "benchmarks")): path.stat().st_mtime_ns for path in found}


OF_BASE, OF_LAW, OF_FOOD = (
    [f"{stage}/{task}.json" for task in ("ask", "say")] for stage in ("000-base", "001-law", "002-food")
)


def test_a_probe_is_measured_after_the_stages_asked_for_and_changes_nothing(probed, tmp_path):
    plain, asked = (probed(DROPOUT, when=when, folder=tmp_path / str(when)) for when in (None, "each"))
    assert_same_bits(tmp_path / "None", tmp_path / "each")
    assert plain["benchmarks"] == {} and [*times_of(tmp_path / "each")] == OF_BASE + OF_LAW + OF_FOOD
    first, _, last = asked["benchmarks"]["tasks"]["say"]["values"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "each" / "model")
    assert first != last == pytest.approx(sum_weights(exported), rel=1e-9)


@pytest.mark.parametrize("error", [KeyError, Preempted])
def test_a_second_start_measures_what_is_missing_damaged_or_of_other_settings(
    probed, tmp_path, monkeypatch, error
):
    def stop(self, name, *given, **how):
        if (tmp_path / "benchmarks" / "000-base" / "say.json").exists():
            monkeypatch.setattr("cpt.core.preemption.notice.number", 15 * (error is Preempted))
            raise error(15)
        return measure(self, name, *given, **how)

    measure = FakeHarness.measure
    with monkeypatch.context() as patched, pytest.raises(error, match="15|in the benchmark after base"):
        patched.setattr(FakeHarness, "measure", stop)
        probed(when="every:2")
    monkeypatch.setattr("cpt.core.preemption.notice.number", 0)
    left = times_of(tmp_path)
    assert [*left] == [OF_BASE[1]]
    probed(when="every:2")
    before = times_of(tmp_path)
    assert [*before] == OF_BASE + OF_FOOD and left.items() <= before.items()
    (tmp_path / "benchmarks" / OF_FOOD[0]).unlink()
    (tmp_path / "benchmarks" / OF_FOOD[1]).write_text("{")
    probed("benchmark.batch_size=2", when="every:2")
    again = times_of(tmp_path)
    assert {name for name in before if again[name] != before[name]} == {*OF_FOOD}
    probed("benchmark.max_documents=3", when="every:2")
    assert all(when != again[name] for name, when in times_of(tmp_path).items())


EACH = ["001-law/law", "002-food/food", "002-food/law"]


@pytest.fixture
def root(tmp_path):
    write_task(tmp_path, "law")
    write_task(tmp_path, "food", train=24)
    return tmp_path


@pytest.fixture
def noted(monkeypatch):
    """What is measured: files that say on which weights, in the place of a fine-tuning; it may be deadly."""
    counted = SimpleNamespace(asked=[], deadly=())

    def note(self, number, name, seed, given, *, device, step):
        if (number, name) in counted.deadly:
            raise KeyError("killed")
        counted.asked.append((name, seed))
        task, weight = self.tasks[name], sum(each.double().sum().item() for each in given.parameters())
        said = {"digest": task.digest(seed), "seconds": 1.0, "weight": weight}
        said |= dict.fromkeys(("macro_f1", "micro_f1", "accuracy"), 10 * number + seed)
        labels = [each.label for each in task.test]
        columns = {"id": [each.id for each in task.test], "label": labels, "prediction": labels}
        save_predictions(endtask_file(self.folder(number), name, seed), columns, about=said)

    monkeypatch.setattr(FinetuneEvaluator, "measure_task", note)
    return counted


def asked_for(root, when, **more):
    given = {"root": root, "when": when, "seeds": "[3]", **more}
    return ["endtask=texts", *(f"endtask.{name}={value}" for name, value in given.items())]


@pytest.fixture
def run(small, start, root, noted):
    def go(*overrides, when="last", **more):
        given = asked_for(root, when, **more) if when else []
        start(small("order=[law,food]", "trainer.steps=2", *overrides, *given), root / "run")
        return read_scores(root / "run")

    return go


def files(root):
    found = (root / "run" / "endtasks").rglob("*.parquet")
    return sorted(f"{path.parent.name}/{path.stem.partition('-')[0]}" for path in found)


def weight(root, name):
    schema = pq.read_schema(root / "run" / "endtasks" / f"{name}-3.parquet")
    return json.loads(schema.metadata[b"cpt"])["weight"]


def test_end_tasks_are_added_to_a_finished_run_and_change_nothing_of_it(run, root, small, noted):
    before, own = run("save_all_stages=true", when=None), ("order=[law,food]", "trainer.steps=2")
    plain, wanted = small(*own), small(*own, *asked_for(root, "each"))
    assert is_done(plain, root / "run") and not is_done(wanted, root / "run")
    noted.deadly = {(2, "food")}
    with pytest.raises(KeyError):
        run("save_all_stages=true", when="each")
    assert not read_scores(root / "run")["run"]["finished"]
    lost, damaged = (root / "run" / "endtasks").rglob("*.parquet")
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:200])
    noted.deadly = ()
    after = run("save_all_stages=true", when="each")
    assert files(root) == EACH and [name for name, _ in noted.asked] == ["law"] * 4 + ["food"]
    for key in ("rows", "nll", "metrics", "trained", "seen", "flops", "optimized_metric", "run"):
        assert after[key] == before[key], key
    assert is_done(wanted, root / "run") and is_done(plain, root / "run")
    run("save_all_stages=true", when="diagonal", lr=0.01)  # other settings
    assert [name for name, _ in noted.asked[5:]] == ["law", "food"]
    assert weight(root, EACH[0]) != weight(root, EACH[2])


def test_a_part_is_measured_on_its_own_task_and_weights_that_were_not_kept_are_asked_for(run, root):
    run("method=demix")
    assert files(root) == EACH[1:] and weight(root, EACH[1]) != weight(root, EACH[2])
    with pytest.raises(ValueError, match=r"the weights after law were not kept"):
        run("method=demix", when="each")


@pytest.mark.slow
def test_end_tasks_between_the_stages_change_nothing_of_what_is_learned(small, start, root):
    quick = {name: value for name, value in QUICK.items() if name != "seeds"}
    given = ["order=[law,food]", "trainer.steps=3", "+model.config.attention_dropout=0.1"]
    start(small(*given), root / "plain")
    start(small(*given, *asked_for(root, "each", **quick)), root / "asked")
    assert_same_bits(root / "asked", root / "plain")
