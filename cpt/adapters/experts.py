"""Feed-forward networks (FFNs) that become mixtures and gain experts: up-cycling (Komatsuzaki et al., ICLR
2023) with the routing of GLaM (Du et al., ICML 2022).

    y = sum over the k experts e with the largest z_e of  g_e(x) FFN_e(x),    g = softmax of these k z_e
    z_0 = 0,    z_e = w_e x + log o for the newest experts,    z_e = w_e x for the others

Expert 0 is the model's own FFN, no token is dropped, and o in [0, 1] is the opening of the newest experts.
Hooks on the FFN's own linear layers append the other experts' outputs, so that what is between is computed at
once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import log
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.adapters.domain_store import BASE, DomainScorer, Scope
from cpt.core.distributed import full_tensor
from cpt.data.collate import Batch
from cpt.models.block_attention import find_text_masks
from cpt.models.forward import find_token_side
from cpt.models.objectives import Objective
from cpt.models.options import Freeze
from cpt.models.units import Projection, SubLayer, find_projections, find_sublayers
from cpt.models.weights import find_frozen

MIXTURE = "mixture"  # the name of a MoELayer in its block


class TextRows(nn.Module):
    """Passes on a layer's outputs on text, where a mask may observe them."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows


class TextMask:
    """Where text is in a pass (`text_in`); its hooks are methods, so that a copy of a model has its own."""

    def __init__(self) -> None:
        self.present: dict[str, Tensor | None] = {}

    def open(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.present = find_text_masks(module, kwargs)

    def close(self, *args: Any) -> None:
        self.present = {}


@dataclass(frozen=True)
class Dispatch:
    """The tokens of x by experts, in a pass of one FFN."""

    x: Tensor
    rows: Tensor  # [N k, D], expert after expert
    counts: list[int]  # of each expert's rows
    back: Tensor  # [N k]: where the rows of each token are, token after token
    gates: Tensor  # [N, k]
    text: Tensor | None  # [N k] bool: which rows are no padding; None: all


@dataclass(frozen=True)
class RoutingRecord:
    """The routing of a pass's N tokens without padding."""

    probabilities: Tensor  # [N, E], softmax of all z
    gates: Tensor  # [N, k], descending
    chosen: Tensor  # [N, k]
    firsts: Tensor  # [E]: how many tokens each expert is the first choice of

    @property
    def taken(self) -> Tensor:
        """The sum of the gates of each expert, [E] in 64 bits."""
        gates = self.gates.detach().double()
        return gates.new_zeros(len(gates), len(self.firsts)).scatter(1, self.chosen, gates).sum(0)


class Expert(nn.Module):
    """Linear layers of zeros like those of an FFN, in their order."""

    def __init__(self, maps: Sequence[Projection]) -> None:
        super().__init__()
        self.maps = cast(list[nn.Module], nn.ModuleList())
        self.seen = cast(list[TextRows], nn.ModuleList(TextRows() for _ in maps))
        for like in maps:
            with torch.device("meta"):
                if isinstance(like.module, Conv1D):
                    new: nn.Module = Conv1D(like.outputs, like.inputs)
                else:
                    new = nn.Linear(like.inputs, like.outputs, bias=like.bias is not None)
            weight = like.weight
            self.maps.append(new.to_empty(device=weight.device).to(weight.dtype))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class ExpertGroup(nn.Module):
    """The experts of one domain, and their router rows, [e, D]."""

    def __init__(self, maps: Sequence[Projection], count: int) -> None:
        super().__init__()
        self.experts = cast(list[Expert], nn.ModuleList(Expert(maps) for _ in range(count)))
        rows, like = 0.02 * torch.randn(count, maps[0].inputs), maps[0].weight
        self.router = nn.Parameter(rows.to(like.device, like.dtype))


class MoELayer(nn.Module):
    """The experts of an FFN besides its own layers, a group per domain; `side`: the tokens it sees."""

    def __init__(self, place: SubLayer, *, top_k: int, texts: TextMask, side: str | None) -> None:
        super().__init__()
        self.own = tuple(place.projections)  # the model's
        self.top_k, self.texts, self.side = top_k, texts, side
        self.groups = cast(list[ExpertGroup], nn.ModuleList())
        self.opening = 1.0  # o
        self.among: range | None = None  # the active experts; None: all
        self.dispatch: Dispatch | None = None
        self.features: Tensor | None = None  # the input of the FFN's last layer
        self.passed: RoutingRecord | None = None
        for number, each in enumerate(self.own[:-1]):
            each.module.register_forward_pre_hook(self.read)
            each.module.register_forward_hook(partial(self.append, number))
        self.own[-1].module.register_forward_pre_hook(self.narrow)
        self.own[-1].module.register_forward_hook(self.combine)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"dispatch": None, "features": None, "passed": None}  # of one pass

    @property
    def experts(self) -> list[Expert]:
        """All but expert 0, in order."""
        return [expert for group in self.groups for expert in group.experts]

    def members(self, group: int) -> range:
        """The numbers of a group's experts; BASE: that of the model's FFN."""
        sizes = [1, *(len(each.experts) for each in self.groups)]
        start = sum(sizes[: group + 1])
        return range(start, start + sizes[group + 1])

    def grow(self, count: int) -> None:
        """Adds `count` experts with weights of zero, and draws their router rows."""
        self.groups.append(ExpertGroup(self.own, count).train(self.training))

    @torch.no_grad()
    def copy(self, group: int) -> None:
        """Makes the newest experts copies of those of a group, in turn; BASE: of the model's FFN."""
        source, experts = self.members(group), self.experts
        for number, expert in enumerate(self.groups[-1].experts):
            copied = source[number % len(source)] - 1
            maps = experts[copied].maps if copied >= 0 else [each.module for each in self.own]
            for one, other in zip(expert.maps, maps, strict=True):
                for name, parameter in one.named_parameters():
                    parameter.copy_(full_tensor(getattr(other, name)))

    @property
    def noted(self) -> RoutingRecord:
        """The record of the last pass with more than one expert."""
        assert self.passed is not None
        return self.passed

    def route(self, x: Tensor, active: range) -> Dispatch:
        """Chooses the experts of each token of x [..., D], with z in 32 bits or more."""
        flat, count = x.flatten(0, -2), 1 + len(self.experts)
        router = torch.cat([group.router for group in self.groups])
        wide = torch.promote_types(router.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = functional.pad(functional.linear(flat.to(wide), router.to(wide)), (1, 0))
        if self.opening != 1:
            offset = log(self.opening) if self.opening > 0 else -torch.inf
            start = self.members(len(self.groups) - 1).start
            logits = torch.cat([logits[:, :start], logits[:, start:] + offset], dim=1)
        logits = logits[:, active.start : active.stop]
        highest, chosen = logits.topk(min(self.top_k, len(active)))
        gates, chosen = highest.softmax(-1), chosen + active.start
        sorted_, order = chosen.flatten().sort(stable=True)
        others = torch.arange(1, count, device=x.device)
        starts = [0, *torch.searchsorted(sorted_, others).tolist(), len(order)]
        present = self.texts.present.get(self.side) if self.side else None
        text = present.flatten().bool() if present is not None and present.numel() == len(flat) else None
        found = (logits.softmax(-1), gates, chosen)
        if text is not None:
            found = (found[0][text], gates[text], chosen[text])
        self.passed = RoutingRecord(*found, torch.bincount(found[2][:, 0], minlength=count))
        times = gates.shape[1]
        rows = flat[:, None].expand(-1, times, -1).reshape(-1, flat.shape[1]).index_select(0, order)
        rows, counts = rows.view(*[1] * (x.ndim - 2), *rows.shape), [b - a for a, b in pairwise(starts)]
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        text = None if text is None else text.repeat_interleave(times)[order]
        return Dispatch(x, rows, counts, back, gates, text)

    def read(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The pre-hook of layers that read x: selects the tokens of expert 0."""
        count = 1 + len(self.experts)
        active = range(count) if self.among is None else self.among
        if count == 1 or active == range(1):
            self.dispatch = self.passed = None
            return None
        if self.dispatch is None or self.dispatch.x is not args[0]:
            self.dispatch = self.route(args[0], active)
        return (self.dispatch.rows.split(self.dispatch.counts, dim=-2)[0],)

    def append(self, number: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Their forward hook: the output on expert 0's rows, then those of the others, [..., N k, F]."""
        if self.dispatch is None:
            return output
        counts, text = self.dispatch.counts, self.dispatch.text
        rows = self.dispatch.rows if self.features is None else self.features
        shares, outputs = rows.split(counts, dim=-2)[1:], [output]
        texts = [None] * len(shares) if text is None else text.split(counts)[1:]
        for expert, own, present in zip(self.experts, shares, texts, strict=True):
            made = expert.maps[number](own)
            if expert.seen[number]._forward_hooks:
                expert.seen[number](made if present is None else made[..., present, :])
            outputs.append(made)
        return torch.cat(outputs, dim=-2)

    def narrow(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The pre-hook of the FFN's last layer: selects the rows of expert 0."""
        if self.dispatch is None:
            return None
        self.features = args[0]
        return (args[0].split(self.dispatch.counts, dim=-2)[0],)

    def combine(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Its forward hook: for each token the sum of its experts' outputs by its gates, [..., D]."""
        if (dispatch := self.dispatch) is None:
            return output
        made = self.append(len(self.own) - 1, module, args, output).flatten(0, -2)
        self.dispatch = self.features = None
        by_token = made.index_select(0, dispatch.back).view(*dispatch.gates.shape, -1)
        summed = (dispatch.gates[..., None].to(made) * by_token).sum(1)
        return summed.view(*dispatch.x.shape[:-1], -1)


def choose_blocks(model: PreTrainedModel, freeze: Freeze, *, every: int) -> list[str]:
    """The blocks whose FFN becomes a mixture: the last of `every` each, unless frozen."""
    if every > len(places := find_sublayers(model, ("neurons",))):
        raise ValueError(f"method.every={every} is invalid. Allowed: 1 to {len(places)}, the model's blocks")
    frozen = {id(parameter) for parameter in find_frozen(model, freeze)}
    found = [p for p in places[every - 1 :: every] if id(p.out.weight) not in frozen]
    if not found:
        allowed = "a smaller method.every or fewer of freeze.layers, and no trainable=…"
        told = f"method.every={every} is invalid: freeze leaves no FFN that becomes a mixture"
        raise ValueError(f"{told}. Allowed: {allowed}")
    return [place.name for place in found]


def mixtures_of(model: nn.Module) -> dict[str, MoELayer]:
    """The mixtures in a model, by name, in the order of its blocks."""
    return {name: each for name, each in model.named_modules() if isinstance(each, MoELayer)}


def attach_mixtures(
    model: PreTrainedModel, *, blocks: Sequence[str], top_k: int, groups: Sequence[int] = ()
) -> Scope:
    """Makes the FFNs of the named blocks mixtures of one expert, or with groups of further ones."""
    found = {place.name: place for place in find_sublayers(model, ("neurons",))}
    texts = TextMask()
    model.register_forward_pre_hook(texts.open, with_kwargs=True)
    model.register_forward_hook(texts.close, always_call=True)
    sides = [find_token_side(model, found[name].out.name) for name in blocks]
    for name, side in zip(blocks, sides, strict=True):
        mixture = MoELayer(found[name], top_k=top_k, texts=texts, side=side)
        model.get_submodule(name).add_module(MIXTURE, mixture)
        for count in groups:
            mixture.grow(count)
    return with_newest(model, Scope((), ()))


def scope_beside(model: PreTrainedModel, chosen: Sequence[str]) -> Scope:
    """All of a model without mixtures except the FFNs of the chosen blocks, by name."""
    places = [place for place in find_sublayers(model, ("neurons",)) if place.name in chosen]
    own = {each.name for place in places for each in place.projections}
    names = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in own]
    return Scope(tuple(names), tuple(each for each in find_projections(model) if each.name not in own))


def with_newest(model: nn.Module, scope: Scope) -> Scope:
    """A scope extended by the newest experts and their router rows; of mixtures without any, by expert 0."""
    maps: list[Projection] = []
    for name, mixture in mixtures_of(model).items():
        maps += mixture.own if not mixture.groups else ()
        last = len(mixture.groups) - 1
        for number, expert in enumerate(mixture.groups[last].experts if mixture.groups else ()):
            for place, own in enumerate(mixture.own):
                path = f"{name}.groups.{last}.experts.{number}.maps.{place}"
                maps.append(replace(own, name=path, module=expert.maps[place], measured=expert.seen[place]))
    inside = {id(parameter) for each in maps for parameter in each.module.parameters()}
    inside |= {id(each.groups[-1].router) for each in mixtures_of(model).values() if each.groups}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in inside]
    return Scope((*scope.names, *names), (*scope.maps, *maps))


@contextmanager
def working(model: nn.Module, group: int, *, before: bool = False) -> Iterator[None]:
    """Only the experts of a group are active inside the context, or those `before` it; BASE: the own FFN."""
    mixtures = list(mixtures_of(model).values())
    for each in mixtures:
        members = each.members(group)
        each.among = range(members.start) if before else members
    try:
        yield
    finally:
        for each in mixtures:
            each.among = None


class GatedScorer(DomainScorer):
    """Scores all texts with all experts, and records how much of a text each domain's experts had."""

    def __init__(self, model: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        self.mixtures, self.objective = [*mixtures_of(model).values()], objective

    @property
    def all_sources(self) -> list[int]:
        return [BASE, *range(len(self.mixtures[0].groups))]

    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        nll, parts = self.objective.nll(model, batch), self.all_sources
        if "idle" in batch:
            return nll
        if len(parts) == 1:
            shares = torch.full((1, 1), float(len(nll)), dtype=torch.double, device=nll.device)
        else:  # gates summed over tokens and mixtures
            sums = torch.stack([each.noted.taken for each in self.mixtures]).sum(0)
            own = [self.mixtures[0].members(part) for part in parts]
            shares = torch.stack([sums[each.start : each.stop].sum() for each in own])[:, None]
        self.record_weights(domain, parts, shares)
        return nll
