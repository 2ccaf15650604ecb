"""End tasks: when they are measured, on whose weights, and what a second start repeats."""

import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from cpt.evaluation import finetune
from cpt.evaluation.finetune_tasks import plan_endtasks
from cpt.evaluation.predictions import endtask_file, save_predictions
from cpt.train import is_done
from cpt.trainer import evaluators
from cpt.trainer.evaluators import FinetuneEvaluator, share_measurements
from cpt.trainer.run_dir import RunDir
from tests.runs.reading import assert_same_bits, told_by
from tests.support.endtask_fixtures import QUICK, model, options, tokenizer, write_task

CPU = torch.device("cpu")
ALL = ["law", "food"]
DONE = [("law", 3), ("law", 4), ("food", 3), ("food", 4)]


class Stages:
    """Stands for the data of a run: its stages, with the domains of each."""

    def __init__(self, *stages):
        self.domains = [SimpleNamespace(name="+".join(parts), parts=parts) for parts in stages]
        self.places = {part: place for place, part in enumerate(part for parts in stages for part in parts)}

    def __len__(self):
        return len(self.domains)


@pytest.fixture(scope="module")
def words():
    return tokenizer()


@pytest.fixture
def root(tmp_path):
    write_task(tmp_path, "law")
    write_task(tmp_path, "food", train=24)
    return tmp_path


@pytest.fixture
def made(root, words):
    """An evaluator of a run of two domains, in a folder."""
    start = model("roberta", words, dropout=0.1)

    def make(folder="run", *, stages=(("law",), ("food",)), alone=False, asked=None, **overrides):
        plan = plan_endtasks(options("texts", root=root, **{**QUICK, **overrides}), ALL, ALL)
        model_for = (lambda place: asked.append(place) or start) if asked is not None else lambda place: start
        module = SimpleNamespace(alone=alone, model_for=model_for)
        place = RunDir(root / folder)
        return FinetuneEvaluator(plan, words, place=place, module=module, data=Stages(*stages))

    return make


def predictions(evaluator, number=2):
    files = sorted(evaluator.folder(number).glob("*.parquet"))
    return {each.name: pq.read_table(each).to_pydict() for each in files}


def about(evaluator, name, seed, number=2):
    """What a file says of itself."""
    schema = pq.read_schema(endtask_file(evaluator.folder(number), name, seed))
    return json.loads(schema.metadata[b"cpt"])


LAW, FOOD, SPACE = ("law",), ("food",), ("space",)


@pytest.mark.parametrize(
    ("when", "stages", "alone", "due"),  # by stage, the base first
    [
        ("last", [LAW, FOOD], False, [[], [], ALL]),
        ("last", [("law", "food")], False, [[], ALL]),
        ("last", [FOOD], False, [[], ["food"]]),
        ("last", [], False, [ALL]),
        ("last", [LAW, FOOD], True, [[], ["law"], ["food"]]),
        ("each", [LAW, FOOD], False, [[], ["law"], ALL]),
        ("each", [LAW, FOOD], True, [[], ["law"], ["food"]]),
        ("diagonal", [LAW, FOOD], False, [[], ["law"], ["food"]]),
        ("diagonal", [LAW, SPACE], False, [[], ["law"], []]),
    ],
)
def test_what_is_asked_for_after_a_stage(made, when, stages, alone, due):
    found = made(when=when, stages=stages, alone=alone)
    for number, names in enumerate(due):
        assert list(dict.fromkeys(name for name, _ in found.due(number))) == names
        assert found.follows(number) == bool(names)


@pytest.mark.slow
def test_only_what_is_missing_damaged_or_of_other_settings_is_measured(made, root, caplog, monkeypatch):
    """Also where one measurement was killed; a result depends on seed and task alone."""
    counted, whole = [], finetune.fine_tune
    asked, deadly = [], {("food", 4)}

    def count(start, job, *, seed, **rest):
        if (job.name, seed) in deadly:
            raise KeyboardInterrupt
        counted.append((job.name, seed))
        return whole(start, job, seed=seed, **rest)

    monkeypatch.setattr(finetune, "fine_tune", count)
    with pytest.raises(KeyboardInterrupt):
        made().measure(2, CPU)
    assert made().due(2) == DONE[3:]
    deadly.clear()
    made(asked=asked).measure(2, CPU)
    expected = predictions(made())
    assert counted == DONE and made().due(2) == [] and not made().missing(2) and asked == [1]
    endtask_file(made().folder(2), "law", 4).unlink()
    damaged, flipped = (endtask_file(made().folder(2), "food", seed) for seed in (3, 4))
    damaged.write_bytes(damaged.read_bytes()[:200])
    data = bytearray(flipped.read_bytes())
    data[data.index(b"test-1")] ^= 1
    flipped.write_bytes(data)
    counted.clear()
    made().measure(2, CPU)
    assert counted == DONE[1:] and predictions(made()) == expected
    assert f"{damaged}: damaged predictions" in caplog.text
    made("alone", stages=[FOOD], seeds=[4]).measure(1, CPU)
    assert predictions(made("alone"), 1) == {"food-4.parquet": expected["food-4.parquet"]}
    assert made(seeds=[3, 5]).due(2) == [("law", 5), ("food", 5)]
    assert made(tasks={"law": {"lr": 1e-3}}).due(2) == DONE[:2]
    assert made(when="each", eval_batch_size=1).due(2) == []
    write_task(root, "food", train=25)
    assert made().due(2) == DONE[2:]


@pytest.mark.slow
def test_two_processes_make_what_one_makes_and_predictions_say_what_they_are_of(made, monkeypatch):
    found = made("one")
    found.measure(2, CPU)
    for rank in range(2):
        monkeypatch.setattr(evaluators, "rank_and_world", lambda rank=rank: (rank, 2))
        made("two").measure(2, CPU)
        assert 0 < len(predictions(made("two"))) < 4 or rank
    assert predictions(made("two")) == predictions(found)
    assert sorted(predictions(found)) == sorted(f"{name}-{seed}.parquet" for name, seed in DONE)
    task, columns, said = found.tasks["law"], predictions(found)["law-3.parquet"], about(found, "law", 3)
    labels = [each.label for each in task.test]
    assert (columns["id"], columns["label"]) == ([each.id for each in task.test], labels)
    right = sum(map(str.__eq__, labels, columns["prediction"]))
    assert said["accuracy"] == pytest.approx(right / len(labels), abs=1e-6)
    assert (said["classes"], said["digest"]) == (["bad", "good"], task.digest(3))
    assert (said["metric"], said["epochs"]) == ("macro_f1", 2) and said["seconds"] > 0


def test_shares_are_even_whole_and_do_not_depend_on_what_is_done():
    costs = {("a", 1): 10, ("a", 2): 10, ("b", 1): 4, ("b", 2): 4, ("c", 1): 12}
    shares = [share_measurements(costs, rank=rank, world=3) for rank in range(3)]
    assert sorted(each for one in shares for each in one) == sorted(costs)
    assert [sum(costs[each] for each in one) for one in shares] == [12, 14, 14]
    assert share_measurements({("a", 1): 1}, rank=1, world=2) == set()


@pytest.mark.slow
def test_results_are_those_of_all_rows(made):
    found = made(when="each", tasks={"food": {"metric": "micro_f1"}})
    found.measure(1, CPU)
    found.measure(2, CPU)
    endtask_file(found.folder(2), "food", 4).unlink()
    results, told = found.results(3), {each: about(found, *each) for each in DONE[:3]}
    for name, matrix in results.pop("scores").items():
        assert matrix[0] == [[None, None], [None, None]]
        assert matrix[1][1] == [None, None] and None not in matrix[1][0]
        assert matrix[2] == [[told["law", 3][name], told["law", 4][name]], [told["food", 3][name], None]]
    assert results.pop("seconds") > sum(each["seconds"] for each in told.values())
    assert len(results.pop("digest")) == 16
    assert results == {
        "when": "each",
        "tasks": ALL,
        "seeds": [3, 4],
        "metric": {"law": "macro_f1", "food": "micro_f1"},
        "classes": {"law": 2, "food": 2},
        "examples": {"law": 20, "food": 20},
    }
    other = made(tasks={"law": {"lr": 1e-3}}).results(3)
    assert other["scores"]["accuracy"][2][0] == [None, None]


@pytest.mark.slow
def test_selection_on_dev_is_another_measurement_and_else_dev_is_not_used(made, root, words):
    before = words.backend_tokenizer.to_str()
    only = {"tasks": {"food": None}, "seeds": [3]}
    made("with", **only).measure(2, CPU)
    chosen = made("with", select="dev", epochs=3, **only)
    assert len(chosen.due(2)) == 1
    chosen.measure(2, CPU)
    assert chosen.due(2) == []
    (root / "endtasks" / "law" / "dev.jsonl").unlink()
    assert made("without", **only).tasks["law"].dev == []
    assert words.backend_tokenizer.to_str() == before


# In a run


def note(self, number, name, seed, given, *, device, step):
    """In the place of a fine-tuning: a file that says the weights that it was measured on."""
    task, weight = self.tasks[name], sum(each.double().sum().item() for each in given.parameters())
    said = {"digest": task.digest(seed), "seconds": 1.0, "weight": weight}
    said |= dict.fromkeys(("macro_f1", "micro_f1", "accuracy"), 0.5)
    labels = [each.label for each in task.test]
    columns = {"id": [each.id for each in task.test], "label": labels, "prediction": labels}
    save_predictions(endtask_file(self.folder(number), name, seed), columns, about=said)


def asked_for(root, when, **more):
    given = {"root": root, "when": when, "seeds": "[3]", **more}
    return ["endtask=texts", *(f"endtask.{name}={value}" for name, value in given.items())]


@pytest.fixture
def run(small, start, root, monkeypatch):
    monkeypatch.setattr(FinetuneEvaluator, "measure_task", note)

    def go(*overrides, when="last", **more):
        given = asked_for(root, when, **more) if when else []
        start(small("order=[law,food]", "trainer.steps=2", *overrides, *given), root / "run")
        return told_by(root / "run")

    return go


def files(root):
    found = (root / "run" / "endtasks").rglob("*.parquet")
    return sorted(f"{path.parent.name}/{path.stem.partition('-')[0]}" for path in found)


def weight(root, name):
    schema = pq.read_schema(root / "run" / "endtasks" / f"{name}-3.parquet")
    return json.loads(schema.metadata[b"cpt"])["weight"]


EACH = ["001-law/law", "002-food/food", "002-food/law"]


@pytest.mark.parametrize(
    ("method", "there"),
    [
        ("one", EACH[:2]),
        ("joint", ["001-joint/food", "001-joint/law"]),
        ("none", ["000-base/food", "000-base/law"]),
        ("demix", EACH[1:]),
    ],
)
def test_what_is_asked_for_is_measured_after_its_stage(run, root, method, there):
    scores = run(f"method={method}")
    assert files(root) == there and len(scores["endtasks"]["digest"]) == 16
    assert scores["phases"]["endtasks"][scores["rows"][-1]] > 0
    if method == "demix":  # each by its part
        assert weight(root, there[0]) != weight(root, there[1])


def test_end_tasks_are_added_to_a_finished_run_and_change_nothing_of_it(run, root, small):
    before = run(when=None)
    with pytest.raises(ValueError, match=r"needs the weights after law, which were not kept"):
        run(when="each")
    weights, own = root / "run" / "model" / "model.safetensors", ("order=[law,food]", "trainer.steps=2")
    whole, plain, wanted = weights.read_bytes(), small(*own), small(*own, *asked_for(root, "last"))
    assert is_done(plain, root / "run") and not is_done(wanted, root / "run")
    after = run(when="last")
    assert files(root) == EACH[1:]
    for key in ("rows", "nll", "metrics", "trained", "seen", "flops", "objective", "run"):
        assert after[key] == before[key], key
    assert weights.read_bytes() == whole
    assert is_done(wanted, root / "run") and is_done(plain, root / "run")
    law, food = (root / "run" / "endtasks" / "002-food" / f"{name}-3.parquet" for name in ALL)
    law.unlink()
    kept = food.stat().st_mtime_ns
    run(when="last", eval_batch_size=3)  # repeats what is missing
    assert law.exists() and food.stat().st_mtime_ns == kept


def test_weights_that_were_kept_are_used_and_a_killed_run_goes_on_with_its_end_tasks(run, root, monkeypatch):
    run("keep_stages=true", when=None)

    def killed(self, number, *given, **others):
        if number == 2:
            raise KeyError("killed")
        note(self, number, *given, **others)

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(FinetuneEvaluator, "measure_task", killed)
        run("keep_stages=true", when="each")
    assert not told_by(root / "run")["run"]["finished"]
    assert run("keep_stages=true", when="each")["run"]["finished"] and files(root) == EACH
    after_law = weight(root, EACH[0])
    state = torch.load(root / "run" / "stages" / "001.pt", weights_only=True)
    tied = {value.data_ptr(): value for name, value in state.items() if name.startswith("model.")}
    assert after_law != weight(root, EACH[2])
    assert after_law == pytest.approx(sum(each.double().sum().item() for each in tied.values()), abs=1e-3)


@pytest.mark.slow
def test_end_tasks_between_the_stages_change_nothing_of_what_is_learned(small, start, root):
    quick = {name: value for name, value in QUICK.items() if name != "seeds"}
    given = ["order=[law,food]", "trainer.steps=3", "+model.config.attention_dropout=0.1"]
    start(small(*given), root / "plain")
    start(small(*given, *asked_for(root, "each", **quick)), root / "asked")
    assert_same_bits(root / "asked", root / "plain")
    found = told_by(root / "asked")
    assert found["metrics"] == told_by(root / "plain")["metrics"]
    scores = found["endtasks"]["scores"]["macro_f1"]
    assert [[None not in task for task in row] for row in scores] == [[False] * 2, [True, False], [True] * 2]
    assert "forget_rate" in (root / "asked" / "report.md").read_text()
