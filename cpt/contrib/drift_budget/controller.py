"""Holds the drift of a stage within its budget: measures it at every monitoring evaluation, and takes the
weights back along the way since the stage began where it is exceeded."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Trainer
from torch import Tensor

from cpt.contrib.drift_budget.options import PAST, DriftBudget
from cpt.core.files import check_archive
from cpt.data.sources.base import GENERAL
from cpt.evaluation.metrics import CHANGE_REPLICATES, Losses, bootstrap
from cpt.evaluation.monitor import MonitorObserver
from cpt.methods.base import ContinualMethod
from cpt.trainer.monitor import copy_trained, load_interpolated, load_trained
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
TRIALS, LEFT, ENOUGH = 8, 0.02, 0.05  # evaluations along a line; of what is unspent, what they aim to leave
Texts = Mapping[str, Tensor]  # losses by text [2, documents]: nats and scored tokens
Names = Sequence[str]
Drift = Mapping[str, tuple[float, float]]  # by what is bounded its rise and the upper end of its interval


@dataclass
class BudgetRecord:
    """What was seen and done in a stage, as in scores.json; lists have an entry for each evaluation."""

    allowed: dict[str, float]  # nats by the end of the stage
    drift: dict[str, list[list[float]]] = field(default_factory=dict)  # rises, upper ends of 95 % intervals
    ways: list[float] = field(default_factory=list)  # share that is kept of the way since the stage began
    acts: list[str] = field(default_factory=list)
    kept: int | None = None  # the last step within the budget
    spent: float = 0.0  # share of the budget at that step
    ended: str = ""

    def share(self, drift: Drift) -> float:
        """The share of the budget that is spent: of the scarcer one, by its upper end."""
        shares = [upper / self.allowed[name] for name, (_, upper) in drift.items()]
        return float(np.max(shares or [0.0]))

    def add(self, step: int, drift: Drift, *, way: float = 1.0) -> bool:
        """Adds an evaluation, for which the weights have gone back to `way` of the way since the stage began;
        whether the model is within the budget. If not, its weights are to go back to step `kept`."""
        for name, rise in drift.items():
            self.drift.setdefault(name, []).append([*rise])
        bounds = [(name, *rise, self.allowed[name]) for name, rise in drift.items()]
        told = ", ".join("{} {:+.4f}, at most {:+.4f} of {:.4f}".format(*each) for each in bounds)
        self.ways.append(way)
        within = (spent := self.share(drift)) <= 1  # false for NaN
        if within:
            self.kept, self.spent = step, spent
            if way < 1:
                self.acts.append(f"step {step}: {told}: back to {way:.3g} of the way since the stage began")
        else:
            if self.kept is None:
                self.ended = "its budget is spent before its first step"
            self.acts.append(f"step {step}: {told}: {self.ended or f'back to step {self.kept}'}")
        return within


class DriftController(MonitorObserver):
    """The budget of one stage (`number` from 1). Drift is counted from `began`: the losses of texts as the
    stages before left them, and of others at this stage's first evaluation."""

    def __init__(
        self, options: DriftBudget, run: RunDir, number: int, *, stages: int, own: Names, texts: Names = ()
    ) -> None:
        self.options, self.run, self.number, self.own, self.texts = options, run, number, own, texts
        self.seen = BudgetRecord(options.allow(number, stages=stages))
        self.began: dict[str, Tensor] = {}
        for path in map(self.file_of, range(1, number)):
            check_archive(path, instead=run.restore_hint)
            with np.load(path) as file:
                self.began |= {name: torch.from_numpy(file[name]) for name in file.files}
        self.new: dict[str, Tensor] = {}  # what the stages after it count from
        self.kept: dict[str, Tensor] = {}  # weights of the first evaluation
        self.least = 0.0  # share of the budget at the first evaluation

    def file_of(self, number: int) -> Path:
        """The losses by document at the first evaluation of a stage."""
        return self.run.path / "monitor" / f"{number:03d}.npz"

    @property
    def ended(self) -> str:
        return self.seen.ended

    def see(self, trainer: Trainer, module: ContinualMethod, losses: Texts, measure: Callable) -> Texts:
        first, way = not self.seen.ways, 1.0
        if first:
            self.new = {name: each for name, each in losses.items() if name not in (*self.own, *self.began)}

        def drift_of(losses: Texts) -> Drift:
            both = (self.began | self.new, losses)
            began, now = ({name: each.numpy() for name, each in one.items()} for one in both)
            return find_drift(list(self.options.given), began, now, own=self.own)

        drift = drift_of(losses)
        if self.kept and not (most := self.seen.share(drift)) <= 1:
            end = copy_trained(module)

            def losses_at(way: float) -> Texts:
                load_interpolated(module, self.kept, end, share=way)
                return measure()

            way = find_way(lambda way: self.seen.share(drift_of(losses_at(way))), least=self.least, most=most)
            drift = drift_of(losses := losses_at(way))
        told = len(self.seen.acts)
        within = self.seen.add(trainer.global_step, drift, way=way)
        if within and first:
            self.kept = copy_trained(module)
        elif not within:
            load_trained(module, self.kept)
        if first:
            self.least = self.seen.spent
        for act in self.seen.acts[told:]:
            log.info("Budget of %s: %s", trainer.datamodule.domain.name, act)
        return losses

    def series(self, stage: str) -> dict[str, float]:
        """Upper ends of drift in nats, and the share of the way."""
        drift = {f"budget/{name}/{stage}": each[-1][1] for name, each in self.seen.drift.items()}
        return drift | {f"budget/way/{stage}": self.seen.ways[-1]}

    def finish(self) -> None:
        counted = {name: each.numpy() for name, each in self.new.items()}
        self.run.save_arrays(self.file_of(self.number), counted)

    def record(self) -> dict[str, Any]:
        return asdict(self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.record(), "new": self.new, "kept": self.kept, "least": self.least}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen, self.least = BudgetRecord(**state["seen"]), state["least"]
        self.new, self.kept = dict(state["new"]), dict(state["kept"])


def find_way(share_at: Callable[[float], float], *, least: float, most: float) -> float:
    """The share of a way at which the model is within the budget and has spent nearly all of it: by false
    position, where each trial cuts off a tenth at least. At the beginning of the way a share of the budget
    is spent of `least`, at most 1, at its end of `most`, above 1 or nan."""
    low, high, unspent = 0.0, 1.0, 1 - least
    for _ in range(TRIALS):
        if least >= 1 - ENOUGH * unspent:
            break
        aim = (1 - LEFT * unspent - least) / (most - least) if np.isfinite(most) else 0.5
        way = low + (high - low) * min(max(aim, 0.1), 0.9)
        if (share := share_at(way)) <= 1:
            low, least = way, share
        else:
            high, most = way, share
    return low


def find_drift(names: Names, began: Losses, now: Losses, *, own: Names) -> Drift:
    """Of what is bounded (`general`, `past`) the mean rise of its texts since `began`, each text counting the
    same, nats per token, and the upper end of its 95 % interval over documents; of single documents the rise
    itself. Losses are by text [2, documents]: nats and scored tokens."""

    def mean_rise(means: np.ndarray) -> dict[str, dict[str, np.ndarray]]:  # [draw, before or after, text]
        return {"rise": {"nats": (means[..., 1, :] - means[..., 0, :]).mean(-1)}}

    past = [text for text in now if text in began and text not in (*own, GENERAL)]
    texts = {GENERAL: [GENERAL] * (GENERAL in began and GENERAL in now), PAST: past}
    found = {}
    for name in (name for name in names if texts[name]):
        samples = []
        for text in texts[name]:
            (before, counts), (after, _) = (np.asarray(each[text], float) for each in (began, now))
            there = counts > 0
            samples.append([np.stack([before, after])[:, there], counts[there]])
        whole = np.stack([sums.sum(1) / counts.sum() for sums, counts in samples], -1)
        upper = value = float(mean_rise(whole)["rise"]["nats"])
        if all(counts.size >= 2 for _, counts in samples):
            _, upper = bootstrap(samples, mean_rise, replicates=CHANGE_REPLICATES)["rise"]["nats"]
        found[name] = value, upper
    return found
