"""Updates that bfloat16 rounds to nearest away, and stochastic rounding, which keeps them on average."""

import pytest
import torch
from torch import nn

from cpt.optim import rounding
from cpt.optim.rounding import TO_NEAREST, StochasticRounding, compute_lost_update_share, round_stochastically


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
    assert compute_lost_update_share([parameter(value, 10)], rate=rate) == share


def test_the_share_is_by_weights_not_by_tensors_and_does_not_change():
    large = parameter(1.5, 30_000)
    small = parameter(0.01, 10_000)
    assert compute_lost_update_share([large, small, parameter(0.0, 0)], rate=1e-3) == pytest.approx(0.75)
    mixed = nn.Parameter(torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
    shares = {compute_lost_update_share([mixed], rate=1e-3) for _ in range(2)}
    exact = ((mixed.bfloat16() - 1e-3) == mixed.bfloat16()).double().mean()
    assert len(shares) == 1 and abs(shares.pop() - exact) < 0.03


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("value", [0.02 + 1e-6, -1.0 - 1e-3, 3e38, -1e-39])
def test_a_number_becomes_one_of_its_neighbours_and_their_mean_is_the_number(value):
    values = torch.full((40_000,), value)
    rounded = round_stochastically(values, generator())
    neighbours = rounded.unique().double()
    distance = float(neighbours[1] - neighbours[0])
    assert len(neighbours) == 2 and neighbours[0] < values[0] < neighbours[1]
    assert float(rounded.double().mean() - values[0]) == pytest.approx(0, abs=0.01 * distance)


def test_what_bfloat16_has_stays_and_so_does_what_is_no_number():
    numbers = torch.randn(1000, generator=generator()).bfloat16()
    assert torch.equal(round_stochastically(numbers.float(), generator()), numbers)

    # All bits of the last one, the NaN of a GPU, are 1.
    bits = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int64)
    odd = bits.to(torch.int32).view(torch.float32)
    for seed in range(20):
        rounded = round_stochastically(odd, generator(seed))
        assert rounded[:2].tolist() == [float("inf"), float("-inf")] and rounded[2:].isnan().all()


def test_strides_change_nothing_and_sizes_need_not_divide_by_four():
    values = torch.randn(7, 3, generator=generator())
    columns = torch.empty(3, 7).T.copy_(values)
    rows = round_stochastically(values, generator())
    assert torch.equal(round_stochastically(columns, generator()), rows)
    assert round_stochastically(values[:0], generator()).shape == (0, 3)


def test_the_numbers_of_a_step_are_a_function_of_its_position(monkeypatch):
    """The same for weights that all processes have whole, other ones for the rows of each process."""
    values = torch.full((1000,), 0.02 + 1e-5)

    def store(rank: int, *position: int, is_sharded: bool = False) -> torch.Tensor:
        monkeypatch.setattr(rounding, "rank_and_world", lambda: (rank, 2))
        monkeypatch.setattr(rounding, "is_sharded", lambda tensor: is_sharded)
        stochastic = StochasticRounding()
        stochastic.start_step(*position)
        weight = torch.zeros(1000, dtype=torch.bfloat16)
        stochastic.store(weight, values)
        return weight

    assert torch.equal(store(0, 1, 2), store(1, 1, 2))
    assert not torch.equal(store(0, 1, 2), store(0, 1, 3))
    assert not torch.equal(store(0, 1, 2, is_sharded=True), store(1, 1, 2, is_sharded=True))


def test_values_at_another_place_of_one_storage_are_stored():
    storage = torch.tensor([1.0, 2.0, 3.0, 4.0])
    TO_NEAREST.store(storage[:2], storage[2:])
    assert storage.tolist() == [3.0, 4.0, 3.0, 4.0]
