"""Callbacks: custom ones, movement in the protected subspace, looks at text while a domain is learned."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from cpt import verify
from cpt.evaluation.monitor import MonitorOptions, MonitorRecord
from cpt.gradient_masks.base import GradientMask
from cpt.trainer.callbacks import CustomCallbacks, shorten_requirements
from cpt.trainer.protected_movement import compute_protected_shares
from tests.runs.reading import assert_same_bits, read_scores, same_state, start_and_kill, state_of
from tests.support.method_fixtures import DROPOUT, load_model_weights

TWO = "order=[law,food]"
HERE = "tests.trainer.test_callbacks"
COUNTING = f"+callbacks.mine._target_={HERE}.Counting"


class Counting(Callback):
    """Counts what it sees, its state; ends the run at a batch of the next one's choice."""

    instances: list["Counting"] = []
    stop_at = None

    def __init__(self) -> None:
        self.batches = 0
        self.stages = []
        self.losses = 0.0
        Counting.instances.append(self)

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
        self.batches = state["batches"]
        self.stages = list(state["stages"])
        self.losses = state["losses"]


def test_a_callback_lasts_for_the_whole_run_and_a_killed_run_resumes_its_state(
    small, start, tmp_path, monkeypatch
):
    Counting.instances.clear()
    cfg = small(TWO, COUNTING, "+callbacks.other=null")
    start(cfg, tmp_path / "whole")
    for number in (3, 6, 7):
        monkeypatch.setattr(Counting, "stop_at", number)
        with pytest.raises(SystemExit):
            start(cfg, tmp_path / "killed")
    monkeypatch.setattr(Counting, "stop_at", None)
    start(cfg, tmp_path / "killed")
    first, *_, resumed = Counting.instances
    assert len(Counting.instances) == 5 and (first.batches, first.stages) == (12, ["law", "food"])
    assert resumed.state_dict() == first.state_dict()

    state = tmp_path / "killed" / "callbacks" / "001.pt"
    state.write_bytes(b"PK")
    assert verify.main([str(tmp_path / "killed")]) == 1
    with pytest.raises(ValueError, match=f"{state} is truncated or damaged"):
        CustomCallbacks({"counting": resumed}, state.parent).enter_stage(2)
    assert_same_bits(tmp_path / "killed", tmp_path / "whole")


FEW = [TWO, "trainer.steps=6", "trainer.importance_samples=8", "optim.weight_decay=0.1"]


class FirstRowMask(GradientMask):
    """Protects the first of two rows of a weight: its factor is 0, that of the second row 1."""

    static = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(apply_to="update")
        self.weight = [model.weight]

    def factors(self):
        return iter([(self.weight[0], torch.tensor([[0.0], [1.0]]))])


def test_the_leak_is_the_protected_share_of_the_squared_movement():
    model = nn.Linear(3, 2, bias=False)
    method = SimpleNamespace(model=model, protected_subspace=FirstRowMask(model).protected_subspace)
    initial_weights = {"weight": model.weight.detach().clone()}
    with torch.no_grad():
        model.weight += torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 2.0]])
    leak, random_share = compute_protected_shares(method, initial_weights, seed=0)
    assert leak == pytest.approx(1 / 9)  # squared movement: 1 in the protected row, 4 + 4 in the other
    assert 0.1 < random_share < 0.9  # half of the weights are protected

    # Weights that have not moved have no shares.
    current_weights = {"weight": model.weight.detach().clone()}
    assert compute_protected_shares(method, current_weights, seed=0) == []


SOFT = "method=das method.units=[heads,neurons,outputs,tokens] method.contrast=0 method.normalize=rank"


@pytest.mark.parametrize("method", [SOFT, "method=osf"], ids=["das", "osf"])
def test_masks_of_the_step_keep_the_protected_subspace_and_released_forms_do_not(
    method, start, killing, small, tmp_path
):
    options = [*FEW, *method.split()]
    start_and_kill(start, killing, small(*options), tmp_path / "ours", step=4, domain="food")
    start(small(*options), tmp_path / "ours")
    start(small(*options, "method.apply_to=gradient"), tmp_path / "theirs")
    ours = read_scores(tmp_path / "ours")["protected_movement"]
    theirs = read_scores(tmp_path / "theirs")["protected_movement"]
    for (leak, random), (their_leak, their_random) in zip(ours[1:], theirs[1:], strict=True):
        assert leak < 1e-3 and their_leak > max(100 * leak, 1e-2)
        assert random == pytest.approx(their_random, rel=0.5) and random > 0.02


def test_what_protects_nothing_for_a_whole_domain_has_none_and_ewc_once_it_knows_what_matters(
    start, small, tmp_path
):
    start(small(*FEW, "mask=migu", "trainer.steps=1"), tmp_path / "migu")
    assert read_scores(tmp_path / "migu")["protected_movement"] == [[], [], []]
    start(small(*FEW, "method=ewc"), tmp_path / "ewc")
    base, first, second = read_scores(tmp_path / "ewc")["protected_movement"]
    assert base == first == []
    assert 0 < second[0] < 1 and second[1] == pytest.approx(0.05, abs=0.02)


THREE = ["order=[law,food,space]", "trainer.steps=6"]
OFF = MonitorOptions(every=None, max_tokens=2000, past=4, general=True, stop=None, patience=None, keep="last")
EVERY = ["monitor.every=2", "monitor.max_tokens=200"]


def record_losses(values):
    """What was watched of a stage whose texts had these losses, of three documents each."""
    watched = MonitorRecord()
    counts = np.array([9.0, 11.0, 10.0])
    num_looks = len(next(iter(values.values())))
    looks = []
    for number in range(num_looks):
        looks.append({text: np.array([means[number] * counts, counts]) for text, means in values.items()})
    for step, look in enumerate(looks):
        watched.add(step, looks[0], look)
    return watched


def test_a_stage_ends_when_a_text_has_risen_for_certain():
    watched = record_losses({"mine": [3.0, 2.0], "past": [2.0, 2.3], "general": [4.0, 4.05]})
    reason = watched.why_stop(replace(OFF, every=1, stop=0.2), stage_texts=("mine",))
    assert reason.startswith("past has risen by 0.300")
    assert not watched.why_stop(replace(OFF, every=1, stop=0.31), stage_texts=("mine",))
    stage_looks = record_losses({"mine": [3.0, 4.0], "past": [2.0, 2.0]})  # which may rise
    assert not stage_looks.why_stop(replace(OFF, every=1, stop=0.2), stage_texts=("mine",))

    doubted = MonitorRecord()
    counts = [10.0, 10.0, 10.0]
    first_losses = {text: np.array([[20.0, 20.0, 20.0], counts]) for text in ("mine", "past")}
    risen = np.array([[30.0, 20.0, 20.0], counts])  # of one document in three
    doubted.add(1, first_losses, first_losses | {"past": risen})
    low, high = doubted.rise["past"][-1]
    assert low < 0 and high > 1 and (low + high) / 2 == pytest.approx(1 / 3)
    assert not doubted.why_stop(replace(OFF, every=1, stop=0.1), stage_texts=["mine"])


def test_looking_changes_no_bit(small, start, tmp_path):
    for name, monitor_options in (("plain", []), ("watched", EVERY)):
        start(small("method=demix", *THREE, *DROPOUT, *monitor_options), tmp_path / name)
    assert_same_bits(tmp_path / "watched", tmp_path / "plain")
    plain = read_scores(tmp_path / "plain")
    watched = read_scores(tmp_path / "watched")
    assert all(plain[name] == watched[name] for name in ("flops", "seen", "config_hash"))
    assert plain["monitor"] == {} and list(watched["monitor"]) == ["law", "food", "space"]
    last = watched["monitor"]["space"]
    assert last["steps"] == [0, 2, 4, 6] and list(last["nll"]) == ["space", "law", "food", "general"]
    assert last["nll"]["space"][-1] < last["nll"]["space"][0]
    assert last["rise"]["law"][0] == pytest.approx([0, 0]) and not last["ended"]


def test_what_is_looked_at_is_validation_text(small, start, tmp_path):
    options = ["monitor.every=3", "monitor.max_tokens=1000000", "domains.score_on=valid"]
    start(small("method=ncl", "order=[law,food]", *DROPOUT, *options), tmp_path)
    scores = read_scores(tmp_path)
    column = scores["domains"].index("general")
    for row, stage in enumerate(["law", "food"], start=1):
        looks = scores["monitor"][stage]["nll"]["general"]
        assert looks[-1] == pytest.approx(scores["nll"][row][column], rel=1e-5)
        assert looks[0] == pytest.approx(scores["nll"][row - 1][column], rel=1e-5)


def test_patience_with_the_best_weights(small, start, tmp_path):
    options = ["order=[law]", "optim.lr=0.05", "lr_scheduler=constant", "lr_scheduler.warmup_ratio=0"]
    ending = ["monitor.every=1", "monitor.patience=3", "monitor.keep=best", "trainer.steps=30"]
    start(small(*options, *ending), tmp_path / "best")
    watched = read_scores(tmp_path / "best")["monitor"]["law"]
    assert watched["ended"] and watched["kept"] == watched["steps"][int(np.argmin(watched["nll"]["law"]))]
    assert watched["steps"][-1] == watched["kept"] + 3
    start(small(*options, f"trainer.steps={watched['kept']}"), tmp_path / "short")
    assert same_state(load_model_weights(tmp_path / "best"), load_model_weights(tmp_path / "short"))


def test_a_stage_that_ended_early_is_the_same_after_any_kill(small, start, killing, tmp_path):
    options = [
        "method=ewc",
        "order=[law,food]",
        "trainer.steps=12",
        "trainer.checkpoint_every_n_steps=3",
        *DROPOUT,
    ]
    options += ["monitor.every=2", "monitor.patience=1", "monitor.keep=best", "monitor.stop=0.01"]
    options += ["optim.lr=0.1"]
    start(small(*options), tmp_path / "whole")
    undisturbed = read_scores(tmp_path / "whole")
    last = undisturbed["monitor"]["food"]["steps"][-1]
    assert last < 12 and undisturbed["monitor"]["food"]["ended"] and undisturbed["run"]["finished"]
    for step in (1, last):
        start_and_kill(start, killing, small(*options), tmp_path / "killed", step=step, domain="food")
    start(small(*options), tmp_path / "killed")
    resumed = read_scores(tmp_path / "killed")
    for name in ("nll", "monitor", "seen", "flops", "rates", "metrics"):
        assert undisturbed[name] == resumed[name], name
    assert same_state(state_of(tmp_path / "whole"), state_of(tmp_path / "killed"))


def test_a_package_that_a_logger_needs_is_named_without_lightnings_hints():
    hints = (
        "Neither is available. Requirement 'tensorboardX' not met. HINT: … Requirement 'tensorboard' not met."
    )
    error = shorten_requirements(ModuleNotFoundError(hints))
    assert str(error) == "tensorboard is not installed: pip install tensorboard"
    plain_error = ModuleNotFoundError("No module named 'x'")
    assert shorten_requirements(plain_error) is plain_error


class Remembering(Callback):
    """Has a state of numpy from the first stage on, or from its end on."""

    state: dict = {}

    def state_dict(self) -> dict:
        return self.state


def test_a_state_that_could_not_be_loaded_again_is_refused_before_it_is_stored(tmp_path):
    callback = Remembering()
    callbacks = CustomCallbacks({"mine": callback}, tmp_path)
    trainer = SimpleNamespace(is_global_zero=True)
    callbacks.on_train_start(trainer, None)
    callback.state = {"best": [np.float32(0.5)] * 1000}
    message = r"^callbacks.mine: its state_dict is .{200}\. Allowed: tensors"
    with pytest.raises(ValueError, match=message):
        callbacks.on_train_start(trainer, None)
    with pytest.raises(ValueError, match=message):
        callbacks.teardown(trainer, None, "fit")
    assert list(tmp_path.iterdir()) == []
