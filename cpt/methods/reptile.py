"""REPTILE (Nichol, Achiam and Schulman, 2018, algorithm 1), used against interference in meta-experience
replay (Riemer et al., ICLR 2019, section 3) and in continual pre-training (Abbes et al., 2025):

    theta <- theta_a + epsilon (theta - theta_a),   theta_a <- theta      after every k optimizer steps

and at a domain's end, over the remaining steps. The optimizer keeps its moments. k is a share of the domain's
steps, or a number of steps as in the papers, whose runs have many thousands."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import ReptileOptions
from cpt.models.weights import Snapshot

log = logging.getLogger(__name__)


class Reptile(ContinualMethod):
    """Interpolates between the weights before and after every k steps."""

    depends_on_total_steps = True
    options: ReptileOptions
    gone: Tensor

    def __init__(self, options: ReptileOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.anchor = Snapshot(self.model, persistent=True)
        self.register_buffer("gone", torch.zeros((), dtype=torch.int64))  # steps since the anchor

    @property
    def interval(self) -> int:
        """k, in steps."""
        every = self.options.every
        return int(every) if every >= 1 else max(1, round(every * self.trainer.max_steps))

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.interval > (steps := self.trainer.max_steps):
            log.info(
                "method.every=%d is more than the %d steps of %s: one interpolation, at its end",
                *(self.interval, steps, self.domain.name),
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
        self.anchor.restore(self.model, share=1 - self.options.share)
        self.anchor.take(self.model)
        self.gone.zero_()
