"""The optimizer's state between two domains: counts as whole numbers, and scales of other shapes."""

import pytest
import torch
from torch import nn

from cpt.optim.state import CarriedState


class Counting(torch.optim.SGD):
    """Its state is as that of bitsandbytes: moments, a count of steps, and a scale for each block."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                count = self.state[parameter].get("step", 0)
                self.state[parameter] = {
                    "step": count + 1,
                    "state1": torch.ones(parameter.shape, dtype=torch.uint8),
                    "absmax1": torch.ones(3),
                }


def carry(weight: nn.Parameter, next_weight: nn.Parameter) -> Counting:
    """The next domain's optimizer with the state of the one before."""
    optimizer = Counting([weight], lr=1.0)
    for _ in range(2):
        optimizer.step()
    carried = CarriedState()
    carried.capture(optimizer, [("weight", weight)])
    assert all(isinstance(value, torch.Tensor) for value in carried.named().values())
    next_optimizer = Counting([next_weight], lr=1.0)
    carried.load_into(next_optimizer, [("weight", next_weight)])
    return next_optimizer


@pytest.mark.parametrize("shape", [(4, 6), (24,)])
def test_counts_come_back_as_whole_numbers_and_scales_with_them(shape):
    weight = nn.Parameter(torch.zeros(shape))
    state = carry(weight, weight).state[weight]
    assert state["step"] == 2 and type(state["step"]) is int
    assert len(state["absmax1"]) == 3 and state["state1"].shape == weight.shape


def test_a_parameter_of_another_shape_starts_without_state():
    next_weight = nn.Parameter(torch.zeros(5, 6))
    assert next_weight not in carry(nn.Parameter(torch.zeros(4, 6)), next_weight).state


def test_what_is_neither_a_tensor_nor_a_whole_number_is_refused():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.state[weight] = {"scale": 0.5}
    with pytest.raises(ValueError, match="keeps scale=0.5. Allowed: none"):
        CarriedState().capture(optimizer, [("weight", weight)])
