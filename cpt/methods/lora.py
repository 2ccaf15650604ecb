"""LoRA (Hu et al., ICLR 2022): one adapter per linear layer for all domains (SeqLoRA), or one per domain.

    h = W x + alpha / r B A x,    W frozen, B = 0 at first                          (section 4.1)

All linear layers but the head have adapters, unless `targets` names others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.adapters.domain_store import BASE, DomainParams, DomainScorer
from cpt.adapters.options import StoredLoRAOptions, SummedLoRAOptions
from cpt.adapters.orthogonal_lora import ProtectedDirections
from cpt.adapters.plain_model import copy_without_tuners, save_without_tuners
from cpt.adapters.routed_lora import (
    SampleRouter,
    attach_experts,
    attach_routed,
    begin_routed,
    find_router,
    routed_part,
)
from cpt.adapters.saved_modules import train_fully
from cpt.core.distributed import all_reduce_sum
from cpt.core.exceptions import InvalidOptionError
from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import LoRAOptions, MoELoRAOptions, NLoRAOptions, OLoRAOptions, SAPTOptions
from cpt.methods.prompt import check_rows
from cpt.models.fsdp import named_weights
from cpt.models.objectives import Objective
from cpt.models.weights import overwrite_rows


class LoRA(ContinualMethod):
    """LoRA (Hu et al., ICLR 2022): one adapter per linear layer for all domains (SeqLoRA), or one
    `per_domain`, new or a copy of the last.

        h = W x + alpha / r B A x,    W frozen, B = 0 at first                          (section 4.1)

    With `protected_rank` it is OPLoRA (cpt.adapters.orthogonal_lora)."""

    keeps_base = True
    takes_quantized = True
    options: SummedLoRAOptions

    def __init__(self, options: SummedLoRAOptions, context: MethodContext) -> None:
        scope = lora.attach_lora(
            context.model,
            r=options.r,
            alpha=options.alpha,
            dropout=options.lora_dropout,
            targets=options.targets,
            embeddings=options.embeddings,
            parameters=options.target_parameters,
            use_dora=options.use_dora,
            initialization=options.init_lora_weights,
        )
        if options.export_format == "peft":
            lora.check_loadable(context.model)
        saved_names = train_fully(context.model, options.modules_to_save)
        scope = replace(scope, names=(*scope.names, *saved_names))
        super().__init__(options, context, scope=scope)
        self.saved_names = saved_names
        self.protected_directions: ProtectedDirections | None = None
        if isinstance(options, LoRAOptions) and options.protected_rank:
            self.protected_directions = ProtectedDirections(self.model, rank=options.protected_rank)
            self.protected_directions.project_adapters(self.model, self.rounding)
        if isinstance(options, LoRAOptions) and options.per_domain:
            self.use_domain_params(DomainParams(self.model, scope.names), options.routing)

        # Files of peft refer to a base, in which trained modules and the weights of PiSSA are as at first.
        self.start_weights: NamedTensors | None = None
        start_names = scope.names if options.has_pissa else saved_names
        if options.export_format == "peft" and start_names:
            start = {name: self.model.get_parameter(name) for name in start_names}
            self.start_weights = NamedTensors(start, persistent=False)

    @property
    def rewritten(self) -> list[nn.Parameter]:
        # PiSSA has taken its adapters out of them.
        return list(self.adapted_weights().values()) if self.options.has_pissa else []

    def adapted_weights(self) -> dict[str, nn.Parameter]:
        """The frozen weights that have adapters, by name."""
        weights = named_weights(self.model)
        names_by_id = {id(weight): name for name, weight in weights.items()}
        adapted = {}
        for layer in lora.find_lora_layers(self.model).values():
            weight = lora.get_adapted_weight(layer)
            adapted[names_by_id[id(weight)]] = weight
        return adapted

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        # The first domain has the adapter that was drawn when it was attached.
        if self.domain_params is None or self.domain.index == 0:
            return
        if isinstance(self.options, LoRAOptions) and self.options.start == "base":
            self.restart()
        if self.protected_directions is not None:
            self.protected_directions.project_adapters(self.model, self.rounding)

    def transform_gradients(self, optimizer: Optimizer) -> None:
        if self.protected_directions is not None:
            self.protected_directions.project_gradients(self.model)

    def after_update(self) -> None:
        if self.protected_directions is not None:
            self.protected_directions.project_adapters(self.model, self.rounding)

    def restart(self) -> None:
        """Starts the parameters of a new domain from the base."""
        assert self.domain_params is not None
        restored_names = set(self.saved_names)
        if self.options.has_pissa:
            # PiSSA computes adapters from the weights and draws nothing: they are the base's again.
            restored_names.update(self.domain_params.names)
        else:
            lora.reset_newest(self.model, self.make_generator().initial_seed())
        base = self.domain_params.weights(BASE)
        overwrite_rows(self.model, {name: base[name] for name in restored_names})

    def model_for(self, domain: int) -> PreTrainedModel:
        return copy_without_tuners(self.copy_for(domain))

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.options.export_format == "merged":
            return save_without_tuners(folder, self.model, weights=self.exported_weights(order))
        # One adapter per domain, or one of all ranks: the earlier ones of IncLoRA add to the newest.
        adapters: Mapping[str, Mapping[str, Tensor]]
        if self.domain_params is None:
            saved = {name: self.model.get_parameter(name) for name in self.saved_names}
            adapters = {order[-1]: {**lora.join_all_adapters(self.model), **saved}}
        else:
            adapters = self.domain_modules(order)
        start = {} if self.start_weights is None else self.start_weights.named()
        return lora.export_adapters(folder, self.model, adapters, start=start, saved=self.saved_names)


class IncLoRA(LoRA):
    """IncLoRA: a new LoRA adapter for each domain, added to the frozen ones of all domains before it; the
    baseline of O-LoRA (Wang et al., Findings of EMNLP 2023).

        h = W x + alpha / r (sum_{k<t} B_k A_k x + B_t A_t x),    of which A_t and B_t are trained"""

    options: StoredLoRAOptions

    def __init__(self, options: StoredLoRAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        lora.resize_on_load(self.model)

    @property
    def rewritten(self) -> list[nn.Parameter]:
        if self.options.adapter_storage == "merged":
            return list(self.adapted_weights().values())
        return super().rewritten

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.domain.index > 0:
            lora.begin_adapter(
                self.model, storage=self.options.adapter_storage, seed=self.make_generator().initial_seed()
            )


class MoELoRA(ContinualMethod):
    """MoELoRA: a mixture of LoRA adapters for all domains, the baseline of MIGU (Du et al., 2024).

        h = W x + alpha / r sum_e g_e(x) B_e A_e x,    g(x) = softmax(W_g x) [E]

    E adapters and a router W_g [E, d_in] per linear layer are trained through all domains, W frozen. Gates
    are per token and over all adapters: no token is dropped, nothing is balanced."""

    keeps_base = True
    takes_quantized = True
    options: MoELoRAOptions

    def __init__(self, options: MoELoRAOptions, context: MethodContext) -> None:
        attach = partial(
            attach_experts,
            experts=options.num_experts,
            r=options.r,
            alpha=options.alpha,
            dropout=options.lora_dropout,
            targets=options.targets,
            initialization=options.init_lora_weights,
        )
        scope = attach(context.model)
        saved_names = train_fully(context.model, options.modules_to_save)
        super().__init__(options, context, scope=replace(scope, names=(*scope.names, *saved_names)))
        self.saved_names = saved_names
        self.attached = attach_experts, attach.keywords  # what loads an exported model repeats


FactorPair = tuple[Tensor, Tensor]  # A [r, d_in], B [d_out, r]


class _ProductNorm(torch.autograd.Function):
    """||B A||_1. The gradients sign(B A) A^T and B^T sign(B A) are computed in the forward pass, so that only
    one product at a time is in memory."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        wide_dtype = torch.promote_types(a.dtype, torch.float32)  # the sum is of as many terms as W has
        with torch.autocast(a.device.type, enabled=False):
            wide_a = a.to(wide_dtype)
            wide_b = b.to(wide_dtype)
            product = wide_b @ wide_a
            signs = product.sign()
            ctx.save_for_backward((wide_b.T @ signs).to(a), (signs @ wide_a.T).to(b))
            return product.abs_().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> FactorPair:
        gradient_of_a, gradient_of_b = ctx.saved_tensors
        return gradient * gradient_of_a, gradient * gradient_of_b


def product_norm(pairs: Iterable[FactorPair]) -> Tensor:
    """The sum over the pairs of A and B of ||B A||_1, a scalar."""
    return torch.stack([_ProductNorm.apply(a, b) for a, b in pairs]).sum()


def factors_norm(pairs: Iterable[FactorPair]) -> Tensor:
    """The sum over the pairs of A and B and their ranks i of ||b_i||_1 ||a_i||_1, a scalar."""
    norms = []
    for a, b in pairs:
        norms_by_rank = b.abs().sum(0, dtype=torch.float) * a.abs().sum(1, dtype=torch.float)
        norms.append(norms_by_rank.sum())
    return torch.stack(norms).sum()


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
            newest: list[FactorPair] = []
            for layer in lora.find_lora_layers(self.model).values():
                newest += lora.map_factors(layer)
            norm = product_norm if self.options.penalty == "product" else factors_norm
            terms["sparsity"] = self.options.strength * norm(newest)
        return terms


@dataclass(frozen=True)
class WidthGroup:
    """The A of G layers of E experts (1: of a matrix) with the same input width d."""

    newest: list[Tensor]  # [E r, d] each
    earlier: Tensor  # those of t earlier domains along the rank, [G E, t r, d]
    num_experts: int


def pair_overlap(groups: Iterable[WidthGroup], *, penalty: str) -> Tensor:
    """Sum over maps, earlier domains and entries of |A_k A_t^T| or its square, a scalar."""
    # One product per width, not one per layer and earlier domain.
    terms = []
    for group in groups:
        newest = torch.stack(group.newest).unflatten(1, (group.num_experts, -1)).flatten(0, 1)
        products = torch.bmm(group.earlier, newest.transpose(1, 2)).float()
        terms.append(products.abs().sum() if penalty == "l1" else products.square().sum())
    return torch.stack(terms).sum()


def group_by_width(
    newest: Sequence[Tensor], earlier: Sequence[Sequence[Tensor]], experts: Sequence[int]
) -> list[WidthGroup]:
    """Groups layers by width and number of experts, from A of all layers, of the current domain and of each
    earlier one."""
    layers_by_shape: dict[tuple[int, int], list[int]] = {}
    for layer, a in enumerate(newest):
        layers_by_shape.setdefault((a.shape[1], experts[layer]), []).append(layer)

    groups = []
    for (_, num_experts), layers in layers_by_shape.items():
        earlier_by_layer = []
        for layer in layers:
            by_expert = [factors[layer].unflatten(0, (num_experts, -1)) for factors in earlier]
            earlier_by_layer.append(torch.cat(by_expert, dim=1))  # [E, t r, d]
        newest_factors = [newest[layer] for layer in layers]
        groups.append(WidthGroup(newest_factors, torch.cat(earlier_by_layer), num_experts))
    return groups


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
        names_of_a = [name for name in self.scope.names if ".lora_A." in name or "embedding_A" in name]
        self.domain_factors = DomainParams(self.model, names_of_a)  # A of each domain at its end
        self.experts: list[int] = []  # of each A
        for name in names_of_a:
            layer = cast(LoraLayer, self.model.get_submodule(name.partition(".lora_")[0]))
            self.experts.append(lora.count_experts(layer))
        self.groups: list[WidthGroup] | None = None  # made at a domain's first step

    def activate(self, domain: int) -> None:
        super().activate(domain)
        self.groups = None  # they have the A of the domains before this one

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        # A alone is stored; B is in the frozen weights, or with the earlier adapters.
        self.domain_factors.capture(self.model, self.domain.index)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(batch)
        if self.options.strength:
            terms["orthogonality"] = self.options.strength * self.overlap(like=terms["lm"])
        if self.options.norm:
            # The gradient of a norm at 0 is 0.
            norms = []
            for layer in lora.find_lora_layers(self.model).values():
                for factors in lora.map_factors(layer):
                    norms += [torch.linalg.vector_norm(factor) for factor in factors]
            terms["norm"] = self.options.norm * torch.stack(norms).sum()
        return terms

    def overlap(self, *, like: Tensor) -> Tensor:
        """L_orth over all layers and earlier domains, a scalar; 0 in the first domain."""
        domains = self.domain_factors.domains
        if not domains:
            return torch.zeros_like(like)
        if self.groups is None:
            newest = [self.model.get_parameter(name) for name in self.domain_factors.names]
            earlier = [list(self.domain_factors.weights(domain).values()) for domain in domains]
            self.groups = group_by_width(newest, earlier, self.experts)
        return pair_overlap(self.groups, penalty=self.options.penalty)


def check_outside_of_body(model: PreTrainedModel, names: Sequence[str], modules: Sequence[str]) -> None:
    """Raises ValueError for parameters of the body that are trained fully: the keys of earlier domains are
    compared with texts as the frozen body represents them."""
    body_ids = {id(parameter) for parameter in model.base_model.parameters()}
    for name in names:
        if id(model.get_parameter(name)) in body_ids:
            raise InvalidOptionError(
                "method.modules_to_save",
                modules,
                context="with method=sapt",
                reason=f"{name} represents the texts that the keys of earlier domains are for",
                allowed="a head that is not tied to the embedding, or []",
            )


class AttentionScorer(DomainScorer):
    """Scores all texts with all adapters, weighted by attention."""

    def __init__(self, router: SampleRouter, objective: Objective, attention: NamedTensors) -> None:
        super().__init__()
        self.router = router
        self.objective = objective
        self.attention = attention

    @property
    def all_sources(self) -> list[int]:
        return list(range(len(self.attention.named()))) or [BASE]

    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        nll = self.objective.nll(model, batch)
        weights = self.router.row_log_weights.exp()[batch["rows"]].T  # [t, K]
        sources = self.all_sources
        # Within a domain its adapter is there, and its mean attention, by which domains are counted, not yet.
        if len(weights) > len(sources):
            sources = list(range(len(weights)))
        self.record_weights(domain, sources, weights)
        return nll


def pad_attention(means: Sequence[Tensor], width: int) -> Tensor:
    """The mean a of domains, [i + 1] or more each, zero-padded into one matrix [n, width]."""
    return torch.stack([torch.cat([mean, mean.new_zeros(width - len(mean))]) for mean in means])


def attention_divergence(means: Tensor, log_weights: Tensor) -> Tensor:
    """KL(p || a) (nats) of rows [n] from p [n, t] and log a [n, t]."""
    return (torch.xlogy(means, means) - means * log_weights.to(means)).sum(1)


class SAPT(ContinualMethod):
    """SAPT (Zhao et al., ACL 2024) and, with another key and query, MoCL (Wang et al., NAACL 2024): a new
    LoRA adapter per domain, all of them weighted by attention of the text to a key of each.

        h = W x + alpha / r sum_k a_k B_k A_k x,    a of the text (`cpt.adapters.routed_lora`)

        attention   L = L_lm + lambda 1/B sum over rows of domains i < t of KL(mean a of domain i || a(row))
        cosine      L = L_lm + lambda 1/B sum over rows of domain t of (1 - cos(e(row), k_t))

    Domain t trains its adapter, its key and the query; the mean a of each domain is that of its importance
    batches at its end, 0 for later adapters. The KL is on rows of `replay`, B rows per batch. No domain is
    known at test time."""

    keeps_base = True
    takes_quantized = True
    options: SAPTOptions
    reads_importance_batches = True

    def __init__(self, options: SAPTOptions, context: MethodContext) -> None:
        check_rows(context, "method=sapt, whose adapters are weighed for each row of a batch")
        attach = partial(
            attach_routed,
            r=options.r,
            alpha=options.alpha,
            dropout=options.lora_dropout,
            targets=options.targets,
            initialization=options.init_lora_weights,
            key=options.key,
            query=options.query,
            bottleneck=options.bottleneck,
            scale=options.scale,
            causal=context.objective.causal,
        )
        scope = attach(context.model)
        saved_names = train_fully(context.model, options.modules_to_save)
        check_outside_of_body(context.model, saved_names, options.modules_to_save)
        super().__init__(options, context, scope=replace(scope, names=(*scope.names, *saved_names)))
        self.saved_names = saved_names
        self.attached = attach_routed, attach.keywords  # what loads an exported model repeats
        self.attention = NamedTensors()  # mean a of each domain's text at the domain's end
        self.router = AttentionScorer(find_router(self.model), context.objective, self.attention)

    @property
    def mean_attention(self) -> list[Tensor]:
        """The mean a of each domain so far, [t] each."""
        named = self.attention.named()
        return [named[str(domain)] for domain in range(len(named))]

    def rates(self) -> dict[nn.Parameter, float]:
        # A new adapter adds 0 at first: trained as fast, attention would return to earlier adapters, and the
        # new one would never train.
        parameters = find_router(self.model).parameters()
        return {parameter: self.options.key_rate for parameter in parameters if parameter.requires_grad}

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.domain.index > 0:
            begin_routed(self.model, self.make_generator())

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(batch)
        if self.options.strength == 0:
            return terms
        # 1/B with the rows of a mean micro-batch: cut into micro-batches, a batch has the same mean.
        if self.options.key == "attention":
            divergences = self.earlier_divergences(batch)
            terms["reflection"] = self.options.strength * divergences.sum() / batch["mean_rows"]
        else:
            distances = self.key_distances(batch)
            terms["matching"] = self.options.strength * distances.sum() / batch["mean_rows"]
        return terms

    def earlier_divergences(self, batch: Batch) -> Tensor:
        """KL(p || a) of each row of an earlier domain in the last forward pass, [n]: a is the row's attention
        over the modules, p the mean attention of its domain."""
        domains = batch["domains"]  # [B], -1: general text
        log_weights = find_router(self.model).row_log_weights  # log a, [B, modules]
        is_earlier = (domains >= 0) & (domains < self.domain.index)
        # In the first domain no row is of an earlier one, and there is no mean a to compare with.
        if not is_earlier.any():
            return log_weights[:0, 0]
        means = pad_attention(self.mean_attention, log_weights.shape[1]).to(log_weights)
        return attention_divergence(means[domains[is_earlier]], log_weights[is_earlier])

    def key_distances(self, batch: Batch) -> Tensor:
        """1 - cos(e, k_t) of each row of the current domain in the last forward pass, [n]."""
        cosines = find_router(self.model).cosines  # [B, 1 or T, t]
        assert cosines is not None
        newest = cosines[:, -1, -1]  # at the last place, of the whole row; the newest key is the last
        return 1 - newest[batch["domains"] == self.domain.index]

    @torch.no_grad()
    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        router = find_router(self.model)
        # The sum over scored positions of the weights a of their rows, by adapter, and as a last entry the
        # number of positions: in one tensor, so that all processes add them up at once.
        sums = torch.zeros(len(router.keys) + 1, dtype=torch.double, device=self.device)
        for batch in importance_batches:
            self.objective.encode(self.model, batch)  # in the pass the router computes the weights
            weights = router.row_log_weights.exp()[batch["rows"]].double()
            sums += torch.cat([weights.sum(0), weights.new_tensor([len(weights)])])
        all_reduce_sum(sums)
        mean = (sums[:-1] / sums[-1].clamp_min(1)).float()
        self.attention.update({str(self.domain.index): mean})

    def domain_modules(self, order: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        return {order[-1]: routed_part(self.model)}

    def diagnostics(self) -> dict[str, Tensor]:
        """The mean attention of each domain at its end (rows) to each adapter (columns)."""
        diagnostics = super().diagnostics()
        means = self.mean_attention
        if means:
            diagnostics["sapt/attention"] = pad_attention(means, len(means))
        return diagnostics
