"""SI, synaptic intelligence (Zenke, Poole and Ganguli, ICML 2017, eq. 3 to 5): EWC's penalty with
importances accumulated along the training path.

    L(theta) = L_lm(theta) + c sum_i Omega_i (theta_i - theta*_i)^2
    omega_i  = - sum over steps of g_i (theta_i' - theta_i)      g the gradient of L_lm alone
    Omega_i <- max(0, Omega_i + omega_i / ((theta_i - theta*_i)^2 + xi))    at a domain's end; omega <- 0

theta' - theta is the step as made, with clipping, decay and masks; g is averaged over processes and
micro-batches, before masks and clipping. The maximum is from the authors' code."""

from collections.abc import Iterable

import torch
from torch import Tensor

from cpt.core.distributed import to_local
from cpt.core.tensors import NamedTensors, PreciseTensors
from cpt.data.collate import Batch
from cpt.methods.base import MethodContext
from cpt.methods.ewc import AnchorPenalty
from cpt.methods.options import SIOptions
from cpt.models.fsdp import named_weights


class SI(AnchorPenalty):
    """Pulls each weight to its value after the previous domain, by how much its path lowered the loss."""

    options: SIOptions

    def __init__(self, options: SIOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.importance, self.brought = NamedTensors(self.zeros()), PreciseTensors(self.zeros())
        self.before: dict[str, tuple[Tensor, Tensor]] = {}  # gradient and weight before the step, by name

    @property
    def importances(self) -> NamedTensors:
        return self.importance

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.anchor.take(self.model)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return super().losses(batch) | {"si": self.weighted_distance(2 * self.options.strength)}

    @torch.no_grad()
    def on_gradients_ready(self) -> None:
        anchors, importances = self.anchor.named(), self.importance.named()
        for name, parameter in named_weights(self.model).items():
            if parameter.grad is not None:
                own, at_hand = to_local(parameter), self.anchor.at_hand
                apart = own - at_hand(to_local(anchors[name]))
                penalty = 2 * self.options.strength * at_hand(to_local(importances[name])) * apart
                self.before[name] = (to_local(parameter.grad) - penalty, own.clone())

    @torch.no_grad()
    def after_update(self) -> None:
        brought = self.brought.named()
        for name, parameter in named_weights(self.model).items():
            if name in self.before:
                gradient, start = self.before[name]
                kept = to_local(brought[name])
                kept.sub_((gradient * (to_local(parameter) - start)).to(kept.device))
        self.before.clear()

    @torch.no_grad()
    def after_domain(self, probe: Iterable[Batch]) -> None:
        anchors, importances = self.anchor.named(), self.importance.named()
        present = named_weights(self.model)
        for name, brought in self.brought.named().items():
            way = to_local(present[name]).to(brought.device) - to_local(anchors[name])
            # Omega <- max(0, Omega + omega / (way^2 + xi))
            brought, squared = to_local(brought), way.square() + self.options.damping
            to_local(importances[name]).add_(brought / squared).clamp_min_(0)
            brought.zero_()
        self.anchor.take(self.model)
