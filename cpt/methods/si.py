"""SI, synaptic intelligence (Zenke, Poole and Ganguli, ICML 2017, eq. 3 to 5): EWC's penalty with
importances that are gathered on the way.

    L(theta) = L_lm(theta) + c sum_i Omega_i (theta_i - theta*_i)^2
    omega_i  = - sum over steps of g_i (theta_i' - theta_i)      g the gradient of L_lm alone
    Omega_i <- max(0, Omega_i + omega_i / ((theta_i - theta*_i)^2 + xi))    at a domain's end; omega <- 0

theta' - theta is the step really made, with clipping, decay and masks; g is that of all processes and
parts, before masks and clipping. The maximum is of the authors' code, not of the paper: without it a weight
that has moved against its gradient would be pushed away from theta*."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cpt.core.sharding import local
from cpt.core.tensors import NamedTensors, PreciseTensors
from cpt.data.collate import Batch
from cpt.gradient_masks.base import Protection
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import SIOptions
from cpt.models.fisher import keep_important
from cpt.models.fsdp import named_weights
from cpt.models.weights import Snapshot, quadratic_penalty


class SI(ContinualModule):
    """Pulls each weight back to where the previous domain left it, by what its way has brought."""

    options: SIOptions

    def __init__(self, options: SIOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        zeros = {name: torch.zeros_like(each) for name, each in self.model.named_parameters()}
        self.anchor = Snapshot(self.model, persistent=True)
        self.importance, self.brought = NamedTensors(zeros), PreciseTensors(zeros)
        self.before: dict[str, tuple[Tensor, Tensor]] = {}  # of a step: the gradient, and where it began

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.anchor.take(self.model)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return super().losses(batch) | {"si": self.penalty()}

    def protects(self) -> dict[nn.Parameter, Protection]:
        return keep_important(self.model, self.importance.named()) | super().protects()

    def penalty(self) -> Tensor:
        """c sum_i Omega_i (theta_i - theta*_i)^2 over the trained parameters."""
        strength = 2 * self.options.strength
        kept = self.anchor.named(), self.importance.named()
        return strength * quadratic_penalty(self.model, *kept, elsewhere=self.anchor.offloaded)

    @torch.no_grad()
    def see_gradients(self) -> None:
        anchors, importances = self.anchor.named(), self.importance.named()
        for name, parameter in named_weights(self.model).items():
            if parameter.grad is not None:
                own, at_hand = local(parameter), self.anchor.at_hand
                apart = own - at_hand(local(anchors[name]))
                penalty = 2 * self.options.strength * at_hand(local(importances[name])) * apart
                self.before[name] = (local(parameter.grad) - penalty, own.clone())

    @torch.no_grad()
    def after_update(self) -> None:
        brought = self.brought.named()
        for name, parameter in named_weights(self.model).items():
            if name in self.before:
                gradient, start = self.before[name]
                kept = local(brought[name])
                kept.sub_((gradient * (local(parameter) - start)).to(kept.device))
        self.before.clear()

    @torch.no_grad()
    def after_domain(self, probe: Iterable[Batch]) -> None:
        anchors, importances = self.anchor.named(), self.importance.named()
        present = named_weights(self.model)
        for name, brought in self.brought.named().items():
            way = local(present[name]).to(brought.device) - local(anchors[name])
            accumulate(local(importances[name]), local(brought), way, damping=self.options.damping)
            local(brought).zero_()
        self.anchor.take(self.model)


def accumulate(importance: Tensor, brought: Tensor, way: Tensor, *, damping: float) -> None:
    """Omega <- max(0, Omega + omega / (way^2 + xi)), in place."""
    importance.add_(brought / (way.square() + damping)).clamp_min_(0)
