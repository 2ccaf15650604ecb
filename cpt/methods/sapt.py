"""SAPT (Zhao et al., ACL 2024) and, with another key and query, MoCL (Wang et al., NAACL 2024): a new LoRA
adapter per domain, all of them weighted by attention of the text to a key of each.

    h = W x + alpha / r sum_k a_k B_k A_k x,    a of the text (`cpt.adapters.routed_lora`)

    attention   L = L_lm + lambda 1/B sum over rows of domains i < t of KL(mean a of domain i || a(row))
    cosine      L = L_lm + lambda 1/B sum over rows of domain t of (1 - cos(e(row), k_t))

Domain t trains its adapter, its key and the query; the mean a of each domain is that of its probe at its end,
0 for later adapters. The KL is on rows of `replay`, B rows per batch. No domain is known at test time."""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters.domain_store import BASE, DomainScorer
from cpt.adapters.routed_lora import SampleRouter, attach_routed, begin_routed, routed_part, router_of
from cpt.core.distributed import all_reduce_sum
from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import SAPTOptions
from cpt.methods.prompt import check_rows
from cpt.models.objectives import Objective

log = logging.getLogger(__name__)


class Attending(DomainScorer):
    """Scores all texts with all adapters, weighted by attention."""

    def __init__(self, router: SampleRouter, objective: Objective, attention: NamedTensors) -> None:
        super().__init__()
        self.router, self.objective, self.attention = router, objective, attention

    @property
    def parts(self) -> list[int]:
        return list(range(len(self.attention.named()))) or [BASE]

    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        nll = self.objective.nll(model, batch)
        weights = self.router.whole.exp()[batch["rows"]].T
        learning = len(weights) > len(self.parts)  # a domain's own adapter exists before it is kept
        self.take(domain, [*range(len(weights))] if learning else self.parts, weights)
        return nll


def kept_attention(kept: Sequence[Tensor], width: int) -> Tensor:
    """The mean a of domains, [i + 1] or more each, zero-padded into one matrix [n, width]."""
    return torch.stack([torch.cat([each, each.new_zeros(width - len(each))]) for each in kept])


def attention_divergence(kept: Tensor, logits: Tensor) -> Tensor:
    """KL(p || a) (nats) of rows [n] from p [n, t] and log a [n, t]."""
    return (torch.xlogy(kept, kept) - kept * logits.to(kept)).sum(1)


class SAPT(ContinualMethod):
    """Trains a new adapter and its key per domain, and the query that weights all adapters."""

    options: SAPTOptions

    def __init__(self, options: SAPTOptions, context: MethodContext) -> None:
        check_rows(context, "method=sapt, whose pairs are weighed for each row of a batch")
        names = ("key", "query", "bottleneck", "scale")
        attached = options.pair | {name: getattr(options, name) for name in names}
        attached["causal"] = context.objective.causal
        super().__init__(options, context, scope=attach_routed(context.model, **attached))
        self.attached = attach_routed, attached
        self.attention = NamedTensors()  # mean a of each domain's text at the domain's end
        self.router = Attending(router_of(self.model), context.objective, self.attention)

    @property
    def kept(self) -> list[Tensor]:
        """The mean a of each domain so far, [t] each."""
        named = self.attention.named()
        return [named[str(domain)] for domain in range(len(named))]

    def rates(self) -> dict[nn.Parameter, float]:
        # A new adapter adds 0 at first: trained as fast, attention would return to earlier adapters, and the
        # new one would never train.
        weighing = [each for each in router_of(self.model).parameters() if each.requires_grad]
        return dict.fromkeys(weighing, self.options.key_rate)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.domain.index > 0:
            begin_routed(self.model, self.drawing())

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(batch)
        if self.options.strength:
            if self.options.key == "attention":
                name, distances = "reflection", self.forgotten(batch)
            else:  # 1 - cos(e, k_t) of the rows of this domain, [n]
                cosines = router_of(self.model).cosines
                assert cosines is not None
                own = batch["domains"] == self.domain.index
                name, distances = "matching", 1 - cosines[:, -1, -1][own]
            terms[name] = self.options.strength * distances.sum() / len(batch["domains"])
        return terms

    def forgotten(self, batch: Batch) -> Tensor:
        """KL(mean a of its domain || a) of each row of an earlier domain in the last forward pass, [n]."""
        rows, logits = batch["domains"], router_of(self.model).whole
        past = (rows >= 0) & (rows < self.domain.index)
        if not past.any():
            return logits[:0, 0]
        kept = kept_attention(self.kept, logits.shape[1]).to(logits)
        return attention_divergence(kept[rows[past]], logits[past])

    @torch.no_grad()
    def after_domain(self, probe: Iterable[Batch]) -> None:
        router = router_of(self.model)
        sums = torch.zeros(len(router.keys) + 1, dtype=torch.double, device=self.device)
        for batch in probe:
            self.objective.encode(self.model, batch)
            taken = router.whole.exp()[batch["rows"]].double()
            sums += torch.cat([taken.sum(0), taken.new_tensor([len(taken)])])
        all_reduce_sum(sums)
        mean = (sums[:-1] / sums[-1].clamp_min(1)).float()
        self.attention.update({str(self.domain.index): mean})

    def parts(self, order: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        return {order[-1]: routed_part(self.model)}

    def diagnostics(self) -> dict[str, Tensor]:
        """The mean attention of each domain at its end (rows) to each adapter (columns)."""
        own = {"sapt/attention": kept_attention(self.kept, len(self.kept))} if self.kept else {}
        return super().diagnostics() | own
