"""LoRA (Hu et al., ICLR 2022): one adapter per linear layer for all domains (SeqLoRA), or one per domain.

    h = W x + alpha / r B A x,    W frozen, B = 0 at first                          (section 4.1)

All linear layers but the head have adapters, unless `targets` names others."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.adapters.domain_store import BASE, DomainParams, DomainScorer
from cpt.adapters.options import PairOptions, StoredPairOptions
from cpt.adapters.routed_lora import (
    SampleRouter,
    attach_experts,
    attach_routed,
    begin_routed,
    routed_part,
    router_of,
)
from cpt.core.distributed import all_reduce_sum
from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import LoRAOptions, MoELoRAOptions, NLoRAOptions, OLoRAOptions, SAPTOptions
from cpt.methods.prompt import check_rows
from cpt.models.objectives import Objective


class LoRA(ContinualMethod):
    """LoRA (Hu et al., ICLR 2022): one adapter per linear layer for all domains (SeqLoRA), or one
    `per_domain`, new or a copy of the last.

        h = W x + alpha / r B A x,    W frozen, B = 0 at first                          (section 4.1)"""

    options: PairOptions

    def __init__(self, options: PairOptions, context: MethodContext) -> None:
        super().__init__(options, context, scope=lora.attach_lora(context.model, **options.pair))
        if isinstance(options, LoRAOptions) and options.per_domain and self.scope:
            self.use_domain_params(DomainParams(self.model, self.scope.names), options.routing)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        new = isinstance(self.options, LoRAOptions) and self.options.start == "base"
        if self.domain_params is not None and new and self.domain.index > 0:
            lora.reset_newest(self.model, self.make_generator().initial_seed())

    def model_for(self, domain: int) -> PreTrainedModel:
        return lora.without_tuners(super().model_for(domain))

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.options.exported == "merged":
            return super().export(folder, order)
        one = {order[-1]: lora.joined_weights(self.model)}
        return lora.export_adapters(
            folder, self.model, one if self.domain_params is None else self.domain_modules(order)
        )


class IncLoRA(LoRA):
    """IncLoRA: a new LoRA adapter for each domain, added to the frozen ones of all domains before it; the
    baseline of O-LoRA (Wang et al., Findings of EMNLP 2023).

        h = W x + alpha / r (sum_{k<t} B_k A_k x + B_t A_t x),    of which A_t and B_t are trained"""

    options: StoredPairOptions

    def __init__(self, options: StoredPairOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        lora.resize_on_load(self.model)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.domain.index > 0:
            lora.begin_adapter(
                self.model, stored=self.options.stored, seed=self.make_generator().initial_seed()
            )


class MoELoRA(ContinualMethod):
    """MoELoRA: a mixture of LoRA adapters for all domains, the baseline of MIGU (Du et al., 2024).

        h = W x + alpha / r sum_e g_e(x) B_e A_e x,    g(x) = softmax(W_g x) [E]

    E adapters and a router W_g [E, d_in] per linear layer are trained through all domains, W frozen. Gates
    are per token and over all adapters: no token is dropped, nothing is balanced."""

    options: MoELoRAOptions

    def __init__(self, options: MoELoRAOptions, context: MethodContext) -> None:
        attached = {"experts": options.num_experts, **options.pair}
        super().__init__(options, context, scope=attach_experts(context.model, **attached))
        self.attached = attach_experts, attached


Pair = tuple[Tensor, Tensor]  # A [r, d_in], B [d_out, r]


class _ProductNorm(torch.autograd.Function):
    """||B A||_1. The gradients sign(B A) A^T and B^T sign(B A) are computed in the forward pass, so that only
    one product at a time is in memory."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        exact = torch.promote_types(a.dtype, torch.float32)
        with torch.autocast(a.device.type, enabled=False):
            wide_a, wide_b = a.to(exact), b.to(exact)
            product = wide_b @ wide_a
            signs = product.sign()
            ctx.save_for_backward((wide_b.T @ signs).to(a), (signs @ wide_a.T).to(b))
            return product.abs_().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Pair:
        of_a, of_b = ctx.saved_tensors
        return gradient * of_a, gradient * of_b


def product_norm(pairs: Iterable[Pair]) -> Tensor:
    """The sum over pairs of ||B A||_1, a scalar."""
    return torch.stack([_ProductNorm.apply(a, b) for a, b in pairs]).sum()


def factors_norm(pairs: Iterable[Pair]) -> Tensor:
    """The sum over pairs and ranks of ||b_i||_1 ||a_i||_1, a scalar."""
    terms = [(b.abs().sum(0, dtype=torch.float) * a.abs().sum(1, dtype=torch.float)).sum() for a, b in pairs]
    return torch.stack(terms).sum()


class NLoRA(IncLoRA):
    """N-LoRA (Yang et al., COLING 2025): IncLoRA whose new adapter changes few entries of W, so that domains
    rarely collide.

        L = L_lm + lambda sum over maps ||B_t A_t||_1                       (`penalty: product`, the paper)
        L = L_lm + lambda sum over maps and ranks i ||b_i||_1 ||a_i||_1     (`penalty: factors`)

    B_t A_t [d_out, d_in] is what the adapter adds to W but for alpha / r; b_i [d_out] is a column of B_t, a_i
    [d_in] a row of A_t. The second is an upper bound of the first, equal at rank 1, without a matrix as large
    as W."""

    options: NLoRAOptions

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(batch)
        if self.options.strength:
            newest = [lora.factors_of(layer) for layer in lora.lora_layers(self.model).values()]
            norm = product_norm if self.options.penalty == "product" else factors_norm
            terms["sparsity"] = self.options.strength * norm(newest)
        return terms


Group = tuple[list[Tensor], Tensor]  # A of G layers, each [r, d]; the earlier ones, [G, t r, d]


def pair_overlap(groups: Iterable[Group], *, penalty: str) -> Tensor:
    """Sum over maps, earlier domains and entries of |A_k A_t^T| or its square, a scalar."""
    terms = []
    for new, earlier in groups:
        products = torch.bmm(earlier, torch.stack(new).transpose(1, 2)).float()
        terms.append(products.abs().sum() if penalty == "l1" else products.square().sum())
    return torch.stack(terms).sum()


def group_by_width(new: Sequence[Tensor], earlier: Sequence[Sequence[Tensor]]) -> list[Group]:
    """Groups layers by width, from A of all layers, now and in each earlier domain."""
    widths: dict[int, list[int]] = {}
    for place, each in enumerate(new):
        widths.setdefault(each.shape[1], []).append(place)
    return [
        ([new[m] for m in maps], torch.stack([torch.cat([domain[m] for domain in earlier]) for m in maps]))
        for maps in widths.values()
    ]


class OLoRA(IncLoRA):
    """O-LoRA (Wang et al., Findings of EMNLP 2023): IncLoRA whose new A is orthogonal to the earlier ones.

        L = L_lm + lambda_1 sum over maps, sum_{k<t} L_orth(A_k, A_t) + lambda_2 R
        L_orth = sum over entries of |A_k A_t^T|      (`l1`, the released code)
        L_orth = sum over entries of (A_k A_t^T)^2    (`squared`, the paper)
        R = ||A_t||_F + ||B_t||_F summed over maps, not squared

    A_k [r, d_in] are the A's of earlier domains; only A_t and B_t have gradients."""

    options: OLoRAOptions
    ends_domains = True

    def __init__(self, options: OLoRAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        assert self.scope is not None
        names = self.scope.names
        self.kept = DomainParams(self.model, [n for n in names if ".lora_A." in n or "embedding_A" in n])
        self.trained = [self.model.get_parameter(name) for name in names]
        self.groups: list[Group] | None = None  # made at a domain's first step

    def activate(self, domain: int) -> None:
        super().activate(domain)
        self.groups = None

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.kept.capture(self.model, self.domain.index)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(batch)
        if self.options.strength:
            terms["orthogonality"] = self.options.strength * self.overlap(like=terms["lm"])
        if self.options.norm:
            norms = [torch.linalg.vector_norm(each) for each in self.trained]  # whose gradient at 0 is 0
            terms["norm"] = self.options.norm * torch.stack(norms).sum()
        return terms

    def overlap(self, *, like: Tensor) -> Tensor:
        """L_orth over all layers and earlier domains; 0 in the first domain."""
        if not self.kept.domains:
            return torch.zeros_like(like)
        if self.groups is None:
            new = [self.model.get_parameter(name) for name in self.kept.names]
            earlier = [list(self.kept.weights(domain).values()) for domain in self.kept.domains]
            self.groups = group_by_width(new, earlier)
        return pair_overlap(self.groups, penalty=self.options.penalty)


class Attending(DomainScorer):
    """Scores all texts with all adapters, weighted by attention."""

    def __init__(self, router: SampleRouter, objective: Objective, attention: NamedTensors) -> None:
        super().__init__()
        self.router, self.objective, self.attention = router, objective, attention

    @property
    def all_sources(self) -> list[int]:
        return list(range(len(self.attention.named()))) or [BASE]

    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        nll = self.objective.nll(model, batch)
        weights = self.router.whole.exp()[batch["rows"]].T
        learning = len(weights) > len(self.all_sources)  # a domain's own adapter exists before it is kept
        self.record_weights(domain, [*range(len(weights))] if learning else self.all_sources, weights)
        return nll


def kept_attention(kept: Sequence[Tensor], width: int) -> Tensor:
    """The mean a of domains, [i + 1] or more each, zero-padded into one matrix [n, width]."""
    return torch.stack([torch.cat([each, each.new_zeros(width - len(each))]) for each in kept])


def attention_divergence(kept: Tensor, logits: Tensor) -> Tensor:
    """KL(p || a) (nats) of rows [n] from p [n, t] and log a [n, t]."""
    return (torch.xlogy(kept, kept) - kept * logits.to(kept)).sum(1)


class SAPT(ContinualMethod):
    """SAPT (Zhao et al., ACL 2024) and, with another key and query, MoCL (Wang et al., NAACL 2024): a new
    LoRA adapter per domain, all of them weighted by attention of the text to a key of each.

        h = W x + alpha / r sum_k a_k B_k A_k x,    a of the text (`cpt.adapters.routed_lora`)

        attention   L = L_lm + lambda 1/B sum over rows of domains i < t of KL(mean a of domain i || a(row))
        cosine      L = L_lm + lambda 1/B sum over rows of domain t of (1 - cos(e(row), k_t))

    Domain t trains its adapter, its key and the query; the mean a of each domain is that of its importance
    batches at its end, 0 for later adapters. The KL is on rows of `replay`, B rows per batch. No domain is
    known at test time."""

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

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.domain.index > 0:
            begin_routed(self.model, self.make_generator())

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
            terms[name] = self.options.strength * distances.sum() / batch["mean_rows"]
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
    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        router = router_of(self.model)
        sums = torch.zeros(len(router.keys) + 1, dtype=torch.double, device=self.device)
        for batch in importance_batches:
            self.objective.encode(self.model, batch)
            taken = router.whole.exp()[batch["rows"]].double()
            sums += torch.cat([taken.sum(0), taken.new_tensor([len(taken)])])
        all_reduce_sum(sums)
        mean = (sums[:-1] / sums[-1].clamp_min(1)).float()
        self.attention.update({str(self.domain.index): mean})

    def domain_modules(self, order: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        return {order[-1]: routed_part(self.model)}

    def diagnostics(self) -> dict[str, Tensor]:
        """The mean attention of each domain at its end (rows) to each adapter (columns)."""
        own = {"sapt/attention": kept_attention(self.kept, len(self.kept))} if self.kept else {}
        return super().diagnostics() | own
