"""AdamW with moments in 8 bits: near AdamW, whatever the strides of a weight, and continued from its state."""

import pytest
import torch
from torch import nn

from cpt.optim.state import CarriedState, lay_out_moments

pytest.importorskip("bitsandbytes", reason="the extra: pip install -e '.[bitsandbytes]'")
from cpt.optim.adamw_8bit import AdamW8bit

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


def make_weight(*, is_column_major: bool = False) -> nn.Parameter:
    values = 0.02 * torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    return nn.Parameter(to_column_major(values) if is_column_major else values)


def to_column_major(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values.T.contiguous()).T.copy_(values)


def make_steps(weight: nn.Parameter, optimizer: torch.optim.Optimizer, steps: range) -> torch.Tensor:
    for step in steps:
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return weight.detach().clone()


def make_optimizer(weight: nn.Parameter, *, min_8bit_size: int = 4096) -> AdamW8bit:
    return AdamW8bit([{"params": [weight]}], min_8bit_size=min_8bit_size, **OPTIONS)


@pytest.mark.parametrize(("min_8bit_size", "dtype"), [(4096, torch.uint8), (10_000, torch.float32)])
def test_the_movement_is_nearly_that_of_adamw_with_a_quarter_of_its_state(min_8bit_size, dtype):
    start = make_weight().detach().clone()
    weight = make_weight()
    optimizer = make_optimizer(weight, min_8bit_size=min_8bit_size)
    movement = make_steps(weight, optimizer, range(20)) - start
    plain_weight = make_weight()
    expected = make_steps(plain_weight, torch.optim.AdamW([plain_weight], **OPTIONS), range(20)) - start
    assert float((movement * expected).sum() / expected.square().sum()) == pytest.approx(1, abs=0.03)
    state = optimizer.state[weight]
    assert state["state1"].dtype == dtype and state["state1"].is_contiguous()


def test_strides_change_nothing_also_in_a_state_that_is_loaded():
    weight = make_weight()
    expected = make_steps(weight, make_optimizer(weight), range(6))
    first = make_weight(is_column_major=True)
    optimizer = make_optimizer(first)
    make_steps(first, optimizer, range(3))
    second = nn.Parameter(to_column_major(first.detach()))
    continued = make_optimizer(second)
    continued.load_state_dict(optimizer.state_dict())
    lay_out_moments(continued)
    assert continued.state[second]["state1"].is_contiguous()
    assert torch.equal(make_steps(second, continued, range(3, 6)), expected)


def test_the_state_is_carried_with_its_count_of_steps():
    weight = make_weight()
    expected = make_steps(weight, make_optimizer(weight), range(6))
    first = make_weight()
    optimizer = make_optimizer(first)
    make_steps(first, optimizer, range(3))
    carried = CarriedState()
    carried.capture(optimizer, [("weight", first)])
    continued = make_optimizer(first)
    carried.load_into(continued, [("weight", first)])
    assert continued.state[first]["step"] == 3 and type(continued.state[first]["step"]) is int
    assert torch.equal(make_steps(first, continued, range(3, 6)), expected)
