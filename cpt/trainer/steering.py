"""Holds a budget of drift while a domain is learned: measures it from the monitor's looks, takes the weights
back, and sets the rate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor, nn

from cpt.data.datamodule import Domain, DomainSequence
from cpt.evaluation.budget import LINE, PAST, BudgetOptions, Found, Steered, find_drift, find_way
from cpt.methods.base import ContinualModule
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
Losses = Mapping[str, Tensor]  # by text [2, documents]: nats and scored tokens


class Steering:
    """The budget of one stage. `began` has the losses that drift is counted from, by text [2, documents]:
    those of stages before, and what is new at the stage's first look."""

    def __init__(
        self, options: BudgetOptions, place: RunDir, *, number: int, stages: int, own: Sequence[str]
    ) -> None:
        self.options, self.place, self.number, self.own = options, place, number, own
        self.steered = Steered(options.allow(number, stages=stages), options.steer)
        self.began = {name: torch.from_numpy(each) for name, each in place.load_looks(number).items()}
        self.new: dict[str, Tensor] = {}  # what the stages after it count from
        # the weights of the last look within the budget, by line of the first
        self.kept: dict[str, Tensor] = {}
        self.least = 0.0  # by line, at the first look, of what is allowed

    @property
    def pace(self) -> float:
        return self.steered.pace[-1] if self.steered.pace else 1.0

    def see(
        self, trainer: Trainer, module: ContinualModule, now: Losses, measure: Callable[[], Losses]
    ) -> Losses:
        """Takes a look in, and does what follows from it; the losses of the model as it is left then, where
        it has gone back on its line."""
        first = not self.steered.pace
        if first:
            self.new = {name: each for name, each in now.items() if name not in (*self.own, *self.began)}
        found, way = self.find(now), 1.0
        if self.options.steer == LINE and self.kept and not self.steered.share(found) <= 1:
            way, now = self.go_back(module, measure, most=self.steered.share(found))
            found = self.find(now)
        told = len(self.steered.acts)
        within = self.steered.see(trainer.global_step, found, way=way)
        if within and (first or self.options.steer != LINE):
            self.kept = {name: each.detach().clone() for name, each in trained(module)}
        elif not within:
            put_back(module, self.kept)
        if first:
            self.least = self.steered.spent
        module.set_pace(self.pace)
        for act in self.steered.acts[told:]:
            log.info("budget of %s, %s", trainer.datamodule.domain.name, act)
        return now

    def find(self, now: Losses) -> Found:
        """Rises since they are counted, with the upper ends of their intervals."""
        began, after = ({name: each.numpy() for name, each in losses.items()}
                        for losses in (self.began | self.new, now))  # fmt: skip
        return find_drift(list(self.options.given), began, after, own=self.own)

    def go_back(
        self, module: ContinualModule, measure: Callable[[], Losses], *, most: float
    ) -> tuple[float, Losses]:
        """Leaves the model on the line from where the stage began to where it is, as far from there as the
        budget allows: at which share of the way, and its losses there."""
        end = {name: each.detach().clone() for name, each in trained(module)}

        def losses_at(way: float) -> Losses:
            put_back(module, self.kept, towards=end, way=way)
            return measure()

        way = find_way(lambda way: self.steered.share(self.find(losses_at(way))), least=self.least, most=most)
        return way, losses_at(way)

    def series(self, stage: str) -> dict[str, float]:
        """The last look for the loggers: upper ends of drift, nats, the shares of the rate and of the way."""
        drift = {f"budget/{name}/{stage}": each[-1][1] for name, each in self.steered.drift.items()}
        return drift | {f"budget/pace/{stage}": self.pace, f"budget/way/{stage}": self.steered.ways[-1]}

    def save(self) -> None:
        """Leaves what the stages after this one count from in the run folder."""
        self.place.save_arrays(
            self.place.looks(self.number), {name: each.numpy() for name, each in self.new.items()}
        )

    def state_dict(self) -> dict[str, Any]:
        own = {"new": self.new, "kept": self.kept, "least": self.least}
        return {"steered": self.steered.tell(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steered = Steered.read(state["steered"])
        self.new, self.kept = dict(state["new"]), dict(state["kept"])
        self.least = state.get("least", 0.0)


def steer(options: BudgetOptions, place: RunDir, data: DomainSequence, domain: Domain) -> Steering | None:
    """What holds the budget of a stage, where there is one."""
    if not options.given:
        return None
    number = data.domains.index(domain) + 1
    return Steering(options, place, number=number, stages=len(data), own=domain.parts)


def add_last(options: BudgetOptions, names: Sequence[str], data: DomainSequence, domain: Domain) -> list[str]:
    """The texts that are looked at, with those of the stage before where the past is bounded: they are
    counted from here."""
    number = data.domains.index(domain)
    last = data.domains[number - 1].parts if PAST in options.given and number else ()
    return [*names, *(part for part in last if part not in names)]


def trained(module: ContinualModule) -> list[tuple[str, nn.Parameter]]:
    """What a stage trains, by name."""
    return [(name, each) for name, each in module.named_parameters() if each.requires_grad]


@torch.no_grad()
def put_back(
    module: ContinualModule,
    weights: Mapping[str, Tensor],
    *,
    towards: Mapping[str, Tensor] | None = None,
    way: float = 0.0,
) -> None:
    """Gives what a stage trains the weights that were kept, if any were, or those that lie at a share of the
    way from them to others."""
    for name, parameter in trained(module):
        if name in weights:
            parameter.copy_(weights[name].to(parameter.device))
            if towards is not None:
                parameter.lerp_(towards[name], way)
