"""L2: EWC with every weight equally important, its reference (Kirkpatrick et al., PNAS 2017, fig. 2); towards
the base it is L2-SP (Li et al., ICML 2018, eq. 2).

    L(theta) = L_lm(theta) + lambda/2 ||theta - theta*||^2

theta* is the model at the end of the previous domain, or the base."""

from collections.abc import Iterable

from torch import Tensor

from cpt.data.collate import Batch
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import L2Options
from cpt.models.weights import Snapshot, quadratic_penalty

TOWARDS = ("previous", "base")


class L2(ContinualModule):
    """Pulls all weights back to where they were."""

    options: L2Options

    def __init__(self, options: L2Options, shared: Shared) -> None:
        super().__init__(options, shared)
        self.moves = options.towards == "previous"
        self.anchor = Snapshot(self.model, persistent=self.moves)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.moves:
            self.anchor.take(self.model)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return super().losses(batch) | {"l2": self.penalty()}

    def penalty(self) -> Tensor:
        """lambda/2 ||theta - theta*||^2 over the trained parameters."""
        return self.options.strength * quadratic_penalty(
            self.model, self.anchor.named(), elsewhere=self.anchor.offloaded
        )
