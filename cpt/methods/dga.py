"""DGA, adapting a language model while preserving its general knowledge (Ke et al., EMNLP 2022).

Each domain is learned alone, from the base; the attention heads that matter to the base's general knowledge,
measured on the domain's own text, are protected, and a contrast keeps the domain apart from it:

    I_h    = 1/N sum_n |dKL(f1(x_n) || f2(x_n))/dg_h|       f1, f2: two dropout passes of the base
    step_h <- (1 - I_h) * step_h,    L = L_lm + lambda L_con

The formulas are those of DAS (cpt.masks.importance, cpt.methods.common.contrast)."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from cpt.data.batch import Batch
from cpt.masks.soft import Proxy, SoftMask
from cpt.methods.base import ContinualModule
from cpt.methods.common.contrast import Contrast
from cpt.models.snapshots import Snapshot


class DGA(ContinualModule):
    """Protects the heads that matter to general knowledge, for each domain anew."""

    alone = True

    def __init__(
        self,
        *,
        units: Sequence[str],
        columns: Sequence[str],
        acts_on: str,
        normalise: str,
        general: str,
        proxy_dropout: float | None,
        contrast: float,
        contrast_text: str,
        contrast_dropout: float | None,
        temperature: float,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        self.base = Snapshot(self.model, persistent=False)
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

    @property
    def soft(self) -> SoftMask:
        return self.masks[-1]

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.base.restore(self.model)
        self.soft.set(self.proxy.measure(self.soft, probe))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return self.contrast.losses(batch, soft=self.soft)
