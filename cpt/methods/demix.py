"""DEMIX (Gururangan et al., NAACL 2022, sections 3 and 6): an expert for each domain.

    expert_t <- expert_k,    k = argmin_j PPL(D_t | expert_j)    over the experts so far, and the base

then text of domain t trains expert_t and nothing else. An expert is the feed-forward network of every block
(`ffn`), or an adapter (the baseline of Ke et al., ICLR 2023). What scores a text, the domain's own expert or
a mixture by posterior, is `routing`. The paper trains the shared trunk and the first experts together from
scratch; here the trunk is the frozen base, as where the paper adds a domain later (DEMix-DAPT), and the
base's own feed-forward network stands for the first expert. The paper takes the highest posterior for
nearest, here it is the lowest perplexity. ContinualLM's version raises an error before it copies an
expert."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpt.adapters import export
from cpt.adapters.bottleneck import attach_bottlenecks
from cpt.adapters.domain_store import BASE, DomainParams, Scope
from cpt.data.collate import Batch
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.common.candidates import measure_perplexities
from cpt.methods.options import DEMIXOptions
from cpt.models.units import sublayers
from cpt.models.weights import swap_weights

EXPERTS = ("ffn", "adapter")
STARTS = ("nearest", "previous", "base")
RECORD = ("sources", "perplexities")


def feed_forwards(model: PreTrainedModel) -> Scope:
    """The feed-forward network of every block: weights and biases of its linear maps. Raises ValueError where
    it can not be told."""
    places = sublayers(model, ("neurons",))
    maps = [each for place in places for each in (*(source for source, _ in place.sources), place.out)]
    names = [f"{each.name}.{name}" for each in maps for name, _ in each.module.named_parameters()]
    return Scope(tuple(names), tuple(maps))


class DEMIX(ContinualModule):
    """Trains an expert per domain, at first a copy of another (`start`: that `nearest` to the domain, the
    `previous` one, or the `base`).

    `sources` [domains] are the experts that the domains' own began as, by their domains (-1: the base);
    `perplexities` those of the last domain's probe with each candidate: the base, if it is one, and the
    experts in the order of their domains."""

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
        self.register_buffer("sources", torch.empty(0, dtype=torch.long))
        self.register_buffer("perplexities", torch.empty(0, dtype=torch.double))

    def before_domain(self, probe: Iterable[Batch]) -> None:
        candidates = self.candidates()
        if self.options.start == "nearest":
            self.perplexities = self.measure(probe, candidates)
        ranked = zip(self.perplexities.tolist() or [0.0], candidates, strict=True)
        source = min(ranked, key=lambda pair: pair[0])[1]
        self.bank.put(self.model, source)
        earlier = self.sources[: self.domain.index]
        self.sources = torch.cat([earlier, earlier.new_tensor([source])])

    def candidates(self) -> list[int]:
        """The parts that a new expert may begin as."""
        learned = self.bank.domains
        if self.options.start == "base" or not learned:
            return [BASE]
        base = [BASE] * self.router.routing.base
        return base + learned if self.options.start == "nearest" else learned[-1:]

    def measure(self, probe: Iterable[Batch], parts: Sequence[int]) -> Tensor:
        """The model's perplexity on the probes of all processes with each of the parts, [parts]."""
        totals = [partial(self.total, part=part) for part in parts]
        return measure_perplexities(self.model, probe, totals, device=self.device)

    def total(self, batch: Batch, part: int) -> Tensor:
        """The summed loss (nats) of a batch with one of the parts, a scalar."""
        with swap_weights(self.model, self.bank.weights(part)):
            return self.objective.nll(self.model, batch).sum()

    def export(self, folder: Path, order: Sequence[str]) -> str:
        parts = {name: self.bank.weights(index) for index, name in enumerate(order)}
        attached = attach_bottlenecks if self.adapted else None
        options = self.options.bottleneck if self.adapted else {}
        return export.export_parts(folder, self.model, parts, attach=attached, options=options)

    def diagnostics(self) -> dict[str, Tensor]:
        record = {f"demix/{name}": getattr(self, name) for name in RECORD}
        return super().diagnostics() | {name: values for name, values in record.items() if len(values)}

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in RECORD:  # as long as what the state holds
            stored = state_dict.get(prefix + name, getattr(self, name))
            setattr(self, name, torch.empty_like(stored, device=self.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
