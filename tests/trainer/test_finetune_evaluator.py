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


@pytest.fixture
def counted(monkeypatch):
    """The (task, seed) that are fine-tuned."""
    calls, whole = [], finetune.fine_tune

    def count(start, job, *, seed, **rest):
        calls.append((job.name, seed))
        return whole(start, job, seed=seed, **rest)

    monkeypatch.setattr(finetune, "fine_tune", count)
    return calls


def predictions(evaluator, number=2):
    files = sorted(evaluator.folder(number).glob("*.parquet"))
    return {each.name: pq.read_table(each).to_pydict() for each in files}


LAW, FOOD, SPACE = ("law",), ("food",), ("space",)


@pytest.mark.parametrize(
    ("when", "stages", "number", "alone", "due"),
    [
        ("last", [LAW, FOOD], 0, False, []),
        ("last", [LAW, FOOD], 1, False, []),
        ("last", [LAW, FOOD], 2, False, ALL),
        ("last", [("law", "food")], 1, False, ALL),
        ("last", [FOOD], 1, False, ["food"]),
        ("last", [], 0, False, ALL),
        ("last", [LAW, FOOD], 1, True, ["law"]),
        ("last", [LAW, FOOD], 2, True, ["food"]),
        ("each", [LAW, FOOD], 0, False, []),
        ("each", [LAW, FOOD], 1, False, ["law"]),
        ("each", [LAW, FOOD], 2, False, ALL),
        ("each", [LAW, FOOD], 2, True, ["food"]),
        ("diagonal", [LAW, FOOD], 1, False, ["law"]),
        ("diagonal", [LAW, FOOD], 2, False, ["food"]),
        ("diagonal", [LAW, SPACE], 2, False, []),
    ],
)
def test_what_is_asked_for_after_a_stage(made, when, stages, number, alone, due):
    found = made(when=when, stages=stages, alone=alone)
    assert list(dict.fromkeys(name for name, _ in found.due(number))) == due
    assert found.follows(number) == bool(due)


@pytest.mark.slow
def test_predictions_are_kept_with_what_they_are_of(made):
    found = made()
    found.measure(2, CPU)
    assert sorted(predictions(found)) == sorted(f"{name}-{seed}.parquet" for name, seed in DONE)
    task, file = found.tasks["law"], pq.read_table(endtask_file(found.folder(2), "law", 3))
    said = json.loads(file.schema.metadata[b"cpt"])
    ids, labels, predicted = (file[name].to_pylist() for name in ("id", "label", "prediction"))
    assert (ids, labels) == ([e.id for e in task.test], [e.label for e in task.test])
    assert said["accuracy"] == pytest.approx(sum(map(str.__eq__, labels, predicted)) / len(labels), abs=1e-6)
    assert (said["classes"], said["digest"]) == (["bad", "good"], task.digest(3))
    assert (said["metric"], said["epochs"]) == ("macro_f1", 2) and said["seconds"] > 0


@pytest.mark.slow
def test_only_what_is_missing_damaged_or_of_other_settings_is_measured(made, counted, root, caplog):
    made().measure(2, CPU)
    whole = predictions(made())
    assert counted == DONE and made().due(2) == [] and not made().missing(2)
    endtask_file(made().folder(2), "law", 4).unlink()
    damaged = endtask_file(made().folder(2), "food", 3)
    damaged.write_bytes(damaged.read_bytes()[:200])
    flipped = endtask_file(made().folder(2), "food", 4)
    data = bytearray(flipped.read_bytes())
    data[data.index(b"test-1")] ^= 1
    flipped.write_bytes(data)
    counted.clear()
    with caplog.at_level("INFO"):
        made().measure(2, CPU)
    assert counted == DONE[1:] and predictions(made()) == whole
    assert f"{damaged}: damaged predictions" in caplog.text
    assert made(seeds=[3, 5]).due(2) == [("law", 5), ("food", 5)]
    assert made(tasks={"law": {"lr": 1e-3}}).due(2) == DONE[:2]
    assert made(when="each", eval_batch_size=1).due(2) == []
    write_task(root, "food", train=25)
    assert made().due(2) == DONE[2:]


@pytest.mark.slow
def test_a_killed_measurement_loses_only_what_was_under_way(made, monkeypatch):
    made("whole").measure(2, CPU)
    whole = finetune.fine_tune

    def die(start, job, *, seed, **rest):
        if (job.name, seed) == ("food", 3):
            raise KeyboardInterrupt
        return whole(start, job, seed=seed, **rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(finetune, "fine_tune", die)
        made().measure(2, CPU)
    assert made().due(2) == DONE[2:]
    made().measure(2, CPU)
    assert predictions(made()) == predictions(made("whole"))


@pytest.mark.slow
def test_a_result_depends_on_seed_and_task_alone_and_each_domain_has_its_model(made):
    asked = []
    made("all", asked=asked).measure(2, CPU)
    assert asked == [0, 1]
    made("alone", stages=[FOOD], seeds=[4]).measure(1, CPU)
    alone = predictions(made("alone", stages=[FOOD]), 1)
    assert alone == {"food-4.parquet": predictions(made("all"))["food-4.parquet"]}


@pytest.mark.slow
def test_two_processes_make_what_one_makes(made, counted, monkeypatch):
    made("one").measure(2, CPU)
    counted.clear()
    firsts = []
    for rank in range(2):
        monkeypatch.setattr(evaluators, "rank_and_world", lambda rank=rank: (rank, 2))
        made("two").measure(2, CPU)
        firsts.append(len(counted))
    assert sorted(counted) == sorted(DONE) and 0 < firsts[0] < 4
    assert predictions(made("two")) == predictions(made("one"))


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
    results = found.results(3)
    about = {
        each: json.loads(pq.read_schema(endtask_file(found.folder(2), *each)).metadata[b"cpt"])
        for each in DONE[:3]
    }
    for name, matrix in results.pop("scores").items():
        assert matrix[0] == [[None, None], [None, None]]
        assert matrix[1][1] == [None, None] and None not in matrix[1][0]
        assert matrix[2] == [[about["law", 3][name], about["law", 4][name]], [about["food", 3][name], None]]
    assert results.pop("seconds") > sum(each["seconds"] for each in about.values())
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
    made("with", tasks={"food": None}).measure(2, CPU)
    chosen = made("with", select="dev", epochs=3, tasks={"food": None})
    assert len(chosen.due(2)) == 2
    chosen.measure(2, CPU)
    assert chosen.due(2) == []
    (root / "endtasks" / "law" / "dev.jsonl").unlink()
    assert made("without", tasks={"food": None}).tasks["law"].dev == []
    assert words.backend_tokenizer.to_str() == before


# In a run


def weigh(given):
    return sum(p.double().sum().item() for p in given.parameters())


def note(self, number, name, seed, given, *, device, step):
    """In the place of a fine-tuning: a file that says the weights that it was measured on."""
    task = self.tasks[name]
    about = {"digest": task.digest(seed), "seconds": 1.0, "weight": weigh(given)}
    about |= dict.fromkeys(("macro_f1", "micro_f1", "accuracy"), 0.5)
    labels = [each.label for each in task.test]
    columns = {"id": [each.id for each in task.test], "label": labels, "prediction": labels}
    save_predictions(endtask_file(self.folder(number), name, seed), columns, about=about)


def asked_for(root, when, **more):
    given = {"root": root, "when": when, "seeds": "[3]", **more}
    return ["endtask=texts", *(f"endtask.{name}={value}" for name, value in given.items())]


@pytest.fixture
def run(small, start, root, monkeypatch):
    monkeypatch.setattr(FinetuneEvaluator, "measure_task", note)

    def go(*overrides, when="last", **more):
        given = asked_for(root, when, **more) if when else []
        start(small("order=[law,food]", *overrides, *given), root / "run")
        return json.loads((root / "run" / "scores.json").read_text())

    return go


def files(root):
    found = (root / "run" / "endtasks").rglob("*.parquet")
    return sorted(f"{path.parent.name}/{path.stem.partition('-')[0]}" for path in found)


def weight(root, name):
    stage, task = name.split("/")
    schema = pq.read_schema(root / "run" / "endtasks" / stage / f"{task}-3.parquet")
    return json.loads(schema.metadata[b"cpt"])["weight"]


EACH = ["001-law/law", "002-food/food", "002-food/law"]


@pytest.mark.parametrize(
    ("given", "there"),
    [
        (["when=last"], EACH[1:]),
        (["when=each"], EACH),
        (["when=diagonal"], EACH[:2]),
        (["when=last", "method=one"], EACH[:2]),
        (["when=last", "method=joint"], ["001-joint/food", "001-joint/law"]),
        (["when=last", "method=none"], ["000-base/food", "000-base/law"]),
    ],
)
def test_what_is_asked_for_is_measured_after_its_stage(run, root, given, there):
    when, *method = given
    scores = run(*method, when=when.partition("=")[2])
    assert files(root) == there and len(scores["endtasks"]["digest"]) == 16
    assert scores["phases"]["endtasks"][scores["rows"][-1]] > 0


def test_parts_are_those_of_the_task(run, root):
    run("method=demix", "keep_stages=true")
    assert weight(root, "002-food/law") != weight(root, "002-food/food")


def test_end_tasks_are_added_to_a_finished_run_and_change_nothing_of_it(run, root, small):
    before = run(when=None)
    weights = (root / "run" / "model" / "model.safetensors").read_bytes()
    plain, wanted = (small("order=[law,food]", *more) for more in ([], asked_for(root, "last")))
    assert is_done(plain, root / "run") and not is_done(wanted, root / "run")
    after = run(when="last")
    assert files(root) == EACH[1:]
    for key in ("rows", "nll", "metrics", "trained", "seen", "flops", "objective", "run"):
        assert after[key] == before[key], key
    assert (root / "run" / "model" / "model.safetensors").read_bytes() == weights
    assert is_done(wanted, root / "run") and is_done(plain, root / "run")


def test_weights_that_were_not_kept_are_asked_for_in_one_line(run):
    run(when=None)
    with pytest.raises(ValueError, match=r"needs the weights after law, which were not kept; .*when=last"):
        run(when="each")
    assert run(when=None)["run"]["finished"]


def test_weights_that_were_kept_are_used_and_a_killed_run_goes_on_with_its_end_tasks(run, root, monkeypatch):
    run("keep_stages=true", when=None)

    def killed(self, number, *given, **others):
        if number == 2:
            raise KeyError("killed")
        note(self, number, *given, **others)

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(FinetuneEvaluator, "measure_task", killed)
        run("keep_stages=true", when="each")
    assert not json.loads((root / "run" / "scores.json").read_text())["run"]["finished"]
    assert run("keep_stages=true", when="each")["run"]["finished"] and files(root) == EACH
    after_law = weight(root, "001-law/law")
    state = torch.load(root / "run" / "stages" / "001.pt", weights_only=True)
    tied = {value.data_ptr(): value for name, value in state.items() if name.startswith("model.")}
    assert after_law != weight(root, "002-food/law")
    assert after_law == pytest.approx(sum(each.double().sum().item() for each in tied.values()), abs=1e-3)


def test_a_second_start_repeats_what_is_missing(run, root):
    run(when="last")
    law, food = (root / "run" / "endtasks" / "002-food" / f"{name}-3.parquet" for name in ALL)
    law.unlink()
    kept = food.stat().st_mtime_ns
    run(when="last", eval_batch_size=3)
    assert law.exists() and food.stat().st_mtime_ns == kept


@pytest.mark.slow
def test_end_tasks_between_the_stages_change_nothing_of_what_is_learned(small, start, root):
    quick = {name: value for name, value in QUICK.items() if name != "seeds"}
    dropout = "+model.config.attention_dropout=0.1"
    start(small("order=[law,food]", dropout), root / "plain")
    start(small("order=[law,food]", dropout, *asked_for(root, "each", **quick)), root / "asked")
    plain, found = (json.loads((root / name / "scores.json").read_text()) for name in ("plain", "asked"))
    assert found["nll"] == plain["nll"] and found["metrics"] == plain["metrics"]
    weights = [(root / name / "model/model.safetensors").read_bytes() for name in ("asked", "plain")]
    assert weights[0] == weights[1]
    scores = found["endtasks"]["scores"]["macro_f1"]
    assert [[None not in task for task in row] for row in scores] == [[False] * 2, [True, False], [True] * 2]
    assert "forget_rate" in (root / "asked" / "report.md").read_text()
