"""Uncertainty of a comparison: intervals over runs and over test examples, p-values of paired tests.

The interval over runs is Student's t. Of 3 to 50 values it covers 92 to 96 % of the means of normal, t4,
uniform and skewed values, and BCa (Efron 1987) 92 to 97 % (benchmarks/interval_coverage.py). Fewer than LEAST
runs have none. The p-values are those of the sign-flip test (Fisher), which assumes no distribution and is at
least 2^(1-n) for n pairs, and of the paired t test.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from scipy import stats

from cpt.evaluation.metrics import Array

LEVEL = 0.05  # the largest corrected p-value at which two groups differ
EXACT = 12  # up to this number of pairs, every one of the 2^n signs is tried
FLIPS = 10_000  # random signs where there are more pairs
LEAST = 3  # runs or pairs that an interval and a t test need
EQUAL = 1e-12  # relative: values that differ by less differ in their rounding
REPLICATES = 2000
AT_ONCE = 2**22  # numbers that are drawn together
LEVELS = (2.5, 97.5)  # percentiles: a 95 % interval


class Difference(NamedTuple):
    """Mean difference of n pairs, its 95 % interval [low, high] (nan if undefined), the two-sided
    p-value of the sign-flip test, and that of the paired t test (None if undefined)."""

    mean: float
    low: float
    high: float
    p: float
    n: int
    p_t: float | None = None


NO_DIFFERENCE = Difference(mean=np.nan, low=np.nan, high=np.nan, p=np.nan, n=0)


def intervals_of_means(series: Array) -> Array:
    """95 % interval of the mean of each of [series, value] by Student's t, as [series, 2].

    nan for fewer than LEAST values."""
    size = series.shape[-1]
    if size < LEAST:
        return np.full((len(series), 2), np.nan)
    means = series.mean(-1)
    half_widths = stats.t.ppf(LEVELS[1] / 100, size - 1) * stats.sem(series, axis=-1)
    return np.stack([means - half_widths, means + half_widths], axis=-1)


def compare_pairs(
    values: Mapping[Hashable, float | None], baseline: Mapping[Hashable, float | None], *, seed: int = 0
) -> Difference:
    """Mean of values minus baseline over the keys (order and seed of a run, say) that both have. p: the share
    of all 2^n signs of the pairs whose mean is at least as far from 0; from n = 13 on (1 + k) / (1 + FLIPS)
    of drawn ones. `p_t`: the paired t test; None for fewer than LEAST or equal values."""
    shared = [key for key in values if key in baseline]
    one, other = (np.array([given[key] for key in shared], dtype=float) for given in (values, baseline))
    difference = (one - other)[np.isfinite(one - other)]
    size, p_t = len(difference), None
    if not size:
        return NO_DIFFERENCE
    mean, (low, high) = float(difference.mean()), intervals_of_means(difference[None])[0].tolist()
    if size == 1:
        p = 1.0  # scipy needs two
    elif size <= EXACT:
        options = {"permutation_type": "samples", "n_resamples": np.inf}  # every sign of every pair
        p = float(stats.permutation_test((difference,), np.mean, **options).pvalue)
    else:  # our own stream, as the p-values that were published have it
        signs = np.random.default_rng(seed).integers(2, size=(FLIPS, size), dtype=np.int8) * 2 - 1
        p = _drawn_p(signs @ difference / size, mean)
    if size >= LEAST and np.ptp(difference) > EQUAL * np.abs(difference).max():
        ratio = abs(difference.mean()) / stats.sem(difference)
        p_t = float(2 * stats.t.sf(ratio, size - 1))
    return Difference(mean, low, high, p, size, p_t)


def compare_differences(tasks: Iterable[Array], *, seed: int = 0) -> Difference:
    """Mean over tasks of differences by example, [example] each; n counts the test examples. Examples are
    redrawn within their task (interval), or swapped between the two (p: Fisher's test with random signs). One
    task after another, of which no more is held than how often each value occurs."""
    strata = [np.unique(each.round(12), return_counts=True) for each in tasks if len(each)]
    if not strata:
        return NO_DIFFERENCE
    generator = np.random.default_rng(seed)

    def draw(make: Callable[[Array, int], Array], total: int) -> Array:
        """`total` means over tasks, from how often each value occurs in a draw; few are held at a time."""
        found = []
        for level, count in strata:
            part = max(1, AT_ONCE // len(count))
            sizes = [min(part, total - begin) for begin in range(0, total, part)]
            found.append(np.concatenate([make(count, size) @ level / count.sum() for size in sizes]))
        return np.mean(found, axis=0)

    redrawn = draw(lambda n, part: generator.multinomial(n.sum(), n / n.sum(), size=part), REPLICATES)
    # with random signs: of m alike, a binomial number keeps its sign
    flipped = draw(lambda n, part: 2 * generator.binomial(n, 0.5, size=(part, len(n))) - n, FLIPS)
    mean = float(np.mean([level @ count / count.sum() for level, count in strata]))
    low, high = np.percentile(redrawn, LEVELS).tolist()
    return Difference(mean, low, high, _drawn_p(flipped, mean), int(sum(count.sum() for _, count in strata)))


def mcnemar(higher: int, lower: int) -> float:
    """Two-sided p-value of McNemar's exact test (McNemar 1947): of the examples that are right in one of two
    models alone, each is as likely to be the one's as the other's."""
    return float(stats.binomtest(higher, higher + lower).pvalue) if higher + lower else 1.0


def _drawn_p(flipped: Array, mean: float) -> float:
    """The observed mean is one of the flips: p is never 0."""
    as_far = np.abs(flipped) >= abs(mean) * (1 - 1e-9)  # equal sums differ by their rounding
    return float((1 + as_far.sum()) / (1 + len(flipped)))
