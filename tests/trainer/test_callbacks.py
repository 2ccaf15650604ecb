"""Custom callbacks and loggers: they see every stage, survive a kill, and change nothing unseen."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger

from cpt.trainer.callbacks import CustomCallbacks

TWO = "order=[law,food]"
HERE = "tests.trainer.test_callbacks"
COUNTING = f"+callbacks.mine._target_={HERE}.Counting"


class Counting(Callback):
    """Counts what it sees; its state is what it has counted."""

    made: list["Counting"] = []

    def __init__(self, stop_at: int | None = None) -> None:
        self.batches, self.stages, self.losses, self.stop_at = 0, [], 0.0, stop_at
        Counting.made.append(self)

    def on_train_batch_end(self, trainer, pl_module, outputs, *args) -> None:
        self.batches += 1
        self.losses += outputs["loss"].item()
        if self.batches == self.stop_at:
            raise KeyboardInterrupt

    def on_fit_end(self, trainer, pl_module) -> None:
        self.stages.append(pl_module.domain.name)

    def state_dict(self) -> dict:
        return {"batches": self.batches, "stages": list(self.stages), "losses": self.losses}

    def load_state_dict(self, state: dict) -> None:
        self.batches, self.stages, self.losses = state["batches"], list(state["stages"]), state["losses"]


class Stopping(Callback):
    def on_train_batch_end(self, trainer, *args) -> None:
        trainer.should_stop = True


class Opaque(Callback):
    def state_dict(self) -> dict:
        return {"mean": np.float64(1)}


class Telling(DummyLogger):
    """Keeps what it is given."""

    told: dict[str, dict[str, float]] = {}

    def __init__(self, save_dir: str, title: str) -> None:
        super().__init__()
        self.place, self.title = save_dir, title
        Telling.told[title] = {"save_dir": save_dir}

    def log_hyperparams(self, params) -> None:
        Telling.told[self.title]["seed"] = params["seed"]

    def log_metrics(self, metrics, step=None) -> None:
        Telling.told[self.title].update(metrics)


@pytest.fixture(autouse=True)
def forgetful():
    Counting.made.clear()
    Telling.told.clear()


def test_a_callback_is_one_for_the_run_and_sees_every_stage(small, start, tmp_path):
    start(small(TWO, COUNTING, "+callbacks.other=null"), tmp_path)
    (mine,) = Counting.made
    assert (mine.batches, mine.stages) == (12, ["law", "food"])


@pytest.mark.parametrize("stop_at", [3, 6, 7, 11, 12])
def test_a_killed_run_goes_on_with_the_state_of_its_callbacks(stop_at, small, start, tmp_path):
    """Within the first stage, at the end of it, in the second: at steps with and without a checkpoint."""
    cfg = small(TWO, COUNTING)
    start(cfg, tmp_path / "whole")
    with pytest.raises(SystemExit), KilledAt(stop_at):
        start(cfg, tmp_path / "killed")
    start(cfg, tmp_path / "killed")
    whole, _, resumed = Counting.made
    assert resumed.state_dict() == whole.state_dict()
    states = [
        torch.load(tmp_path / run / "stages" / "002.pt", weights_only=True) for run in ("whole", "killed")
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class KilledAt:
    """The next callback raises KeyboardInterrupt at its batch of this number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        self.kept = Counting.__init__.__defaults__
        Counting.__init__.__defaults__ = (self.number,)

    def __exit__(self, *args) -> None:
        Counting.__init__.__defaults__ = self.kept


def test_the_state_between_stages_is_that_of_the_stage_before(tmp_path):
    mine = Counting()
    run = CustomCallbacks({"mine": mine}, tmp_path)
    for number in (1, 2, 3):
        run.entering(number)
        mine.batches = number
        run.teardown(SimpleNamespace(is_global_zero=True), None, "fit")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["002.pt", "003.pt"]
    again = Counting()
    CustomCallbacks({"mine": again}, tmp_path).entering(3)
    assert again.batches == 2
    CustomCallbacks({"mine": again}, tmp_path).entering(4)
    assert again.batches == 3


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            f"+callbacks.x._target_={HERE}.Stopping",
            "the stage was ended at step 1 of 6 by one of the callbacks x; allowed: trainer.steps",
        ),
        (
            f"+callbacks.x._target_={HERE}.Opaque",
            "callbacks.x: its state_dict is .*allowed: tensors",
        ),
    ],
)
def test_a_callback_that_would_spoil_the_run_is_told(override, told, small, start, tmp_path):
    with pytest.raises(ValueError, match=told):
        start(small("order=[law]", override), tmp_path)
    scores = tmp_path / "scores.json"
    assert not scores.exists() or json.loads(scores.read_text())["rows"] == ["base"]


def test_several_loggers_are_told_the_curves_the_row_and_the_metrics(small, start, tmp_path):
    names = ("one", "two")
    loggers = [f"+logger.{name}={{_target_: {HERE}.Telling, title: {name}}}" for name in names]
    start(small("order=[law]", "trainer.log_every_n_steps=1", "logger=csv", *loggers), tmp_path)
    scores = json.loads((tmp_path / "scores.json").read_text())
    for name in names:
        told = Telling.told[name]
        assert (told["save_dir"], told["seed"]) == (str(tmp_path), 0)
        assert told["LC/perplexity"] == pytest.approx(scores["metrics"]["LC"]["perplexity"])
        assert {"train/lm/law", "ppl/law"} <= told.keys()
    assert (tmp_path / "metrics.csv").exists()


def test_a_logger_of_lightning_is_made_from_its_class_and_has_the_curves(small, start, tmp_path):
    """Two stages are two fits, and a row each after them, in one file."""
    theirs = "+logger.theirs={_target_: lightning.pytorch.loggers.CSVLogger, name: theirs, version: ''}"
    start(small(TWO, "trainer.log_every_n_steps=1", "logger=csv", theirs), tmp_path)
    with (tmp_path / "theirs" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    ours = {}
    with (tmp_path / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            ours.setdefault(row["name"], []).append(float(row["value"]))
    for name in ("train/lm/law", "train/lm/food", "train/grad_norm/food", "train/tokens/law", "ppl/law"):
        assert [float(row[name]) for row in rows if row.get(name)] == pytest.approx(ours[name]), name
    assert any(row.get("LC/perplexity") for row in rows)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert ours["train/tokens/law"][-1] == scores["seen"][1]
    assert all(pace > 0 for pace in ours["train/tokens_per_s/food"])
