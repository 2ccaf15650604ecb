"""LoRA (Hu et al., ICLR 2022): one adapter per linear layer for all domains (SeqLoRA), or one per domain.

    h = W x + alpha / r B A x,    W frozen, B = 0 at first                          (section 4.1)

All linear layers but the head have adapters, unless `targets` names others."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.adapters.domain_store import DomainParams
from cpt.adapters.options import StoredPairOptions
from cpt.adapters.routed_lora import attach_experts
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import LoRAOptions, MoELoRAOptions


class LoRA(ContinualMethod):
    """Trains LoRA adapters: one for all domains, or one `per_domain`, new or a copy of the last."""

    options: LoRAOptions

    def __init__(self, options: LoRAOptions, context: MethodContext) -> None:
        scope = lora.attach_lora(context.model, **options.pair)
        super().__init__(options, context, scope=scope)
        if options.per_domain:
            self.use_domain_params(DomainParams(self.model, scope.names), options.routing)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.bank is not None and self.options.start == "base" and self.domain.index > 0:
            lora.reset_newest(self.model, self.drawing().initial_seed())

    def model_for(self, domain: int) -> PreTrainedModel:
        return lora.without_tuners(super().model_for(domain))

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.options.exported == "merged":
            return super().export(folder, order)
        adapters = {order[-1]: lora.joined_weights(self.model)}
        if self.bank is not None:
            adapters = {name: self.bank.weights(index) for index, name in enumerate(order)}
        return lora.export_adapters(folder, self.model, adapters)


class IncLoRA(ContinualMethod):
    """IncLoRA: a new LoRA adapter for each domain, added to the frozen ones of all domains before it; the
    baseline of O-LoRA (Wang et al., Findings of EMNLP 2023).

        h = W x + alpha / r (sum_{k<t} B_k A_k x + B_t A_t x),    of which A_t and B_t are trained"""

    options: StoredPairOptions

    def __init__(self, options: StoredPairOptions, context: MethodContext) -> None:
        super().__init__(options, context, scope=lora.attach_lora(context.model, **options.pair))
        lora.resize_on_load(self.model)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.domain.index > 0:
            lora.begin_adapter(self.model, stored=self.options.stored, seed=self.drawing().initial_seed())

    def model_for(self, domain: int) -> PreTrainedModel:
        return lora.without_tuners(self.model)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.options.exported == "merged":
            return super().export(folder, order)
        return lora.export_adapters(folder, self.model, {order[-1]: lora.joined_weights(self.model)})


class MoELoRA(ContinualMethod):
    """MoELoRA: a mixture of LoRA adapters for all domains, the baseline of MIGU (Du et al., 2024).

        h = W x + alpha / r sum_e g_e(x) B_e A_e x,    g(x) = softmax(W_g x) [E]

    E adapters and a router W_g [E, d_in] per linear layer are trained through all domains, W frozen. Gates
    are per token and over all adapters: no token is dropped, nothing is balanced."""

    options: MoELoRAOptions

    def __init__(self, options: MoELoRAOptions, context: MethodContext) -> None:
        attached = {"experts": options.num_experts, **options.pair}
        super().__init__(options, context, scope=attach_experts(context.model, **attached))
        self.attached = attach_experts, attached
