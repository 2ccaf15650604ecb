"""Callbacks: custom ones survive a kill; what moves in the protected subspace is measured."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from cpt import verify
from cpt.gradient_masks.base import GradientMask
from cpt.trainer.callbacks import CustomCallbacks, protected_shares
from tests.runs.reading import assert_same_bits, killed, told_by

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


FEW = [TWO, "trainer.steps=6", "trainer.importance_samples=8", "optim.weight_decay=0.1"]


class Half(GradientMask):
    static = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(apply_to="update")
        self.weight = [model.weight]

    def factors(self):
        return iter([(self.weight[0], torch.tensor([[0.0], [1.0]]))])


def test_it_is_the_share_of_the_squared_way():
    model = nn.Linear(3, 2, bias=False)
    method = SimpleNamespace(model=model, protected_subspace=Half(model).protected_subspace)
    began = {"weight": method.model.weight.detach().clone()}
    with torch.no_grad():
        method.model.weight += torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 2.0]])
    leak, random = protected_shares(method, began, seed=0)
    assert leak == pytest.approx(1 / 9)
    assert 0.1 < random < 0.9
    assert protected_shares(method, {"weight": method.model.weight.detach().clone()}, seed=0) == []


SOFT = "method=das method.units=[heads,neurons,outputs,tokens] method.contrast=0 method.normalize=rank"


@pytest.mark.parametrize("method", [SOFT, "method=osf"], ids=["das", "osf"])
def test_what_acts_on_the_step_leaks_nothing_and_released_forms_do(method, start, killing, small, tmp_path):
    given = [*FEW, *method.split()]
    killed(start, killing, small(*given), tmp_path / "ours", step=4, domain="food")
    start(small(*given), tmp_path / "ours")
    start(small(*given, "method.apply_to=gradient"), tmp_path / "theirs")
    ours, theirs = (told_by(tmp_path / name)["protected_movement"] for name in ("ours", "theirs"))
    for (leak, random), (more, alike) in zip(ours[1:], theirs[1:], strict=True):
        assert leak < 1e-3 and more > max(100 * leak, 1e-2)
        assert random == pytest.approx(alike, rel=0.5) and random > 0.02


def test_what_protects_nothing_for_a_whole_domain_has_none_and_ewc_once_it_knows_what_matters(
    start, small, tmp_path
):
    start(small(*FEW, "mask=migu", "trainer.steps=1"), tmp_path / "migu")
    assert told_by(tmp_path / "migu")["protected_movement"] == [[], [], []]
    start(small(*FEW, "method=ewc"), tmp_path / "ewc")
    base, first, second = told_by(tmp_path / "ewc")["protected_movement"]
    assert base == first == []
    assert 0 < second[0] < 1 and second[1] == pytest.approx(0.05, abs=0.02)
