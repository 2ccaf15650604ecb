"""The answers of a run in numbers: `answers` of scores.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpt.core.schema import check_types
from cpt.evaluation.answers.metrics import MEASURES, Answered, chance, majority, measures_of
from cpt.evaluation.metrics import Layout, bootstrap, metrics

# What the papers call a metric of the matrix of scores, and what it is called of a matrix of losses.
NAMES = {"AP": "LC", "LA": "CPT", "BWT": "BWT_gem", "F": "FG_max", "FWT": "FWT_gem"}
MEANINGS = {
    "AP": ("Average performance of the last model", "mean_j a[n][j]"),
    "LA": ("Learning accuracy, each task just after it was learned", "mean_{j<=n} a[j][j]"),
    "BWT": ("Backward transfer, < 0 is forgetting", "mean_{j<n} (a[n][j] - a[j][j])"),
    "F": ("Forgetting since the best model, > 0 is bad", "mean_{j<n} (max_{1<=i<=n-1} a[i][j] - a[n][j])"),
    "FWT": ("Forward transfer just before learning", "mean_{2<=j} (a[j-1][j] - a[0][j])"),
}
TASK = {"examples": int, "chance": float | None, "majority": float | None}
TASK |= {"measures": dict[str, list[float | None]]}
FIELDS = {"when": str, "seconds": float, "tasks": dict[str, dict[str, Any]], "metrics": dict[str, float]}
FIELDS |= {"intervals": dict[str, list[float]]}


@dataclass(frozen=True)
class Told:
    """What the answers to a task come to: small, as a run of N tasks has N (N + 1) of them."""

    examples: int
    chance: float | None
    majority: float | None
    means: Mapping[str, float | None]  # of every measure; the task is known by the first
    head: np.ndarray  # [examples]: that one, by example
    seconds: float


def tell_answers(answered: Answered, *, seconds: float = 0.0, known_by: str | None = None) -> Told:
    """What answers come to; `known_by` is the measure that is asked for."""
    values = {name: MEASURES[name].compute(answered) for name in measures_of(answered, known_by)}
    return Told(
        len(answered.references),
        chance(answered.choices),
        majority(answered.references, answered.choices),
        {name: mean_of(each) for name, each in values.items()},
        next(iter(values.values())).astype(np.float32),
        seconds,
    )


def tell_task(rows: Sequence[Told | None]) -> dict[str, Any]:
    """A task of `answers`, from what each row's answers come to; None for a row in which it was not asked."""
    there = next(row for row in rows if row is not None)
    return {
        "examples": there.examples,
        "chance": there.chance,
        "majority": there.majority,
        "measures": {name: [row and row.means[name] for row in rows] for name in there.means},
    }


def mean_of(values: np.ndarray) -> float | None:
    """The mean of those that count; None where none does."""
    there = values[np.isfinite(values)]
    return float(there.mean()) if len(there) else None


def head_of(task: Mapping[str, Any]) -> str:
    """The measure that a task is known by."""
    return next(iter(task["measures"]))


def matrix_of(answers: Mapping[str, Any]) -> np.ndarray:
    """a as [row, task]: each task in the measure that it is known by; nan where it was not asked."""
    columns = [task["measures"][head_of(task)] for task in answers["tasks"].values()]
    return np.array(columns, dtype=float).T


def compute_metrics(
    matrix: np.ndarray, *, rows: Sequence[str], tasks: Sequence[str], asked: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """NAMES of a matrix of scores [..., row, task], each value [...], as far as their terms exist. `asked`,
    [row, task], says which cells were (None: all): AP needs those of the last row, the others all of them."""
    layout = Layout(rows=list(rows), domains=list(tasks), tokens=[], bytes=[])
    found = metrics(matrix, layout=layout, higher=True)
    told = {name: found[other] for name, other in NAMES.items() if other in found}
    if asked is None or asked.all():
        return told
    return {name: value for name, value in told.items() if name == "AP" and asked[-1].all()}


def compute_intervals(
    values: Mapping[str, Sequence[np.ndarray | None]], *, rows: Sequence[str]
) -> dict[str, list[float]]:
    """95 % percentile bootstrap over the examples of each task, alike for every row: {metric: [low, high]}.
    `values` are each task's, [row][examples], None in a row in which it was not asked."""
    asked = np.array([[row is not None for row in each] for each in values.values()]).T
    samples = []
    for each in values.values():
        size = next(len(row) for row in each if row is not None)
        stacked = np.stack([np.full(size, np.nan) if row is None else row for row in each])
        samples.append((stacked.astype(float), np.ones(size)))

    def compute(matrix: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
        found = compute_metrics(matrix, asked=asked, rows=rows, tasks=list(values))
        return {name: {"score": value} for name, value in found.items()}

    return {name: units["score"] for name, units in bootstrap(samples, compute).items()}


def check_answers(answers: Mapping[str, Any], *, rows: Sequence[str]) -> None:
    """Raises ValueError for what is neither empty nor the `answers` of a run with these rows."""
    if not answers:
        return
    check_types(answers, FIELDS, of="answers")
    for name, task in answers["tasks"].items():
        check_types(task, TASK, of=f"answers.tasks.{name}")
        lengths = {len(values) for values in task["measures"].values()}
        if len(lengths) != 1 or max(lengths) > len(rows):
            raise ValueError(
                f"answers.tasks.{name} has {sorted(lengths)} values; needed: as many of each measure, "
                f"at most {len(rows)}"
            )
    for metric, bounds in answers["intervals"].items():
        if metric not in NAMES or len(bounds) != 2:
            raise ValueError(f"answers.intervals.{metric}; allowed: two bounds of {', '.join(NAMES)}")
