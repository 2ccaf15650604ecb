"""Custom callbacks and loggers: they see every stage, survive a kill, and change nothing unseen."""

import csv
import json

import numpy as np
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger

from tests.runs.reading import assert_same_bits, told_by

TWO = "order=[law,food]"
HERE = "tests.trainer.test_callbacks"
COUNTING = f"+callbacks.mine._target_={HERE}.Counting"


class Counting(Callback):
    """Counts what it sees, its state; ends the run at a batch of the next one's choice."""

    made: list["Counting"] = []
    stop_at = None

    def __init__(self) -> None:
        self.batches, self.stages, self.losses = 0, [], 0.0
        Counting.made.append(self)

    def on_train_batch_end(self, trainer, pl_module, outputs, *args) -> None:
        self.batches += 1
        self.losses += outputs["loss"].item()
        if self.batches == Counting.stop_at:
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
        self.title = title
        Telling.told[title] = {"save_dir": save_dir}

    def log_hyperparams(self, params) -> None:
        Telling.told[self.title]["seed"] = params["seed"]

    def log_metrics(self, metrics, step=None) -> None:
        Telling.told[self.title].update(metrics)


def test_a_callback_is_one_for_the_run_and_a_killed_run_goes_on_with_its_state(
    small, start, tmp_path, monkeypatch
):
    """Killed within the first stage, at its end and in the second: at steps with and without a checkpoint."""
    Counting.made.clear()
    cfg = small(TWO, COUNTING, "+callbacks.other=null")
    start(cfg, tmp_path / "whole")
    for number in (3, 6, 7):
        monkeypatch.setattr(Counting, "stop_at", number)
        with pytest.raises(SystemExit):
            start(cfg, tmp_path / "killed")
    monkeypatch.setattr(Counting, "stop_at", None)
    start(cfg, tmp_path / "killed")
    whole, *_, resumed = Counting.made
    assert len(Counting.made) == 5 and (whole.batches, whole.stages) == (12, ["law", "food"])
    assert resumed.state_dict() == whole.state_dict()
    assert_same_bits(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("Stopping", "the stage was ended at step 1 of 6 by one of the callbacks x"),
        ("Opaque", "callbacks.x: its state_dict is "),
    ],
)
def test_a_callback_that_would_spoil_the_run_is_told(kind, told, small, start, tmp_path):
    with pytest.raises(ValueError, match=told):
        start(small("order=[law]", f"+callbacks.x._target_={HERE}.{kind}"), tmp_path)
    scores = tmp_path / "scores.json"
    assert not scores.exists() or json.loads(scores.read_text())["rows"] == ["base"]


def test_several_loggers_are_told_the_curves_the_rows_and_the_metrics(small, start, tmp_path):
    """Ours, one's own and one of Lightning's; two stages are two fits, and a row each after them."""
    mine = f"+logger.mine={{_target_: {HERE}.Telling, title: mine}}"
    theirs = "+logger.theirs={_target_: lightning.pytorch.loggers.CSVLogger, name: theirs, version: ''}"
    start(small(TWO, "trainer.log_every_n_steps=1", "logger=csv", mine, theirs), tmp_path)
    scores, told = told_by(tmp_path), Telling.told["mine"]
    assert (told["save_dir"], told["seed"]) == (str(tmp_path), 0)
    assert told["LC/perplexity"] == pytest.approx(scores["metrics"]["LC"]["perplexity"])
    assert {"train/lm/law", "ppl/law"} <= told.keys()
    places, ours = (tmp_path / "theirs", tmp_path), {}
    rows, own = (list(csv.DictReader((at / "metrics.csv").read_text().splitlines())) for at in places)
    for row in own:
        ours.setdefault(row["name"], []).append(float(row["value"]))
    for name in ("train/lm/law", "train/lm/food", "train/grad_norm/food", "train/tokens/law", "ppl/law"):
        assert [float(row[name]) for row in rows if row.get(name)] == pytest.approx(ours[name]), name
    assert any(row.get("LC/perplexity") for row in rows)
    assert ours["train/tokens/law"][-1] == scores["seen"][1]
