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
    endtask_file,
    load_predictions,
    parse_answer_table,
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

TASKS = ("food", "law")
METRICS = {"AP", "LA", "BWT", "F", "FWT"}


@pytest.fixture(scope="module")
def tasks_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked")
    (folder / "tasks").mkdir()
    write_tasks(folder / "tasks", TASKS, train=60, test=24)
    return folder


@pytest.fixture
def run_with_answers(small_gpt2, tasks_folder, start):
    def run(folder, *overrides):
        options = ["domains=tasks", f"domains.root={tasks_folder / 'tasks'}", "model.max_seq_length=64"]
        if "answers=none" not in overrides:
            options.append("answers.max_new_tokens=4")
        start(small_gpt2(*options, "save_all_stages=true", "trainer.steps=4", *overrides), folder)
        return read_scores(folder)

    return run


def read(folder, task):
    return parse_answer_table(
        *load_predictions(answers_file(folder, task), ANSWER_COLUMNS, optional=[SOURCE])
    )


def test_the_matrix_of_scores_is_of_the_files_and_asking_changes_no_bit(
    run_with_answers, tmp_path, monkeypatch
):
    complete_folder = tmp_path / "whole"
    later_folder = tmp_path / "later"
    scores = run_with_answers(complete_folder)
    answers = scores["answers"]
    assert list(answers["tasks"]) == list(TASKS) and scores["rows"] == ["base", *TASKS]
    assert set(answers["metrics"]) == METRICS == set(answers["intervals"])
    for task, summary in answers["tasks"].items():
        assert summary["examples"] == 24 and summary["chance"] == 0.5 <= summary["majority"] <= 1
        assert list(summary["measures"])[0] == "accuracy_ranked"
        for row, name in enumerate(scores["rows"]):
            task_answers = read(complete_folder / "answers" / f"{row:03d}-{name}", task)
            for measure, values in summary["measures"].items():
                correct = MEASURES[measure].compute(task_answers)
                defined = correct[correct == correct]
                assert values[row] == (pytest.approx(defined.mean()) if len(defined) else None)
    assert run_with_answers(later_folder, "answers=none")["answers"] == {}
    assert_same_bits(later_folder, complete_folder)
    save = predictions.save_predictions
    saved = []
    asks = []
    ask = TaskEvaluator.ask

    def deadly(path, *args, **kwargs):
        save(path, *args, **kwargs)
        saved.append(path)
        if len(saved) == 3:
            raise KeyError("killed")

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(predictions, "save_predictions", deadly)
        run_with_answers(later_folder)
    saved[0].write_bytes(saved[0].read_bytes()[:100])
    monkeypatch.setattr(
        TaskEvaluator,
        "ask",
        lambda *arguments, **options: asks.append(arguments) or ask(*arguments, **options),
    )
    assert run_with_answers(later_folder)["answers"] | {"seconds": 0} == answers | {"seconds": 0}
    assert len(asks) == 4
    assert_same_bits(later_folder, complete_folder)


def test_stages_that_are_not_due_are_missing(run_with_answers, tmp_path):
    options = ["answers.written=false", "answers.max_documents=5"]
    answers = run_with_answers(tmp_path, "answers.when=last", *options)["answers"]
    assert set(answers["metrics"]) == {"AP"} == set(answers["intervals"])
    for summary in answers["tasks"].values():
        assert summary["examples"] == 5 and list(summary["measures"]) == [
            "accuracy_ranked",
            "accuracy_ranked_mean",
        ]
        assert [value is None for value in summary["measures"]["accuracy_ranked"]] == [False, True, False]


def test_without_ranking_a_closed_task_is_known_by_its_generated_answers(run_with_answers, tmp_path):
    complete = run_with_answers(tmp_path / "complete")["answers"]
    without_ranking = run_with_answers(tmp_path / "generated", "answers.ranked=false")["answers"]
    for task, summary in without_ranking["tasks"].items():
        assert list(summary["measures"]) == ["exact_match", "invalid", "accuracy_valid"]
        for measure, values in summary["measures"].items():
            assert values == complete["tasks"][task]["measures"][measure]
        assert summary["chance"] == complete["tasks"][task]["chance"]


def test_a_part_answers_its_own_task_and_the_base_what_has_not_been_learned(run_with_answers, tmp_path):
    run_with_answers(tmp_path, "method=lora", "method.per_domain=true", "optim.lr=0.05")
    rows = [tmp_path / "answers" / name for name in ("000-base", "001-food", "002-law")]
    food = [read(row, "food") for row in rows]
    law = [read(row, "law") for row in rows]
    assert food[1] == food[2] != food[0]
    assert law[0] == law[1] != law[2]


DROPOUT = "model.config.attn_pdrop=0.1"


@pytest.fixture
def probed(small_gpt2, start, tmp_path, monkeypatch):
    def harness(plan, precision):
        return FakeHarness(plan.benchmark) if plan.benchmark is not None else None

    monkeypatch.setattr(LMEvalOptions, "check_installed", lambda self: None)
    monkeypatch.setattr(preflight, "make_harness", harness)

    def go(*overrides, policy="last", folder=tmp_path):
        benchmark_options = []
        if policy is not None:
            benchmark_options = [f"benchmark.when={policy}", "benchmark=lm_eval", "benchmark.tasks=[say,ask]"]
        start(small_gpt2("order=[law,food]", "trainer.steps=4", *benchmark_options, *overrides), folder)
        return read_scores(folder)

    return go


def times_of(folder):
    """When each file of a benchmark was written, by its path: a file with another time was measured again."""
    paths = sorted((folder / "benchmarks").rglob("*.json"))
    return {str(path.relative_to(folder / "benchmarks")): path.stat().st_mtime_ns for path in paths}


OF_BASE = ["000-base/ask.json", "000-base/say.json"]
OF_LAW = ["001-law/ask.json", "001-law/say.json"]
OF_FOOD = ["002-food/ask.json", "002-food/say.json"]


def test_a_probe_is_measured_after_the_stages_asked_for_and_changes_nothing(probed, tmp_path):
    plain = probed(DROPOUT, policy=None, folder=tmp_path / "plain")
    probed_scores = probed(DROPOUT, policy="each", folder=tmp_path / "each")
    assert_same_bits(tmp_path / "plain", tmp_path / "each")
    assert plain["benchmarks"] == {} and [*times_of(tmp_path / "each")] == OF_BASE + OF_LAW + OF_FOOD
    first, _, last = probed_scores["benchmarks"]["tasks"]["say"]["values"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "each" / "model")
    assert first != last == pytest.approx(sum_weights(exported), rel=1e-9)


@pytest.mark.parametrize("error", [KeyError, Preempted])
def test_a_second_start_measures_what_is_missing_damaged_or_of_other_settings(
    probed, tmp_path, monkeypatch, error
):
    # The first start ends with an error after its first task.
    def stop(self, name, *arguments, **options):
        if (tmp_path / "benchmarks" / "000-base" / "say.json").exists():
            monkeypatch.setattr("cpt.core.preemption.notice.number", 15 if error is Preempted else 0)
            raise error(15)
        return measure(self, name, *arguments, **options)

    measure = FakeHarness.measure
    with monkeypatch.context() as patched, pytest.raises(error, match="15|in the benchmark after base"):
        patched.setattr(FakeHarness, "measure", stop)
        probed(policy="every:2")
    monkeypatch.setattr("cpt.core.preemption.notice.number", 0)
    interrupted_times = times_of(tmp_path)
    assert [*interrupted_times] == [OF_BASE[1]]

    # The second start measures what is missing, and keeps what the first one has measured.
    probed(policy="every:2")
    finished_times = times_of(tmp_path)
    assert [*finished_times] == OF_BASE + OF_FOOD
    assert interrupted_times.items() <= finished_times.items()

    # A missing and a damaged file are measured again, and only these: the batch size changes no score.
    (tmp_path / "benchmarks" / OF_FOOD[0]).unlink()
    (tmp_path / "benchmarks" / OF_FOOD[1]).write_text("{")
    probed("benchmark.batch_size=2", policy="every:2")
    repaired_times = times_of(tmp_path)
    measured_again = {name for name in finished_times if repaired_times[name] != finished_times[name]}
    assert measured_again == {*OF_FOOD}

    # Another setting of the benchmark: all files are measured again.
    probed("benchmark.max_documents=3", policy="every:2")
    assert all(time != repaired_times[name] for name, time in times_of(tmp_path).items())


EACH = ["001-law/law", "002-food/food", "002-food/law"]


@pytest.fixture
def root(tmp_path):
    write_task(tmp_path, "law")
    write_task(tmp_path, "food", train=24)
    return tmp_path


@pytest.fixture
def measured_tasks(monkeypatch):
    """What is measured: files that say on which weights, in the place of a fine-tuning; it may be deadly."""
    counted = SimpleNamespace(asked=[], deadly=())

    def note(self, number, name, seed, start, *, device, on_step_done):
        if (number, name) in counted.deadly:
            raise KeyError("killed")
        counted.asked.append((name, seed))
        task = self.tasks[name]
        weight = sum(parameter.double().sum().item() for parameter in start.parameters())
        metadata = {"digest": task.digest(seed), "seconds": 1.0, "weight": weight}
        metadata |= dict.fromkeys(("macro_f1", "micro_f1", "accuracy"), 10 * number + seed)
        labels = [example.label for example in task.test]
        columns = {"id": [example.id for example in task.test], "label": labels, "prediction": labels}
        save_predictions(endtask_file(self.folder(number), name, seed), columns, metadata=metadata)

    monkeypatch.setattr(FinetuneEvaluator, "measure_task", note)
    return counted


def endtask_overrides(root, policy, **changes):
    options = {"root": root, "when": policy, "seeds": "[3]", **changes}
    return ["endtask=texts", *(f"endtask.{name}={value}" for name, value in options.items())]


@pytest.fixture
def run(small, start, root, measured_tasks):
    def go(*overrides, policy="last", **changes):
        endtask_options = endtask_overrides(root, policy, **changes) if policy else []
        start(small("order=[law,food]", "trainer.steps=2", *overrides, *endtask_options), root / "run")
        return read_scores(root / "run")

    return go


def files(root):
    paths = (root / "run" / "endtasks").rglob("*.parquet")
    return sorted(f"{path.parent.name}/{path.stem.partition('-')[0]}" for path in paths)


def weight(root, name):
    schema = pq.read_schema(root / "run" / "endtasks" / f"{name}-3.parquet")
    return json.loads(schema.metadata[b"cpt"])["weight"]


def test_end_tasks_are_added_to_a_finished_run_and_change_nothing_of_it(run, root, small, measured_tasks):
    before = run("save_all_stages=true", policy=None)
    options = ("order=[law,food]", "trainer.steps=2")
    plain = small(*options)
    cfg_with_endtasks = small(*options, *endtask_overrides(root, "each"))
    assert is_done(plain, root / "run") and not is_done(cfg_with_endtasks, root / "run")

    measured_tasks.deadly = {(2, "food")}
    with pytest.raises(KeyError):
        run("save_all_stages=true", policy="each")
    assert not read_scores(root / "run")["run"]["finished"]
    lost, damaged = (root / "run" / "endtasks").rglob("*.parquet")
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:200])

    measured_tasks.deadly = ()
    after = run("save_all_stages=true", policy="each")
    assert files(root) == EACH and [name for name, _ in measured_tasks.asked] == ["law"] * 4 + ["food"]
    for key in ("rows", "nll", "metrics", "trained", "seen", "flops", "optimized_metric", "run"):
        assert after[key] == before[key], key
    assert is_done(cfg_with_endtasks, root / "run") and is_done(plain, root / "run")

    run("save_all_stages=true", policy="diagonal", lr=0.01)  # other settings
    assert [name for name, _ in measured_tasks.asked[5:]] == ["law", "food"]
    assert weight(root, EACH[0]) != weight(root, EACH[2])


def test_a_part_is_measured_on_its_own_task_and_weights_that_were_not_kept_are_endtask_overrides(run, root):
    run("method=demix")
    assert files(root) == EACH[1:] and weight(root, EACH[1]) != weight(root, EACH[2])
    with pytest.raises(ValueError, match=r"the weights after law were not kept"):
        run("method=demix", policy="each")


@pytest.mark.slow
def test_end_tasks_between_the_stages_change_nothing_of_what_is_learned(small, start, root):
    quick = {name: value for name, value in QUICK.items() if name != "seeds"}
    options = ["order=[law,food]", "trainer.steps=3", "+model.config.attention_dropout=0.1"]
    start(small(*options), root / "plain")
    start(small(*options, *endtask_overrides(root, "each", **quick)), root / "asked")
    assert_same_bits(root / "asked", root / "plain")
