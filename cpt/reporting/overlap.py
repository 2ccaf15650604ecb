"""How far domains use the same units of a model, from the `diagnostics/` of a run folder.

The similarity of two domains is the soft Jaccard index over units, `sum min(a, b) / sum max(a, b)`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.spatial.distance import cdist

from cpt.core.files import check_archive
from cpt.evaluation.scores import Scores

QUANTITIES = {  # by the prefix of the arrays in diagnostics/
    "importance": "importance, accumulated",  # DAS: the largest so far
    "measured": "importance of each domain",
    "chosen": "rows updated",  # MIGU: share of the steps since the first domain in which a row was updated
}
LARGEST_ROWS = "largest rows"  # MIGU: by product magnitudes on held-out text, of the base and the final model
Diagnostics = Mapping[int, Mapping[str, np.ndarray]]  # the arrays of diagnostics/ by row of the matrix


class Overlap(NamedTuple):
    """Similarities [n, n] of domains or texts; nan between two that use nothing."""

    names: list[str]
    whole: np.ndarray  # over the units of all layers; of product magnitudes, the mean over layers
    layers: Mapping[str, np.ndarray]


class Distribution(NamedTuple):
    """The product magnitudes of one layer, as shares of their sum: [texts, units]."""

    layer: str
    texts: list[str]
    shares: np.ndarray


def read_diagnostics(folder: Path, scores: Scores) -> Diagnostics:
    """A missing or damaged file leaves its row out."""
    stages = {}
    for row in range(len(scores.rows)):
        path = Path(folder) / "diagnostics" / f"{row:03d}.npz"
        try:
            check_archive(path, instead="")
            with np.load(path) as arrays:
                stages[row] = dict(arrays)
        except (OSError, ValueError):
            continue
    return stages


def by_prefix(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    parted = ((name.partition("/"), values) for name, values in arrays.items())
    return {name: values for (kind, _, name), values in parted if kind == prefix}


def measure_overlap(measured: Diagnostics, scores: Scores) -> dict[str, Overlap]:
    """By quantity, what domains share; nothing of a quantity with fewer than two."""
    found: dict[str, Overlap] = {}
    stages = {row: arrays for row, arrays in measured.items() if row}
    for prefix, title in QUANTITIES.items():
        own = {row: named for row, arrays in stages.items() if (named := by_prefix(arrays, prefix))}
        sizes = {row: {name: each.size for name, each in named.items()} for row, named in own.items()}
        layers = max(sizes.values(), key=lambda each: sum(each.values()), default={})
        vectors = {
            row: np.concatenate([each.ravel() for each in named.values()]).astype(float)
            for row, named in own.items()
            if sizes[row] == layers
        }
        if prefix == "chosen":
            # Shares [units] of each stage's own steps, from those of all steps so far, by the tokens that
            # stages read. Leading stages without a mask do not count; nothing is known after a missing stage.
            read = len(scores.tokens_read) == len(scores.rows) and all(scores.tokens_read[1:])
            seen, shares = scores.tokens_read if read else [1] * len(scores.rows), vectors
            vectors, before, steps = {}, np.array(0.0), 0.0
            for row in itertools.takewhile(shares.__contains__, range(1, len(scores.rows))):
                if shares[row].any():
                    total = shares[row] * (steps + seen[row])
                    vectors[row] = np.clip((total - before) / seen[row], 0, 1)
                    before, steps = total, steps + seen[row]
        if len(vectors) > 1:
            parts = np.split(np.stack([*vectors.values()]), np.cumsum([*layers.values()])[:-1], axis=1)
            sums = np.array([min_and_max(part) for part in parts])  # [layer, 2, n, n]
            with np.errstate(invalid="ignore"):
                each = dict(zip(layers, sums[:, 0] / sums[:, 1], strict=True))
                whole = sums[:, 0].sum(0) / sums[:, 1].sum(0)
            found[title] = Overlap([scores.rows[row] for row in vectors], whole, each)
    for name, gates in (stages[max(stages)] if stages else {}).items():  # HAT: of the last model
        prefix, _, kind = name.partition("/")
        if prefix == "overlap" and gates.ndim == 2 and 1 < len(gates) < len(scores.rows):
            names = scores.rows[1 : len(gates) + 1]
            found[f"gates: {kind}"] = Overlap(names, jaccard(gates.astype(float)), {})
    for row, arrays in measured.items():
        if len(each := by_prefix(arrays, "similarity")) and len(arrays["texts"]) > 1:
            names = [scores.domains[place] for place in arrays["texts"]]
            title = f"{LARGEST_ROWS}, {'after ' * bool(row)}{scores.rows[row]}"
            found[title] = Overlap(names, np.mean([*each.values()], 0), each)
    return found


def read_distributions(measured: Diagnostics, scores: Scores) -> dict[str, Distribution]:
    """Product magnitudes of one layer by the row of the matrix whose model has them."""
    found = {}
    for row, arrays in measured.items():
        for layer, shares in by_prefix(arrays, "magnitudes").items():
            texts = [scores.domains[place] for place in arrays["texts"][: len(shares)]]
            found[scores.rows[row]] = Distribution(layer, texts, shares)
    return found


def min_and_max(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each two rows of [n, units] >= 0, the sums of their minima and of their maxima, each [n, n]."""
    total = values.sum(1)
    both, apart = total[:, None] + total, cdist(values, values, "cityblock")
    return (both - apart) / 2, (both + apart) / 2


def jaccard(shares: np.ndarray) -> np.ndarray:
    """From shares p_ij of row i's set that row j's has, [n, n]: 1 / (1/p_ij + 1/p_ji - 1), or nan."""
    empty = np.diagonal(shares) == 0
    with np.errstate(divide="ignore"):
        return np.where(empty[:, None] & empty, np.nan, 1 / (1 / shares + 1 / shares.T - 1))
