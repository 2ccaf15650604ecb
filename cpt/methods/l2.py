"""L2: EWC with every weight equally important, its reference (Kirkpatrick et al., PNAS 2017, fig. 2); towards
the base it is L2-SP (Li et al., ICML 2018, eq. 2).

    L(theta) = L_lm(theta) + lambda/2 ||theta - theta*||^2

theta* is the model at the end of the previous domain, or the base."""

from collections.abc import Iterable

from torch import Tensor

from cpt.data.collate import Batch
from cpt.methods.base import MethodContext
from cpt.methods.ewc import AnchorPenalty
from cpt.methods.options import L2Options


class L2(AnchorPenalty):
    """Pulls all weights to where they were."""

    options: L2Options

    def __init__(self, options: L2Options, context: MethodContext) -> None:
        super().__init__(options, context, anchor_moves=options.towards == "previous")

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.options.towards == "previous":
            self.anchor.take(self.model)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return super().losses(batch) | {"l2": self.weighted_distance(self.options.strength)}
