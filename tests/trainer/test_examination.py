"""When end tasks are measured, on whose weights, and what a second start repeats."""

import json

import pytest
import torch

from cpt.evaluation.endtasks import suite
from cpt.train import is_done
from cpt.trainer import plan
from tests.support.endtask_fixtures import QUICK, write_task


class Fake:
    """Stands for EndTasks: one file per task, which says the weights that it was measured on."""

    def __init__(self, when, tasks):
        self.when, self.tasks, self.by_name, self.stamp = when, tasks, {}, ""

    @classmethod
    def planned(cls, options, names, order):
        if options["name"] == "none":
            return None
        return cls(options["when"], [name for name in order if name in options["tasks"]])

    @classmethod
    def of_plan(cls, plan, tokenizer):
        return plan

    due = suite.EndTasks.due

    @property
    def plan(self):
        return self

    def missing(self, folder, tasks):
        return [(task, 0) for task in tasks if not (folder / task).exists()]

    def measure(self, backbone, tasks, *, folder, device, rank, world, label):
        assert (device.type, rank, world) == ("cpu", 0, 1)
        folder.mkdir(parents=True, exist_ok=True)
        for task, _ in self.missing(folder, tasks):
            (folder / task).write_text(json.dumps(weight(backbone(task))))

    def results(self, folders):
        files = {f"{each.name}/{file.name}" for each in folders if each.exists() for file in each.iterdir()}
        there = [[[0.5 if (each / task).exists() else None] for task in self.tasks] for each in folders]
        return {
            "when": self.when,
            "tasks": self.tasks,
            "seeds": [0],
            "metric": dict.fromkeys(self.tasks, "macro_f1"),
            "classes": dict.fromkeys(self.tasks, 2),
            "examples": dict.fromkeys(self.tasks, 9),
            "scores": dict.fromkeys(("macro_f1", "micro_f1", "accuracy"), there),
            "seconds": 1.0,
            "files": sorted(files),
        }


def weight(model):
    return sum(p.double().sum().item() for p in model.parameters())


@pytest.fixture
def run(small, start, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "EndTasks", Fake)
    monkeypatch.setattr(plan, "plan_endtasks", Fake.planned)

    def go(*overrides, when="last", tasks="{law: {}, food: {}}"):
        if when is not None:
            asked = {"name": "texts", "_target_": "null", "when": when, "tasks": tasks}
            overrides += tuple(f"++endtask.{key}={value}" for key, value in asked.items())
        start(small("order=[law,food]", *overrides), tmp_path)
        return json.loads((tmp_path / "scores.json").read_text())

    return go


def stage(folder, number):
    state = torch.load(folder / "stages" / f"{number:03d}.pt", weights_only=True)
    names = {name for name in state if name.startswith("model.")}
    return {name: state[name] for name in names}


@pytest.mark.parametrize(
    ("when", "files"),
    [
        ("last", ["002-food/food", "002-food/law"]),
        ("each", ["001-law/law", "002-food/food", "002-food/law"]),
        ("diagonal", ["001-law/law", "002-food/food"]),
    ],
)
def test_what_is_asked_for_is_measured_after_its_stage(run, when, files):
    scores = run(when=when)
    assert scores["endtasks"]["files"] == files
    assert len(scores["endtasks"]["digest"]) == 16
    assert scores["phases"]["endtasks"]["food"] > 0


def test_methods_with_a_model_per_domain_are_measured_on_each(run):
    assert run("method=one")["endtasks"]["files"] == ["001-law/law", "002-food/food"]


def test_joint_training_and_the_base_are_measured_on_all(run, tmp_path):
    assert run("method=joint")["endtasks"]["files"] == ["001-joint/food", "001-joint/law"]


def test_without_stages_it_is_the_base_that_is_measured(run):
    assert run("method=none")["endtasks"]["files"] == ["000-base/food", "000-base/law"]


def test_parts_are_those_of_the_task(run, tmp_path):
    run("method=demix", "keep_stages=true")
    folder = tmp_path / "endtasks" / "002-food"
    assert (folder / "law").read_text() != (folder / "food").read_text()


def test_end_tasks_are_added_to_a_finished_run_and_change_nothing_of_it(run, tmp_path):
    before = run(when=None)
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    after = run(when="last")
    assert after["endtasks"]["files"] == ["002-food/food", "002-food/law"]
    for key in ("rows", "nll", "metrics", "trained", "seen", "flops", "objective", "run"):
        assert after[key] == before[key], key
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


def test_weights_that_were_not_kept_are_asked_for_in_one_line(run, tmp_path):
    run(when=None)
    with pytest.raises(ValueError, match=r"needs the weights after law, which were not kept; .*when=last"):
        run(when="each")
    assert run(when=None)["run"]["finished"]


def test_weights_that_were_kept_are_used(run, tmp_path):
    run("keep_stages=true", when=None)
    run("keep_stages=true", when="each")
    after_law = json.loads((tmp_path / "endtasks" / "001-law" / "law").read_text())
    again = run("keep_stages=true", when="each")
    assert after_law != json.loads((tmp_path / "endtasks" / "002-food" / "law").read_text())
    kept = stage(tmp_path, 1)
    assert again["run"]["finished"]
    tied = {value.data_ptr(): value for value in kept.values()}
    assert after_law == pytest.approx(sum(each.double().sum().item() for each in tied.values()), abs=1e-3)


def test_a_second_start_repeats_what_is_missing(run, tmp_path):
    run(when="last")
    (tmp_path / "endtasks" / "002-food" / "law").unlink()
    changed = tmp_path / "endtasks" / "002-food" / "food"
    changed.write_text("kept")
    run(when="last", tasks="{law: {epochs: 2}, food: {}}")
    assert changed.read_text() == "kept"
    assert (tmp_path / "endtasks" / "002-food" / "law").exists()


def test_done_is_what_has_its_end_tasks(run, small, tmp_path):
    plain, asked = small("order=[law,food]"), "{law: {}, food: {}}"
    fields = {"name": "texts", "_target_": "null", "when": "last", "tasks": asked}
    wanted = small("order=[law,food]", *(f"++endtask.{key}={value}" for key, value in fields.items()))
    assert not is_done(plain, tmp_path)
    run(when=None)
    assert is_done(plain, tmp_path) and not is_done(wanted, tmp_path)
    assert not is_done(small("order=[law,food]", "trainer.steps=7"), tmp_path)
    run(when="last")
    assert is_done(wanted, tmp_path) and is_done(plain, tmp_path)


def test_a_run_killed_in_its_end_tasks_is_not_finished(run, tmp_path, monkeypatch):
    run(when=None)
    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(Fake, "results", lambda *args: {}["killed"])
        run(when="last")
    scores = run(when="last")
    assert scores["run"]["finished"] and scores["endtasks"]["files"]


def test_end_tasks_between_the_stages_change_nothing_of_what_is_learned(small, start, corpora, tmp_path):
    for domain in ("law", "food"):
        write_task(tmp_path, domain)
    quick = [f"endtask.{name}={value}" for name, value in (QUICK | {"seeds": "[3]"}).items()]
    asked = ["endtask=texts", f"endtask.root={tmp_path}", "endtask.when=each", *quick]
    dropout = "+model.config.attention_dropout=0.1"
    start(small("order=[law,food]", dropout), tmp_path / "plain")
    start(small("order=[law,food]", dropout, *asked), tmp_path / "asked")
    plain, found = (json.loads((tmp_path / name / "scores.json").read_text()) for name in ("plain", "asked"))
    assert found["nll"] == plain["nll"] and found["metrics"] == plain["metrics"]
    assert (tmp_path / "asked/model/model.safetensors").read_bytes() == (
        tmp_path / "plain/model/model.safetensors"
    ).read_bytes()
    scores = found["endtasks"]["scores"]["macro_f1"]
    assert [[None not in task for task in row] for row in scores] == [[False] * 2, [True, False], [True] * 2]
    assert "forget_rate" in (tmp_path / "asked" / "report.md").read_text()
    names = sorted(path.name for path in (tmp_path / "asked" / "endtasks").rglob("*.parquet"))
    assert names == ["food-3.parquet", "law-3.parquet", "law-3.parquet"]


def test_a_run_killed_between_its_end_tasks_goes_on_with_them(run, tmp_path, monkeypatch):
    run("keep_stages=true", when=None)
    measure = Fake.measure

    def killed(self, backbone, tasks, *, folder, **others):
        if folder.name == "002-food":
            raise KeyError("killed")
        measure(self, backbone, tasks, folder=folder, **others)

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(Fake, "measure", killed)
        run("keep_stages=true", when="each")
    assert not json.loads((tmp_path / "scores.json").read_text())["run"]["finished"]
    scores = run("keep_stages=true", when="each")
    assert scores["endtasks"]["files"] == ["001-law/law", "002-food/food", "002-food/law"]
