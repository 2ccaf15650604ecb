"""MoELoRA: a mixture of LoRA pairs for all domains, as the baseline of MIGU (Du et al., EMNLP Findings 2024)
has it: "vanilla" experts, as many as there are tasks, without the contrast of Luo et al. (arXiv 2402.12851).

    h = W x + alpha / r sum_e g_e(x) B_e A_e x,    g(x) = softmax(W_g x) [E]

E adapters and a router W_g [E, d_in] per linear layer exist from the start and are trained through all
domains, W frozen. Gates are per token and over all adapters: no token is dropped, nothing is balanced. No
code was released."""

from collections.abc import Sequence
from pathlib import Path

from cpt.adapters import export
from cpt.adapters.routed_lora import attach_experts
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import MoELoRAOptions


class MoELoRA(ContinualMethod):
    """Trains LoRA experts and their token routers through all domains."""

    options: MoELoRAOptions

    def __init__(self, options: MoELoRAOptions, context: MethodContext) -> None:
        self.attaching = {"experts": options.experts, **options.pair}
        scope = attach_experts(context.model, **self.attaching)
        super().__init__(options, context, scope=scope)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        assert self.scope is not None
        parts = {order[-1]: {name: self.model.get_parameter(name) for name in self.scope.names}}
        return export.export_parts(folder, self.model, parts, attach=attach_experts, options=self.attaching)
