"""Updates that bfloat16 rounds away."""

import pytest
import torch
from torch import nn

from cpt.optim.rounding import lost_update_share


def parameter(value: float, count: int) -> nn.Parameter:
    return nn.Parameter(torch.full((count,), value))


@pytest.mark.parametrize(
    ("value", "rate", "share"),
    [
        (1.5, 0.003, 1.0),  # numbers in [1, 2) are 1/128 apart
        (1.5, 0.005, 0.0),
        (-1.5, 0.003, 1.0),
        (0.02, 1e-5, 1.0),
        (0.02, 1e-4, 0.0),
        (0.0, 1e-9, 0.0),
    ],
)
def test_an_update_below_half_the_distance_to_the_next_number_is_lost(value, rate, share):
    assert lost_update_share([parameter(value, 10)], rate=rate) == share


def test_the_share_is_by_weights_not_by_tensors_and_does_not_change():
    large = parameter(1.5, 30_000)
    small = parameter(0.01, 10_000)
    assert lost_update_share([large, small, parameter(0.0, 0)], rate=1e-3) == pytest.approx(0.75)
    mixed = nn.Parameter(torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
    shares = {lost_update_share([mixed], rate=1e-3) for _ in range(2)}
    exact = ((mixed.bfloat16() - 1e-3) == mixed.bfloat16()).double().mean()
    assert len(shares) == 1 and abs(shares.pop() - exact) < 0.03
