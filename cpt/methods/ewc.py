"""EWC, elastic weight consolidation (Kirkpatrick et al., PNAS 2017, eq. 3), and online EWC (Schwarz et al.,
ICML 2018).

    L(theta) = L_lm(theta) + lambda/2 sum_i F_i (theta_i - theta*_i)^2
    F_i      = E_x [ (dL_lm(x)/dtheta_i)^2 ]    at theta*, the model at the end of the previous domain

After each domain its Fisher F_new is merged into that of the t domains before it; the penalty stays one
term:

    mean:  F <- (t F + F_new) / (t + 1)         decay:  F <- gamma F + F_new

The released code (ContinualLM) squares the gradient of a loss that includes the penalty, with dropout. Here
it is that of the language-model loss, in eval mode and in 32 bits."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from cpt.core.schema import Options
from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.gradient_masks.base import Protection
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import ConsolidationOptions, EWCOptions
from cpt.models.fisher import fisher, keep_important
from cpt.models.weights import Snapshot, quadratic_penalty


class AnchorPenalty(ContinualMethod):
    """A method that pulls the weights to `anchor`, those of the base or of the end of the last domain; the
    most important twentieth of each parameter counts as protected."""

    @property
    def importances(self) -> NamedTensors | None:
        """The weights of the penalty; None: all are 1."""
        return None

    def __init__(self, options: Options, context: MethodContext, *, anchor_moves: bool = True) -> None:
        super().__init__(options, context)
        self.anchor = Snapshot(self.model, persistent=anchor_moves)

    def zeros(self) -> dict[str, Tensor]:
        """A zero tensor for each parameter, by name."""
        return {name: torch.zeros_like(each) for name, each in self.model.named_parameters()}

    def weighted_distance(self, factor: float) -> Tensor:
        """factor/2 sum_i w_i (theta_i - theta*_i)^2 over the trained parameters, a scalar; w are the
        importances, or 1."""
        weights = None if self.importances is None else self.importances.named()
        away = self.anchor.offloaded
        return factor * quadratic_penalty(self.model, self.anchor.named(), weights, elsewhere=away)

    def protected_subspace(self) -> dict[nn.Parameter, Protection]:
        if self.importances is None:
            return super().protected_subspace()
        return keep_important(self.model, self.importances.named()) | super().protected_subspace()


class Consolidation(AnchorPenalty):
    """An anchor penalty whose importances are measured after each domain and merged with those before."""

    needs_32_bits = True  # the importances do
    options: ConsolidationOptions
    domains: Tensor

    def __init__(self, options: ConsolidationOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.register_buffer("domains", torch.zeros((), dtype=torch.int64))

    @abstractmethod
    def measure(self, probe: Iterable[Batch]) -> dict[str, Tensor]:
        """The importances of a domain by parameter name, in 32 bits."""

    def after_domain(self, probe: Iterable[Batch]) -> None:
        with torch.autocast(self.device.type, enabled=False):
            found = self.measure(probe)
        merge, gamma = self.options.merge, self.options.gamma
        kept = cast(NamedTensors, self.importances)
        known = kept.named()
        for name, new in found.items():
            old = kept.at_hand(known[name]) if name in known else torch.zeros_like(new)
            kept.update({name: merge_importances(old, new, domains=self.domains, merge=merge, gamma=gamma)})
        self.domains += 1
        self.anchor.take(self.model)


def merge_importances(old: Tensor, new: Tensor, *, domains: Tensor, merge: str, gamma: float) -> Tensor:
    """The importances of a number of domains merged with those of one more."""
    return (domains * old + new) / (domains + 1) if merge == "mean" else gamma * old + new


class EWC(Consolidation):
    """Pulls each weight to its value after the previous domain, by its Fisher."""

    options: EWCOptions

    def __init__(self, options: EWCOptions, context: MethodContext) -> None:
        super().__init__(options, context)
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
