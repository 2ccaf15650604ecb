"""MoFO, momentum-filtered optimizer (Chen et al., 2024, arXiv 2407.20999): over any optimizer with
momentum.

    theta_i <- theta_i + step_i   for the ceil(alpha n) entries of a tensor with the largest |m_i|

m is the momentum that the step was made with; it and the second moment go on for all entries. What has
little momentum stays where it was, so that a model moves least from where it started. Weight decay is part
of a step. With outputs of maps in place of momentum, and whole rows, it is MIGU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.core.options import Options, option
from cpt.core.rules import number
from cpt.core.sharding import local, whole
from cpt.masks.base import Constraint, Step
from cpt.models.units import Projection

MOMENTA = ("exp_avg", "momentum_buffer")  # what optimizers of torch call it


def find_least(momentum: Tensor, share: float) -> Tensor:
    """The least |m| of the ceil(share n) largest of n entries, a scalar."""
    values = momentum.detach().abs().flatten()
    count = ceil(Fraction(str(share)) * len(values))
    place = len(values) - count
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        found = values.numpy()  # a copy, as abs gives one: it is put in order where it lies
        found.partition(place)  # the same number as kthvalue's in a tenth of its time
        return values[place]
    return values.kthvalue(place + 1).values


def momentum_of(parameter: nn.Parameter, optimizer: Optimizer) -> Tensor:
    """A parameter's momentum after a step; raises ValueError for an optimizer without."""
    state = optimizer.state[parameter]
    for name in MOMENTA:
        if isinstance(state.get(name), Tensor):
            return state[name]
    raise ValueError(
        f"optim={type(optimizer).__name__} keeps no momentum to choose by; allowed with mask=mofo: adamw, or "
        "another with one, as sgd with optim.momentum"
    )


@dataclass(frozen=True, kw_only=True)
class MomentumFilterOptions(Options):
    """Options of MoFO."""

    share: float = option("alpha, the share of each tensor's entries that move", number("above 0, at most 1"))


class MomentumFilter(Constraint):
    """Lets of each tensor only those entries move that have the most momentum."""

    def __init__(self, options: MomentumFilterOptions) -> None:
        super().__init__(acts_on="update")
        self.share = options.share
        self.watched: list[nn.Module] = []  # in a list: it is no part of the mask

    def watch(self, model: PreTrainedModel, maps: Sequence[Projection] | None) -> None:
        self.watched = [model]

    def covered(self) -> Iterable[nn.Parameter]:
        # Asked for anew: where weights are shared out they are other parameters than at first.
        return [p for model in self.watched for p in model.parameters()] if self.share < 1 else ()

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        for parameter, step in steps:
            momentum = momentum_of(parameter, optimizer)
            least = find_least(whole(momentum), self.share)
            size = local(momentum).abs()
            local(step).mul_(torch.ge(size, least, out=size))  # as numbers: a mask of bits is slower here
