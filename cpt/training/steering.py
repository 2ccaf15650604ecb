"""Holds a budget of drift while a domain is learned: measures it from the monitor's looks, sets the rate, and
takes the weights back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor, nn

from cpt.data.datamodule import Domain, DomainSequence
from cpt.evaluation.budget import PAST, BudgetOptions, Steered, find_drift
from cpt.methods.base import ContinualModule
from cpt.training.run_folder import RunFolder

log = logging.getLogger(__name__)


class Steering:
    """The budget of one stage. `began` has the losses that drift is counted from, by text [2, documents]:
    those of stages before, and what is new at the stage's first look."""

    def __init__(
        self, options: BudgetOptions, place: RunFolder, *, number: int, stages: int, own: Sequence[str]
    ) -> None:
        self.options, self.place, self.number, self.own = options, place, number, own
        self.steered = Steered(options.allow(number, stages=stages))
        self.began = {name: torch.from_numpy(each) for name, each in place.load_looks(number).items()}
        self.new: dict[str, Tensor] = {}  # what the stages after it count from
        self.kept: dict[str, Tensor] = {}  # the weights of the last look within the budget

    @property
    def pace(self) -> float:
        return self.steered.pace[-1] if self.steered.pace else 1.0

    def see(self, trainer: Trainer, module: ContinualModule, now: Mapping[str, Tensor]) -> None:
        """Takes a look in, and does what follows from it."""
        if not self.steered.pace:
            self.new = {name: each for name, each in now.items() if name not in (*self.own, *self.began)}
        began = {name: each.numpy() for name, each in (self.began | self.new).items()}
        found = find_drift(
            list(self.options.given), began, {name: each.numpy() for name, each in now.items()}, own=self.own
        )
        told = len(self.steered.acts)
        if self.steered.see(trainer.global_step, found, steer=self.options.steer):
            self.kept = {name: each.detach().clone() for name, each in trained(module)}
        else:
            put_back(module, self.kept)
        module.set_pace(self.pace)
        for act in self.steered.acts[told:]:
            log.info("budget of %s, %s", trainer.datamodule.domain.name, act)

    def series(self, stage: str) -> dict[str, float]:
        """The last look for the loggers: upper ends of drift, nats, and the share of the rate."""
        drift = {f"budget/{name}/{stage}": each[-1][1] for name, each in self.steered.drift.items()}
        return drift | {f"budget/pace/{stage}": self.pace}

    def save(self) -> None:
        """Leaves what the stages after this one count from in the run folder."""
        self.place.save_looks(self.number, {name: each.numpy() for name, each in self.new.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"steered": self.steered.tell(), "new": self.new, "kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steered = Steered.read(state["steered"])
        self.new, self.kept = dict(state["new"]), dict(state["kept"])


def steer(options: BudgetOptions, place: RunFolder, data: DomainSequence, domain: Domain) -> Steering | None:
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
def put_back(module: ContinualModule, weights: Mapping[str, Tensor]) -> None:
    """Gives what a stage trains the weights that were kept, if any were."""
    for name, parameter in trained(module):
        if name in weights:
            parameter.copy_(weights[name].to(parameter.device))
