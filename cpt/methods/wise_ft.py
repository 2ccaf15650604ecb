"""WISE_FT, weight-space ensembles (Wortsman et al., CVPR 2022, eq. 1) from domain to domain.

    theta_t <- (1 - p) theta_t + p theta_{t-1}    at the end of each domain

The paper does so once, with the zero-shot model as theta_{t-1} and alpha = 1 - p, by default 0.5."""

from collections.abc import Iterable

from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import WiSEFTOptions
from cpt.models.weights import Snapshot


class WiSEFT(ContinualMethod):
    """Mixes the weights before a domain with those after it."""

    options: WiSEFTOptions

    def __init__(self, options: WiSEFTOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.previous = Snapshot(self.model, persistent=True)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.previous.take(self.model)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        self.previous.restore(self.model, share=self.options.previous)
