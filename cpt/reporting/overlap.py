"""Similarity of what domains use inside a model, from the `diagnostics/` of a run folder.

Values of units in 0..1 for domains s and t are compared by the soft Jaccard index (Ruzicka's similarity),
`sum_u min(a_u, b_u) / sum_u max(a_u, b_u)`; of sets it is Jaccard's, |A and B| / |A or B|. All layers count
as one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cpt.core.files import check_archive
from cpt.evaluation.scores import Scores

QUANTITIES = {  # by the prefix of the arrays' names
    "importance": "importance, accumulated",  # DAS: the largest so far
    "measured": "importance of each domain",
    "chosen": "rows updated",  # MIGU: share of the steps since the first domain in which a row was updated
}


def measure_overlap(folder: Path, scores: Scores) -> dict[str, tuple[list[str], np.ndarray]]:
    """By quantity the domains' names [n] and their similarities [n, n] in 0..1, nan between two that use
    nothing. A file that is missing or damaged leaves its domain out."""
    stages = {row: read_stage(folder, row) for row in range(1, len(scores.rows))}
    stages = {row: arrays for row, arrays in stages.items() if arrays}
    found = {}
    for prefix, title in QUANTITIES.items():
        vectors = {}
        for row, arrays in stages.items():
            parts = [
                each.ravel().astype(float) for name, each in arrays.items() if name.startswith(f"{prefix}/")
            ]
            if parts:
                vectors[row] = np.concatenate(parts)
        longest = max(map(len, vectors.values()), default=0)
        vectors = {row: each for row, each in vectors.items() if len(each) == longest}
        if prefix == "chosen":
            vectors = split_shares(vectors, scores)
        if len(vectors) > 1:
            similarities = soft_jaccard(np.stack([*vectors.values()]))
            found[title] = [scores.rows[row] for row in vectors], similarities
    for name, shares in (stages[max(stages)] if stages else {}).items():  # HAT: gates of the last model
        prefix, _, kind = name.partition("/")
        if prefix == "overlap" and shares.ndim == 2 and 1 < len(shares) < len(scores.rows):
            found[f"gates: {kind}"] = scores.rows[1 : len(shares) + 1], jaccard(shares.astype(float))
    return found


def read_stage(folder: Path, row: int) -> Mapping[str, np.ndarray]:
    """The arrays of one stage; empty where its file is missing or damaged."""
    path = Path(folder) / "diagnostics" / f"{row:03d}.npz"
    try:
        check_archive(path, instead="")
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError):
        return {}


def split_shares(shares: Mapping[int, np.ndarray], scores: Scores) -> dict[int, np.ndarray]:
    """Shares [units] of each stage's own steps, from those of all steps so far, by the tokens that stages
    read. Leading stages without a mask do not count; what follows a missing stage cannot be told apart."""
    read = len(scores.seen) == len(scores.rows) and all(scores.seen[1:])
    seen = scores.seen if read else [1] * len(scores.rows)
    own, before, steps = {}, 0.0, 0.0
    for row in range(1, len(scores.rows)):
        if row not in shares:
            break
        if shares[row].any():
            total = shares[row] * (steps + seen[row])
            own[row] = np.clip((total - before) / seen[row], 0, 1)
            before, steps = total, steps + seen[row]
    return own


def soft_jaccard(values: np.ndarray) -> np.ndarray:
    """Of the rows of [n, units], [n, n]; nan where both rows are 0 throughout."""
    total = values.sum(1)
    apart = np.stack([np.abs(values - row).sum(1) for row in values])  # sum of max - sum of min
    with np.errstate(invalid="ignore"):
        return (total[:, None] + total - apart) / (total[:, None] + total + apart)


def jaccard(shares: np.ndarray) -> np.ndarray:
    """From the shares p of row i's set that row j's has too, [n, n]: 1 / (1/p_ij + 1/p_ji - 1); nan between
    empty sets."""
    empty = np.diagonal(shares) == 0
    with np.errstate(divide="ignore"):
        return np.where(empty[:, None] & empty, np.nan, 1 / (1 / shares + 1 / shares.T - 1))
