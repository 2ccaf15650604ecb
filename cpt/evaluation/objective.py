"""What a sweep minimises: a metric of a finished run."""

import math
from collections.abc import Sequence

from cpt.evaluation.metrics import METRICS, UNITS


def objective_value(
    metrics: dict[str, dict], objective: str | Sequence[str]
) -> float | list[float | None] | None:
    """What a sweeper minimises, METRIC.UNIT, or a list of such; None where the run has no such metric."""
    if not isinstance(objective, str):
        return [objective_value(metrics, each) for each in objective]
    metric, _, unit = objective.partition(".")
    if metric not in METRICS or unit not in UNITS:
        raise ValueError(
            f"objective={objective}; allowed: METRIC.UNIT of {', '.join(METRICS)} and {', '.join(UNITS)}"
        )
    value = metrics.get(metric, {}).get(unit)
    return value if value is None or math.isfinite(value) else None
