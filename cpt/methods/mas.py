"""MAS, memory aware synapses (Aljundi et al., ECCV 2018, eq. 2 to 4): EWC's penalty with importances that
need no label.

    L(theta)  = L_lm(theta) + lambda sum_i Omega_i (theta_i - theta*_i)^2
    Omega_i   = E_x | d mean_k ||f(x)_k||^2 / d theta_i |      at theta*, in eval mode

f(x)_k are the logits, or the last hidden states, at the k-th scored place of a sample. The mean over its
places keeps a sample's length out of Omega. As in EWC, Omega is joined to that of the domains before
(`merge`); the paper's sum is decay at gamma 1."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.gradient_masks.base import Protection
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.common.consolidation import join
from cpt.methods.options import MASOptions
from cpt.models.fisher import keep_important, sensitivity
from cpt.models.forward import at
from cpt.models.weights import Snapshot, quadratic_penalty

OUTPUTS = ("logits", "hidden")


class MAS(ContinualModule):
    """Pulls each weight back to where the previous domain left it, by how much the outputs depend on it."""

    needs_32_bits = True  # its importances do
    options: MASOptions

    def __init__(self, options: MASOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.anchor = Snapshot(self.model, persistent=True)
        self.importance = NamedTensors({n: torch.zeros_like(p) for n, p in self.model.named_parameters()})
        self.register_buffer("domains", torch.zeros((), dtype=torch.int64))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        kept = self.anchor.named(), self.importance.named()
        half = quadratic_penalty(self.model, *kept, elsewhere=self.anchor.offloaded)
        return super().losses(batch) | {"mas": 2 * self.options.strength * half}

    def protects(self) -> dict[nn.Parameter, Protection]:
        return keep_important(self.model, self.importance.named()) | super().protects()

    def after_domain(self, probe: Iterable[Batch]) -> None:
        with torch.autocast(self.device.type, enabled=False):
            found = self.measure(probe)
        join(self.importance, found, self.domains, self.options)
        self.domains += 1
        self.anchor.take(self.model)

    def measure(self, probe: Iterable[Batch]) -> dict[str, Tensor]:
        """Omega of a domain, by the names of the parameters."""
        how = {"estimator": self.options.estimator, "power": 1, "label": "MAS"}
        return sensitivity(self.model, probe, self.squared_norms, **how)

    def squared_norms(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """||f||^2 at each scored position, [K]."""
        logits, hidden = self.objective.outputs(model, batch)
        output = logits if self.options.output == "logits" else at(hidden, batch["positions"])
        return output.float().square().sum(-1)
