"""DGA, adapting a language model while preserving its general knowledge (Ke et al., EMNLP 2022).

Each domain is learned alone, from the base; the attention heads that matter to the base's general knowledge,
measured on the domain's own text, are protected, and a contrast keeps the domain apart from it:

    I_h    = 1/N sum_n |dKL(f1(x_n) || f2(x_n))/dg_h|       f1, f2: two dropout passes of the base
    step_h <- (1 - I_h) * step_h,    L = L_lm + lambda L_con

The formulas are those of DAS (cpt.gradient_masks.soft, cpt.methods.common.contrast)."""

from collections.abc import Iterable

from torch import Tensor

from cpt.data.collate import Batch
from cpt.gradient_masks.soft import Proxy, SoftMask
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.common.contrast import Contrast
from cpt.methods.options import DGAOptions
from cpt.models.weights import Snapshot


class DGA(ContinualModule):
    """Protects the heads that matter to general knowledge, for each domain anew."""

    alone = True

    options: DGAOptions

    def __init__(self, options: DGAOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.base = Snapshot(self.model, persistent=False)
        self.masks.append(SoftMask.from_options(self.model, options))
        self.proxy = Proxy.from_options(self.model, self.objective, options)
        self.contrast = Contrast.from_options(self.model, self.objective, options)
        self.period = options.contrast_every if options.contrast else 1

    @property
    def soft(self) -> SoftMask:
        return self.masks[-1]

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.base.restore(self.model)
        self.soft.set(self.proxy.measure(self.soft, probe))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return self.contrast.losses(batch, soft=self.soft, step=self.trainer.global_step)
