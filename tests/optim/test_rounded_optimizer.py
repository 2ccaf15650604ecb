"""Steps in 32 bits on weights in 16: none is lost, for any optimizer, and the state has 32 bits."""

import pytest
import torch
from torch import nn

from cpt.optim import rounded_optimizer
from cpt.optim.rounded_optimizer import RoundedOptimizer
from cpt.optim.rounding import StochasticRounding

OPTIMIZERS = {
    "AdamW": {"weight_decay": 0.01, "fused": True},
    "SGD": {"momentum": 0.9},
    "Muon": {"adjust_lr_fn": "match_rms_adamw"},
    "Adafactor": {},
}


class Regression:
    """Learns a matrix, in batches that are the same for each."""

    def __init__(self, name: str, *, rate: float, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(1)
        start = (0.02 * torch.randn(96, 96, generator=generator)).bfloat16()
        self.target = 0.1 * torch.randn(96, 96, generator=generator)
        self.batches = torch.randn(40, 16, 96, generator=generator)
        self.weights = [nn.Parameter(half.to(dtype)) for half in start.split(48, dim=1)]
        self.start = start.float()
        self.rounding = StochasticRounding()
        groups = [{"params": [weight]} for weight in self.weights]
        self.optimizer = getattr(torch.optim, name)(groups, lr=rate, **OPTIMIZERS[name])
        if dtype == torch.bfloat16:
            self.optimizer = RoundedOptimizer(self.optimizer, self.rounding)

    def learn(self, steps: range) -> "Regression":
        for step in steps:
            self.rounding.start_step(step)
            self.optimizer.step(lambda step=step: self.backward(self.batches[step]))
        return self

    def backward(self, batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        weight = torch.cat([weight.float() for weight in self.weights], dim=1)
        loss = (batch @ (weight - self.target)).square().mean()
        loss.backward()
        return loss

    @property
    def movement(self) -> torch.Tensor:
        return torch.cat([weight.detach().float() for weight in self.weights], dim=1) - self.start


RATES = {"AdamW": 1e-6, "SGD": 1e-5, "Muon": 1e-6, "Adafactor": 1e-4}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_movement_is_that_of_32_bits(name):
    steps = range(40)
    expected = Regression(name, rate=RATES[name], dtype=torch.float32).learn(steps).movement
    run = Regression(name, rate=RATES[name]).learn(steps)
    assert float((run.movement * expected).sum() / expected.square().sum()) == pytest.approx(1, abs=0.05)
    assert float(expected.abs().max()) < 2e-4 < run.movement.abs().max()  # few weights move, by whole units

    for state in run.optimizer.state.values():
        for name, value in state.items():
            assert value.dtype == torch.float32, name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_continued_from_its_state_it_ends_with_the_same_bits(name):
    uninterrupted = Regression(name, rate=1e-3).learn(range(8))
    first = Regression(name, rate=1e-3).learn(range(4))
    second = Regression(name, rate=1e-3)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    for weight, stored in zip(second.weights, first.weights, strict=True):
        weight.data.copy_(stored)
    second.learn(range(4, 8))
    assert torch.equal(second.movement, uninterrupted.movement)
    for weight, expected_weight in zip(second.weights, uninterrupted.weights, strict=True):
        state = uninterrupted.optimizer.state[expected_weight]
        assert state and all(torch.equal(second.optimizer.state[weight][key], state[key]) for key in state)


def test_the_bits_do_not_depend_on_how_many_weights_are_copied_at_a_time(monkeypatch):
    expected = Regression("AdamW", rate=1e-3).learn(range(3)).movement
    monkeypatch.setattr(rounded_optimizer, "MAX_COPIED", 10)
    parts = Regression("AdamW", rate=1e-3)
    assert len(list(parts.optimizer.divide_parameters())) == 0  # before a backward pass
    assert torch.equal(parts.learn(range(3)).movement, expected)
    assert len(list(parts.optimizer.divide_parameters())) == 2


class Counting(torch.optim.SGD):
    """Counts its steps in the group, as schedule-free optimizers do, and moves by the count."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                parameter.data.add_(group["count"])


def test_what_an_optimizer_stores_in_a_group_changes_once_in_a_step(monkeypatch):
    monkeypatch.setattr(rounded_optimizer, "MAX_COPIED", 1)
    weights = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = RoundedOptimizer(Counting(weights), StochasticRounding())
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert [weight.tolist() for weight in weights] == [[3, 3]] * 3
    assert optimizer.param_groups[0]["count"] == 2 and optimizer.param_groups[0]["params"] == weights


def test_weights_in_32_bits_and_those_without_a_gradient_are_left_as_they_are():
    wide = nn.Parameter(torch.ones(3))
    untouched = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = RoundedOptimizer(torch.optim.SGD([wide, untouched], lr=1e-6), StochasticRounding())
    wide.grad = torch.ones(3)
    optimizer.step()
    assert wide.tolist() == (torch.ones(3) - 1e-6).tolist()
    assert torch.equal(untouched, torch.ones(3, dtype=torch.bfloat16)) and untouched not in optimizer.state
