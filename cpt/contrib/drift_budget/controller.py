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
from cpt.reporting.formats import format_or_dash, format_signed
from cpt.trainer.monitor import copy_trained, load_interpolated, load_trained
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
MAX_TRIALS = 8  # evaluations along the way since the stage began
AIMED_REST = 0.02  # share of the unspent budget that a trial aims to leave
ACCEPTED_REST = 0.05  # share of the unspent budget that the search may leave
REPORT_TITLE = "Budget of drift: upper ends at the kept step, of what was allowed"
TextLosses = Mapping[str, Tensor]  # by text [2, documents]: nats and scored tokens
Drift = Mapping[str, tuple[float, float]]  # by bound: mean rise, upper end of its interval


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

    def add(self, step: int, drift: Drift, *, way_share: float = 1.0) -> bool:
        """Adds an evaluation, for which the weights have gone back to a share of the way since the stage
        began; whether the model is within the budget. If not, its weights are to go back to step `kept`."""
        for name, rise_and_upper in drift.items():
            self.drift.setdefault(name, []).append(list(rise_and_upper))
        self.ways.append(way_share)
        message = f"step {step}: {self.describe_drift(drift)}"

        spent_share = self.share(drift)
        if spent_share <= 1:  # false for NaN
            self.kept = step
            self.spent = spent_share
            if way_share < 1:
                self.acts.append(f"{message}: back to {way_share:.3g} of the way since the stage began")
            return True

        # Without a step within the budget there are no weights to go on from.
        if self.kept is None:
            self.ended = "its budget is spent before its first step"
            self.acts.append(f"{message}: {self.ended}")
        else:
            self.acts.append(f"{message}: back to step {self.kept}")
        return False

    def describe_drift(self, drift: Drift) -> str:
        """The drift and what is allowed of it, for the log."""
        bounds = []
        for name, (rise, upper) in drift.items():
            bounds.append(f"{name} {rise:+.4f}, at most {upper:+.4f} of {self.allowed[name]:.4f}")
        return ", ".join(bounds)

    def summarize(self, steps: Sequence[int]) -> str:
        """The drift at the kept step and how often the weights went back, for the run page; `steps` are those
        of the evaluations."""
        index = list(steps).index(self.kept) if self.kept in steps else -1
        parts = []
        for name, rises in self.drift.items():
            _, upper = rises[index]
            parts.append(f"{name} {format_or_dash(upper, format_signed)} of {self.allowed[name]:.3f}")

        num_returns = len(self.acts)
        if self.ended:  # the last act ended the stage
            num_returns -= 1
        return "; ".join([*parts, f"kept step {self.kept}", f"gone back {num_returns} times"])


class DriftController(MonitorObserver):
    """The budget of one stage (`number` from 1), in which the domain's own texts (`stage_texts`) may change.
    Drift is counted from the losses of texts as the stages before left them, and of other texts from this
    stage's first evaluation."""

    def __init__(
        self,
        options: DriftBudget,
        run: RunDir,
        number: int,
        *,
        stages: int,
        stage_texts: Sequence[str],
        texts: Sequence[str] = (),
    ) -> None:
        self.options = options
        self.run = run
        self.number = number
        self.stage_texts = stage_texts
        self.texts = texts

        self.budget = BudgetRecord(options.allow(number, stages=stages))
        self.earlier_losses: dict[str, Tensor] = {}  # from which the stages before this one counted
        for earlier_number in range(1, number):
            path = self.losses_path(earlier_number)
            check_archive(path, remedy=run.restore_hint)
            with np.load(path) as archive:
                for name in archive.files:
                    self.earlier_losses[name] = torch.from_numpy(archive[name])

        # Of this stage's first evaluation:
        self.initial_losses: dict[str, Tensor] = {}  # from which it and later stages count
        self.initial_weights: dict[str, Tensor] = {}
        self.initial_share = 0.0  # of the budget

    def losses_path(self, number: int) -> Path:
        """The losses by document at the first evaluation of a stage."""
        return self.run.path / "monitor" / f"{number:03d}.npz"

    @property
    def ended(self) -> str:  # type: ignore[override]
        return self.budget.ended

    def on_evaluation(
        self, trainer: Trainer, module: ContinualMethod, losses: TextLosses, measure: Callable
    ) -> TextLosses:
        is_first = not self.budget.ways
        if is_first:
            counted = {*self.stage_texts, *self.earlier_losses}
            self.initial_losses = {name: value for name, value in losses.items() if name not in counted}

        # The initial weights are absent at the first evaluation, and where that one spent the whole budget.
        way_share = 1.0
        drift = self.measure_drift(losses)
        spent_share = self.budget.share(drift)
        if self.initial_weights and not spent_share <= 1:  # NaN counts as exceeded
            losses, way_share = self.go_back(module, measure, end_share=spent_share)
            drift = self.measure_drift(losses)

        # Of the first evaluation there are no initial weights, and nothing to take back.
        num_acts = len(self.budget.acts)
        is_within = self.budget.add(trainer.global_step, drift, way_share=way_share)
        if not is_within:
            load_trained(module, self.initial_weights)
        elif is_first:
            self.initial_weights = copy_trained(module)
        if is_first:
            self.initial_share = self.budget.spent

        for act in self.budget.acts[num_acts:]:
            log.info("Budget of %s: %s", trainer.datamodule.domain.name, act)  # type: ignore[attr-defined]
        return losses

    def measure_drift(self, losses: TextLosses) -> Drift:
        """The drift of what is bounded, up to an evaluation with these losses."""
        initial = to_arrays({**self.earlier_losses, **self.initial_losses})
        return find_drift(list(self.options.bounds), initial, to_arrays(losses), stage_texts=self.stage_texts)

    def go_back(
        self, module: ContinualMethod, measure: Callable, *, end_share: float
    ) -> tuple[TextLosses, float]:
        """Interpolates the weights between those at the beginning of the stage and the present ones, of which
        `end_share` of the budget is spent; the losses where the budget is met, and the share of the way."""
        end_weights = copy_trained(module)

        def measure_at(way_share: float) -> TextLosses:
            load_interpolated(module, self.initial_weights, end_weights, share=way_share)
            return measure()

        def spent_share_at(way_share: float) -> float:
            return self.budget.share(self.measure_drift(measure_at(way_share)))

        way_share = find_way(spent_share_at, start_share=self.initial_share, end_share=end_share)
        # The last trial may have been beyond the budget: only this call loads the weights that are found.
        return measure_at(way_share), way_share

    def series(self, stage: str) -> dict[str, float]:
        """Upper ends of drift in nats, and the share of the way."""
        values = {f"budget/{name}/{stage}": rises[-1][1] for name, rises in self.budget.drift.items()}
        values[f"budget/way/{stage}"] = self.budget.ways[-1]
        return values

    def finish(self) -> None:
        self.run.save_arrays(self.losses_path(self.number), to_arrays(self.initial_losses))

    def record(self, steps: Sequence[int]) -> dict[str, Any]:
        return {**asdict(self.budget), "report": {REPORT_TITLE: self.budget.summarize(steps)}}

    def state_dict(self) -> dict[str, Any]:
        return {
            "budget": asdict(self.budget),
            "initial_losses": self.initial_losses,
            "initial_weights": self.initial_weights,
            "initial_share": self.initial_share,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.budget = BudgetRecord(**state["budget"])
        self.initial_losses = dict(state["initial_losses"])
        self.initial_weights = dict(state["initial_weights"])
        self.initial_share = state["initial_share"]


def to_arrays(losses: TextLosses) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in losses.items()}


def find_way(spent_share_at: Callable[[float], float], *, start_share: float, end_share: float) -> float:
    """The share of a way at which the model is within the budget and has spent nearly all of it: by false
    position, where each trial cuts off a tenth at least. At the beginning of the way a share of the budget
    is spent of `start_share`, at most 1, at its end of `end_share`, above 1 or nan."""
    # What is spent at `low` is within the budget, what is spent at `high` is not.
    low = 0.0
    high = 1.0
    low_spent = start_share
    high_spent = end_share
    unspent = 1 - start_share

    for _ in range(MAX_TRIALS):
        if low_spent >= 1 - ACCEPTED_REST * unspent:
            break

        # The line through both ends says where the aim is met; without a number at one end it is halved.
        if np.isfinite(high_spent):
            fraction = (1 - AIMED_REST * unspent - low_spent) / (high_spent - low_spent)
        else:
            fraction = 0.5
        trial = low + (high - low) * min(max(fraction, 0.1), 0.9)

        trial_spent = spent_share_at(trial)
        if trial_spent <= 1:
            low = trial
            low_spent = trial_spent
        else:
            high = trial
            high_spent = trial_spent
    return low


def find_drift(
    bounds: Sequence[str], initial: Losses, current: Losses, *, stage_texts: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Of what is bounded (`general`, `past`) the mean rise of its texts since `initial`, each text counting
    the same, nats per token, and the upper end of its 95 % interval over documents; of single documents the
    rise itself. Losses are by text [2, documents]: nats and scored tokens."""
    compared_texts = [text for text in current if text in initial]
    texts_by_bound = {
        GENERAL: [text for text in compared_texts if text == GENERAL],
        PAST: [text for text in compared_texts if text not in (*stage_texts, GENERAL)],
    }
    drift = {}
    for name in bounds:
        if texts_by_bound[name]:  # the first stage has no past texts
            drift[name] = find_rise(texts_by_bound[name], initial, current)
    return drift


def find_rise(texts: Sequence[str], initial: Losses, current: Losses) -> tuple[float, float]:
    """The mean rise of the losses on texts, and the upper end of its interval, as `find_drift`."""

    def mean_rise(means: np.ndarray) -> dict[str, dict[str, np.ndarray]]:  # [draw, before or after, text]
        return {"rise": {"nats": (means[..., 1, :] - means[..., 0, :]).mean(-1)}}

    samples = []
    for text in texts:
        before, counts = np.asarray(initial[text], float)
        after, _ = np.asarray(current[text], float)
        has_tokens = counts > 0  # the other documents are outside the rows that the monitor draws
        samples.append([np.stack([before, after])[:, has_tokens], counts[has_tokens]])

    means = np.stack([sums.sum(1) / counts.sum() for sums, counts in samples], -1)
    rise = float(mean_rise(means)["rise"]["nats"])
    if any(counts.size < 2 for _, counts in samples):
        return rise, rise
    _, upper = bootstrap(samples, mean_rise, replicates=CHANGE_REPLICATES)["rise"]["nats"]
    return rise, upper
