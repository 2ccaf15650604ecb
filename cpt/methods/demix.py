"""DEMIX (Gururangan et al., NAACL 2022, sections 3 and 6): an expert for each domain.

    expert_t <- expert_k,    k = argmin_j PPL(D_t | expert_j)    over the experts so far, and the base

Then domain t trains expert_t only. An expert is the feed-forward network of every block (`ffn`), or an
adapter (the baseline of Ke et al., ICLR 2023). `routing` selects what scores a text: the domain's own expert
or a mixture by posterior. The paper trains the trunk and the first experts together from scratch; here the
trunk is the frozen base, as in its DEMix-DAPT, and the base's FFN is a first expert. The paper's nearest
expert has the highest posterior, here the lowest perplexity. ContinualLM's version raises an error before it
copies an expert."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from cpt.adapters import export
from cpt.adapters.bottleneck import attach_bottlenecks
from cpt.adapters.domain_store import DomainParams, Scope
from cpt.adapters.options import BottleneckOptions, Routing
from cpt.core.options import option
from cpt.core.rules import one_of
from cpt.data.collate import Batch
from cpt.methods.base import Shared
from cpt.methods.common.candidates import CopyingMethod
from cpt.models.units import sublayers
from cpt.models.weights import swap_weights

EXPERTS = ("ffn", "adapter")
STARTS = ("nearest", "previous", "base")


def feed_forwards(model: PreTrainedModel) -> Scope:
    """Weights and biases of the linear layers of every block's FFN. Raises ValueError if it is not found."""
    places = sublayers(model, ("neurons",))
    maps = [each for place in places for each in (*(source for source, _ in place.sources), place.out)]
    names = [f"{each.name}.{name}" for each in maps for name, _ in each.module.named_parameters()]
    return Scope(tuple(names), tuple(maps))


@dataclass(frozen=True, kw_only=True)
class DEMIXOptions(BottleneckOptions):
    """Options of DEMIX; those of bottlenecks count for experts=adapter."""

    experts: str = option("what a domain has of its own: every block's FFN, or an adapter", one_of(*EXPERTS))
    start: str = option("what a new expert is a copy of", one_of(*STARTS))
    routing: Routing = option("which experts score a text: one of conf/routing")


class DEMIX(CopyingMethod):
    """Trains an expert per domain, which starts as a copy of another."""

    options: DEMIXOptions

    def __init__(self, options: DEMIXOptions, shared: Shared) -> None:
        self.adapted = options.experts == "adapter"
        scope = (
            attach_bottlenecks(shared.model, **options.bottleneck)
            if self.adapted
            else feed_forwards(shared.model)
        )
        super().__init__(options, shared, scope=scope)
        self.keep_parts(DomainParams(self.model, scope.names), options.routing)
        self.record_sources()

    def before_domain(self, probe: Iterable[Batch]) -> None:
        learned, base = self.bank.domains, self.router.routing.base
        self.bank.put(self.model, self.choose_source(probe, learned, base=base))

    def holding(self, domain: int) -> AbstractContextManager:
        return swap_weights(self.model, self.bank.weights(domain))

    def export(self, folder: Path, order: Sequence[str]) -> str:
        parts = {name: self.bank.weights(index) for index, name in enumerate(order)}
        attached = attach_bottlenecks if self.adapted else None
        options = self.options.bottleneck if self.adapted else {}
        return export.export_parts(folder, self.model, parts, attach=attached, options=options)

    def diagnostics(self) -> dict[str, Tensor]:
        return super().diagnostics() | self.recorded("demix")
