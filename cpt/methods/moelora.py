"""MoELoRA: a mixture of LoRA pairs for all domains, as the baseline of MIGU (Du et al., EMNLP Findings 2024)
has it: "vanilla" experts, as many as there are tasks, without the contrast of Luo et al. (arXiv 2402.12851).

    h = W x + alpha / r sum_e g_e(x) B_e A_e x,    g(x) = softmax(W_g x) [E]

E pairs and a router W_g [E, d_in] beside each map, there from the start and trained through all domains, W
frozen. Gates are of each token and over all pairs, so that no token is dropped and none has to be balanced.
No code was released."""

from collections.abc import Sequence
from pathlib import Path

from cpt.adapters import export
from cpt.adapters.routed_lora import attach_experts
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import MoELoRAOptions


class MoELoRA(ContinualModule):
    """Trains pairs and the routers that weigh them, token by token, through all domains."""

    options: MoELoRAOptions

    def __init__(self, options: MoELoRAOptions, shared: Shared) -> None:
        self.attaching = {"experts": options.experts, **options.pair}
        scope = attach_experts(shared.model, **self.attaching)
        super().__init__(options, shared, scope=scope)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        part = {name: self.model.get_parameter(name) for name in self.scope.names}
        how = {"attach": attach_experts, "options": self.attaching}
        return export.export_parts(folder, self.model, {order[-1]: part}, **how)
