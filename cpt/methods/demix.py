"""DEMIX (Gururangan et al., NAACL 2022, sections 3 and 6): an expert for each domain.

    expert_t <- expert_k,    k = argmin_j PPL(D_t | expert_j)    over the experts so far, and the base

Then domain t trains expert_t only: the feed-forward network of every block (`ffn`), or an adapter (the
baseline of Ke et al., ICLR 2023). `routing` selects what scores a text: the domain's own expert or a mixture
by posterior. As in the paper's DEMix-DAPT the trunk is the frozen base, and the base's FFN a first expert."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from cpt.adapters.bottleneck import attach_bottlenecks
from cpt.adapters.domain_store import BASE, DomainParams, Router, Scope
from cpt.core.distributed import all_reduce_sum
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import DEMIXOptions, LifelongMoEOptions
from cpt.models.forward import in_mode
from cpt.models.units import sublayers
from cpt.models.weights import swap_weights

RECORD = ("sources", "perplexities")


class CopyingMethod(ContinualMethod):
    """A method whose new modules are copies of the base's, of the last domain's, or of those `nearest` to
    the domain, by `options.start`. `sources` [domains]: the domain (-1: the base) that each was copied from;
    `perplexities`: those of the last domain's probe with each candidate."""

    options: DEMIXOptions | LifelongMoEOptions
    sources: Tensor
    perplexities: Tensor

    def __init__(
        self, options: DEMIXOptions | LifelongMoEOptions, context: MethodContext, scope: Scope | None
    ) -> None:
        super().__init__(options, context, scope=scope)
        self.register_buffer("sources", torch.empty(0, dtype=torch.long))
        self.register_buffer("perplexities", torch.empty(0, dtype=torch.double))

    @abstractmethod
    def holding(self, domain: int) -> AbstractContextManager:
        """A context in which the model has the modules of one domain (-1: the base)."""

    def choose_source(self, probe: Iterable[Batch], learned: Sequence[int], *, base: bool) -> int:
        """The domain whose modules are copied, noted in `sources`; `base` says whether the base competes."""
        candidates = [BASE]
        if self.options.start != "base" and learned:
            nearest = self.options.start == "nearest"
            candidates = [*([BASE] * base), *learned] if nearest else [learned[-1]]
        if self.options.start == "nearest":
            self.perplexities = self.measure(probe, candidates)
        ranked = zip(self.perplexities.tolist() or [0.0], candidates, strict=True)
        source = min(ranked, key=lambda pair: pair[0])[1]
        earlier = self.sources[: self.domain.index]
        self.sources = torch.cat([earlier, earlier.new_tensor([source])])
        return source

    @torch.no_grad()
    def measure(self, probe: Iterable[Batch], candidates: Sequence[int]) -> Tensor:
        """The perplexity with each candidate on the probes of all processes, [candidates] in 64 bits."""
        sums = torch.zeros(len(candidates) + 1, dtype=torch.double, device=self.device)
        with in_mode(self.model, training=False):
            for batch in probe:
                for place, domain in enumerate(candidates):
                    with self.holding(domain):
                        sums[place] += self.objective.nll(self.model, batch).sum()
                sums[-1] += len(batch["positions"])
        all_reduce_sum(sums)
        return (sums[:-1] / sums[-1].clamp_min(1)).exp()

    def recorded(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}/{n}": getattr(self, n) for n in RECORD if len(getattr(self, n))}

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in RECORD:  # as long as what the state holds
            stored = state_dict.get(prefix + name, getattr(self, name))
            setattr(self, name, torch.empty_like(stored, device=self.device))
        super()._load_from_state_dict(state_dict, prefix, *args)


class DEMIX(CopyingMethod):
    """Trains an expert per domain, which starts as a copy of another."""

    options: DEMIXOptions
    bank: DomainParams
    router: Router

    def __init__(self, options: DEMIXOptions, context: MethodContext) -> None:
        if options.experts == "adapter":
            scope = attach_bottlenecks(context.model, **options.bottleneck)
        else:  # weights and biases of the linear layers of every block's FFN
            maps = [each for ffn in sublayers(context.model, ("neurons",)) for each in ffn.projections]
            names = [f"{each.name}.{name}" for each in maps for name, _ in each.module.named_parameters()]
            scope = Scope(tuple(names), tuple(maps))
        super().__init__(options, context, scope)
        adapted = options.experts == "adapter"
        self.attached = (attach_bottlenecks, options.bottleneck) if adapted else (None, {})
        self.use_domain_params(DomainParams(self.model, scope.names), options.routing)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        learned, base = self.bank.domains, self.router.routing.base
        self.bank.put(self.model, self.choose_source(probe, learned, base=base))

    def holding(self, domain: int) -> AbstractContextManager:
        return swap_weights(self.model, self.bank.weights(domain))

    def diagnostics(self) -> dict[str, Tensor]:
        return super().diagnostics() | self.recorded("demix")
