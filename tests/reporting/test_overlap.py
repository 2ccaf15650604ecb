"""How far domains use the same: hand-computed similarities, and what the methods themselves write."""

from types import SimpleNamespace

import numpy as np
import pytest

from cpt.evaluation.scores import Scores
from cpt.reporting.overlap import (
    jaccard,
    measure_overlap,
    read_diagnostics,
    read_distributions,
    sum_min_and_max,
)
from tests.support.kill_callback import KilledError, Killer

ROWS = ["base", "law", "food", "space"]
OWN = [[1, 0, 0.5, 0.5], [0, 1, 0.5, 0.5], [0.25, 0.75, 1, 0]]


def overlap(folder, rows=ROWS, tokens_read=()):
    scores = SimpleNamespace(rows=rows, tokens_read=[*tokens_read], domains=[*rows[1:], "general"])
    return measure_overlap(read_diagnostics(folder, scores), scores)


def test_the_indices_by_hand():
    values = np.array([[1, 0.5, 0], [0.5, 0.5, 1], [0, 0, 0]])
    expected = [[1.5, 1, 0], [1, 2, 0], [0, 0, 0]], [[1.5, 2.5, 1.5], [2.5, 2, 2], [1.5, 2, 0]]
    np.testing.assert_allclose(sum_min_and_max(values), expected)
    sets = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]], float)
    shares = sets @ sets.T / np.maximum(sets.sum(1, keepdims=True), 1)
    expected = [[1, 2 / 3, 0, 0, 0], [2 / 3, 1, 0, 0, 0], [0, 0, 1, 0, 0]] + [[0, 0, 0, np.nan, np.nan]] * 2
    np.testing.assert_allclose(jaccard(shares), expected)


def test_rows_are_compared_by_each_domains_own_steps(tmp_path):
    folder = tmp_path / "diagnostics"
    folder.mkdir()
    for first, steps in enumerate([(4, 8, 400), (0, 4, 4)]):  # a first domain without a mask does not count
        total = np.zeros(4)
        for number, (size, domain_values) in enumerate(zip(steps, OWN, strict=True), start=1):
            total += size * np.array(domain_values)
            since_the_first = {"chosen/map": total / max(sum(steps[:number]), 1)}
            np.savez(folder / f"{number:03d}.npz", **since_the_first)
        names, values, _ = overlap(tmp_path, ROWS, [0, *(size * 128 for size in steps)])["rows updated"]
        assert names == ROWS[1 + first :]
        shared, spanned = sum_min_and_max(np.array(OWN[first:]))
        np.testing.assert_allclose(values, shared / spanned, atol=1e-4)


METHODS = {
    "das mask=migu": {"importance, accumulated", "rows updated", "largest rows, after food"},
    "hat": {"gates: heads", "gates: neurons"},
}


@pytest.mark.parametrize("method", METHODS)
def test_what_the_methods_write_is_found(small, start, tmp_path, method):
    start(small(*f"method={method} trainer.steps=2 order=[law,food]".split()), tmp_path)
    overlaps = overlap(tmp_path, ROWS[:3])
    assert METHODS[method] <= set(overlaps)
    for names, values, layers in overlaps.values():
        assert names[:2] == ["law", "food"]
        for matrix in (values, *layers.values()):
            np.testing.assert_allclose(np.diagonal(matrix), 1)
            assert 0 <= matrix[0, 1] == matrix[1, 0] <= 1


def test_magnitudes_are_those_of_the_base_and_of_the_final_model_and_change_no_bit(
    small, start, killing, tmp_path
):
    options = ["mask=migu", "trainer.steps=4", "trainer.checkpoint_every_n_steps=1", "order=[law,food]"]
    start(small(*options), tmp_path / "whole")
    killing(Killer(step=2, domain="food"))
    with pytest.raises(KilledError):
        start(small(*options), tmp_path / "killed")
    killing(None)
    start(small(*options), tmp_path / "killed")
    start(small(*options, "mask.migu.magnitudes=false"), tmp_path / "without")

    scores, plain_scores = (Scores.load(tmp_path / name / "scores.json") for name in ("whole", "without"))
    assert plain_scores.nll == scores.nll
    folders = (tmp_path / name / "diagnostics" for name in ("whole", "killed", "without"))
    for row, files in enumerate(zip(*(sorted(folder.glob("*.npz")) for folder in folders), strict=True)):
        undisturbed, killed, none = (dict(np.load(file)) for file in files)
        assert undisturbed.keys() == killed.keys() and all(
            (undisturbed[name] == killed[name]).all() for name in undisturbed
        )
        assert ("texts" in undisturbed) == (row != 1) and "texts" not in none

    distributions = read_distributions(read_diagnostics(tmp_path / "whole", scores), scores)
    base = distributions["base"]
    last = distributions["food"]
    assert base.layer == last.layer and base.texts == ["law", "food", "general"]
    np.testing.assert_allclose([base.shares.sum(1), last.shares.sum(1)], 1, rtol=1e-5)
    assert (base.shares != last.shares).any(1).all()
