"""LoRA (Hu et al., ICLR 2022): one adapter per linear layer for all domains (SeqLoRA), or one per domain.

    h = W x + alpha / r B A x,    W frozen, B = 0 at first                          (section 4.1)

All linear layers but the head have adapters, unless `targets` names others."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.adapters.domain_store import DomainParams
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import LoRAOptions


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
        return lora.without_tuners(super().model_for(domain), merged=True)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.options.exported == "merged":
            return super().export(folder, order)
        adapters = {order[-1]: lora.joined_weights(self.model)}
        if self.bank is not None:
            adapters = {name: self.bank.weights(index) for index, name in enumerate(order)}
        return lora.export_adapters(folder, self.model, adapters)
