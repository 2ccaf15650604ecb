"""New modules for a domain that start as copies of earlier ones, chosen by perplexity on the domain."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from cpt.adapters.domain_store import BASE
from cpt.core.collectives import sum_in_place
from cpt.data.collate import Batch
from cpt.methods.base import ContinualModule
from cpt.models.forward import in_mode

RECORD = ("sources", "perplexities")


class CopyingMethod(ContinualModule):
    """A method whose new modules are copies of the base's, of the last domain's, or of those `nearest` to the
    domain, by `options.start`.

    `sources` [domains]: the domain (-1: the base) whose modules each domain's began as. `perplexities`: those
    of the last domain's probe with each candidate, in the order of their domains."""

    def record_sources(self) -> None:
        """Registers the buffers."""
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
        sum_in_place(sums)
        return (sums[:-1] / sums[-1].clamp_min(1)).exp()

    def recorded(self, prefix: str) -> dict[str, Tensor]:
        """The non-empty buffers, for the diagnostics."""
        return {f"{prefix}/{n}": getattr(self, n) for n in RECORD if len(getattr(self, n))}

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in RECORD:  # as long as what the state holds
            stored = state_dict.get(prefix + name, getattr(self, name))
            setattr(self, name, torch.empty_like(stored, device=self.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
