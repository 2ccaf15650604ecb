"""LoRA (Hu et al., ICLR 2022): one low-rank pair beside each linear map for all domains, or one per domain.

    h = W x + alpha / r B A x,    W frozen, B = 0 at first                          (section 4.1)

One pair for all domains is SeqLoRA. The paper adapts W_q and W_v of the attention, as does the code released
with O-LoRA and MIGU; here it is every linear map but the head, unless `targets` says otherwise."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.adapters.bank import Bank
from cpt.adapters.routing import Routing
from cpt.core.options import choice
from cpt.data.batch import Batch
from cpt.methods.base import ContinualModule

STARTS = ("base", "previous")


class LoRA(ContinualModule):
    """Trains low-rank pairs and nothing else: one for all domains, or one `per_domain`, new at each domain
    (`start=base`) or at first the previous domain's."""

    def __init__(
        self,
        *,
        r: int,
        alpha: float,
        dropout: float,
        targets: str | Sequence[str],
        embeddings: bool,
        exported: str,
        per_domain: bool,
        start: str,
        routing: Routing,
        model: PreTrainedModel,
        **shared: Any,
    ) -> None:
        choice("exported", exported, allowed=lora.EXPORTED)
        choice("start", start, allowed=STARTS)
        scope = lora.attach(model, r=r, alpha=alpha, dropout=dropout, targets=targets, embeddings=embeddings)
        super().__init__(model=model, scope=scope, **shared)
        self.exported, self.start = exported, start
        if per_domain:
            self.keep_parts(Bank(model, scope.names), routing)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.bank is not None and self.start == "base" and self.domain.index > 0:
            lora.draw(self.model, self.drawing().initial_seed())

    def backbone(self, domain: int) -> PreTrainedModel:
        return lora.plain(super().backbone(domain), merged=True)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.exported == "merged":
            return super().export(folder, order)
        if self.bank is None:
            return lora.export(folder, self.model, {order[-1]: lora.present(self.model)})
        return lora.export(folder, self.model, {n: self.bank.weights(k) for k, n in enumerate(order)})
