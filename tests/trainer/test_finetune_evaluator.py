"""End tasks: when they are measured, on whose weights, and what a second start repeats."""

import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from cpt.evaluation.finetune_tasks import plan_endtasks
from cpt.evaluation.predictions import endtask_file, save_predictions
from cpt.train import is_done
from cpt.trainer.evaluators import FinetuneEvaluator
from cpt.trainer.run_dir import RunDir
from tests.runs.reading import assert_same_bits, told_by
from tests.support.endtask_fixtures import QUICK, model, options, tokenizer, write_task

CPU = torch.device("cpu")
ALL = ["law", "food"]
DONE = [("law", 3), ("law", 4), ("food", 3), ("food", 4)]
EACH = ["001-law/law", "002-food/food", "002-food/law"]
LAW, FOOD, SPACE = ("law",), ("food",), ("space",)


class Stages:
    """Stands for the data of a run: its stages, with the domains of each."""

    def __init__(self, *stages):
        self.domains = [SimpleNamespace(name="+".join(parts), parts=parts) for parts in stages]
        self.places = {part: place for place, part in enumerate(part for parts in stages for part in parts)}

    def __len__(self):
        return len(self.domains)


@pytest.fixture
def root(tmp_path):
    write_task(tmp_path, "law")
    write_task(tmp_path, "food", train=24)
    return tmp_path


@pytest.fixture
def made(root):
    """An evaluator of a run of two domains, in a folder."""
    words = tokenizer()
    start = model("roberta", words)

    def make(*, stages=(LAW, FOOD), alone=False, **overrides):
        plan = plan_endtasks(options("texts", root=root, **{**QUICK, **overrides}), ALL, ALL)
        module = SimpleNamespace(alone=alone, model_for=lambda place: start)
        return FinetuneEvaluator(plan, words, place=RunDir(root / "run"), module=module, data=Stages(*stages))

    return make


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


@pytest.mark.parametrize(
    ("when", "stages", "alone", "due"),  # by stage, the base first
    [
        ("last", [LAW, FOOD], False, [[], [], ALL]),
        ("last", [("law", "food")], False, [[], ALL]),
        ("last", [LAW, FOOD], True, [[], ["law"], ["food"]]),
        ("each", [LAW, FOOD], False, [[], ["law"], ALL]),
        ("diagonal", [LAW, SPACE], False, [[], ["law"], []]),
    ],
)
def test_what_is_asked_for_after_a_stage(made, when, stages, alone, due):
    found = made(when=when, stages=stages, alone=alone)
    for number, names in enumerate(due):
        assert list(dict.fromkeys(name for name, _ in found.due(number))) == names


def test_only_what_is_missing_damaged_or_of_other_settings_is_measured(made, noted, root):
    noted.deadly = {(2, "food")}
    with pytest.raises(KeyError):
        made().measure(2, CPU)
    assert made().due(2) == DONE[2:]
    noted.deadly = ()
    made().measure(2, CPU)
    assert noted.asked == DONE and not made().missing(2)
    lost, damaged, flipped = (endtask_file(made().folder(2), *each) for each in DONE[1:])
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:200])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    assert made().due(2) == DONE[1:]
    matrix = made().results(3)["scores"]["accuracy"]
    assert matrix == [[[None] * 2] * 2, [[None] * 2] * 2, [[23, None], [None] * 2]]
    made().measure(2, CPU)
    assert made(seeds=[3, 5]).due(2) == [("law", 5), ("food", 5)]
    assert made(tasks={"law": {"lr": 1e-3}}).due(2) == DONE[:2]
    write_task(root, "food", train=25)
    assert made().due(2) == DONE[2:]


def asked_for(root, when, **more):
    given = {"root": root, "when": when, "seeds": "[3]", **more}
    return ["endtask=texts", *(f"endtask.{name}={value}" for name, value in given.items())]


@pytest.fixture
def run(small, start, root, noted):
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


def test_end_tasks_are_added_to_a_finished_run_and_change_nothing_of_it(run, root, small, noted):
    """Whose weights were kept, after each of its stages."""
    before, own = run("save_all_stages=true", when=None), ("order=[law,food]", "trainer.steps=2")
    plain, wanted = small(*own), small(*own, *asked_for(root, "each"))
    assert is_done(plain, root / "run") and not is_done(wanted, root / "run")
    noted.deadly = {(2, "law")}
    with pytest.raises(KeyError):
        run("save_all_stages=true", when="each")
    assert not told_by(root / "run")["run"]["finished"]
    noted.deadly = ()
    after = run("save_all_stages=true", when="each")
    assert files(root) == EACH and len(noted.asked) == 3 and len(after["endtasks"]["hash"]) == 16
    for key in ("rows", "nll", "metrics", "trained", "seen", "flops", "optimized_metric", "run"):
        assert after[key] == before[key], key
    assert is_done(wanted, root / "run") and is_done(plain, root / "run")
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
