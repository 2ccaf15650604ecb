"""REPTILE (Nichol, Achiam and Schulman, 2018, algorithm 1), as it is used against interference in
meta-experience replay (Riemer et al., ICLR 2019, section 3) and in continual pre-training (Abbes et al.,
2025):

    theta <- theta_a + epsilon (theta - theta_a),   theta_a <- theta      after every k optimizer steps

and at a domain's end, of the steps that are left. The optimizer goes on with its moments."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cpt.core.options import Options, option
from cpt.core.rules import number, whole
from cpt.data.batch import Batch
from cpt.methods.base import ContinualModule, Shared
from cpt.models.snapshots import Snapshot


@dataclass(frozen=True, kw_only=True)
class ReptileOptions(Options):
    """Options of Reptile."""

    every: int = option("k, optimizer steps between two interpolations", whole(1))
    share: float = option("epsilon, of the way since the last one; 1: plain ncl", number("0 to 1"))


class Reptile(ContinualModule):
    """Goes a share of the way that so many steps have gone."""

    options: ReptileOptions

    def __init__(self, options: ReptileOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.anchor = Snapshot(self.model, persistent=True)
        self.register_buffer("gone", torch.zeros((), dtype=torch.int64))  # since the anchor

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.anchor.take(self.model)
        self.gone.zero_()

    def after_update(self) -> None:
        self.gone += 1
        if self.gone == self.options.every:
            self.interpolate()

    def after_domain(self, probe: Iterable[Batch]) -> None:
        if self.gone:
            self.interpolate()

    def interpolate(self) -> None:
        """Leaves of the way since the anchor its share, and begins at the end of it."""
        self.anchor.restore(self.model, share=1 - self.options.share)
        self.anchor.take(self.model)
        self.gone.zero_()
