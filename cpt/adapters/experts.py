"""Feed-forward networks (FFNs) that become mixtures and gain experts: up-cycling (Komatsuzaki et al., ICLR
2023) with the routing of GLaM (Du et al., ICML 2022).

    y = sum over the k experts e with the largest z_e of  g_e(x) FFN_e(x),    g = softmax of these k z_e
    z_0 = 0,    z_e = w_e x + log o for the newest experts,    z_e = w_e x for the others

Expert 0 is the model's own FFN; by itself it is run as ever. Each token is computed by its k experts and by
no other, and none is dropped. o in [0, 1] is how far the newest experts are open: at 0 no token goes to them.

Hooks on the FFN's own maps do it, so that whatever stands between these is computed for all experts at once:
a map that reads x gets the tokens of expert 0, and what the others make of theirs is put behind that."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import log
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from cpt.core.sharding import whole
from cpt.models.isolation import text_of, text_of_target
from cpt.models.stacks import SOURCE, TARGET
from cpt.models.units import Between, Projection

STD = 0.02  # of new router rows
PASSING = ("plan", "features", "passed")  # of one pass, and no part of a copy


class TextRows(nn.Module):
    """Gives what a map makes of tokens that are no padding: where a mask may look at it."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows


class Texts:
    """Where text stands in what a model is run on, [B, T] by SOURCE and TARGET; None: everywhere."""

    def __init__(self) -> None:
        self.present: dict[str, Tensor | None] = {}

    def open(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """The model's pre-hook."""
        self.present = {SOURCE: text_of(kwargs)}
        if "decoder_input_ids" in kwargs:
            self.present[TARGET] = text_of_target(kwargs["decoder_input_ids"], module.config.pad_token_id)

    def close(self, *args: Any) -> None:
        self.present = {}


@dataclass(frozen=True)
class Plan:
    """Which expert computes which tokens of x, in a pass of one FFN: rows [N k, D], expert after expert."""

    x: Tensor
    rows: Tensor
    counts: list[int]  # of each expert's rows
    back: Tensor  # [N k]: where the rows of each token stand, token after token
    gates: Tensor  # [N, k]
    text: Tensor | None  # [N k] bool: which rows are no padding; None: all

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows [..., N k, D] by experts."""
        return rows.split(self.counts, dim=-2)


@dataclass(frozen=True)
class Passed:
    """What a pass has made of N tokens, padding left out."""

    probabilities: Tensor  # [N, E], softmax of all z
    gates: Tensor  # [N, k], of which the largest comes first
    chosen: Tensor  # [N, k]
    experts: int

    @property
    def firsts(self) -> Tensor:
        """How many tokens each expert is the first choice of, [E]."""
        return torch.bincount(self.chosen[:, 0], minlength=self.experts)

    @property
    def taken(self) -> Tensor:
        """The sum of the gates of each expert, [E] in 64 bits."""
        gates = self.gates.detach().double()
        return gates.new_zeros(len(gates), self.experts).scatter(1, self.chosen, gates).sum(0)


class Expert(nn.Module):
    """A copy of an FFN's linear maps, in their order."""

    def __init__(self, maps: Sequence[Projection]) -> None:
        super().__init__()
        self.maps = nn.ModuleList(map(new_map, maps))
        self.seen = nn.ModuleList(TextRows() for _ in maps)

    def run(self, number: int, rows: Tensor, text: Tensor | None) -> Tensor:
        """What a map makes of rows [..., n, d_in], of which `text` [n] says which are no padding."""
        output = self.maps[number](rows)
        if self.seen[number]._forward_hooks:
            self.seen[number](output if text is None else output[..., text, :])
        return output


class Group(nn.Module):
    """The experts that came together, and their router rows, [e, D]."""

    def __init__(self, maps: Sequence[Projection], count: int) -> None:
        super().__init__()
        weight = maps[0].module.weight
        self.experts = nn.ModuleList(Expert(maps) for _ in range(count))
        self.router = nn.Parameter((STD * torch.randn(count, maps[0].inputs)).to(weight.device, weight.dtype))


def new_map(like: Projection) -> nn.Module:
    """A linear map of zeros of the kind, shape and type of another."""
    own = like.module
    with torch.device("meta"):
        if isinstance(own, Conv1D):
            made: nn.Module = Conv1D(like.outputs, like.inputs)
        else:
            made = nn.Linear(like.inputs, like.outputs, bias=own.bias is not None)
    made = made.to_empty(device=own.weight.device).to(own.weight.dtype)
    for parameter in made.parameters():
        nn.init.zeros_(parameter)
    return made


class Mixture(nn.Module):
    """The experts of an FFN beside its own maps, in groups: one for each domain."""

    def __init__(self, place: Between, *, top_k: int, texts: Texts, side: str | None) -> None:
        super().__init__()
        self.own = (*(source for source, _ in place.sources), place.out)  # the model's
        self.top_k, self.texts, self.side = top_k, texts, side
        self.groups = nn.ModuleList()
        self.opening = 1.0  # o
        self.among: range | None = None  # the experts that work now; None: all
        self.plan: Plan | None = None
        self.features: Tensor | None = None  # what the map that ends the FFN reads
        self.passed: Passed | None = None
        for number, each in enumerate(self.own[:-1]):
            each.module.register_forward_pre_hook(self.read)
            each.module.register_forward_hook(partial(self.widen, number))
        self.own[-1].module.register_forward_pre_hook(self.narrow)
        self.own[-1].module.register_forward_hook(self.combine)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | dict.fromkeys(PASSING)

    @property
    def experts(self) -> list[Expert]:
        """All but expert 0, in order."""
        return [expert for group in self.groups for expert in group.experts]

    @property
    def count(self) -> int:
        return 1 + sum(len(group.experts) for group in self.groups)

    def members(self, group: int) -> range:
        """The numbers of a group's experts; -1: that of the FFN which the model had."""
        sizes = [1, *(len(each.experts) for each in self.groups)]
        start = sum(sizes[: group + 1])
        return range(start, start + sizes[group + 1])

    def grow(self, count: int) -> None:
        """Adds so many experts, all of whose weights are zero; draws their router rows."""
        self.groups.append(Group(self.own, count).train(self.training))

    @torch.no_grad()
    def copy(self, group: int) -> None:
        """Makes the newest experts copies of those of a group, one after another; -1: of the model's FFN."""
        source, experts = self.members(group), self.experts
        for number, expert in enumerate(self.groups[-1].experts):
            copied = source[number % len(source)] - 1
            maps = experts[copied].maps if copied >= 0 else [each.module for each in self.own]
            for one, other in zip(expert.maps, maps, strict=True):
                for name, parameter in one.named_parameters():
                    parameter.copy_(whole(getattr(other, name)))

    @property
    def noted(self) -> Passed:
        """What there is to know of the last pass, with more than one expert."""
        assert self.passed is not None
        return self.passed

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Those of expert 0."""
        for each in self.own:
            yield from each.module.parameters()

    @property
    def works(self) -> range:
        return range(self.count) if self.among is None else self.among

    def logits(self, x: Tensor) -> Tensor:
        """z [N, E] of tokens [N, D], in 32 bits or more."""
        rows = torch.cat([group.router for group in self.groups])
        wide = torch.promote_types(rows.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            found = functional.pad(functional.linear(x.to(wide), rows.to(wide)), (1, 0))
        if self.opening == 1:
            return found
        offset = log(self.opening) if self.opening > 0 else -torch.inf
        newest = self.members(len(self.groups) - 1)
        return torch.cat([found[:, : newest.start], found[:, newest.start :] + offset], dim=1)

    def route(self, x: Tensor) -> Plan:
        """Chooses the experts of each token of x [..., D]."""
        flat, works = x.flatten(0, -2), self.works
        logits = self.logits(flat)[:, works.start : works.stop]
        highest, chosen = logits.topk(min(self.top_k, len(works)))
        gates, chosen = highest.softmax(-1), chosen + works.start
        sorted_, order = chosen.flatten().sort(stable=True)
        others = torch.arange(1, self.count, device=x.device)
        starts = [0, *torch.searchsorted(sorted_, others).tolist(), len(order)]
        text = self.text_in(len(flat))
        self.pass_on(logits, gates, chosen, text)
        times = gates.shape[1]
        rows = flat[:, None].expand(-1, times, -1).reshape(-1, flat.shape[1]).index_select(0, order)
        return Plan(
            x=x,
            rows=rows.view(*[1] * (x.ndim - 2), *rows.shape),
            counts=[end - start for start, end in pairwise(starts)],
            back=torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device)),
            gates=gates,
            text=None if text is None else text.repeat_interleave(times)[order],
        )

    def text_in(self, tokens: int) -> Tensor | None:
        """Which of so many tokens are no padding, [N] bool; None: all, or it can not be told."""
        present = self.texts.present.get(self.side) if self.side else None
        return present.flatten().bool() if present is not None and present.numel() == tokens else None

    def pass_on(self, logits: Tensor, gates: Tensor, chosen: Tensor, text: Tensor | None) -> None:
        """Notes what there is to know of the pass afterwards."""
        found = (logits.softmax(-1), gates, chosen)
        if text is not None:
            found = (found[0][text], gates[text], chosen[text])
        self.passed = Passed(*found, experts=self.count)

    def read(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The pre-hook of maps that read x: the tokens of expert 0."""
        if self.count == 1 or self.works == range(1):
            self.plan = self.passed = None
            return None
        if self.plan is None or self.plan.x is not args[0]:
            self.plan = self.route(args[0])
        return (self.plan.split(self.plan.rows)[0],)

    def widen(self, number: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The hook of the same: behind expert 0's what the others make of their tokens, [..., N k, F]."""
        return output if self.plan is None else self.beside(number, output, self.plan.rows)

    def beside(self, number: int, output: Tensor, rows: Tensor) -> Tensor:
        """A map's output on the rows of expert 0, and behind it those of the other experts' own maps."""
        assert self.plan is not None
        shares, text = self.plan.split(rows)[1:], self.plan.text
        texts = [None] * len(shares) if text is None else text.split(self.plan.counts)[1:]
        made = [
            expert.run(number, own, present)
            for expert, own, present in zip(self.experts, shares, texts, strict=True)
        ]
        return torch.cat([output, *made], dim=-2)

    def narrow(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The pre-hook of the map that ends the FFN: the rows of expert 0."""
        if self.plan is None:
            return None
        self.features = args[0]
        return (self.plan.split(args[0])[0],)

    def combine(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Its hook: for each token the sum of what its experts make of it, by its gates, [..., D]."""
        plan = self.plan
        if plan is None:
            return output
        assert self.features is not None
        made = self.beside(len(self.own) - 1, output, self.features).flatten(0, -2)
        self.plan = self.features = None
        by_token = made.index_select(0, plan.back).view(*plan.gates.shape, -1)
        summed = (plan.gates[..., None].to(made) * by_token).sum(1)
        return summed.view(*plan.x.shape[:-1], -1)
