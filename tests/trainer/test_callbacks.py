"""Custom callbacks and loggers: they see every stage, survive a kill, and change nothing unseen."""

import pytest
from lightning.pytorch.callbacks import Callback

from cpt import verify
from cpt.trainer.callbacks import CustomCallbacks, make_callbacks
from tests.runs.reading import assert_same_bits

TWO = "order=[law,food]"
HERE = "tests.trainer.test_callbacks"
COUNTING = f"+callbacks.mine._target_={HERE}.Counting"


def test_a_callback_that_changes_what_is_trained_is_refused():
    for name in ("WeightAveraging", "BackboneFinetuning", "ModelPruning"):
        more = {"pruning_fn": "l1_unstructured"} if name == "ModelPruning" else {}
        entry = {"_target_": f"lightning.pytorch.callbacks.{name}", **more}
        with pytest.raises(ValueError, match=f"callbacks.a={name} is invalid: it changes how a domain is tr"):
            make_callbacks({"a": entry})


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
    (state := tmp_path / "killed" / "callbacks" / "001.pt").write_bytes(b"PK")
    assert verify.main([str(tmp_path / "killed")]) == 1
    with pytest.raises(ValueError, match=f"{state} is truncated or damaged"):
        CustomCallbacks({"counting": resumed}, state.parent).entering(2)
    assert_same_bits(tmp_path / "killed", tmp_path / "whole")
