"""IncLoRA: a new LoRA adapter for each domain, added to the frozen ones of all domains before it; the
baseline of O-LoRA (Wang et al., Findings of EMNLP 2023).

    h = W x + alpha / r (sum_{k<t} B_k A_k x + B_t A_t x),    of which A_t and B_t are trained"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.adapters.options import StoredPairOptions
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext


class IncLoRA(ContinualMethod):
    """Trains a new LoRA adapter per domain; the earlier ones are merged into the weights or stored apart."""

    options: StoredPairOptions

    def __init__(self, options: StoredPairOptions, context: MethodContext) -> None:
        super().__init__(options, context, scope=lora.attach_lora(context.model, **options.pair))
        lora.resize_on_load(self.model)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.domain.index > 0:
            lora.begin_adapter(self.model, stored=self.options.stored, seed=self.drawing().initial_seed())

    def model_for(self, domain: int) -> PreTrainedModel:
        return lora.without_tuners(self.model, merged=True)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.options.exported == "merged":
            return super().export(folder, order)
        return lora.export_adapters(folder, self.model, {order[-1]: lora.joined_weights(self.model)})
