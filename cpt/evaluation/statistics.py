"""Uncertainty of a comparison: intervals over runs and over test examples, p-values of paired tests.

The interval over runs is Student's t. Of 3 to 50 values it covers 92 to 96 % of the means of normal, t4,
uniform and skewed values, and BCa (Efron 1987) 92 to 97 % (benchmarks/studies/interval_coverage.py). Fewer
than MIN_PAIRS runs have no interval. The p-values are those of the sign-flip test (Fisher), which assumes no
distribution and is at least 2^(1-n) for n pairs, and of the paired t test.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import stats

from cpt.evaluation.metrics import Array

Key = TypeVar("Key", bound=Hashable)
SIGNIFICANCE_LEVEL = 0.05  # the largest corrected p-value at which two groups differ
MAX_EXACT_PAIRS = 12  # up to this number n of pairs, all 2^n assignments of signs are tried
NUM_RANDOM_FLIPS = 10_000  # assignments of signs that are drawn where there are more pairs
MIN_PAIRS = 3  # runs or pairs that an interval and a t test need
RELATIVE_ROUNDING = 1e-12  # values whose relative difference is smaller differ in their rounding
NUM_BOOTSTRAP_DRAWS = 2000
MAX_DRAWN_NUMBERS = 2**22  # that are held in one array
INTERVAL_PERCENTILES = (2.5, 97.5)  # of a 95 % interval


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


def compute_mean_intervals(series: Array) -> Array:
    """The 95 % interval of the mean of each row of `series` [row, value] by Student's t, as [row, 2]: low and
    high, nan for fewer than MIN_PAIRS values."""
    size = series.shape[-1]
    if size < MIN_PAIRS:
        return np.full((len(series), 2), np.nan)
    means = series.mean(-1)
    half_widths = stats.t.ppf(INTERVAL_PERCENTILES[1] / 100, size - 1) * stats.sem(series, axis=-1)
    return np.stack([means - half_widths, means + half_widths], axis=-1)


def compare_pairs(
    values: Mapping[Key, float | None], baseline: Mapping[Key, float | None], *, seed: int = 0
) -> Difference:
    """Compares two sets of runs by the pairs that share a key, like an order and a seed.

    `values` and `baseline` hold a value for each run, None where it was not measured. A key that only one of
    them has, and a pair without a finite difference, is left out; NO_DIFFERENCE where none is left. `mean` is
    the mean of values minus baseline, `low` and `high` its 95 % interval, `p` the p-value of the sign-flip
    test (`find_sign_flip_p`) and `p_t` that of the paired t test (`find_t_test_p`)."""
    shared_keys = [key for key in values if key in baseline]
    values_by_pair = np.array([values[key] for key in shared_keys], dtype=float)
    baseline_by_pair = np.array([baseline[key] for key in shared_keys], dtype=float)
    differences = values_by_pair - baseline_by_pair
    differences = differences[np.isfinite(differences)]
    if not len(differences):
        return NO_DIFFERENCE

    mean = float(differences.mean())
    low, high = compute_mean_intervals(differences[None])[0].tolist()
    p = find_sign_flip_p(differences, seed=seed)
    p_t = find_t_test_p(differences)
    return Difference(mean, low, high, p, len(differences), p_t)


def find_sign_flip_p(differences: Array, *, seed: int) -> float:
    """The two-sided p-value of the sign-flip test of the differences of n pairs, [n]: the share of the 2^n
    assignments of signs to the differences whose mean is at least as far from 0 as theirs. Above
    MAX_EXACT_PAIRS pairs, NUM_RANDOM_FLIPS of these assignments are drawn (`find_drawn_p`)."""
    size = len(differences)
    if size == 1:
        return 1.0  # scipy needs two
    if size <= MAX_EXACT_PAIRS:
        test = stats.permutation_test(
            (differences,),
            np.mean,
            permutation_type="samples",
            n_resamples=np.inf,  # every sign of every pair
        )
        return float(test.pvalue)

    # A stream of our own, as the p-values that were published have it.
    signs = np.random.default_rng(seed).integers(2, size=(NUM_RANDOM_FLIPS, size), dtype=np.int8) * 2 - 1
    return find_drawn_p(signs @ differences / size, float(differences.mean()))


def find_t_test_p(differences: Array) -> float | None:
    """The p-value of the paired t test; None for fewer than MIN_PAIRS pairs or equal differences."""
    size = len(differences)
    if size < MIN_PAIRS or np.ptp(differences) <= RELATIVE_ROUNDING * np.abs(differences).max():
        return None
    ratio = abs(differences.mean()) / stats.sem(differences)
    return float(2 * stats.t.sf(ratio, size - 1))


def compare_differences(tasks: Iterable[Array], *, seed: int = 0) -> Difference:
    """The mean over tasks of the mean difference of a task's examples. `tasks` has for each task the
    differences of two models' scores, [example]. The interval is a bootstrap that redraws the examples within
    each task; `p` is of Fisher's test, which swaps the two models' scores of random examples; `n` is the
    number of test examples. Tasks are read one after another: only the values that occur in each, and their
    counts, are held."""
    # A stratum is a task. Rounded, since equal sums may differ in their last digits.
    strata = [
        np.unique(differences.round(12), return_counts=True) for differences in tasks if len(differences)
    ]
    if not strata:
        return NO_DIFFERENCE
    generator = np.random.default_rng(seed)

    def redraw(counts: Array, size: int) -> Array:
        return generator.multinomial(counts.sum(), counts / counts.sum(), size=size)

    def flip_signs(counts: Array, size: int) -> Array:
        """Among m equal values, a binomial number of them keep their sign."""
        return 2 * generator.binomial(counts, 0.5, size=(size, len(counts))) - counts

    redrawn = draw_task_means(strata, redraw, NUM_BOOTSTRAP_DRAWS)
    flipped = draw_task_means(strata, flip_signs, NUM_RANDOM_FLIPS)

    mean = float(np.mean([values @ counts / counts.sum() for values, counts in strata]))
    low, high = np.percentile(redrawn, INTERVAL_PERCENTILES).tolist()
    num_examples = int(sum(counts.sum() for _, counts in strata))
    return Difference(mean, low, high, find_drawn_p(flipped, mean), num_examples)


def draw_task_means(
    strata: Sequence[tuple[Array, Array]], draw_counts: Callable[[Array, int], Array], num_draws: int
) -> Array:
    """The mean over tasks in each draw, [draw], of the values in a task's draw.

    `strata` holds for each task the different values that its examples have, [value], and the number of
    examples with each value, [value]. `draw_counts` gets these numbers and a number of draws, and gives the
    number of examples with each value in each draw, [draw, value]. It is called for a part of the draws at a
    time, so that at most MAX_DRAWN_NUMBERS numbers are held."""
    means_by_task = []
    for values, counts in strata:
        chunk_size = max(1, MAX_DRAWN_NUMBERS // len(counts))
        chunks = []
        for begin in range(0, num_draws, chunk_size):
            size = min(chunk_size, num_draws - begin)
            chunks.append(draw_counts(counts, size) @ values / counts.sum())
        means_by_task.append(np.concatenate(chunks))
    return np.mean(means_by_task, axis=0)


def mcnemar(higher: int, lower: int) -> float:
    """Two-sided p-value of McNemar's exact test (McNemar 1947). By its hypothesis an example that only one of
    two models has right is as likely to be that of the one as of the other."""
    if not higher + lower:
        return 1.0
    return float(stats.binomtest(higher, higher + lower).pvalue)


def find_drawn_p(flipped: Array, mean: float) -> float:
    """The two-sided p-value of an observed `mean` by the means of random assignments of signs, [draw]: the
    share of means that are at least as far from 0, where the observed mean counts as one of them, so that p
    is never 0."""
    is_as_far = np.abs(flipped) >= abs(mean) * (1 - 1e-9)  # equal sums differ by their rounding
    return float((1 + is_as_far.sum()) / (1 + len(flipped)))
