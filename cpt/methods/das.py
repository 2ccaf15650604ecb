"""DAS, continual DAP-training of language models with soft-masking (Ke et al., ICLR 2023).

The importance of each unit for what the model knows protects it (eq. 5), and a contrast keeps what is new
apart from what was known (eq. 6):

    I_lu     = 1/N sum_n |dL(x_n)/dg_lu|           L: KL of two dropout passes before the first domain, then
    I^(<=t)  = max(I^(t), I^(<=t-1))               after each domain its language-model loss (eq. 2-4)
    step_l  <- (1 - I_l^(<=t-1)) * step_l
    L        = L_lm + lambda L_con

The soft mask scales the step itself: scaled gradients, as in the released code, are divided out again by
Adam. cpt.gradient_masks.soft and cpt.methods.common.contrast hold the formulas."""

from collections.abc import Iterable
from functools import partial

from torch import Tensor

from cpt.data.collate import Batch
from cpt.gradient_masks.soft import Proxy, SoftMask, domain_losses
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.common.contrast import Contrast
from cpt.methods.options import DASOptions


class DAS(ContinualModule):
    """Protects the units that matter to general knowledge and to the domains so far."""

    options: DASOptions

    def __init__(self, options: DASOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.masks.append(SoftMask.from_options(self.model, options))
        self.proxy = Proxy.from_options(self.model, self.objective, options)
        self.contrast = Contrast.from_options(self.model, self.objective, options)
        self.period = options.contrast_every if options.contrast else 1
        self.first = True

    @property
    def soft(self) -> SoftMask:
        return self.masks[-1]

    def activate(self, domain: int) -> None:
        super().activate(domain)
        self.first = domain == 0

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.first:
            self.soft.update_max(self.proxy.measure(self.soft, probe))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return self.contrast.losses(batch, soft=self.soft, step=self.trainer.global_step)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        if self.options.domains:
            losses = partial(domain_losses, objective=self.objective)
            self.soft.update_max(self.soft.measure(self.model, probe, losses))
