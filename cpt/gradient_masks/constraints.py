"""Constraints on steps: the entries with the most momentum alone (MoFO), and no way into a subspace."""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import ceil
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.core.distributed import all_reduce_sum, full_tensor, is_sharded, select_local_rows, to_local
from cpt.core.exceptions import InvalidOptionError
from cpt.core.tensors import NamedTensors
from cpt.gradient_masks.base import Constraint, Protection, Step
from cpt.gradient_masks.options import MomentumFilterOptions
from cpt.models.units import Projection
from cpt.models.weights import find_trainable

MOMENTA = ("exp_avg", "momentum_buffer")  # what optimizers of torch call it


def find_momentum_threshold(momentum: Tensor, share: float) -> Tensor:
    """The least |m| of the ceil(share n) largest of n entries, a scalar."""
    values = momentum.detach().abs().flatten()
    count = ceil(Fraction(str(share)) * len(values))
    index = len(values) - count
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        # The same number as kthvalue, in a tenth of its time; in place, as abs has made a copy.
        values.numpy().partition(index)
        return values[index]
    return values.kthvalue(index + 1).values


class MomentumFilter(Constraint):
    """MoFO, momentum-filtered optimizer (Chen et al., 2024, arXiv 2407.20999), over any with momentum.

        theta_i <- theta_i + step_i   for the ceil(alpha n) entries of a tensor with the largest |m_i|

    m is the momentum of the step; both moments advance for all entries. As in the released code, norms and
    biases are not filtered, and decoupled weight decay reaches all entries; `form=whole` filters every tensor
    and its decay."""

    comes_first = True

    def __init__(self, options: MomentumFilterOptions) -> None:
        super().__init__(apply_to="update")
        self.share = options.share
        self.is_released = options.form == "released"
        self.watched: list[nn.Module] = []  # in a list: it is not part of the mask

    def watch(self, model: PreTrainedModel, projections: Sequence[Projection] | None) -> None:
        self.watched = [model]

    def covered(self) -> Iterable[nn.Parameter]:
        # Looked up at each step: where weights are shared out they are other parameters than at first.
        if self.share == 1:
            return
        for model in self.watched:
            unfiltered = set[nn.Parameter]()
            if self.is_released:
                unfiltered.update(find_trainable(model, "norms"), find_trainable(model, "biases"))
            for parameter in model.parameters():
                if parameter not in unfiltered:
                    yield parameter

    def masked_weights(self) -> Iterable[nn.Parameter]:
        return self.covered()

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        decays = self.find_decays(optimizer) if self.is_released else {}
        for parameter, step in steps:
            momentum = find_momentum(parameter, optimizer)
            threshold = find_momentum_threshold(full_tensor(momentum), self.share)
            magnitudes = to_local(momentum).abs()
            is_kept = torch.ge(magnitudes, threshold, out=magnitudes)  # as numbers: faster than bits here
            local_step = to_local(step)
            decay_rate = decays.get(parameter, 0.0)
            if decay_rate:  # entries that are not updated decay too
                decay = (to_local(parameter) - local_step).mul_(-decay_rate)
                local_step.copy_(decay.lerp_(local_step, is_kept.to(local_step)))
            else:
                local_step.mul_(is_kept)

    def find_decays(self, optimizer: Optimizer) -> dict[nn.Parameter, float]:
        """The share of each weight that decoupled decay takes in a step; other decay is in the gradient."""
        decays = {}
        for group in optimizer.param_groups:
            if group.get("decoupled_weight_decay"):
                decays.update(dict.fromkeys(group["params"], group["lr"] * group["weight_decay"]))
        return decays


def find_momentum(parameter: nn.Parameter, optimizer: Optimizer) -> Tensor:
    """The momentum of a parameter in an optimizer's state; raises ValueError for an optimizer without one."""
    state = optimizer.state[parameter]
    for name in MOMENTA:
        if isinstance(state.get(name), Tensor):
            return cast(Tensor, state[name])
    raise InvalidOptionError(
        "optim",
        type(optimizer).__name__,
        context="with mask=mofo",
        reason="it has no momentum",
        allowed="adamw, or another with one",
    )


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

    def set_layers(self, projections: Sequence[Projection]) -> None:
        self.projections = projections
        self.pairs = None

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The present weights by name: sharding replaces parameters."""
        return {projection.name: projection.weight for projection in self.projections}

    def masked_weights(self) -> Iterable[nn.Parameter]:
        return self.weights.values()

    @torch.no_grad()
    def protect_directions(self, ranks: Mapping[str, int]) -> None:
        """Protects the largest singular directions, a rank per layer, of the present weights."""
        self.bases.clear()
        for name, weight in self.weights.items():
            rank = ranks[name]
            if rank:
                u, _, v = torch.linalg.svd(full_tensor(weight.detach()).float(), full_matrices=False)
                self.bases.update({f"{name}.left": u[:, :rank].contiguous()})
                self.bases.update({f"{name}.right": v[:rank].T.contiguous()})
        self.pairs = None

    def activate(self, domain: int) -> None:
        self.pairs = None

    def covered(self) -> Iterable[nn.Parameter]:
        return self.find_bases()

    def find_bases(self) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        """U and V of each protected weight, looked up once per domain."""
        if self.pairs is None:
            self.pairs = {}
            bases = self.bases.named()
            for name, weight in self.weights.items():
                if f"{name}.left" in bases:
                    self.pairs[weight] = (bases[f"{name}.left"], bases[f"{name}.right"])
        return self.pairs

    def protected_subspace(self) -> dict[nn.Parameter, Protection]:
        protections: dict[nn.Parameter, Protection] = {}
        for weight, (left_basis, right_basis) in self.find_bases().items():
            protections[weight] = partial(self.project, left_basis=left_basis, right_basis=right_basis)
        return protections

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        for parameter, step in steps:
            left_basis, right_basis = self.find_bases()[parameter]
            to_local(step).sub_(self.project(step, left_basis=left_basis, right_basis=right_basis))

    def project(self, step: Tensor, *, left_basis: Tensor, right_basis: Tensor) -> Tensor:
        """The protected part of a step, of its local rows where it is sharded: `left_basis` is U [n, k],
        `right_basis` V [m, k]."""
        local_step = to_local(step)
        u = select_local_rows(left_basis, step).to(local_step)
        v = right_basis.to(local_step)

        # U^T step sums over rows, of which each process has some.
        coefficients = u.T @ local_step  # [k, m]
        if is_sharded(step):
            all_reduce_sum(coefficients)
        if self.protected == "block":
            return u @ (coefficients @ v) @ v.T
        across = (local_step @ v) @ v.T
        return u @ (coefficients - (coefficients @ v) @ v.T) + across
