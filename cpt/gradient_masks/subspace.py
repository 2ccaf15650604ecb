"""Protected subspaces of the weights of linear layers."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpt.core.distributed import all_reduce_sum, full_tensor, is_sharded, local_rows, to_local
from cpt.core.tensors import NamedTensors
from cpt.gradient_masks.base import Constraint, Protection, Step
from cpt.models.units import Projection


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
        """Sets the layers."""
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
        """U and V by protected parameter."""
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
