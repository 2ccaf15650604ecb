"""Holds the drift of a stage within its budget: measures it at every monitoring evaluation, and where the
budget is exceeded, moves the weights back towards those with which the stage began.

The weights on the line between the two are `initial + alpha * (current - initial)`: alpha = 0 gives the
initial weights of the stage, alpha = 1 the current ones."""

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
from cpt.core.messages import count_noun
from cpt.data.sources.base import GENERAL
from cpt.evaluation.metrics import CHANGE_REPLICATES, Losses, bootstrap
from cpt.evaluation.monitor import MonitorObserver
from cpt.methods.base import ContinualMethod
from cpt.reporting.formats import format_or_dash, format_signed
from cpt.trainer.monitor import copy_trained, load_interpolated, load_trained
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
MAX_TRIALS = 8  # values of alpha that are evaluated when the weights are moved back
AIMED_REST = 0.02  # share of the unspent budget that a trial aims to leave
ACCEPTED_REST = 0.05  # share of the unspent budget that the search may leave
REPORT_TITLE = "Budget of drift: upper ends at the kept step, of what was allowed"
TextLosses = Mapping[str, Tensor]  # by text [2, documents]: nats and scored tokens
Drift = Mapping[str, tuple[float, float]]  # by bound: mean rise, upper end of its interval


@dataclass
class BudgetRecord:
    """What was measured and done in a stage. Its fields are keys of scores.json. The lists but `acts` have an
    entry for each evaluation."""

    allowed: dict[str, float]  # nats by the end of the stage
    drift: dict[str, list[list[float]]] = field(default_factory=dict)  # rises, upper ends of 95 % intervals
    ways: list[float] = field(default_factory=list)  # alpha of the weights after the evaluation
    acts: list[str] = field(default_factory=list)  # a line for each time that the weights were moved back
    kept: int | None = None  # the last step within the budget
    spent: float = 0.0  # share of the budget at that step
    ended: str = ""  # why the stage had to end, empty as long as it may go on

    def find_spent_share(self, drift: Drift) -> float:
        """The share of the budget that a drift spends, 1: all of it. It is counted by the upper ends of the
        intervals; where there are two bounds, the one that is spent further counts."""
        shares = [upper / self.allowed[name] for name, (_, upper) in drift.items()]
        return float(np.max(shares or [0.0]))

    def add(self, step: int, drift: Drift, *, alpha: float = 1.0) -> bool:
        """Adds the evaluation of a step, whose weights have been moved back to `alpha` (1: they were not).
        Returns whether the model is within the budget. If not, the caller has to load the weights of step
        `kept`."""
        for name, rise_and_upper in drift.items():
            self.drift.setdefault(name, []).append(list(rise_and_upper))
        self.ways.append(alpha)
        message = f"step {step}: {self.describe_drift(drift)}"

        spent_share = self.find_spent_share(drift)
        if spent_share <= 1:  # false for NaN
            self.kept = step
            self.spent = spent_share
            if alpha < 1:
                self.acts.append(f"{message}: back to {alpha:.3g} of the way since the stage began")
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
        return "; ".join([*parts, f"kept step {self.kept}", f"gone back {count_noun(num_returns, 'time')}"])


class DriftController(MonitorObserver):
    """Holds one stage (`number` from 1) within its budget. The texts of the stage's domain (`stage_texts`)
    have no budget. The drift of any other text is counted from the first evaluation of the stage in which
    counting began: the stage that first measured the text without learning it, this one or an earlier one."""

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
        # By text, from which the stages before this one counted drift: it adds up over stages.
        self.earlier_losses: dict[str, Tensor] = {}
        for earlier_number in range(1, number):
            path = self.losses_path(earlier_number)
            check_archive(path, remedy=run.restore_hint)
            with np.load(path) as archive:
                for name in archive.files:
                    self.earlier_losses[name] = torch.from_numpy(archive[name])

        # Of this stage's first evaluation, before its first step:
        self.initial_losses: dict[str, Tensor] = {}  # of texts that no stage before measured
        self.initial_weights: dict[str, Tensor] = {}  # empty where the whole budget was spent before
        self.initial_share = 0.0  # of the budget that the stages before had spent

    def losses_path(self, number: int) -> Path:
        """The losses by document at the first evaluation of a stage."""
        return self.run.path / "monitor" / f"{number:03d}.npz"

    @property
    def end_reason(self) -> str:  # type: ignore[override]
        return self.budget.ended

    def on_evaluation(
        self, trainer: Trainer, module: ContinualMethod, losses: TextLosses, measure: Callable
    ) -> TextLosses:
        """Measures drift; moves the weights back where it exceeds the budget; records both.

        1. The first evaluation sets the losses from which this stage counts the drift of new texts.
        2. Where the budget is exceeded, the weights are moved back to the largest alpha that is within it.
        3. The evaluation is recorded. Weights that are still beyond the budget are replaced by the initial
           ones. The first evaluation, if it is within the budget, stores the initial weights."""
        is_first = not self.budget.ways
        if is_first:
            exempt_texts = {*self.stage_texts, *self.earlier_losses}
            self.initial_losses = {name: value for name, value in losses.items() if name not in exempt_texts}

        # Without initial weights there is nothing to go back to: at the first evaluation, and in a stage
        # whose budget was spent before its first step, which ends there.
        alpha = 1.0
        drift = self.measure_drift(losses)
        spent_share = self.budget.find_spent_share(drift)
        is_exceeded = not spent_share <= 1  # also by NaN
        if is_exceeded and self.initial_weights:
            losses, alpha = self.go_back(module, measure, spent_at_end=spent_share)
            drift = self.measure_drift(losses)

        num_logged = len(self.budget.acts)
        is_within = self.budget.add(trainer.global_step, drift, alpha=alpha)
        if not is_within:
            load_trained(module, self.initial_weights)
        elif is_first:
            self.initial_weights = copy_trained(module)
        if is_first:
            self.initial_share = self.budget.spent

        for act in self.budget.acts[num_logged:]:
            log.info("Budget of %s: %s", trainer.datamodule.domain.name, act)  # type: ignore[attr-defined]
        return losses

    def measure_drift(self, losses: TextLosses) -> Drift:
        """The drift of the bounded texts, from the losses at which counting began to the given ones."""
        initial = to_arrays({**self.earlier_losses, **self.initial_losses})
        return find_drift(list(self.options.bounds), initial, to_arrays(losses), stage_texts=self.stage_texts)

    def go_back(
        self, module: ContinualMethod, measure: Callable, *, spent_at_end: float
    ) -> tuple[TextLosses, float]:
        """Loads the weights at alpha between the initial (0) and the current ones (1), the largest alpha that
        was found within the budget. The current weights have spent `spent_at_end` of it. Returns the losses
        of the loaded weights, and alpha."""
        end_weights = copy_trained(module)

        def measure_at(alpha: float) -> TextLosses:
            load_interpolated(module, self.initial_weights, end_weights, share=alpha)
            return measure()

        def find_spent_at(alpha: float) -> float:
            return self.budget.find_spent_share(self.measure_drift(measure_at(alpha)))

        alpha = find_alpha(find_spent_at, spent_at_start=self.initial_share, spent_at_end=spent_at_end)
        # The last alpha that was tried may have been beyond the budget: only this call loads the found one.
        return measure_at(alpha), alpha

    def series(self, stage: str) -> dict[str, float]:
        """The upper ends of drift in nats, and alpha, of the last evaluation."""
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


def find_alpha(
    find_spent_at: Callable[[float], float], *, spent_at_start: float, spent_at_end: float
) -> float:
    """An alpha in [0, 1] at which the model is within the budget and has spent nearly all of it, by false
    position (regula falsi) with at most MAX_TRIALS calls of `find_spent_at`, which measures the spent share
    of the budget at an alpha. At alpha = 0 the share `spent_at_start` is spent, at most 1; at alpha = 1
    `spent_at_end`, above 1 or nan."""
    # The spent share at `low` is always within the budget, the one at `high` never.
    low = 0.0
    high = 1.0
    low_spent = spent_at_start
    high_spent = spent_at_end
    unspent = 1 - spent_at_start

    for _ in range(MAX_TRIALS):
        if low_spent >= 1 - ACCEPTED_REST * unspent:
            break

        # The line through both ends crosses the aim at this fraction of the interval; with nan or infinity
        # at the upper end there is no line.
        if np.isfinite(high_spent):
            fraction = (1 - AIMED_REST * unspent - low_spent) / (high_spent - low_spent)
        else:
            fraction = 0.5
        # Without these limits one end could come closer and closer without the other ever moving.
        alpha = low + (high - low) * min(max(fraction, 0.1), 0.9)

        spent_at_alpha = find_spent_at(alpha)
        if spent_at_alpha <= 1:
            low = alpha
            low_spent = spent_at_alpha
        else:
            high = alpha
            high_spent = spent_at_alpha
    return low


def find_drift(
    bounds: Sequence[str], initial: Losses, current: Losses, *, stage_texts: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """For each of `bounds` (`general`, `past`) the mean rise of its texts from the `initial` to the `current`
    losses, nats per token, with equal weights for all texts, and the upper end of the rise's 95 % interval
    over documents; the rise itself where a text has a single document. Losses are by text [2, documents]:
    nats and scored tokens. A bound without a text in both is left out."""
    compared_texts = [text for text in current if text in initial]
    texts_by_bound = {
        GENERAL: [text for text in compared_texts if text == GENERAL],
        PAST: [text for text in compared_texts if text not in (*stage_texts, GENERAL)],
    }
    drift = {}
    for name in bounds:
        if texts_by_bound[name]:  # the first stage has no past texts
            drift[name] = find_loss_rise(texts_by_bound[name], initial, current)
    return drift


def find_loss_rise(texts: Sequence[str], initial: Losses, current: Losses) -> tuple[float, float]:
    """The mean rise of the losses on texts, and the upper end of its interval: a value of `find_drift`."""

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
