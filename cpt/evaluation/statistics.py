"""Uncertainty of a comparison: intervals over runs and over test examples, p-values of paired tests.

The interval over runs is Student's t. Of 3 to 50 values it covers 92 to 96 % of the means of normal, t4,
uniform and skewed values, and BCa (Efron 1987) 92 to 97 % (benchmarks/interval_coverage.py). Fewer than LEAST
runs have none. The p-values are those of the sign-flip test (Fisher), which assumes no distribution and is at
least 2^(1-n) for n pairs, and of the paired t test.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import stats

from cpt.evaluation.metrics import Array

Key = TypeVar("Key", bound=Hashable)
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
    values: Mapping[Key, float | None], baseline: Mapping[Key, float | None], *, seed: int = 0
) -> Difference:
    """Mean of values minus baseline over the keys (order and seed of a run, say) that both have. p: the share
    of all 2^n signs of the pairs whose mean is at least as far from 0; from n = 13 on (1 + k) / (1 + FLIPS)
    of drawn ones. `p_t`: the paired t test; None for fewer than LEAST or equal values."""
    shared = [key for key in values if key in baseline]
    ours = np.array([values[key] for key in shared], dtype=float)
    theirs = np.array([baseline[key] for key in shared], dtype=float)
    differences = (ours - theirs)[np.isfinite(ours - theirs)]
    if not len(differences):
        return NO_DIFFERENCE

    mean = float(differences.mean())
    low, high = intervals_of_means(differences[None])[0].tolist()
    p = find_sign_flip_p(differences, seed=seed)
    p_t = find_t_test_p(differences)
    return Difference(mean, low, high, p, len(differences), p_t)


def find_sign_flip_p(differences: Array, *, seed: int) -> float:
    """The p-value of the sign-flip test of [pair]: exact up to EXACT pairs, else of drawn signs."""
    size = len(differences)
    if size == 1:
        return 1.0  # scipy needs two
    if size <= EXACT:
        test = stats.permutation_test(
            (differences,),
            np.mean,
            permutation_type="samples",
            n_resamples=np.inf,  # every sign of every pair
        )
        return float(test.pvalue)

    # A stream of our own, as the p-values that were published have it.
    signs = np.random.default_rng(seed).integers(2, size=(FLIPS, size), dtype=np.int8) * 2 - 1
    return find_drawn_p(signs @ differences / size, float(differences.mean()))


def find_t_test_p(differences: Array) -> float | None:
    """The p-value of the paired t test; None for fewer than LEAST pairs or equal differences."""
    size = len(differences)
    if size < LEAST or np.ptp(differences) <= EQUAL * np.abs(differences).max():
        return None
    ratio = abs(differences.mean()) / stats.sem(differences)
    return float(2 * stats.t.sf(ratio, size - 1))


def compare_differences(tasks: Iterable[Array], *, seed: int = 0) -> Difference:
    """Mean over tasks of differences by example, [example] each; n counts the test examples. Examples are
    redrawn within their task (interval), or swapped between the two (p: Fisher's test with random signs). One
    task after another, of which no more is held than how often each value occurs."""
    # By task, the values that occur and how often each does; rounded, as sums that are equal differ in their
    # last digits.
    strata = [
        np.unique(differences.round(12), return_counts=True) for differences in tasks if len(differences)
    ]
    if not strata:
        return NO_DIFFERENCE
    generator = np.random.default_rng(seed)

    def redraw(counts: Array, size: int) -> Array:
        return generator.multinomial(counts.sum(), counts / counts.sum(), size=size)

    def flip_signs(counts: Array, size: int) -> Array:
        """Of m equal values, a binomial number keeps its sign."""
        return 2 * generator.binomial(counts, 0.5, size=(size, len(counts))) - counts

    redrawn = draw_task_means(strata, redraw, REPLICATES)
    flipped = draw_task_means(strata, flip_signs, FLIPS)

    mean = float(np.mean([values @ counts / counts.sum() for values, counts in strata]))
    low, high = np.percentile(redrawn, LEVELS).tolist()
    num_examples = int(sum(counts.sum() for _, counts in strata))
    return Difference(mean, low, high, find_drawn_p(flipped, mean), num_examples)


def draw_task_means(
    strata: Sequence[tuple[Array, Array]], draw_counts: Callable[[Array, int], Array], num_draws: int
) -> Array:
    """Means over tasks, [draw], from how often each value of a task occurs in a draw.

    `draw_counts` gives [size, value] from the counts of the values and a size: AT_ONCE numbers at most are
    held at a time."""
    means_by_task = []
    for values, counts in strata:
        chunk_size = max(1, AT_ONCE // len(counts))
        chunks = []
        for begin in range(0, num_draws, chunk_size):
            size = min(chunk_size, num_draws - begin)
            chunks.append(draw_counts(counts, size) @ values / counts.sum())
        means_by_task.append(np.concatenate(chunks))
    return np.mean(means_by_task, axis=0)


def mcnemar(higher: int, lower: int) -> float:
    """Two-sided p-value of McNemar's exact test (McNemar 1947): of the examples that are right in one of two
    models alone, each is as likely to be the one's as the other's."""
    if not higher + lower:
        return 1.0
    return float(stats.binomtest(higher, higher + lower).pvalue)


def find_drawn_p(flipped: Array, mean: float) -> float:
    """The observed mean is one of the flips: p is never 0."""
    as_far = np.abs(flipped) >= abs(mean) * (1 - 1e-9)  # equal sums differ by their rounding
    return float((1 + as_far.sum()) / (1 + len(flipped)))
