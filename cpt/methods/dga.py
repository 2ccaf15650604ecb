"""DGA, adapting a language model while preserving its general knowledge (Ke et al., EMNLP 2022).

Each domain starts from the base. The attention heads that matter to the base's general knowledge, measured on
the domain's text, are protected, and a contrast separates the domain from it:

    I_h    = 1/N sum_n |dKL(f1(x_n) || f2(x_n))/dg_h|       f1, f2: two dropout passes of the base
    step_h <- (1 - I_h) * step_h,    L = L_lm + lambda L_con

The formulas are those of DAS (cpt.gradient_masks.soft, cpt.methods.das)."""

from collections.abc import Iterable

from cpt.data.collate import Batch
from cpt.methods.base import MethodContext
from cpt.methods.das import ContrastMethod
from cpt.methods.options import DGAOptions
from cpt.models.weights import Snapshot


class DGA(ContrastMethod):
    """Protects the heads that matter to general knowledge, measured anew for each domain."""

    alone = True
    options: DGAOptions

    def __init__(self, options: DGAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.base = Snapshot(self.model, persistent=False)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.base.restore(self.model)
        self.soft.set(self.proxy.measure(self.soft, probe))
