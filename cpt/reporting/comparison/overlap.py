"""How far domains use the same units, gates or rows: similarities from a run's `diagnostics/`.

What a method measured of unit u in 0..1 for domains s and t, a_u and b_u, is compared by the soft Jaccard
index (Ruzicka's similarity), `sum_u min(a_u, b_u) / sum_u max(a_u, b_u)`: 1 where they are alike, 0 where no
unit matters to both; between sets it is Jaccard's, |A and B| / |A or B|. All layers count as one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cpt.core.files import check_archive
from cpt.evaluation.journal import read_journal

Row = Mapping[str, np.ndarray]
IMPORTANCE, OWN, CHOSEN, GATES = "importance", "measured", "chosen", "overlap"  # what names begin with
SUMMED = {
    IMPORTANCE: "importance, accumulated",
    OWN: "importance of each domain",
    CHOSEN: "rows updated",
}


def measure_overlap(folder: Path, rows: Sequence[str]) -> dict[str, tuple[list[str], np.ndarray]]:
    """By quantity the domains' names [n] and their similarities [n, n], 0..1, nan between two that use
    nothing, from RUNFOLDER/diagnostics/NNN.npz; rows are scores.rows. A file that is missing or damaged
    leaves its domain out; quantities of fewer than two domains are left out.

    - "importance, accumulated" (DAS): the importances I^(<=t) that protect after each domain, the largest so
      far. As these only grow, the similarity of s and a later t is the share of what is protected after t
      that was protected after s already: 1 says that t added nothing.
    - "importance of each domain": what a method measured on each domain itself, where it keeps that.
    - "rows updated" (MIGU): how often each row of a linear map was chosen within the domain's own steps,
      recovered from the shares since the first domain by the tokens that the stages read.
    - "gates: neurons", ... (HAT): the units that are open.
    """
    stages = {number: read_stage(folder, number) for number in range(1, len(rows))}
    there = {number: row for number, row in stages.items() if row}
    found = {}
    for prefix, title in SUMMED.items():
        vectors = _vectors(there, prefix)
        if prefix == CHOSEN:
            vectors = _within(vectors, seen=_seen(folder, stages=len(rows)))
        if len(vectors) > 1:
            names = [rows[number] for number in vectors]
            found[title] = names, similarity(np.stack([*vectors.values()]))
    return found | _gates(there, rows)


def similarity(values: np.ndarray) -> np.ndarray:
    """The soft Jaccard index of the rows of [n, units], [n, n]; nan where both rows are 0 throughout."""
    total = values.sum(1)
    apart = np.stack([np.abs(values - row).sum(1) for row in values])  # = sum of max - sum of min
    with np.errstate(invalid="ignore"):
        return (total[:, None] + total - apart) / (total[:, None] + total + apart)


def jaccard(shares: np.ndarray) -> np.ndarray:
    """Jaccard's index from the shares of row i's set that row j's has too, both [n, n]; nan where both are
    empty.

    With |A and B| / |A| = p and |A and B| / |B| = q it is 1 / (1/p + 1/q - 1), 0 where p or q is.
    """
    p, q = shares, shares.T
    empty = np.diagonal(shares) == 0
    with np.errstate(divide="ignore"):
        return np.where(empty[:, None] & empty, np.nan, 1 / (1 / p + 1 / q - 1))


def read_stage(folder: Path, number: int) -> Row:
    """The arrays of one stage; none if its file is missing or damaged."""
    path = Path(folder) / "diagnostics" / f"{number:03d}.npz"
    try:
        check_archive(path, instead="")
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError):
        return {}


def _vectors(stages: Mapping[int, Row], prefix: str) -> dict[int, np.ndarray]:
    """Of each stage the arrays whose names begin with `prefix/`, one behind the other."""
    found = {}
    for number, row in stages.items():
        parts = [
            values.ravel().astype(float) for name, values in row.items() if name.startswith(f"{prefix}/")
        ]
        if parts:
            found[number] = np.concatenate(parts)
    longest = max((values.size for values in found.values()), default=0)
    return {number: values for number, values in found.items() if values.size == longest}


def _within(shares: Mapping[int, np.ndarray], *, seen: Sequence[float]) -> dict[int, np.ndarray]:
    """The shares [units] within each stage, from those of all steps so far; `seen` [row] is proportional to a
    stage's steps. Leading stages in which nothing was chosen had no steps that count."""
    own, before, steps = {}, 0.0, 0.0
    for number in range(1, len(seen)):
        if number not in shares:
            return own  # what came later can no longer be told apart
        if shares[number].any():
            sums = shares[number] * (steps + seen[number])
            own[number] = np.clip((sums - before) / seen[number], 0, 1)
            before, steps = sums, steps + seen[number]
    return own


def _seen(folder: Path, *, stages: int) -> list[float]:
    """Tokens by stage as scores.json has them; alike for all where it does not."""
    try:
        file = Path(folder) / "scores.json"
        lines = read_journal(file)
        known = json.loads(file.read_text(encoding="utf-8"))["seen"]
        known += {line["row"]: line["seen"] for line in lines if line["row"] >= len(known)}.values()
        seen = [float(tokens) for tokens in known[:stages]]
    except (OSError, ValueError, KeyError, TypeError):
        seen = []
    return seen if len(seen) == stages and all(tokens > 0 for tokens in seen[1:]) else [1.0] * stages


def _gates(stages: Mapping[int, Row], rows: Sequence[str]) -> dict[str, tuple[list[str], np.ndarray]]:
    """HAT's matrices of the last stage, one for each kind of unit."""
    found = {}
    for name, shares in (stages[max(stages)] if stages else {}).items():
        prefix, _, kind = name.partition("/")
        if prefix == GATES and shares.ndim == 2 and 1 < len(shares) < len(rows):
            found[f"gates: {kind}"] = list(rows[1 : len(shares) + 1]), jaccard(shares.astype(float))
    return found
