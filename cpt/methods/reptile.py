"""REPTILE (Nichol, Achiam and Schulman, 2018, algorithm 1), as it is used against interference in
meta-experience replay (Riemer et al., ICLR 2019, section 3) and in continual pre-training (Abbes et al.,
2025):

    theta <- theta_a + epsilon (theta - theta_a),   theta_a <- theta      after every k optimizer steps

and at a domain's end, of the steps that are left. The optimizer goes on with its moments. k is a share of the
domain's steps, or a number of steps; the papers give a number, for runs of many thousand steps."""

import logging
from collections.abc import Iterable

import torch

from cpt.data.collate import Batch
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import ReptileOptions
from cpt.models.weights import Snapshot

log = logging.getLogger(__name__)


class Reptile(ContinualModule):
    """Goes a share of the way that so many steps have gone."""

    counts_steps = True
    options: ReptileOptions

    def __init__(self, options: ReptileOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.anchor = Snapshot(self.model, persistent=True)
        self.register_buffer("gone", torch.zeros((), dtype=torch.int64))  # since the anchor

    @property
    def interval(self) -> int:
        """k, in steps."""
        every = self.options.every
        return int(every) if every >= 1 else max(1, round(every * self.trainer.max_steps))

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.interval > self.trainer.max_steps:
            log.info(
                "method.every=%d is more than the %d steps of %s: one interpolation, at its end",
                self.interval,
                self.trainer.max_steps,
                self.domain.name,
            )
        self.anchor.take(self.model)
        self.gone.zero_()

    def after_update(self) -> None:
        self.gone += 1
        if self.gone == self.interval:
            self.interpolate()

    def after_domain(self, probe: Iterable[Batch]) -> None:
        if self.gone:
            self.interpolate()

    def interpolate(self) -> None:
        """Leaves of the way since the anchor its share, and begins at the end of it."""
        self.anchor.restore(self.model, share=1 - self.options.share)
        self.anchor.take(self.model)
        self.gone.zero_()
