"""HAT's gradient mask: what the gates of earlier domains opened is protected (Serra et al., ICML 2018)."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from cpt.gradient_masks.base import GradientMask
from cpt.models.units import Units, factors


class ClaimedUnits(GradientMask):
    """Blocks updates to what the units claimed by earlier domains compute: the factor of a step is 1 - a for
    the weights of one unit with gate a in [0, 1], and 1 - min(a_i, a_j) between two units (eq. 2)."""

    static = True
    taken: Tensor

    def __init__(self, groups: Sequence[Units], *, apply_to: str) -> None:
        super().__init__(apply_to=apply_to)
        self.groups, self.sizes = tuple(groups), [group.count for group in groups]
        self.register_buffer("taken", torch.zeros(sum(self.sizes)))
        self.known: list[tuple[nn.Parameter, Tensor]] | None = None

    def update_max(self, gates: Tensor) -> None:
        """Claims the units of one more domain by its gates [units]."""
        self.taken.copy_(torch.maximum(self.taken, gates.to(self.taken)))
        self.known = None

    def activate(self, domain: int) -> None:
        self.known = None

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if self.known is None:
            found: dict[nn.Parameter, Tensor] = {}
            if self.taken.any():
                for group, taken in zip(self.groups, self.taken.split(self.sizes), strict=True):
                    for parameter, factor in factors(group, 1 - taken):  # the larger one between two units
                        other = found.get(parameter)
                        found[parameter] = factor if other is None else torch.maximum(other, factor)
            self.known = list(found.items())
        return iter(self.known)

    def diagnostics(self) -> dict[str, Tensor]:
        parts = self.taken.split(self.sizes)
        return {f"taken/{group.name}": part for group, part in zip(self.groups, parts, strict=True)}
