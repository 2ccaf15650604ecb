"""Averages of weights over steps and domains: EMA, WiSE-FT and Reptile."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import EMAOptions, ReptileOptions, WiSEFTOptions
from cpt.models.weights import Snapshot

log = logging.getLogger(__name__)


class EMA(ContinualMethod):
    """An exponential moving average of the weights (Polyak and Juditsky, 1992; Tarvainen and Valpola, NeurIPS
    2017, eq. 1).

        theta_ema <- alpha theta_ema + (1 - alpha) theta    after every optimizer step of a domain

    It starts at the model before each domain and replaces the model at the domain's end."""

    options: EMAOptions

    def __init__(self, options: EMAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.average = Snapshot(self.model, persistent=True)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.average.take(self.model)

    def after_update(self) -> None:
        self.average.take(self.model, share=1 - self.options.decay)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        self.average.restore(self.model)


class WiSEFT(ContinualMethod):
    """Weight-space ensembles (Wortsman et al., CVPR 2022, eq. 1) from domain to domain.

        theta_t <- (1 - p) theta_t + p theta_{t-1}    at the end of each domain

    The paper does so once, with the zero-shot model as theta_{t-1} and alpha = 1 - p, by default 0.5."""

    options: WiSEFTOptions

    def __init__(self, options: WiSEFTOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.previous = Snapshot(self.model, persistent=True)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.previous.take(self.model)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        self.previous.restore(self.model, share=self.options.previous)


class Reptile(ContinualMethod):
    """REPTILE (Nichol, Achiam and Schulman, 2018, algorithm 1), used against interference in meta-experience
    replay (Riemer et al., ICLR 2019, section 3) and in continual pre-training (Abbes et al., 2025):

        theta <- theta_a + epsilon (theta - theta_a),   theta_a <- theta      after every k optimizer steps

    and at a domain's end, over the remaining steps. The optimizer keeps its moments."""

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
            told = "Interpolating once: method.every=%d is more than the %d steps of %s"
            log.info(told, self.interval, steps, self.domain.name)
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
