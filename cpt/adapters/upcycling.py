"""FFNs of a model that become mixtures of experts (`cpt.adapters.experts`): which, who works in them, and how
much of a text each domain's experts had."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters.bank import BASE, Scope
from cpt.adapters.experts import Mixture, Texts
from cpt.adapters.routing import Scorer
from cpt.data.collate import Batch
from cpt.models.freezing import frozen_parameters
from cpt.models.objectives import Objective
from cpt.models.options import Freeze
from cpt.models.stacks import tokens_of
from cpt.models.units import Projection, projections, sublayers

NAME = "mixture"  # in its block


def choose_blocks(model: PreTrainedModel, freeze: Freeze, *, every: int) -> list[str]:
    """The names of the blocks whose FFN becomes a mixture: the last of so many each, but for those that are
    frozen. Raises ValueError where there are none."""
    places = sublayers(model, ("neurons",))
    if every > len(places):
        raise ValueError(f"method.every={every}; allowed: 1 to {len(places)}, the model's blocks")
    frozen = {id(parameter) for parameter in frozen_parameters(model, freeze)}
    found = [p for p in places[every - 1 :: every] if id(p.out.module.weight) not in frozen]
    if not found:
        raise ValueError(
            f"freeze leaves no FFN that method.every={every} makes a mixture; allowed: a smaller "
            "method.every or fewer of freeze.layers, and no freeze.only"
        )
    return [place.name for place in found]


def mixtures_of(model: nn.Module) -> dict[str, Mixture]:
    """The mixtures in a model, by name, in the order of its blocks."""
    return {name: each for name, each in model.named_modules() if isinstance(each, Mixture)}


def attach_mixtures(
    model: PreTrainedModel, *, blocks: Sequence[str], top_k: int, groups: Sequence[int] = ()
) -> Scope:
    """Makes the FFNs of the blocks, by their names, mixtures of one expert, or with groups of so many more;
    what is new. Raises ValueError where an FFN can not be told."""
    found = {place.name: place for place in sublayers(model, ("neurons",))}
    texts = Texts()
    model.register_forward_pre_hook(texts.open, with_kwargs=True)
    model.register_forward_hook(texts.close, always_call=True)
    sides = {name: tokens_of(model, found[name].out.name) for name in blocks}
    for name in blocks:
        mixture = Mixture(found[name], top_k=top_k, texts=texts, side=sides[name])
        model.get_submodule(name).add_module(NAME, mixture)
        for count in groups:
            mixture.grow(count)
    names = [name for name, _ in model.named_parameters() if f".{NAME}." in name]
    return Scope(tuple(names), tuple(newest_maps(model)))


def newest_maps(model: nn.Module) -> Iterator[Projection]:
    """The linear maps of the newest experts; of mixtures that have none, those of expert 0."""
    for name, mixture in mixtures_of(model).items():
        if not mixture.groups:
            yield from mixture.own
            continue
        last = len(mixture.groups) - 1
        for number, expert in enumerate(mixture.groups[last].experts):
            for place, own in enumerate(mixture.own):
                path = f"{name}.groups.{last}.experts.{number}.maps.{place}"
                yield replace(own, name=path, module=expert.maps[place], measured=expert.seen[place])


def scope_beside(model: PreTrainedModel, chosen: Sequence[str]) -> Scope:
    """All of a model that has no mixtures, but for the FFNs of the blocks that are chosen, by their names."""
    own = {
        each.name
        for place in sublayers(model, ("neurons",))
        if place.name in chosen
        for each in (*(source for source, _ in place.sources), place.out)
    }
    names = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in own]
    return Scope(tuple(names), tuple(each for each in projections(model) if each.name not in own))


def with_newest(model: nn.Module, scope: Scope) -> Scope:
    """A scope that has the newest experts and their router rows too; of mixtures that have none, expert 0."""
    maps = [*newest_maps(model)]
    inside = {id(parameter) for each in maps for parameter in each.module.parameters()}
    inside |= {id(each.groups[-1].router) for each in mixtures_of(model).values() if each.groups}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in inside]
    return Scope((*scope.names, *names), (*scope.maps, *maps))


@contextmanager
def working(model: nn.Module, group: int, *, before: bool = False) -> Iterator[None]:
    """While it lasts, the experts of a group work alone, or those `before` it; -1: the FFN the model had."""
    mixtures = list(mixtures_of(model).values())
    for each in mixtures:
        members = each.members(group)
        each.among = range(members.start) if before else members
    try:
        yield
    finally:
        for each in mixtures:
            each.among = None


class Gated(Scorer):
    """Scores all texts with all experts, those of a domain being its part."""

    def __init__(self, model: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        self.mixtures, self.objective = [*mixtures_of(model).values()], objective

    @property
    def parts(self) -> list[int]:
        return [BASE, *range(len(self.mixtures[0].groups))]

    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        nll = self.objective.nll(model, batch)
        if "idle" not in batch:
            self.take(domain, self.parts, self.shares(len(nll), nll.device))
        return nll

    def shares(self, scored: int, device: torch.device) -> Tensor:
        """How much the last pass has taken of each part, [parts, 1]: gates summed over tokens and
        mixtures."""
        parts = self.parts
        if len(parts) == 1:
            return torch.full((1, 1), float(scored), dtype=torch.double, device=device)
        sums = torch.stack([each.noted.taken for each in self.mixtures]).sum(0)
        own = [self.mixtures[0].members(part) for part in parts]
        return torch.stack([sums[each.start : each.stop].sum() for each in own])[:, None]
