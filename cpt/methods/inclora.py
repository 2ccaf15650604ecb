"""IncLoRA: a new LoRA pair for each domain, added to the frozen ones of all domains before it; the baseline
of O-LoRA (Wang et al., Findings of EMNLP 2023).

    h = W x + alpha / r (sum_{k<t} B_k A_k x + B_t A_t x),    of which A_t and B_t are trained

The sum needs no domain at test time. The released code keeps the pairs apart and feeds the dropped-out x to
the earlier ones too; here these see x itself, so that it makes no difference whether they are kept apart or
added to W."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.data.collate import Batch
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import IncLoRAOptions


class IncLoRA(ContinualModule):
    """Trains a new pair per domain on top of the earlier ones. These are `stored` in the frozen weights
    (`merged`: the state does not grow) or beside them (`pairs`: the weights stay the base's)."""

    options: IncLoRAOptions

    def __init__(self, options: IncLoRAOptions, shared: Shared) -> None:
        super().__init__(options, shared, scope=lora.attach_lora(shared.model, **options.pair))
        lora.resize_on_load(self.model)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.domain.index > 0:
            lora.begin_adapter(self.model, stored=self.options.stored, seed=self.drawing().initial_seed())

    def backbone(self, domain: int) -> PreTrainedModel:
        return lora.without_tuners(self.model, merged=True)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.options.exported == "merged":
            return super().export(folder, order)
        return lora.export_adapters(folder, self.model, {order[-1]: lora.joined_weights(self.model)})
