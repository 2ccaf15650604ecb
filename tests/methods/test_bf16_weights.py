"""Training with weights in bfloat16 (trainer.precision=bf16-true): what 32 bits would move, moves, also under
masks and averages, and a killed run ends with the same bits."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from cpt.gradient_masks.base import Constraint, GradientMask, StepSnapshot
from cpt.models.weights import PreciseSnapshot
from cpt.optim.rounding import StochasticRounding
from tests.support.campaign import run_few
from tests.support.kill_callback import KilledError, Killer
from tests.support.method_fixtures import (
    ORDER,
    assert_unchosen_rows_are_unchanged,
    equal_tensors,
    load_model_weights,
)

BF16 = "trainer.precision=bf16-true"


def train_movement(run, *, rounded_start: dict[str, torch.Tensor]) -> torch.Tensor:
    """How far the weights move in the first domain, from a start that bfloat16 has, as a vector."""
    run.module.model.load_state_dict(rounded_start, strict=False)
    run.learn(0)
    return torch.cat(
        [(weight.float() - rounded_start[name].float()).flatten() for name, weight in run.weights().items()]
    )


def project_on_32_bits(build, method: str, *options: str) -> float:
    """The movement in bfloat16, projected on that in 32 bits, in units of the latter."""
    movements = {}
    start: dict[str, torch.Tensor] = {}
    for precision in ("32-true", "bf16-true"):
        run = build(method, f"trainer.precision={precision}", "lr_scheduler=constant", *options, on="causal")
        start = start or {name: weight.bfloat16() for name, weight in run.weights().items()}
        movements[precision] = train_movement(run, rounded_start=start)
    expected = movements["32-true"]
    return float(movements["bf16-true"] @ expected / expected.square().sum())


@pytest.mark.parametrize("steps", run_few([12, 500], [12]))
@pytest.mark.parametrize("rate", ["1e-5", "1e-6"])
def test_small_steps_are_not_lost(rate, steps, build):
    options = [f"optim.lr={rate}", f"trainer.steps={steps}"]
    assert project_on_32_bits(build, "ncl", *options) == pytest.approx(1, abs=0.05)
    if rate == "1e-5":
        assert project_on_32_bits(build, "ncl", *options, "optim.rounding=nearest") < 0.3


class WeightsSeen(Callback):
    """Stores the type of the weight of each training batch."""

    def __init__(self) -> None:
        self.types = []

    def on_train_batch_start(self, trainer, module, batch, number) -> None:
        self.types.append(batch["weight"].dtype)


def test_the_weight_of_a_batch_is_not_rounded(build):
    run = build("ncl", BF16, "trainer.steps=2", on="causal")
    recorder = WeightsSeen()
    run.learn(0, recorder)
    assert recorder.types == [torch.float32] * 2


# Where a step is changed after the optimizer, it is rounded once more.
CHANGED = [
    "ncl mask=migu mask.migu.apply_to=update",
    "das method.apply_to=update method.contrast=0",
    "osf method.apply_to=update",
    "ncl mask=mofo mask.mofo.share=0.5",
    "recadam",
    "reptile method.interpolate_every=2 method.share=0.3",
    "ema method.decay=0.8",
    "wise_ft method.previous=0.7",
]


@pytest.mark.parametrize("case", run_few(CHANGED, [CHANGED[5]]))
def test_what_is_left_of_a_step_is_not_lost(case, build):
    options = [*case.split(), "optim.lr=5e-6", "trainer.steps=12"]
    assert project_on_32_bits(build, *options) == pytest.approx(1, abs=0.1)


def test_rows_that_a_mask_holds_keep_their_bits(build):
    run = build("ncl", BF16, "mask=migu", "mask.migu.apply_to=update", "mask.migu.threshold=0.9", on="causal")
    start = run.weights()
    run.learn(0)
    assert_unchosen_rows_are_unchanged(run, {name: weight.bfloat16() for name, weight in start.items()})


def test_killed_and_started_again_it_ends_with_the_same_bits(small_gpt2, start, killing, tmp_path):
    method = ["method=reptile", "method.interpolate_every=2", "mask=migu", "mask.migu.apply_to=update"]
    options = [*method, ORDER, BF16, "trainer.steps=4", "optim.state_across_domains=moments"]
    start(small_gpt2(*options), tmp_path / "whole")
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(small_gpt2(*options), tmp_path / "killed")
    killing(None)
    start(small_gpt2(*options), tmp_path / "killed")
    weights = load_model_weights(tmp_path / "whole")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert equal_tensors(weights, load_model_weights(tmp_path / "killed"))


def test_a_run_that_began_with_rounding_to_nearest_continues_so(small_gpt2, start, killing, tmp_path):
    """Its config has no optim.rounding, as those of earlier versions have none."""
    config = [ORDER, BF16, "trainer.steps=4"]
    nearest = small_gpt2(*config, "optim.rounding=nearest")
    start(nearest, tmp_path / "whole")
    killing(Killer(step=3, domain="law"))
    with pytest.raises(KilledError):
        start(nearest, tmp_path / "old")
    killing(None)
    path = tmp_path / "old" / "config.yaml"
    lines = [line for line in path.read_text().splitlines() if "rounding: nearest" not in line]
    path.write_text("\n".join(lines) + "\n")
    start(small_gpt2(*config), tmp_path / "old")
    assert equal_tensors(load_model_weights(tmp_path / "whole"), load_model_weights(tmp_path / "old"))


class Shrinking(Constraint):
    """Keeps three tenths of each step."""

    def constrain(self, steps, optimizer):
        for _, step in steps:
            step.mul_(0.3)


def step_of_one_unit() -> tuple[nn.Parameter, torch.Tensor, float]:
    """A weight in bfloat16, what it is after a step to the next number, and the distance of the two."""
    before = torch.full((20_000,), 0.02, dtype=torch.bfloat16)
    after = (before.view(torch.int16) + 1).view(torch.bfloat16)
    return nn.Parameter(before), after, float(after[0].double() - before[0].double())


@pytest.mark.parametrize("is_factor", [True, False])
def test_a_share_of_a_step_is_rounded_stochastically(is_factor):
    """Rounded to nearest, three tenths of a unit would be nothing."""
    weight, after, unit = step_of_one_unit()
    start = weight.detach().double()
    mask = GradientMask(apply_to="update") if is_factor else Shrinking(apply_to="update")
    factor = torch.tensor(0.3) if is_factor else None
    snapshot = StepSnapshot(mask, [weight], factor=factor)
    weight.data.copy_(after)
    snapshot.apply(torch.optim.SGD([weight]), StochasticRounding())
    assert float((weight.detach().double() - start).mean()) == pytest.approx(0.3 * unit, rel=0.05)


def test_an_average_is_rounded_stochastically():
    """As EMA rounds it: three tenths of the way from the start to the end."""
    weight, after, unit = step_of_one_unit()
    start = weight.detach().double()
    model = nn.ParameterDict({"weight": weight})
    average = PreciseSnapshot(model, persistent=True)
    weight.data.copy_(after)
    average.capture(model, share=0.3)
    average.restore(model, rounding=StochasticRounding())
    assert float((weight.detach().double() - start).mean()) == pytest.approx(0.3 * unit, rel=0.05)
