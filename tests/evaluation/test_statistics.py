"""Intervals cover, p-values are those of all signs, ranks are those of a hand."""

import itertools

import numpy as np
import pytest
from scipy import stats

from cpt.evaluation.pairs import FLIPS, least_p, needed_pairs
from cpt.evaluation.statistics import compare_differences, compare_pairs, intervals_of_means, mcnemar


def interval(values, **how):
    return tuple(intervals_of_means(np.array([values], float), **how)[0].tolist())


@pytest.mark.parametrize("size", range(3, 11))
def test_an_interval_over_few_runs_covers_the_mean(size):
    series = np.random.default_rng(size).normal(3, 2, size=(1500, size))
    low, high = intervals_of_means(series, replicates=1000).T
    assert 0.92 <= np.mean((low <= 3) & (high >= 3)) <= 0.98


def test_up_to_seven_values_the_interval_is_that_of_t():
    values = [1.0, 2.0, 4.0, 9.0]
    assert interval(values) == pytest.approx((4 - 3.182446 * 3.559026 / 2, 4 + 3.182446 * 3.559026 / 2))
    spread = np.random.default_rng(0).normal(size=9)
    assert interval(spread) == interval(spread) != interval(spread, seed=1)
    assert interval(spread[:7]) == interval(spread[:7], seed=1)


def test_values_that_are_not_there():
    given = dict(enumerate([None, 2.0, 4.0, 5.0, float("nan")]))
    assert compare_pairs(given, dict.fromkeys(given, 0.0))[1:3] == interval([2.0, 4.0, 5.0])
    for few in ([3.0, 4.0], [3.0], []):
        assert np.isnan(interval(few)).all()
    assert interval([0.1 * 3] * 8 + [0.3]) == pytest.approx((0.3, 0.3))


def test_the_p_value_of_all_signs():
    values, baseline = {"a": 3.0, "b": 5.0, "c": 2.0, "d": 4.0}, {"a": 2.0, "b": 3.0, "c": 2.5, "d": 1.0}
    differences = np.array([1.0, 2.0, -0.5, 3.0])
    means = [abs(np.mean(differences * signs)) for signs in itertools.product((-1, 1), repeat=4)]
    found = compare_pairs(values, baseline)
    assert found.mean == pytest.approx(5.5 / 4)
    assert found.p == np.mean(np.array(means) >= 5.5 / 4 - 1e-12)
    assert found.n == 4
    assert (found.low, found.high) == interval(differences)
    assert found.low < found.mean < found.high
    assert found.p_t == pytest.approx(stats.ttest_rel(list(values.values()), list(baseline.values())).pvalue)


def test_the_difference_is_over_shared_keys():
    found = compare_pairs({1: 2.0, 2: 4.0, 3: None, 5: 7.0}, {2: 1.0, 1: 1.0, 3: 1.0, 4: 9.0})
    assert (found.mean, found.n) == (2.0, 2)
    assert (found.p, found.p_t) == (0.5, None) and np.isnan([found.low, found.high]).all()
    assert compare_pairs({1: 2.0}, {1: 1.0}).p == 1
    nothing = compare_pairs({1: 2.0}, {2: 1.0})
    assert nothing.n == 0
    assert np.isnan([nothing.mean, nothing.low, nothing.high, nothing.p]).all()


def test_no_difference_has_p_1_and_a_sure_one_the_least_there_is():
    same = dict.fromkeys(range(8), 1.0)
    assert compare_pairs(same, same) == (0, 0, 0, 1, 8, None)
    better = {key: 2.0 + key / 10 for key in range(8)}
    assert compare_pairs(better, same).p == 2 / 2**8
    assert compare_pairs(same, better).mean == pytest.approx(-1.35)
    rounded = dict(enumerate([0.1, 0.1 * 3, 0.9, 0.1, 0.7]))  # the sums of one sign differ in their last bit
    assert compare_pairs(rounded, dict.fromkeys(rounded, 0.0)).p == 2 / 2**5


def test_many_pairs_are_flipped_at_random():
    generator = np.random.default_rng(1)
    draws = generator.normal(0.15, 1, 13)
    values, zero = dict(enumerate(draws)), dict.fromkeys(range(13), 0.0)
    found = compare_pairs(values, zero)
    signs = np.array(list(itertools.product((-1, 1), repeat=13)))
    exact = np.mean(abs(signs @ draws) >= abs(draws.sum()) - 1e-9)
    assert found.p == pytest.approx(exact, abs=0.02)
    assert found.p != exact
    assert compare_pairs(values, zero) == found
    assert compare_pairs(values, zero, seed=1).p != found.p, "other signs are drawn"
    sure = compare_pairs({key: 1.0 + key for key in range(60)}, dict.fromkeys(range(60), 0.0))
    assert sure.p == 1 / (FLIPS + 1)


def test_how_many_pairs_holm_needs():
    for comparisons, pairs in ((1, 6), (4, 8), (6, 8), (7, 9), (69, 12), (400, 13)):
        assert needed_pairs(comparisons) == pairs
        assert least_p(pairs) * comparisons <= 0.05 < least_p(pairs - 1) * comparisons
    assert needed_pairs(501) is None


def test_up_to_twelve_pairs_the_test_is_exact():
    draws = dict(enumerate(np.random.default_rng(2).normal(0.3, 1, 12)))
    signs = np.array(list(itertools.product((-1, 1), repeat=12)))
    values = np.array(list(draws.values()))
    exact = np.mean(abs(signs @ values) >= abs(values.sum()) - 1e-9)
    assert compare_pairs(draws, dict.fromkeys(draws, 0.0)).p == exact


def test_p_values_are_uniform_under_no_difference():
    generator = np.random.default_rng(3)
    zero = dict.fromkeys(range(10), 0.0)
    p = [compare_pairs(dict(enumerate(generator.normal(size=10))), zero).p for _ in range(150)]
    assert 0.02 <= np.mean(np.array(p) <= 0.1) <= 0.18


# --- over test examples


def test_examples_as_plain_resampling():
    """The same as drawing examples and signs one by one."""
    generator = np.random.default_rng(4)
    difference = (generator.random(80) < 0.6).astype(float) - (generator.random(80) < 0.5)
    found = compare_differences([difference])
    assert (found.mean, found.n) == (pytest.approx(difference.mean()), 80)
    drawn = difference[generator.integers(80, size=(20_000, 80))].mean(1)
    assert [found.low, found.high] == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=0.0126)
    flipped = (difference * generator.choice([-1, 1], size=(20_000, 80))).mean(1)
    assert found.p == pytest.approx(np.mean(abs(flipped) >= abs(difference.mean()) - 1e-12), abs=0.02)
    assert compare_differences([difference]) == found


def test_p_over_tasks_is_that_of_all_signs():
    law, food = np.array([1.0, 1, 1, 0, 1]), np.array([1, 0.0, 1])
    found = compare_differences([law, food])
    means = [
        (np.mean(law * signs[:5]) + np.mean(food * signs[5:])) / 2
        for signs in itertools.product((-1, 1), repeat=8)
    ]
    assert (found.mean, found.n) == (pytest.approx((0.8 + 2 / 3) / 2), 8), "tasks weigh alike"
    assert found.p == pytest.approx(np.mean(np.abs(means) >= found.mean - 1e-9), abs=0.006)
    assert compare_differences([np.array([1.0] * 5 + [0])]).p == pytest.approx(2 / 2**5, abs=0.01)


def test_equal_predictions_and_none():
    assert compare_differences([np.zeros(3)]) == (0, 0, 0, 1, 3, None)
    assert compare_differences([]).n == compare_differences([np.empty(0)]).n == 0


def test_the_interval_over_examples_covers():
    generator = np.random.default_rng(6)
    hits = []
    for _ in range(100):
        found = compare_differences([(generator.random(200) < 0.7) * 1.0 - (generator.random(200) < 0.6)])
        hits.append(found.low <= 0.1 <= found.high)
    assert 0.87 <= np.mean(hits) <= 1


def test_mcnemar_is_two_sided():
    assert mcnemar(4, 1) == mcnemar(1, 4) == pytest.approx(2 * (1 + 5) / 2**5)
    assert mcnemar(3, 3) == mcnemar(0, 0) == 1


def test_intervals_of_many_series_are_those_of_each_alone():
    series = np.random.default_rng(3).normal(size=(5, 10))
    series[2] = 7.0
    for size in (3, 10):
        found = intervals_of_means(series[:, :size])
        assert [tuple(bounds) for bounds in found.tolist()] == [interval(row[:size]) for row in series]
