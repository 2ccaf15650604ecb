"""Ends a stage whose model has gone further from the base than its budget allows, with the weights of the
last monitoring evaluation that was within it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cpt.contrib.divergence_budget.options import DivergenceBudget
from cpt.evaluation.divergence import Documents, estimate_mean
from cpt.evaluation.monitor import MonitorObserver
from cpt.reporting.formats import format_or_dash, format_thousandths

REPORT_TITLE = "Budget of KL from the base: upper end at the kept step, of what was allowed"


@dataclass
class DivergenceRecord:
    """What was measured in a stage. Its fields are keys of scores.json."""

    allowed: float  # nats per scored token
    steps: list[int] = field(default_factory=list)  # of the evaluations
    # The upper end of the interval of each, or its mean where there is no interval.
    uppers: list[float] = field(default_factory=list)
    reason_to_end: str = ""  # empty as long as the stage may continue


class DivergenceController(MonitorObserver):
    """Holds one stage within its budget: the mean over the texts of its domain is bounded."""

    def __init__(self, options: DivergenceBudget) -> None:
        self.budget = DivergenceRecord(allowed=options.kl)

    @property
    def end_reason(self) -> str:  # type: ignore[override]
        return self.budget.reason_to_end

    @property
    def is_within(self) -> bool:
        """Whether the last evaluation was within the budget."""
        return bool(self.budget.uppers) and self.budget.uppers[-1] <= self.budget.allowed  # false for NaN

    @property
    def keeps_weights(self) -> bool:  # type: ignore[override]
        return self.is_within

    def on_divergence(self, step: int, divergences: Mapping[str, Documents]) -> None:
        mean, _, high = estimate_mean(list(divergences.values()))
        upper = mean if high is None else high  # few documents have no interval
        self.budget.uppers.append(np.nan if upper is None else upper)
        self.budget.steps.append(step)
        if not self.is_within:
            upper_text = format_or_dash(self.budget.uppers[-1], format_thousandths)
            self.budget.reason_to_end = (
                f"its predictions are up to {upper_text} nats from those of the base on its own text "
                f"(budget.kl={self.budget.allowed:g})"
            )

    def series(self, stage: str) -> dict[str, float]:
        return {f"budget/kl/{stage}": self.budget.uppers[-1]}

    def record(self, steps: Sequence[int]) -> dict[str, Any]:
        # The weights that are kept are those of the last evaluation within the budget.
        uppers_within = [upper for upper in self.budget.uppers if upper <= self.budget.allowed]
        last_upper = format_thousandths(uppers_within[-1]) if uppers_within else "none"
        report = f"{last_upper} of {self.budget.allowed:g}"
        return {**asdict(self.budget), "report": {REPORT_TITLE: report}}

    def state_dict(self) -> dict[str, Any]:
        return {"budget": asdict(self.budget)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.budget = DivergenceRecord(**state["budget"])
