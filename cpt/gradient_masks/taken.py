"""The protection of what the gates of earlier domains have opened (HAT; Serra et al., ICML 2018, eq. 2)."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from cpt.gradient_masks.base import GradientMask
from cpt.models.units import Units, factors


class Taken(GradientMask):
    """Lets nothing change what the units that are taken compute, if all else that they read is kept: a step's
    factor is 1 - a for weights of one unit with a of [0, 1], and 1 - min(a_i, a_j) between two (eq. 2). At
    first nothing is taken."""

    lasting = True

    def __init__(self, groups: Sequence[Units], *, acts_on: str) -> None:
        super().__init__(acts_on=acts_on)
        self.groups, self.sizes = tuple(groups), [group.count for group in groups]
        self.register_buffer("taken", torch.zeros(sum(self.sizes)))
        self.known: list[tuple[nn.Parameter, Tensor]] | None = None

    def raise_to(self, gates: Tensor) -> None:
        """Takes the units of a domain as well, by its gates [units]."""
        self.taken.copy_(torch.maximum(self.taken, gates.to(self.taken)))
        self.known = None

    def activate(self, domain: int) -> None:
        self.known = None

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if self.known is None:
            self.known = list(self.between().items()) if self.taken.any() else []
        return iter(self.known)

    def between(self) -> dict[nn.Parameter, Tensor]:
        """The factors: where two groups own a parameter, the larger of theirs."""
        found: dict[nn.Parameter, Tensor] = {}
        for group, taken in zip(self.groups, self.taken.split(self.sizes), strict=True):
            for parameter, factor in factors(group, 1 - taken):
                found[parameter] = torch.maximum(found[parameter], factor) if parameter in found else factor
        return found

    def diagnostics(self) -> dict[str, Tensor]:
        parts = self.taken.split(self.sizes)
        return {f"taken/{group.name}": part for group, part in zip(self.groups, parts, strict=True)}
