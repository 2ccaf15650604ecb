"""Answers to tasks as a run has them in its scores."""

from collections.abc import Sequence
from typing import Any

from cpt.evaluation.answers.results import compute_metrics, matrix_of


def answers(values: dict[str, Sequence[float]], *, rows: Sequence[str]) -> dict[str, Any]:
    """The `answers` of scores.json of tasks whose ranked accuracy has these values in the rows."""
    tasks = {
        name: {
            "examples": 40,
            "chance": 0.25,
            "majority": 0.3,
            "measures": {"accuracy_ranked": list(each), "invalid": [0.5] * len(each)},
        }
        for name, each in values.items()
    }
    made = {"when": "each", "seconds": 2.5, "tasks": tasks, "intervals": {"AP": [0.1, 0.9]}}
    found = compute_metrics(matrix_of(made), rows=rows, tasks=list(values))
    return made | {
        "metrics": {name: float(value) for name, value in found.items()},
        "digest": "d",
    }
