"""How the results of steps become weights: to nearest, or in bfloat16 stochastically, so that updates smaller
than the distance between two numbers are not lost.

Stochastic rounding takes one of the two neighbours of x in bfloat16, each with a probability in proportion to
how near x is to it, so that the expected result is x itself:

    P(up) = (x - down) / (up - down)"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cpt.core.distributed import is_sharded, to_local
from cpt.core.processes import rank_and_world
from cpt.core.randomness import torch_seed

SAMPLE_SIZE = 4096  # entries of a tensor
LOWER_BITS = 16  # of float32, which bfloat16 lacks


class Rounding:
    """Rounds to nearest, as torch does."""

    def start_step(self, *position: int | str) -> None:
        """Called before each optimizer step with what its random numbers are a function of."""

    def widen(self, values: Tensor) -> Tensor:
        """The values in the type in which steps are computed; themselves, if they have it."""
        return values

    @torch.no_grad()
    def store(self, parameter: Tensor, values: Tensor) -> None:
        """Overwrites a parameter, or its local rows, with values of its shape."""
        rows = to_local(parameter)
        new_rows = to_local(values)
        # Views of one storage may lie at different places of it.
        has_same_storage = new_rows.untyped_storage()._cdata == rows.untyped_storage()._cdata
        is_in_place = has_same_storage and new_rows.storage_offset() == rows.storage_offset()
        if not is_in_place:
            rows.copy_(new_rows)


TO_NEAREST = Rounding()


class StochasticRounding(Rounding):
    """Computes steps on weights in bfloat16 in 32 bits, and rounds what they result in stochastically.
    Weights of other types are left as they are.

    The random numbers are a function of the position of a step and of the order of the parameters. They are
    the same in all processes for whole parameters, and differ for the local rows of sharded ones."""

    def __init__(self) -> None:
        self.position: tuple[int | str, ...] = ()
        self.generators: dict[tuple[torch.device, bool], torch.Generator] = {}  # of the current step

    def start_step(self, *position: int | str) -> None:
        self.position = position
        self.generators.clear()

    def widen(self, values: Tensor) -> Tensor:
        return values.float() if values.dtype == torch.bfloat16 else values

    @torch.no_grad()
    def store(self, parameter: Tensor, values: Tensor) -> None:
        if parameter.dtype != torch.bfloat16:
            super().store(parameter, values)
            return
        generator = self.find_generator(to_local(parameter).device, is_sharded=is_sharded(parameter))
        to_local(parameter).copy_(round_stochastically(to_local(values), generator))

    def find_generator(self, device: torch.device, *, is_sharded: bool) -> torch.Generator:
        """The generator of the current step for whole parameters, or for the local rows of sharded ones."""
        if (device, is_sharded) not in self.generators:
            rank, _ = rank_and_world()
            owner = rank if is_sharded else "all"
            seed = torch_seed("rounding", *self.position, owner)
            self.generators[device, is_sharded] = torch.Generator(device).manual_seed(seed)
        return self.generators[device, is_sharded]


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Values in float32 as bfloat16, each of them one of its two neighbours there; numbers that bfloat16 has,
    infinities and NaN stay what they are."""
    # The bits of a float32 count its magnitude, and bfloat16 has the upper half of them. A random number of
    # the size of the lower half carries into the upper one with just the probability that is asked for.
    bits = draw_16_bits(values, generator)
    bits.add_(values.view(torch.int32)).bitwise_and_(-(1 << LOWER_BITS))
    rounded = bits.view(torch.float32).bfloat16()

    # All bits of a GPU's NaN are 1, so that the sum would be a number.
    return torch.where(values.isnan(), values.bfloat16(), rounded)


def draw_16_bits(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random integers from 0 to 65,535, int32, with the shape, the strides and the device of a tensor."""
    # Four of them share the 64 bits of a drawn number: fewer draws take less time.
    num_draws = math.ceil(like.numel() / 4)
    draws = torch.empty(num_draws, dtype=torch.int64, device=like.device)
    draws.random_(-(2**63), None, generator=generator)
    numbers = draws.view(torch.int16)[: like.numel()].view(like.shape)
    integers = torch.empty_like(like, dtype=torch.int32).copy_(numbers)
    return integers.add_(1 << (LOWER_BITS - 1))  # they begin at -32,768


@torch.no_grad()
def compute_lost_update_share(parameters: Iterable[nn.Parameter], *, rate: float) -> float:
    """The share of weights, 0 to 1, that a step of size `rate` does not change in bfloat16: it is less than
    half the distance to the next number of 8 significant bits.

    A step of Adam is about as large as the learning rate. The share is estimated from evenly spaced entries
    of every tensor, and is therefore the same for the same weights."""
    num_lost = 0.0  # an estimate, not a count
    num_weights = 0
    for parameter in parameters:
        entries = parameter.detach().flatten()
        stride = max(1, len(entries) // SAMPLE_SIZE)
        sample = entries[::stride].to(torch.bfloat16)
        is_lost = (sample - rate) == sample

        # The sample stands for the whole tensor.
        num_lost += float(is_lost.double().sum() / max(1, len(sample))) * len(entries)
        num_weights += len(entries)
    return num_lost / max(1, num_weights)
