"""DAS, continual DAP-training of language models with soft-masking (Ke et al., ICLR 2023).

The importance of each unit for what the model knows protects it (eq. 5), and a contrast keeps what is new
apart from what was known (eq. 6):

    I_lu     = 1/N sum_n |dL(x_n)/dg_lu|           L: KL of two dropout passes before the first domain, then
    I^(<=t)  = max(I^(t), I^(<=t-1))               after each domain its language-model loss (eq. 2-4)
    step_l  <- (1 - I_l^(<=t-1)) * step_l
    L        = L_lm + lambda L_con

The soft mask scales the step itself: Adam divides the scale of gradients, as released, out again. Formulas:
cpt.gradient_masks.soft, cpt.methods.common.contrast."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from cpt.core.options import option
from cpt.core.rules import YES_NO
from cpt.data.collate import Batch
from cpt.gradient_masks.options import SoftMaskOptions
from cpt.gradient_masks.soft import domain_losses
from cpt.methods.base import Shared
from cpt.methods.common.contrast import ContrastMethod
from cpt.methods.common.options import ContrastOptions


@dataclass(frozen=True, kw_only=True)
class DASOptions(SoftMaskOptions, ContrastOptions):
    """Options of DAS."""

    domains: bool = option("importance of each domain learned, by its language-model loss", YES_NO)


class DAS(ContrastMethod):
    """Protects the units that matter to general knowledge and to the domains so far."""

    options: DASOptions

    def __init__(self, options: DASOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.first = True

    def activate(self, domain: int) -> None:
        super().activate(domain)
        self.first = domain == 0

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.first:
            self.soft.update_max(self.proxy.measure(self.soft, probe))

    def after_domain(self, probe: Iterable[Batch]) -> None:
        if self.options.domains:
            losses = partial(domain_losses, objective=self.objective)
            self.soft.update_max(self.soft.measure(self.model, probe, losses))
