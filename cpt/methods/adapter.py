"""Adapters (Houlsby et al., ICML 2019, section 2.1; Pfeiffer et al., EACL 2021).

    A(h) = W_up act(W_down h + b_down) + b_up,    W_down of D / reduction rows

    houlsby    h <- h + A(h)           h: output of a sub-layer's out projection, before dropout and the sum
    pfeiffer   h <- norm(s + A(h))     h = norm(s), s: the last residual sum of a block
               s <- s + A(s)           in pre-norm blocks, whose sum no norm follows

Houlsby's stand behind attention and FFN, or behind the FFN alone (`ffn`). Pfeiffer's form is that of
adapter-transformers, which the released code uses: the norm runs before and after, and the sum before it is
the adapter's residual. All else is frozen, the language-model head too. W_up begins at
zero, so that the first model is the base; one adapter learns all domains, or each domain has its own. The
released code (ContinualLM) draws both maps from N(0, 0.02) and trains the head of the masked model along."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cpt.adapters import export
from cpt.adapters.bottleneck import Bottleneck, attach_bottlenecks
from cpt.adapters.domain_store import DomainParams
from cpt.data.collate import Batch
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import AdapterOptions

STARTS = ("base", "previous")


def fresh(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Makes all adapters of a model new ones."""
    for part in model.modules():
        if isinstance(part, Bottleneck):
            part.reset(generator)


class Adapter(ContinualModule):
    """Trains bottlenecks in the blocks and nothing else: one set of them, or one `per_domain`, new at
    each domain (`start=base`) or at first the previous domain's."""

    options: AdapterOptions

    def __init__(self, options: AdapterOptions, shared: Shared) -> None:
        scope = attach_bottlenecks(shared.model, **options.bottleneck)
        super().__init__(options, shared, scope=scope)
        self.names = scope.names
        if options.per_domain:
            self.keep_parts(DomainParams(self.model, scope.names), options.routing)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.bank is not None and self.options.start == "base":
            fresh(self.model, self.drawing())

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.bank is None:
            parts = {order[-1]: {name: self.model.get_parameter(name) for name in self.names}}
        else:
            parts = {name: self.bank.weights(index) for index, name in enumerate(order)}
        return export.export_parts(
            folder, self.model, parts, attach=attach_bottlenecks, options=self.options.bottleneck
        )
