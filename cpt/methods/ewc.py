"""EWC, elastic weight consolidation (Kirkpatrick et al., PNAS 2017, eq. 3), and online EWC (Schwarz et al.,
ICML 2018).

    L(theta) = L_lm(theta) + lambda/2 sum_i F_i (theta_i - theta*_i)^2
    F_i      = E_x [ (dL_lm(x)/dtheta_i)^2 ]    at theta*, the model at the end of the previous domain

After each domain its Fisher F_new is merged into that of the t domains before it, so that there is one
penalty however many domains there are:

    mean:  F <- (t F + F_new) / (t + 1)         decay:  F <- gamma F + F_new

The released code (ContinualLM) squares a loss with its own penalty in it and with dropout on; here the
gradient is that of the language-model loss alone, in eval mode, and in 32 bits whatever the precision."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.gradient_masks.base import Protection
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.common.consolidation import join
from cpt.methods.options import EWCOptions
from cpt.models.fisher import fisher, keep_important
from cpt.models.weights import Snapshot, quadratic_penalty


class EWC(ContinualModule):
    """Pulls each weight back to where the previous domain left it, by its Fisher."""

    needs_32_bits = True  # its Fisher does
    options: EWCOptions

    def __init__(self, options: EWCOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.anchor = Snapshot(self.model, persistent=True)
        self.fisher = NamedTensors({n: torch.zeros_like(p) for n, p in self.model.named_parameters()})
        self.register_buffer("domains", torch.zeros((), dtype=torch.int64))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return super().losses(batch) | {"ewc": self.penalty()}

    def penalty(self) -> Tensor:
        """lambda/2 sum_i F_i (theta_i - theta*_i)^2 over the trained parameters."""
        kept = self.anchor.named(), self.fisher.named()
        return self.options.strength * quadratic_penalty(self.model, *kept, elsewhere=self.anchor.offloaded)

    def protects(self) -> dict[nn.Parameter, Protection]:
        return keep_important(self.model, self.fisher.named()) | super().protects()

    def after_domain(self, probe: Iterable[Batch]) -> None:
        with torch.autocast(self.device.type, enabled=False):
            found = fisher(self.model, probe, objective=self.objective, estimator=self.options.estimator)
        join(self.fisher, found, self.domains, self.options)
        self.domains += 1
        self.anchor.take(self.model)
