"""Whether what scores.json says follows from the losses by document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isclose, isnan
from typing import Any

import numpy as np

from cpt.evaluation.documents import Losses, gather_documents
from cpt.evaluation.metrics import compute_values, intervals
from cpt.evaluation.scores import Scores


def check_agreement(scores: Scores, rows: Sequence[Losses]) -> None:
    """Raises ValueError, which names the first figure that does not follow, for scores that are not those of
    the losses by document [2, documents] of each row."""
    for name, told, found in (*compare_losses(scores, rows), *compare_metrics(scores, rows)):
        if not is_close(told, found):
            raise ValueError(f"scores.json: {name} is {told}, the losses by document give {found:.6g}")


def compare_losses(scores: Scores, rows: Sequence[Losses]) -> Iterator[tuple[str, Any, float]]:
    """Each cell of the matrix, as it stands and as the documents give it."""
    for row, losses in enumerate(scores.nll):
        for text, told in zip(scores.domains, losses, strict=True):
            if told is not None:
                sums, counts = (each.astype(np.float64).sum() for each in rows[row][text])
                yield f"the loss after {scores.rows[row]} on {text}", told, float(sums / counts)


def compare_metrics(scores: Scores, rows: Sequence[Losses]) -> Iterator[tuple[str, Any, float]]:
    """Each metric and each bound of its interval."""
    values = compute_values(scores.cells, layout=scores)
    sums, counts = gather_documents(rows, scores)
    bounds = intervals(sums, counts=counts, layout=scores)
    for name, metric in scores.metrics.items():
        for unit, found in values.get(name, {}).items():
            yield f"{name} in {unit}", metric[unit], float(found)
        yield from compare_bounds(name, metric.get("interval", {}), bounds.get(name, {}))


def compare_bounds(
    name: str, told: Mapping[str, Sequence[float | None]], found: Mapping[str, Sequence[float]]
) -> Iterator[tuple[str, Any, float]]:
    for unit, pair in told.items():
        for end, given, computed in zip(("low", "high"), pair, found.get(unit, ()), strict=False):
            yield f"{name} in {unit}, the {end} end of its interval,", given, float(computed)


def is_close(told: float | None, found: float) -> bool:
    """Whether two figures are the same; what is no number is null in a file."""
    if told is None or not np.isfinite(found):
        return (told is None or isnan(told)) and not np.isfinite(found)
    return isclose(told, found, rel_tol=1e-6, abs_tol=1e-9)
