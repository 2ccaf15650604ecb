"""Methods whose domains have experts, copies of earlier ones at first: DEMIX and Lifelong-MoE."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters import export
from cpt.adapters.bottleneck import attach_bottlenecks
from cpt.adapters.domain_store import BASE, DomainParams, Router, Scope
from cpt.adapters.experts import (
    MIXTURE,
    GatedScorer,
    MoELayer,
    attach_mixtures,
    choose_blocks,
    extend_to_newest,
    find_mixtures,
    make_scope_outside_ffns,
    use_experts,
)
from cpt.core.distributed import all_reduce_sum
from cpt.core.exceptions import InvalidOptionError
from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.data.options import Domain
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import DEMIXOptions, LifelongMoEOptions
from cpt.models.chunked_head import Logits, WeightedLoss
from cpt.models.forward import TARGET_TOKENS, kl_divergence, set_mode
from cpt.models.fsdp import named_weights, reshard
from cpt.models.units import Projection, find_projections, find_sublayers
from cpt.models.weights import swap_weights


class CopyingMethod(ContinualMethod):
    """A method whose new modules are copies of the base's, of the last domain's, or of those `nearest` to
    the domain, by `options.start`. `sources` [domains]: the domain (-1: the base) that each was copied from;
    `perplexities`: those of the last domain's importance batches with each candidate."""

    keeps_base = True
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
    def use_modules_of(self, domain: int) -> AbstractContextManager:
        """A context in which the model has the modules of one domain (-1: the base)."""

    def choose_source(
        self, importance_batches: Iterable[Batch], learned: Sequence[int], *, includes_base: bool
    ) -> int:
        """The domain whose modules are copied, recorded in `sources`; with `includes_base` the base is a
        candidate, too."""
        candidates = self.list_candidates(learned, includes_base=includes_base)
        if self.options.start == "nearest":
            self.perplexities = self.measure_perplexities(importance_batches, candidates)
            perplexities = self.perplexities.tolist()
            source = candidates[perplexities.index(min(perplexities))]
        else:
            [source] = candidates

        # Cut first: a domain that is started again replaces its entry.
        earlier_sources = self.sources[: self.domain.index]
        self.sources = torch.cat([earlier_sources, earlier_sources.new_tensor([source])])
        return source

    def list_candidates(self, learned: Sequence[int], *, includes_base: bool) -> list[int]:
        """The domains whose modules may be copied."""
        if self.options.start == "base" or not learned:
            return [BASE]
        if self.options.start != "nearest":
            return [learned[-1]]
        return [BASE, *learned] if includes_base else list(learned)

    @torch.no_grad()
    def measure_perplexities(self, importance_batches: Iterable[Batch], candidates: Sequence[int]) -> Tensor:
        """The perplexity with each candidate on the importance batches of all processes, [candidates] in 64
        bits."""
        # In one tensor, so that all processes add them up at once: each candidate's sum of losses, then the
        # number of scored tokens. `loss_sums` and `num_tokens` are views of it.
        sums = torch.zeros(len(candidates) + 1, dtype=torch.double, device=self.device)
        loss_sums = sums[:-1]
        num_tokens = sums[-1:]
        with set_mode(self.model, training=False):
            for batch in importance_batches:
                for index, domain in enumerate(candidates):
                    with self.use_modules_of(domain):
                        loss_sums[index] += self.objective.nll(self.model, batch).sum()
                num_tokens += len(batch["positions"])
        all_reduce_sum(sums)
        return (loss_sums / num_tokens.clamp_min(1)).exp()

    def copy_diagnostics(self, prefix: str) -> dict[str, Tensor]:
        """The diagnostics of copies, PREFIX/sources and PREFIX/perplexities."""
        diagnostics = {}
        if len(self.sources):
            diagnostics[f"{prefix}/sources"] = self.sources
        if len(self.perplexities):
            diagnostics[f"{prefix}/perplexities"] = self.perplexities
        return diagnostics

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        # torch loads into buffers of the same shape only; these grow with the domains.
        for name in ("sources", "perplexities"):
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
    reads_importance_batches = True
    domain_params: DomainParams
    router: Router

    def __init__(self, options: DEMIXOptions, context: MethodContext) -> None:
        has_adapters = options.experts == "adapter"
        if has_adapters:
            scope = attach_bottlenecks(context.model, **options.bottleneck)
        else:
            try:
                scope = make_ffn_scope(context.model)
            except ValueError as error:  # a mixture of experts, or an FFN of unknown form
                raise InvalidOptionError(
                    "method.experts", "ffn", reason=str(error), allowed="adapter"
                ) from error
        super().__init__(options, context, scope)
        if has_adapters:
            self.attached = attach_bottlenecks, options.bottleneck
        else:
            # FFNs are weights of a plain model: nothing is added to it before they are loaded.
            self.attached = None, {}
        self.use_domain_params(DomainParams(self.model, scope.names), options.routing)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        # The base competes where the mixture that scores text has it as an expert.
        source = self.choose_source(
            importance_batches, self.domain_params.domains, includes_base=self.router.routing.base
        )
        self.domain_params.load_into(self.model, source)

    def use_modules_of(self, domain: int) -> AbstractContextManager:
        return swap_weights(self.model, self.domain_params.weights(domain))

    def diagnostics(self) -> dict[str, Tensor]:
        return super().diagnostics() | self.copy_diagnostics("demix")


def make_ffn_scope(model: PreTrainedModel) -> Scope:
    """The weights and biases of the linear layers of every block's FFN."""
    projections: list[Projection] = []
    for ffn in find_sublayers(model, ("neurons",)):
        projections += ffn.projections
    names = []
    for layer in projections:
        names += [f"{layer.name}.{name}" for name, _ in layer.module.named_parameters()]
    return Scope(tuple(names), tuple(projections))


def check_ffns(model: PreTrainedModel, options: LifelongMoEOptions) -> None:
    """Raises ValueError for a model whose FFNs cannot become mixtures, such as mixtures, and for trained
    layers of unknown form."""
    try:
        find_sublayers(model, ("neurons",))
    except ValueError as error:
        raise InvalidOptionError(
            "method.num_experts", options.num_experts, reason=str(error), allowed="0"
        ) from error

    if options.dense == "frozen":
        return
    try:
        find_projections(model)
    except ValueError as error:
        raise InvalidOptionError("method.dense", "trained", reason=str(error), allowed="frozen") from error


def find_dense_scope(model: PreTrainedModel, blocks: Sequence[str], *, dense: str) -> Scope:
    """What is trained of a model outside of the FFNs of some blocks, which become mixtures: all of it, or
    with dense=frozen nothing."""
    if dense == "frozen":
        return Scope(names=(), projections=())
    return make_scope_outside_ffns(model, blocks)


class LifelongMoE(CopyingMethod):
    """Lifelong-MoE (Chen et al., ICML 2023): FFNs that are mixtures of experts gain experts for each domain.

        L = L_lm + lambda KL(f_{t-1} || f_t) + alpha / M sum over the M mixtures of E sum_e s_e P_e

    on text of domain t alone; KL is the mean over the scored positions. Domain t trains its experts, their
    router rows and, unless frozen, all outside of mixtures (`dense`); earlier experts and rows keep their
    bits. Tokens are routed (`cpt.adapters.experts`): no domain is known at test time. The base's FFN is
    expert 0, new experts are copies of earlier ones that open over the first steps (`fade_in`), so that f_t
    starts as f_{t-1}.

    The last term balances tokens over experts (GShard, Lepikhin et al., ICLR 2021, algorithm 1, times E^2 as
    in Fedus et al., JMLR 2022, eq. 4): P_e is the mean of softmax(z)_e over a step's tokens, s_e the share of
    tokens whose first choice is e, in the previous step over its whole batch; uniform at a domain's first.

    `teacher` are the dense parts before the domain, where the distillation needs them;
    `first_choice_shares` has s of all mixtures, [M, E]."""

    options: LifelongMoEOptions
    reads_importance_batches = True

    def __init__(self, options: LifelongMoEOptions, context: MethodContext) -> None:
        # A scope of None: without mixtures all of the model is trained.
        scope = None
        scope_outside_mixtures = None
        if options.num_experts:
            check_ffns(context.model, options)
            blocks = choose_blocks(context.model, context.freeze, interval=options.moe_every_n_blocks)
            scope_outside_mixtures = find_dense_scope(context.model, blocks, dense=options.dense)
            attach_mixtures(context.model, blocks=blocks, top_k=options.top_k)
            scope = extend_to_newest(context.model, scope_outside_mixtures)
        super().__init__(options, context, scope)

        self.scope_outside_mixtures = scope_outside_mixtures
        if self.mixtures:
            self.router = GatedScorer(self.model, context.objective)
        self.teacher = NamedTensors(self.dense_weights() if options.strength else {})
        self.first_choice_shares = NamedTensors()
        self.first_choices: Tensor | None = None  # of the current step so far, [M, E]

    @property
    def mixtures(self) -> list[MoELayer]:
        return list(find_mixtures(self.model).values())

    @property
    def constant_weights(self) -> list[nn.Parameter]:
        # The FFNs of mixtures are in the scope only as long as there are no other experts.
        constant = dict.fromkeys(super().constant_weights)
        for mixture in self.mixtures:
            for layer in mixture.ffn_layers:
                constant.update(dict.fromkeys(layer.module.parameters()))
        return list(constant)

    def expand(self, stage: Domain) -> None:
        for mixture in self.mixtures:
            mixture.grow(self.options.num_experts)
        if self.scope_outside_mixtures is not None:
            self.scope = extend_to_newest(self.model, self.scope_outside_mixtures)

    def dense_weights(self) -> dict[str, nn.Parameter]:
        """The trained parameters outside of mixtures, by name."""
        weights = named_weights(self.model)
        frozen = {id(parameter) for parameter in self.frozen}
        names = weights if self.scope_outside_mixtures is None else self.scope_outside_mixtures.names
        return {name: weights[name] for name in names if id(weights[name]) not in frozen}

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.mixtures:
            source = self.choose_source(importance_batches, range(self.domain.index), includes_base=True)
            reshard(self.model)  # passes leave weights gathered, and copies into gathered weights are lost
            for mixture in self.mixtures:
                mixture.copy_group(source)
        # f_{t-1}, as the dense parts are trained in place; earlier experts keep their bits.
        if self.options.strength:
            self.teacher.update(self.dense_weights())
        self.first_choice_shares.clear()
        self.first_choices = None

    def use_modules_of(self, domain: int) -> AbstractContextManager:
        return use_experts(self.model, domain)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        self.open_newest(self.progress)
        if not self.options.strength:
            return super().losses(batch) | self.balance_terms(batch)

        teacher_logits = self.teacher_logits(batch)

        def distill(logits: Tensor, positions: slice) -> Tensor:
            return kl_divergence(teacher_logits.select(positions), logits)

        losses = {"lm": self.lm_loss(batch), "kd": WeightedLoss(distill, self.options.strength)}
        sums, _ = self.objective.sum_losses(self.model, batch, losses)
        # The balance is of the last pass, which was not the teacher's.
        terms = {"lm": sums["lm"] * batch["weight"]} | self.balance_terms(batch)
        divergence = sums["kd"] * batch["weight"]
        return terms | {"kd": self.options.strength * divergence}

    @torch.no_grad()
    def teacher_logits(self, batch: Batch) -> Logits:
        """The logits of f_{t-1}: with the dense weights before the domain, and without its experts."""
        newest = len(self.mixtures[0].groups) - 1 if self.mixtures else BASE  # of no effect without mixtures
        weights = swap_weights(self.model, self.teacher.named())
        experts = use_experts(self.model, newest, only_earlier=True)
        with set_mode(self.model, training=False), weights, experts:
            logits, _ = self.objective.keep_logits(self.model, batch)
        return logits

    def open_newest(self, progress: float) -> None:
        """Opens the newest experts by the share of the domain's steps."""
        share = self.options.fade_in
        for mixture in self.mixtures:
            mixture.opening = min(1.0, progress / share) if share else 1.0

    def balance_terms(self, batch: Batch) -> dict[str, Tensor]:
        """The balance term of the last forward pass; also accumulates its first choices."""
        mixtures = self.mixtures
        if not mixtures or not self.options.balance:
            return {}
        first_choices = torch.stack([mixture.last_record.first_choices for mixture in mixtures])  # [M, E]
        # Summed over the micro-batches: `on_gradients_ready` makes the next step's s of them.
        if self.first_choices is None:
            self.first_choices = first_choices
        else:
            self.first_choices = self.first_choices + first_choices

        # s is of the previous step, so that a step's term does not depend on how its batch is cut into
        # micro-batches.
        shares = self.first_choice_shares.named().get("firsts")
        if shares is None:  # the domain's first step
            shares = torch.full_like(first_choices, 1 / first_choices.shape[1], dtype=torch.float)

        # A mean of P over the whole step: each micro-batch divides by the tokens of a mean one.
        tokens_read, tokens_of_decoder = batch["mean_tokens"]
        terms = []
        shares = self.first_choice_shares.on_module_device(shares)
        for mixture, mixture_shares in zip(mixtures, shares, strict=True):
            num_tokens = tokens_of_decoder if mixture.side == TARGET_TOKENS else tokens_read
            probabilities = mixture.last_record.probabilities.sum(0)
            # E sum_e s_e P_e
            balance = len(mixture_shares) * (mixture_shares.to(probabilities) * probabilities).sum()
            terms.append(balance / num_tokens)
        return {"balance": self.options.balance * torch.stack(terms).mean()}

    def on_gradients_ready(self) -> None:
        if self.first_choices is not None:
            first_choices = self.first_choices
            self.first_choices = None
            all_reduce_sum(first_choices)
            shares = first_choices / first_choices.sum(1, keepdim=True)
            self.first_choice_shares.update({"firsts": shares.float()})

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.open_newest(1.0)  # a domain of a single step ends at progress 0
        super().after_domain(importance_batches)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if not self.mixtures:
            return super().export(folder, order)
        mixtures_by_name = find_mixtures(self.model)
        # The arguments of `attach_mixtures` that make a model with as many experts.
        options = {
            "blocks": [name.removesuffix(f".{MIXTURE}") for name in mixtures_by_name],
            "top_k": self.options.top_k,
            "groups": [len(group.experts) for group in self.mixtures[0].groups],
        }
        # All experts in one part: a token's router chooses among those of all domains.
        prefixes = tuple(f"{name}." for name in mixtures_by_name)
        experts = {}
        for name, parameter in self.model.named_parameters():
            if name.startswith(prefixes):
                experts[name] = parameter
        modules = {order[-1]: experts}
        return export.export_parts(folder, self.model, modules, attach=attach_mixtures, options=options)

    def diagnostics(self) -> dict[str, Tensor]:
        diagnostics = super().diagnostics() | self.copy_diagnostics("lifelong_moe")
        for name, shares in self.first_choice_shares.named().items():
            diagnostics[f"lifelong_moe/{name}"] = shares
        return diagnostics
