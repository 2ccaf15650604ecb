"""DAS, continual DAP-training of language models with soft-masking (Ke et al., ICLR 2023).

The importance of each unit for what the model knows protects it (eq. 5), and a contrast keeps what is new
apart from what was known (eq. 6):

    I_lu     = 1/N sum_n |dL(x_n)/dg_lu|           L: KL of two dropout passes before the first domain, then
    I^(<=t)  = max(I^(t), I^(<=t-1))               after each domain its language-model loss (eq. 2-4)
    step_l  <- (1 - I_l^(<=t-1)) * step_l
    L        = L_lm + lambda L_con

The soft mask scales the step itself: scaled gradients, as in the released code, are divided out again by
Adam. cpt.masks.importance and cpt.methods.common.contrast hold the formulas."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from cpt.data.batch import Batch
from cpt.masks.importance import domain_losses
from cpt.masks.soft import Proxy, SoftMask
from cpt.methods.base import ContinualModule
from cpt.methods.common.contrast import Contrast


class DAS(ContinualModule):
    """Protects the units that matter to general knowledge and to the domains so far."""

    def __init__(
        self,
        *,
        units: Sequence[str],
        columns: Sequence[str],
        acts_on: str,
        normalise: str,
        general: str | None,
        proxy_dropout: float | None,
        domains: bool,
        contrast: float,
        contrast_text: str,
        contrast_dropout: float | None,
        temperature: float,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        options = {"acts_on": acts_on, "normalise": normalise, "columns": columns}
        self.masks.append(SoftMask(self.model, kinds=units, **options))
        self.proxy = Proxy(self.model, self.objective, compared=general, rate=proxy_dropout)
        self.contrast = Contrast(
            self.model,
            self.objective,
            strength=contrast,
            temperature=temperature,
            text=contrast_text,
            rate=contrast_dropout,
        )
        self.domains, self.first = domains, True

    @property
    def soft(self) -> SoftMask:
        return self.masks[-1]

    def activate(self, domain: int) -> None:
        super().activate(domain)
        self.first = domain == 0

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.first:
            self.soft.raise_to(self.proxy.measure(self.soft, probe))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return self.contrast.losses(batch, soft=self.soft)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        if self.domains:
            losses = partial(domain_losses, objective=self.objective)
            self.soft.raise_to(self.soft.measure(self.model, probe, losses))
