"""EWC, elastic weight consolidation (Kirkpatrick et al., PNAS 2017, eq. 3), and online EWC (Schwarz et al.,
ICML 2018).

    L(theta) = L_lm(theta) + lambda/2 sum_i F_i (theta_i - theta*_i)^2
    F_i      = E_x [ (dL_lm(x)/dtheta_i)^2 ]    at theta*, the model at the end of the previous domain

After each domain its Fisher F_new is merged into that of the t domains before it; the penalty stays one
term:

    mean:  F <- (t F + F_new) / (t + 1)         decay:  F <- gamma F + F_new

The released code (ContinualLM) squares the gradient of a loss that includes the penalty, with dropout. Here
it is that of the language-model loss, in eval mode and in 32 bits."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from cpt.core.options import option
from cpt.core.rules import number
from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.methods.base import Shared
from cpt.methods.common.consolidation import Consolidation
from cpt.methods.common.options import ConsolidationOptions
from cpt.models.fisher import fisher


@dataclass(frozen=True, kw_only=True)
class EWCOptions(ConsolidationOptions):
    """Options of EWC."""

    strength: float = option("lambda, the penalty's weight", number("0 or more"))


class EWC(Consolidation):
    """Pulls each weight to its value after the previous domain, by its Fisher."""

    options: EWCOptions

    def __init__(self, options: EWCOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.fisher = NamedTensors(self.zeros())

    @property
    def importances(self) -> NamedTensors:
        return self.fisher

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return super().losses(batch) | {"ewc": self.penalty()}

    def penalty(self) -> Tensor:
        """lambda/2 sum_i F_i (theta_i - theta*_i)^2."""
        return self.weighted_distance(self.options.strength)

    def measure(self, probe: Iterable[Batch]) -> dict[str, Tensor]:
        return fisher(self.model, probe, objective=self.objective, estimator=self.options.estimator)
