"""Lifelong-MoE (Chen et al., ICML 2023): FFNs that are mixtures of experts gain experts for each domain.

    L = L_lm + lambda KL(f_{t-1} || f_t) + alpha / M sum over the M mixtures of E sum_e s_e P_e

on text of domain t alone; KL as in learning without forgetting, mean over the scored places. Of domain t its
experts and their router rows are trained, and unless they are frozen the dense parts, which are all that is
in no mixture; earlier experts and rows keep their bits. Text is scored by the experts that its tokens are
routed to (`cpt.adapters.experts`): no domain is known at test time.

The paper trains a sparse decoder from scratch, with two experts a token, which it may drop. No code was
released. Here a dense checkpoint is up-cycled: its FFN is expert 0, new experts are copies of earlier ones,
no token is dropped, and f_t is f_{t-1} at first, as new experts open over the first steps (`opening`).

The last term balances tokens over experts (GShard, Lepikhin et al., ICLR 2021, algorithm 1, times E^2 as in
Fedus et al., JMLR 2022, eq. 4): P_e is the mean of softmax(z)_e over a step's tokens, s_e the share of which
e is the first choice. s is that of the step before, over all of its batch: so it does not matter in how many
processes and parts a batch comes. At a domain's first step it is uniform."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cpt.adapters import export
from cpt.adapters.domain_store import BASE, Scope
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
from cpt.core.collectives import sum_in_place
from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.data.datamodule import Domain
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.common.candidates import measure_perplexities
from cpt.methods.options import LifelongMoEOptions
from cpt.models.forward import TARGET_TOKENS, divergence, in_mode, nll_of
from cpt.models.fsdp import named_weights, reshard
from cpt.models.weights import swap_weights

log = logging.getLogger(__name__)
STARTS = ("base", "last", "nearest")
RECORD = ("sources", "perplexities")


def balance_loss(sums: Tensor, shares: Tensor, tokens: float) -> Tensor:
    """E sum_e s_e P_e, a scalar, from the sums over tokens of softmax(z), [E], and s [E]; 1 where one of both
    is uniform."""
    return len(shares) * (shares.to(sums) * sums).sum() / tokens


class LifelongMoE(ContinualModule):
    """Trains new experts per domain in some FFNs, their router rows, and the dense parts. `strength` is
    lambda.

    `sources` [domains] are the domains whose experts the domains' own began as (-1: the model's FFN);
    `perplexities` those of the last domain's probe with each candidate alone, in the order of their domains.
    `teacher` are the dense parts before the domain, where they are trained and have a say; `shares` has s of
    all mixtures, [M, E]."""

    counts_steps = True
    options: LifelongMoEOptions

    def __init__(self, options: LifelongMoEOptions, shared: Shared) -> None:
        scope = None
        if options.experts:
            blocks = choose_blocks(shared.model, shared.freeze, every=options.every)
            scope = scope_beside(shared.model, blocks) if options.dense == "trained" else Scope((), ())
            attach_mixtures(shared.model, blocks=blocks, top_k=options.top_k)
        super().__init__(options, shared, scope=scope and with_newest(shared.model, scope))
        self.beside_mixtures = scope
        if self.mixtures:
            self.router = GatedScorer(self.model, shared.objective)
        self.teacher = NamedTensors(self.dense() if options.strength else {})
        self.shares = NamedTensors()
        self.firsts: Tensor | None = None  # of a step so far, [M, E]
        self.register_buffer("sources", torch.empty(0, dtype=torch.long))
        self.register_buffer("perplexities", torch.empty(0, dtype=torch.double))
        self.tell()

    def tell(self) -> None:
        """Tells what has no effect."""
        if not self.options.experts:
            log.info("method.experts=0: no FFN becomes a mixture, what is said of mixtures has no effect")
        elif self.options.top_k == 1:
            log.info("method.top_k=1: each gate is 1, so that only the balance of experts moves the router")

    @property
    def mixtures(self) -> list[MoELayer]:
        return [*mixtures_of(self.model).values()]

    def shape(self, stage: Domain) -> None:
        for mixture in self.mixtures:
            mixture.grow(self.options.experts)
        if self.beside_mixtures is not None:
            self.scope = with_newest(self.model, self.beside_mixtures)

    def dense(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained and in no mixture, by name."""
        weights, frozen = named_weights(self.model), {id(parameter) for parameter in self.frozen}
        names = weights if self.beside_mixtures is None else self.beside_mixtures.names
        return {name: weights[name] for name in names if id(weights[name]) not in frozen}

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.mixtures:
            self.begin_experts(probe)
        if self.options.strength:
            self.teacher.update(self.dense())
        self.shares.clear()
        self.firsts = None

    def begin_experts(self, probe: Iterable[Batch]) -> None:
        """Makes the new experts copies of earlier ones."""
        candidates = self.candidates()
        if self.options.start == "nearest":
            self.perplexities = self.measure(probe, candidates)
        ranked = zip(self.perplexities.tolist() or [0.0], candidates, strict=True)
        source = min(ranked, key=lambda pair: pair[0])[1]
        reshard(self.model)
        for mixture in self.mixtures:
            mixture.copy(source)
        earlier = self.sources[: self.domain.index]
        self.sources = torch.cat([earlier, earlier.new_tensor([source])])

    def candidates(self) -> list[int]:
        """The domains whose experts the new ones may be copies of; -1: the model's FFN."""
        learned = [*range(self.domain.index)]
        if self.options.start == "base" or not learned:
            return [BASE]
        return [BASE, *learned] if self.options.start == "nearest" else learned[-1:]

    def measure(self, probe: Iterable[Batch], groups: Sequence[int]) -> Tensor:
        """The model's perplexity on the probes of all processes with the experts of each domain alone,
        [groups]."""
        totals = [partial(self.total, group=group) for group in groups]
        return measure_perplexities(self.model, probe, totals, device=self.device)

    def total(self, batch: Batch, *, group: int) -> Tensor:
        """The summed loss (nats) of a batch with the experts of one domain alone, a scalar."""
        with working(self.model, group):
            return self.objective.nll(self.model, batch).sum()

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        self.open(self.progress)
        if not self.options.strength:
            return super().losses(batch) | self.balanced(batch)
        logits = self.objective.outputs(self.model, batch)[0]
        terms = {"lm": nll_of(logits, batch).sum() * batch["weight"]} | self.balanced(batch)
        with self.teaching():
            taught = self.objective.outputs(self.model, batch)[0]
        apart = divergence(taught, logits).sum() * batch["weight"]
        return terms | {"kd": self.options.strength * apart}

    def open(self, progress: float) -> None:
        """Opens the newest experts so far as they are after a share of the domain's steps."""
        share = self.options.opening
        for mixture in self.mixtures:
            mixture.opening = min(1.0, progress / share) if share else 1.0

    @contextmanager
    def teaching(self) -> Iterator[None]:
        """The model as it was before the domain, in eval mode and without gradients, while it lasts."""
        last = len(self.mixtures[0].groups) - 1 if self.mixtures else BASE
        weights = swap_weights(self.model, self.teacher.named())
        experts = working(self.model, last, before=True)
        with torch.no_grad(), in_mode(self.model, training=False), weights, experts:
            yield

    def balanced(self, batch: Batch) -> dict[str, Tensor]:
        """The term of the pass that has just been made; it notes the first choices."""
        mixtures = self.mixtures
        if not mixtures or not self.options.balance:
            return {}
        firsts = torch.stack([each.noted.firsts for each in mixtures])
        self.firsts = firsts if self.firsts is None else self.firsts + firsts
        shares = self.shares.named().get("firsts")
        known = torch.full_like(firsts, 1 / firsts.shape[1], dtype=torch.float) if shares is None else shares
        terms = [
            balance_loss(each.noted.probabilities.sum(0), own, self.places(each) * len(batch["domains"]))
            for each, own in zip(mixtures, self.shares.at_hand(known), strict=True)
        ]
        return {"balance": self.options.balance * torch.stack(terms).mean()}

    def places(self, mixture: MoELayer) -> int:
        """How many tokens of a full row pass a mixture."""
        read, written = self.objective.sides(self.length)
        return written if mixture.side == TARGET_TOKENS and written is not None else read

    def see_gradients(self) -> None:
        if self.firsts is not None:
            firsts, self.firsts = self.firsts, None
            sum_in_place(firsts)
            self.shares.update({"firsts": (firsts / firsts.sum(1, keepdim=True)).float()})

    def after_domain(self, probe: Iterable[Batch]) -> None:
        self.open(1.0)
        super().after_domain(probe)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if not self.mixtures:
            return super().export(folder, order)
        groups = [len(group.experts) for group in self.mixtures[0].groups]
        blocks = [name.removesuffix(f".{MIXTURE}") for name in mixtures_of(self.model)]
        how = {"blocks": blocks, "top_k": self.options.top_k, "groups": groups}
        names = [f"{name}." for name in mixtures_of(self.model)]
        part = {n: p for n, p in self.model.named_parameters() if n.startswith(tuple(names))}
        return export.export_parts(folder, self.model, {order[-1]: part}, attach=attach_mixtures, options=how)

    def diagnostics(self) -> dict[str, Tensor]:
        record = {f"lifelong_moe/{name}": getattr(self, name) for name in RECORD}
        record |= {f"lifelong_moe/{name}": each for name, each in self.shares.named().items()}
        return super().diagnostics() | {name: values for name, values in record.items() if len(values)}

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in RECORD:  # as long as what the state holds
            stored = state_dict.get(prefix + name, getattr(self, name))
            setattr(self, name, torch.empty_like(stored, device=self.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
