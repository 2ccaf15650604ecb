"""MoFO, momentum-filtered optimizer (Chen et al., 2024, arXiv 2407.20999), over any optimizer with momentum.

    theta_i <- theta_i + step_i   for the ceil(alpha n) entries of a tensor with the largest |m_i|

m is the momentum of the step; both moments advance for all entries. As in the released code, norms and biases
are not filtered, and decoupled weight decay reaches all entries; `form=whole` filters every tensor and its
decay."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.core.distributed import full_tensor, to_local
from cpt.gradient_masks.base import Constraint, Step
from cpt.gradient_masks.options import MomentumFilterOptions
from cpt.models.units import Projection
from cpt.models.weights import find_trainable

MOMENTA = ("exp_avg", "momentum_buffer")  # what optimizers of torch call it


def find_least(momentum: Tensor, share: float) -> Tensor:
    """The least |m| of the ceil(share n) largest of n entries, a scalar."""
    values = momentum.detach().abs().flatten()
    count = ceil(Fraction(str(share)) * len(values))
    place = len(values) - count
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        found = values.numpy()  # a copy, as abs gives one: it is put in order where it lies
        found.partition(place)  # the same number as kthvalue, in a tenth of its time
        return values[place]
    return values.kthvalue(place + 1).values


class MomentumFilter(Constraint):
    """Moves only the entries of each tensor with the most momentum."""

    def __init__(self, options: MomentumFilterOptions) -> None:
        super().__init__(apply_to="update")
        self.share, self.released = options.share, options.form == "released"
        self.watched: list[nn.Module] = []  # in a list: it is no part of the mask

    def watch(self, model: PreTrainedModel, maps: Sequence[Projection] | None) -> None:
        self.watched = [model]

    def covered(self) -> Iterable[nn.Parameter]:
        # Looked up at each step: where weights are shared out they are other parameters than at first.
        if self.share == 1:
            return
        for model in self.watched:
            kinds = ("norms", "biases") if self.released else ()
            left = {parameter for kind in kinds for parameter in find_trainable(model, kind)}
            yield from (parameter for parameter in model.parameters() if parameter not in left)

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        # The share of a weight that decoupled decay takes in a step; other decay is in the gradient.
        decoupled = [each for each in optimizer.param_groups if each.get("decoupled_weight_decay")]
        decays = {p: group["lr"] * group["weight_decay"] for group in decoupled for p in group["params"]}
        for parameter, step in steps:
            state = optimizer.state[parameter]
            momentum = next((state[name] for name in MOMENTA if isinstance(state.get(name), Tensor)), None)
            if momentum is None:
                told = f"optim={type(optimizer).__name__} is invalid with mask=mofo: it has no momentum"
                raise ValueError(f"{told}. Allowed: adamw, or another with one")
            least = find_least(full_tensor(momentum), self.share)
            size, own = to_local(momentum).abs(), to_local(step)
            kept = torch.ge(size, least, out=size)  # as numbers: a mask of bits is slower here
            if self.released and (share := decays.get(parameter)):
                decay = (to_local(parameter) - own).mul_(-share)
                own.copy_(decay.lerp_(own, kept.to(own)))
            else:
                own.mul_(kept)
