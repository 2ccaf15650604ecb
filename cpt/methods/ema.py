"""EMA: an exponential moving average of the weights over each domain (Polyak and Juditsky, 1992; Tarvainen
and Valpola, NeurIPS 2017, eq. 1).

    theta_ema <- alpha theta_ema + (1 - alpha) theta    after every optimizer step of a domain

The average starts at the model before each domain and replaces the model at the domain's end."""

from collections.abc import Iterable

from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import EMAOptions
from cpt.models.weights import Snapshot


class EMA(ContinualMethod):
    """Averages the weights over a domain's steps."""

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
