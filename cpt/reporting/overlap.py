"""How far domains use the same units of a model, from the `diagnostics/` of a run folder.

The similarity of two domains is the soft Jaccard index over units, `sum min(a, b) / sum max(a, b)`."""

from __future__ import annotations

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
Arrays = Mapping[str, np.ndarray]  # by `prefix/name`
Diagnostics = Mapping[int, Arrays]  # by row of the matrix


class Overlap(NamedTuple):
    """Similarities [n, n] of domains or texts; nan between two that use nothing."""

    names: list[str]
    similarities: np.ndarray  # over the units of all layers; of product magnitudes, the mean over layers
    by_layer: Mapping[str, np.ndarray]


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
            check_archive(path, remedy="")
            with np.load(path) as arrays:
                stages[row] = dict(arrays)
        except (OSError, ValueError):
            continue
    return stages


def select_prefix(arrays: Arrays, prefix: str) -> dict[str, np.ndarray]:
    """The arrays of one kind by the rest of their names."""
    selected = {}
    for key, values in arrays.items():
        kind, _, name = key.partition("/")
        if kind == prefix:
            selected[name] = values
    return selected


def measure_overlap(diagnostics: Diagnostics, scores: Scores) -> dict[str, Overlap]:
    """By quantity, what domains share; nothing of a quantity with fewer than two."""
    overlaps: dict[str, Overlap] = {}
    for prefix, title in QUANTITIES.items():
        overlap = compare_domains(diagnostics, scores, prefix)
        if overlap is not None:
            overlaps[title] = overlap
    overlaps |= compare_gates(diagnostics, scores)
    overlaps |= compare_largest_rows(diagnostics, scores)
    return overlaps


def compare_domains(diagnostics: Diagnostics, scores: Scores, prefix: str) -> Overlap | None:
    """What domains share of one of QUANTITIES; None for fewer than two domains.

    Rows with other layers than the largest model are left out: the model has grown since."""
    arrays_by_row = {}
    for row, arrays in diagnostics.items():
        selected = select_prefix(arrays, prefix)
        if row > 0 and selected:
            arrays_by_row[row] = selected
    sizes_by_row = {}
    for row, arrays in arrays_by_row.items():
        sizes_by_row[row] = {name: values.size for name, values in arrays.items()}
    sizes = max(sizes_by_row.values(), key=lambda sizes: sum(sizes.values()), default={})

    units_by_row = {}  # [units of all layers]
    for row, arrays in arrays_by_row.items():
        if sizes_by_row[row] == sizes:
            units_by_row[row] = np.concatenate([values.ravel() for values in arrays.values()]).astype(float)
    if prefix == "chosen":
        units_by_row = separate_stages(units_by_row, scores)
    if len(units_by_row) < 2:
        return None

    units = np.stack(list(units_by_row.values()))
    borders = np.cumsum(list(sizes.values()))[:-1]
    minima = []  # [layer, n, n]
    maxima = []
    for layer_units in np.split(units, borders, axis=1):
        minimum, maximum = sum_min_and_max(layer_units)
        minima.append(minimum)
        maxima.append(maximum)
    with np.errstate(invalid="ignore"):
        by_layer = np.array(minima) / np.array(maxima)
        similarities = np.array(minima).sum(0) / np.array(maxima).sum(0)
    names = [scores.rows[row] for row in units_by_row]
    return Overlap(names, similarities, dict(zip(sizes, by_layer, strict=True)))


def separate_stages(shares: Mapping[int, np.ndarray], scores: Scores) -> dict[int, np.ndarray]:
    """Shares [units] of each stage's own steps, from those of all steps so far, by the tokens that stages
    read. Leading stages without a mask do not count; nothing is known after a missing stage."""
    num_rows = len(scores.rows)
    tokens: list[float] = [1] * num_rows
    if len(scores.tokens_read) == num_rows and all(scores.tokens_read[1:]):
        tokens = list(scores.tokens_read)

    separate = {}
    total_before = np.array(0.0)
    tokens_before = 0.0
    for row in range(1, num_rows):
        if row not in shares:
            break
        if shares[row].any():
            total = shares[row] * (tokens_before + tokens[row])
            separate[row] = np.clip((total - total_before) / tokens[row], 0, 1)
            total_before = total
            tokens_before += tokens[row]
    return separate


def compare_gates(diagnostics: Diagnostics, scores: Scores) -> dict[str, Overlap]:
    """HAT: what the gates of the last model's domains share, by kind of gate."""
    rows = [row for row in diagnostics if row > 0]
    if not rows:
        return {}
    overlaps = {}
    for kind, shares in select_prefix(diagnostics[max(rows)], "overlap").items():
        if shares.ndim == 2 and 1 < len(shares) < len(scores.rows):
            names = scores.rows[1 : len(shares) + 1]
            overlaps[f"gates: {kind}"] = Overlap(names, jaccard(shares.astype(float)), {})
    return overlaps


def compare_largest_rows(diagnostics: Diagnostics, scores: Scores) -> dict[str, Overlap]:
    """MIGU: what texts share of the rows with the largest product magnitudes, by model."""
    overlaps = {}
    for row, arrays in diagnostics.items():
        layers = select_prefix(arrays, "similarity")
        if layers and len(arrays["texts"]) > 1:
            texts = [scores.domains[column] for column in arrays["texts"]]
            model = scores.rows[row] if row == 0 else f"after {scores.rows[row]}"
            mean = np.mean(list(layers.values()), 0)
            overlaps[f"{LARGEST_ROWS}, {model}"] = Overlap(texts, mean, layers)
    return overlaps


def read_distributions(diagnostics: Diagnostics, scores: Scores) -> dict[str, Distribution]:
    """Product magnitudes of one layer by the row of the matrix whose model has them."""
    distributions = {}
    for row, arrays in diagnostics.items():
        for layer, shares in select_prefix(arrays, "magnitudes").items():
            texts = [scores.domains[column] for column in arrays["texts"][: len(shares)]]
            distributions[scores.rows[row]] = Distribution(layer, texts, shares)
    return distributions


def sum_min_and_max(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sums of the minima and of the maxima of each two rows of [n, units] >= 0, each [n, n]."""
    sums = values.sum(1)
    pair_sums = sums[:, None] + sums
    distances = cdist(values, values, "cityblock")
    return (pair_sums - distances) / 2, (pair_sums + distances) / 2


def jaccard(shares: np.ndarray) -> np.ndarray:
    """From shares p_ij of row i's set that row j's has, [n, n]: 1 / (1/p_ij + 1/p_ji - 1), or nan."""
    is_empty = np.diagonal(shares) == 0
    with np.errstate(divide="ignore"):
        return np.where(is_empty[:, None] & is_empty, np.nan, 1 / (1 / shares + 1 / shares.T - 1))
