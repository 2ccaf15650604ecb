"""Intervals cover, p-values are those of all signs, ranks are those of a hand."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from cpt.evaluation.divergence import estimate_mean, find_mean
from cpt.evaluation.metrics import compare_losses
from cpt.evaluation.statistics import (
    NUM_RANDOM_FLIPS,
    compare_differences,
    compare_pairs,
    compute_mean_intervals,
    mcnemar,
)


def interval(values):
    return tuple(compute_mean_intervals(np.array([values], float))[0].tolist())


def compare_with_zeros(values, **options):
    return compare_pairs(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0), **options)


def all_signs(values):
    """The share of all flips that are as far from 0."""
    signs = np.array(list(itertools.product((-1, 1), repeat=len(values))))
    return np.mean(abs(signs @ np.array(values)) >= abs(np.sum(values)) - 1e-9)


@pytest.mark.parametrize("size", [3, 4, 8, 10, 20])
def test_an_interval_covers_the_mean(size):
    """Also of a distribution with heavy tails, of which a bootstrap of ten values covers 92 %."""
    generator = np.random.default_rng(size)
    for series in (generator.normal(0, 2, size=(6000, size)), generator.standard_t(4, size=(6000, size))):
        low, high = compute_mean_intervals(series).T
        assert 0.942 <= np.mean((low <= 0) & (high >= 0)) <= 0.968


def test_intervals_follow_students_t_also_for_several_series_at_once():
    for values in ([1.0, 2.0, 4.0, 9.0], np.random.default_rng(0).normal(size=12).tolist()):
        expected = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        assert interval(values) == pytest.approx(expected)
    series = np.random.default_rng(3).normal(size=(5, 10))
    series[2] = 7.0
    for size in (3, 10):
        intervals = compute_mean_intervals(series[:, :size])
        assert [tuple(bounds) for bounds in intervals.tolist()] == [interval(row[:size]) for row in series]
    for sample in ([3.0, 4.0], [3.0], []):
        assert np.isnan(interval(sample)).all()
    assert interval([0.1 * 3] * 8 + [0.3]) == pytest.approx((0.3, 0.3))


def test_the_p_value_of_all_signs():
    values = {"a": 3.0, "b": 5.0, "c": 2.0, "d": 4.0}
    baseline = {"a": 2.0, "b": 3.0, "c": 2.5, "d": 1.0}
    differences = [1.0, 2.0, -0.5, 3.0]
    difference = compare_pairs(values, baseline)
    assert (difference.mean, difference.n, difference.p) == (
        pytest.approx(5.5 / 4),
        4,
        all_signs(differences),
    )
    assert (difference.low, difference.high) == interval(
        differences
    ) and difference.low < difference.mean < difference.high
    assert difference.p_t == pytest.approx(
        stats.ttest_rel(list(values.values()), list(baseline.values())).pvalue
    )
    draws = np.random.default_rng(2).normal(0.3, 1, 12).tolist()
    assert compare_with_zeros(draws).p == all_signs(draws), "up to twelve pairs it is exact"
    rounded = [0.1, 0.1 * 3, 0.9, 0.1, 0.7]  # the sums of one sign differ in their last bit
    assert compare_with_zeros(rounded).p == 2 / 2**5


def test_the_difference_is_over_what_both_have():
    difference = compare_pairs({1: 2.0, 2: 4.0, 3: None, 5: 7.0}, {2: 1.0, 1: 1.0, 3: 1.0, 4: 9.0})
    assert (difference.mean, difference.n, difference.p, difference.p_t) == (2.0, 2, 0.5, None)
    assert np.isnan([difference.low, difference.high]).all()
    nothing = compare_pairs({1: 2.0}, {2: 1.0})
    assert nothing.n == 0 and np.isnan([nothing.mean, nothing.low, nothing.high, nothing.p]).all()
    ones_by_seed = dict.fromkeys(range(8), 1.0)
    assert compare_pairs(ones_by_seed, ones_by_seed) == (0, 0, 0, 1, 8, None)


def test_many_pairs_are_flipped_at_random():
    draws = np.random.default_rng(1).normal(0.15, 1, 13).tolist()
    difference = compare_with_zeros(draws)
    assert difference.p == pytest.approx(all_signs(draws), abs=0.02) and difference.p != all_signs(draws)
    assert compare_with_zeros(draws) == difference
    assert compare_with_zeros(draws, seed=1).p != difference.p, "other signs are drawn"
    assert compare_with_zeros([1.0 + key for key in range(60)]).p == 1 / (NUM_RANDOM_FLIPS + 1)


def test_examples_as_plain_resampling():
    generator = np.random.default_rng(4)
    difference = (generator.random(80) < 0.6).astype(float) - (generator.random(80) < 0.5)
    comparison = compare_differences([difference])
    assert (comparison.mean, comparison.n) == (pytest.approx(difference.mean()), 80)
    drawn = difference[generator.integers(80, size=(20_000, 80))].mean(1)
    assert [comparison.low, comparison.high] == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=0.0126)
    flipped = (difference * generator.choice([-1, 1], size=(20_000, 80))).mean(1)
    assert comparison.p == pytest.approx(np.mean(abs(flipped) >= abs(difference.mean()) - 1e-12), abs=0.02)
    assert compare_differences([difference]) == comparison


def test_p_over_tasks_is_that_of_all_signs_and_tasks_weigh_alike():
    law = np.array([1.0, 1, 1, 0, 1])
    food = np.array([1, 0.0, 1])
    comparison = compare_differences([law, food])
    assert (comparison.mean, comparison.n) == (pytest.approx((0.8 + 2 / 3) / 2), 8)
    assert comparison.p == pytest.approx(all_signs([*law / 5, *food / 3]), abs=0.006)
    assert compare_differences([]).n == compare_differences([np.empty(0)]).n == 0
    assert mcnemar(4, 1) == mcnemar(1, 4) == pytest.approx(2 * (1 + 5) / 2**5)
    assert mcnemar(3, 3) == mcnemar(0, 0) == 1


@pytest.mark.filterwarnings("error")
def test_a_text_without_a_scored_token_has_no_mean_and_no_interval():
    for num_documents in (0, 3):
        losses = {"law": np.zeros((2, num_documents)), "food": np.ones((2, 30))}
        law, food = compare_losses(["law", "food"], losses, losses)
        assert np.isnan([law.before, law.after, law.low, law.high]).all()
        assert food.difference == food.low == food.high == 0
        assert math.isnan(find_mean(np.zeros((4, num_documents)), "kl"))
        assert estimate_mean([np.zeros((4, num_documents)), np.ones((4, 30))]) == [None, None, None]
    assert estimate_mean([np.ones((4, 30))]) == [1, 1, 1]
