"""Methods whose domains have experts, copies of earlier ones at first: DEMIX and Lifelong-MoE."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cpt.adapters import export
from cpt.adapters.bottleneck import attach_bottlenecks
from cpt.adapters.domain_store import BASE, DomainParams, Router, Scope
from cpt.adapters.experts import (
    MIXTURE,
    GatedScorer,
    MoELayer,
    attach_mixtures,
    choose_blocks,
    mixtures_of,
    scope_beside,
    with_newest,
    working,
)
from cpt.core.distributed import all_reduce_sum
from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.data.options import Domain
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import DEMIXOptions, LifelongMoEOptions
from cpt.models.forward import TARGET_TOKENS, kl_divergence, set_mode, token_nll
from cpt.models.fsdp import named_weights, reshard
from cpt.models.units import find_sublayers
from cpt.models.weights import swap_weights

RECORD = ("sources", "perplexities")


class CopyingMethod(ContinualMethod):
    """A method whose new modules are copies of the base's, of the last domain's, or of those `nearest` to
    the domain, by `options.start`. `sources` [domains]: the domain (-1: the base) that each was copied from;
    `perplexities`: those of the last domain's importance batches with each candidate."""

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

    def choose_source(
        self, importance_batches: Iterable[Batch], learned: Sequence[int], *, base: bool
    ) -> int:
        """The domain whose modules are copied, noted in `sources`; `base` says whether the base competes."""
        candidates = [BASE]
        if self.options.start != "base" and learned:
            nearest = self.options.start == "nearest"
            candidates = [*([BASE] * base), *learned] if nearest else [learned[-1]]
        if self.options.start == "nearest":
            self.perplexities = self.measure(importance_batches, candidates)
        ranked = zip(self.perplexities.tolist() or [0.0], candidates, strict=True)
        source = min(ranked, key=lambda pair: pair[0])[1]
        earlier = self.sources[: self.domain.index]
        self.sources = torch.cat([earlier, earlier.new_tensor([source])])
        return source

    @torch.no_grad()
    def measure(self, importance_batches: Iterable[Batch], candidates: Sequence[int]) -> Tensor:
        """The perplexity with each candidate on the probes of all processes, [candidates] in 64 bits."""
        sums = torch.zeros(len(candidates) + 1, dtype=torch.double, device=self.device)
        with set_mode(self.model, training=False):
            for batch in importance_batches:
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
    """DEMIX (Gururangan et al., NAACL 2022, sections 3 and 6): an expert for each domain.

        expert_t <- expert_k,    k = argmin_j PPL(D_t | expert_j)    over the experts so far, and the base

    Then domain t trains expert_t only: the feed-forward network of every block (`ffn`), or an adapter (the
    baseline of Ke et al., ICLR 2023). `routing` selects what scores a text: the domain's own expert or a
    mixture by posterior. As in the paper's DEMix-DAPT the trunk is the frozen base, and the base's FFN a
    first expert."""

    options: DEMIXOptions
    domain_params: DomainParams
    router: Router

    def __init__(self, options: DEMIXOptions, context: MethodContext) -> None:
        if options.experts == "adapter":
            scope = attach_bottlenecks(context.model, **options.bottleneck)
        else:  # weights and biases of the linear layers of every block's FFN
            maps = [each for ffn in find_sublayers(context.model, ("neurons",)) for each in ffn.projections]
            names = [f"{each.name}.{name}" for each in maps for name, _ in each.module.named_parameters()]
            scope = Scope(tuple(names), tuple(maps))
        super().__init__(options, context, scope)
        adapted = options.experts == "adapter"
        self.attached = (attach_bottlenecks, options.bottleneck) if adapted else (None, {})
        self.use_domain_params(DomainParams(self.model, scope.names), options.routing)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        learned, base = self.domain_params.domains, self.router.routing.base
        self.domain_params.load_into(self.model, self.choose_source(importance_batches, learned, base=base))

    def holding(self, domain: int) -> AbstractContextManager:
        return swap_weights(self.model, self.domain_params.weights(domain))

    def diagnostics(self) -> dict[str, Tensor]:
        return super().diagnostics() | self.recorded("demix")


class LifelongMoE(CopyingMethod):
    """Lifelong-MoE (Chen et al., ICML 2023): FFNs that are mixtures of experts gain experts for each domain.

        L = L_lm + lambda KL(f_{t-1} || f_t) + alpha / M sum over the M mixtures of E sum_e s_e P_e

    on text of domain t alone; KL is the mean over the scored positions. Domain t trains its experts, their
    router rows and, unless frozen, all outside of mixtures (`dense`); earlier experts and rows keep their
    bits. Tokens are routed (`cpt.adapters.experts`): no domain is known at test time. The base's FFN is
    expert 0, new experts are copies of earlier ones that open over the first steps (`opening`), so that f_t
    starts as f_{t-1}.

    The last term balances tokens over experts (GShard, Lepikhin et al., ICLR 2021, algorithm 1, times E^2 as
    in Fedus et al., JMLR 2022, eq. 4): P_e is the mean of softmax(z)_e over a step's tokens, s_e the share of
    tokens whose first choice is e, in the previous step over its whole batch; uniform at a domain's first.

    `teacher` are the dense parts before the domain, where the distillation needs them; `shares` has s of all
    mixtures, [M, E]."""

    options: LifelongMoEOptions

    def __init__(self, options: LifelongMoEOptions, context: MethodContext) -> None:
        scope = None
        if options.num_experts:
            blocks = choose_blocks(context.model, context.freeze, every=options.every)
            scope = scope_beside(context.model, blocks) if options.dense == "trained" else Scope((), ())
            attach_mixtures(context.model, blocks=blocks, top_k=options.top_k)
        super().__init__(options, context, scope and with_newest(context.model, scope))
        self.beside_mixtures = scope
        if self.mixtures:
            self.router = GatedScorer(self.model, context.objective)
        self.teacher = NamedTensors(self.dense() if options.strength else {})
        self.shares = NamedTensors()
        self.firsts: Tensor | None = None  # of the current step so far, [M, E]

    @property
    def mixtures(self) -> list[MoELayer]:
        return [*mixtures_of(self.model).values()]

    def expand(self, stage: Domain) -> None:
        for mixture in self.mixtures:
            mixture.grow(self.options.num_experts)
        if self.beside_mixtures is not None:
            self.scope = with_newest(self.model, self.beside_mixtures)

    def dense(self) -> dict[str, nn.Parameter]:
        """The trained parameters outside of mixtures, by name."""
        weights, frozen = named_weights(self.model), {id(parameter) for parameter in self.frozen}
        names = weights if self.beside_mixtures is None else self.beside_mixtures.names
        return {name: weights[name] for name in names if id(weights[name]) not in frozen}

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.mixtures:
            source = self.choose_source(importance_batches, range(self.domain.index), base=True)
            reshard(self.model)
            for mixture in self.mixtures:
                mixture.copy(source)
        if self.options.strength:
            self.teacher.update(self.dense())
        self.shares.clear()
        self.firsts = None

    def holding(self, domain: int) -> AbstractContextManager:
        return working(self.model, domain)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        self.open(self.progress)
        if not self.options.strength:
            return super().losses(batch) | self.balanced(batch)
        logits = self.objective.outputs(self.model, batch)[0]
        terms = {"lm": token_nll(logits, batch).sum() * batch["weight"]} | self.balanced(batch)
        last = len(self.mixtures[0].groups) - 1 if self.mixtures else BASE
        weights = swap_weights(self.model, self.teacher.named())
        experts = working(self.model, last, before=True)
        with torch.no_grad(), set_mode(self.model, training=False), weights, experts:
            taught = self.objective.outputs(self.model, batch)[0]
        apart = kl_divergence(taught, logits).sum() * batch["weight"]
        return terms | {"kd": self.options.strength * apart}

    def open(self, progress: float) -> None:
        """Opens the newest experts by the share of the domain's steps."""
        share = self.options.opening
        for mixture in self.mixtures:
            mixture.opening = min(1.0, progress / share) if share else 1.0

    def balanced(self, batch: Batch) -> dict[str, Tensor]:
        """The balance term of the last forward pass; also accumulates its first choices."""
        mixtures = self.mixtures
        if not mixtures or not self.options.balance:
            return {}
        firsts = torch.stack([each.noted.firsts for each in mixtures])
        self.firsts = firsts if self.firsts is None else self.firsts + firsts
        shares = self.shares.named().get("firsts")
        known = torch.full_like(firsts, 1 / firsts.shape[1], dtype=torch.float) if shares is None else shares
        read, written = self.objective.sides(self.length)  # tokens of a full row
        terms = []
        for each, own in zip(mixtures, self.shares.on_module_device(known), strict=True):
            tokens = written if each.side == TARGET_TOKENS and written is not None else read
            probabilities = each.noted.probabilities.sum(0)
            # E sum_e s_e P_e
            balance = len(own) * (own.to(probabilities) * probabilities).sum()
            terms.append(balance / (tokens * batch["mean_rows"]))
        return {"balance": self.options.balance * torch.stack(terms).mean()}

    def on_gradients_ready(self) -> None:
        if self.firsts is not None:
            firsts, self.firsts = self.firsts, None
            all_reduce_sum(firsts)
            self.shares.update({"firsts": (firsts / firsts.sum(1, keepdim=True)).float()})

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.open(1.0)
        super().after_domain(importance_batches)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if not self.mixtures:
            return super().export(folder, order)
        groups = [len(group.experts) for group in self.mixtures[0].groups]
        blocks = [name.removesuffix(f".{MIXTURE}") for name in mixtures_of(self.model)]
        how = {"blocks": blocks, "top_k": self.options.top_k, "groups": groups}
        names = tuple(f"{name}." for name in mixtures_of(self.model))
        part = {n: p for n, p in self.model.named_parameters() if n.startswith(names)}
        return export.export_parts(folder, self.model, {order[-1]: part}, attach=attach_mixtures, options=how)

    def diagnostics(self) -> dict[str, Tensor]:
        shares = {f"lifelong_moe/{name}": each for name, each in self.shares.named().items()}
        return super().diagnostics() | self.recorded("lifelong_moe") | shares
