"""Constraints on steps: the entries with the most momentum alone (MoFO), and no way into a subspace."""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import ceil

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.core.distributed import all_reduce_sum, full_tensor, is_sharded, local_rows, to_local
from cpt.core.tensors import NamedTensors
from cpt.gradient_masks.base import Constraint, Protection, Step
from cpt.gradient_masks.options import MomentumFilterOptions
from cpt.models.units import Projection
from cpt.models.weights import find_trainable

MOMENTA = ("exp_avg", "momentum_buffer")  # what optimizers of torch call it


def find_threshold(momentum: Tensor, share: float) -> Tensor:
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
    """MoFO, momentum-filtered optimizer (Chen et al., 2024, arXiv 2407.20999), over any with momentum.

        theta_i <- theta_i + step_i   for the ceil(alpha n) entries of a tensor with the largest |m_i|

    m is the momentum of the step; both moments advance for all entries. As in the released code, norms and
    biases are not filtered, and decoupled weight decay reaches all entries; `form=whole` filters every tensor
    and its decay."""

    comes_first = True

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
            least = find_threshold(full_tensor(momentum), self.share)
            size, own = to_local(momentum).abs(), to_local(step)
            kept = torch.ge(size, least, out=size)  # as numbers: a mask of bits is slower here
            if self.released and (share := decays.get(parameter)):
                decay = (to_local(parameter) - own).mul_(-share)
                own.copy_(decay.lerp_(own, kept.to(own)))
            else:
                own.mul_(kept)


class Subspaces(Constraint):
    """Projects the step of a matrix W [n, m] out of the span of U [n, k] or V [m, k] (orthonormal columns):

    step <- (I - U U^T) step (I - V V^T)          both
    step <- step - U U^T step V V^T               block: only what lies in both"""

    def __init__(self, *, apply_to: str, protected: str) -> None:
        super().__init__(apply_to=apply_to)
        self.protected = protected
        self.bases = NamedTensors()  # by <name of the map>.left and .right
        self.projections: Sequence[Projection] = ()
        self.pairs: dict[nn.Parameter, tuple[Tensor, Tensor]] | None = None

    def over(self, maps: Sequence[Projection]) -> None:
        self.projections, self.pairs = maps, None

    @property
    def maps(self) -> dict[str, nn.Parameter]:
        """The present weights by name: sharding replaces parameters."""
        return {each.name: each.weight for each in self.projections}

    @torch.no_grad()
    def span(self, ranks: Mapping[str, int]) -> None:
        """Protects the largest singular directions, a rank per layer, of the present weights."""
        self.bases.clear()
        for name, weight in self.maps.items():
            if rank := ranks[name]:
                u, _, v = torch.linalg.svd(full_tensor(weight.detach()).float(), full_matrices=False)
                self.bases.update({f"{name}.left": u[:, :rank].contiguous()})
                self.bases.update({f"{name}.right": v[:rank].T.contiguous()})
        self.pairs = None

    def activate(self, domain: int) -> None:
        self.pairs = None

    def covered(self) -> Iterable[nn.Parameter]:
        return self.known()

    def known(self) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        if self.pairs is None:
            named = self.bases.named()
            self.pairs = {
                weight: (named[f"{name}.left"], named[f"{name}.right"])
                for name, weight in self.maps.items()
                if f"{name}.left" in named
            }
        return self.pairs

    def protected_subspace(self) -> dict[nn.Parameter, Protection]:
        known = self.known().items()
        return {weight: partial(self.inside, left=left, right=right) for weight, (left, right) in known}

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        for parameter, step in steps:
            left, right = self.known()[parameter]
            to_local(step).sub_(self.inside(step, left=left, right=right))

    def inside(self, step: Tensor, *, left: Tensor, right: Tensor) -> Tensor:
        """The protected part of a step, of its local rows where it is sharded."""
        own = to_local(step)
        rows, right = local_rows(left, step).to(own), right.to(own)
        within = rows.T @ own  # [k, m]
        if is_sharded(step):
            all_reduce_sum(within)
        if self.protected == "block":
            return rows @ (within @ right) @ right.T
        across = (own @ right) @ right.T
        return rows @ (within - (within @ right) @ right.T) + across
