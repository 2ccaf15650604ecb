"""The numbers of a comparison: spreads within groups of runs, paired differences of groups from their
baselines, ranks, the best group, and the Pareto front.

`compare` puts them into words. Tables are frames. A row that is looked up by its group is a `Spread` or a
`PairedContrast`, whose fields are the columns of the frame. Undefined numbers are nan."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from statistics import fmean, stdev

import numpy as np
from pandas import DataFrame

from cpt.evaluation.statistics import SIGNIFICANCE_LEVEL, Difference, compare_pairs, compute_mean_intervals
from cpt.reporting.load_runs import Pair
from cpt.reporting.measures import TESTED_MEASURES, ComparedMeasure, select_measured
from cpt.reporting.sections import RunGroup, RunSection

# A method with a model per domain has no final model of all domains: it is ranked in these measures only.
RANKED_WITHOUT_FINAL_MODEL = ("CPT/", "intransigence/", "endtask/", "task/", "cost/")

ValuesByGroup = dict[str, dict[Pair, float]]  # a value by group, and by order and seed of the run


@dataclass(frozen=True)
class Spread:
    """A value over the runs of a group."""

    n: int  # runs that have the value
    num_runs: int  # all runs of the group; runs of one order and seed count once
    mean: float
    sd: float  # of the sample; nan for a single value
    low: float  # 95 % interval of the mean; nan for fewer than statistics.MIN_PAIRS values
    high: float


@dataclass(frozen=True)
class PairedContrast:
    """A mean paired difference between two groups, and its p-values before and after Holm's correction."""

    mean: float
    low: float  # 95 % interval of the mean
    high: float
    p: float  # sign-flip test
    n: int  # pairs of runs, or test examples
    p_t: float  # paired t test
    p_holm: float
    p_t_holm: float


@dataclass(frozen=True)
class BestGroup:
    """The best of several groups in a measure, and its contrasts with the others by their names."""

    group: RunGroup
    contrasts: Mapping[str, PairedContrast]


def count_pairs(group: RunGroup) -> int:
    """The number of different pairs of order and seed among the runs of a group."""
    return len({run.pair for run in group.runs})


def measure_spreads(series: np.ndarray, *, num_runs: int) -> list[Spread]:
    """The spread of each row of `series` [series, value], of which each value is of another run.
    `num_runs` counts all runs that were to have a value, those without one as well."""
    num_values = series.shape[1]
    intervals = compute_mean_intervals(series).tolist()

    spreads = []
    for values, (low, high) in zip(series.tolist(), intervals, strict=True):
        sd = stdev(values) if num_values > 1 else math.nan
        spreads.append(Spread(num_values, num_runs, fmean(values), sd, low, high))
    return spreads


@lru_cache(maxsize=64)
def summarize_groups(section: RunSection) -> DataFrame:
    """A row for each group and key that some of its runs have: group, key, and the columns of `Spread`."""
    num_runs = {group.name: count_pairs(group) for group in section.groups}

    rows = []
    for group, group_frame in section.frame.groupby("group", sort=False):
        values_by_key = {}
        for key, key_frame in group_frame.groupby("key", sort=False):
            values_by_key[key] = key_frame["value"].to_numpy()

        # One bootstrap of many series is faster than many of one: series of one length are stacked.
        for num_values in {len(values) for values in values_by_key.values()}:
            stacked = {key: values for key, values in values_by_key.items() if len(values) == num_values}
            spreads = measure_spreads(np.stack(list(stacked.values())), num_runs=num_runs[group])
            for key, spread in zip(stacked, spreads, strict=True):
                rows.append([group, key, *astuple(spread)])

    columns = ["group", "key", *(field.name for field in fields(Spread))]
    return DataFrame(rows, columns=columns)


@lru_cache(maxsize=64)
def group_spreads(section: RunSection) -> dict[str, dict[str, Spread]]:
    """The spreads of a section by key and by the name of the group."""
    spreads: dict[str, dict[str, Spread]] = defaultdict(dict)
    for group, key, *row in summarize_groups(section).itertuples(index=False):
        spreads[key][group] = Spread(*row)
    return spreads


def find_spreads(section: RunSection, key: str) -> dict[str, Spread]:
    """The spread of one value by the name of the group; without groups that lack it."""
    return group_spreads(section).get(key, {})


def correct_holm(p_values: np.ndarray) -> np.ndarray:
    """The p-values after Holm's step-down procedure (Holm 1979).

    The k-th smallest of m is multiplied by m - k + 1, and is never below the one before it or above 1.

    >>> correct_holm(np.array([0.01, 0.04, 0.03])).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.minimum(1, np.maximum.accumulate(p_values[order] * factors))
    ranks = np.argsort(order)
    return corrected[ranks]


def correct_differences(differences: Mapping[str, Difference]) -> DataFrame:
    """The columns of `PairedContrast`, a row for each difference. All are corrected together. One without a
    t test counts as a test with p = 1, and its own corrected p-value is nan."""
    contrasts = DataFrame(
        list(differences.values()), columns=list(Difference._fields), index=list(differences)
    )
    contrasts["p_t"] = contrasts["p_t"].astype(float)  # None becomes nan
    contrasts["p_holm"] = correct_holm(contrasts["p"].to_numpy())
    p_t_holm = correct_holm(contrasts["p_t"].fillna(1.0).to_numpy())
    contrasts["p_t_holm"] = np.where(contrasts["p_t"].isna(), math.nan, p_t_holm)
    return contrasts


def read_contrasts(contrasts: DataFrame) -> dict[str, PairedContrast]:
    """The rows of a frame of `correct_differences` by its index."""
    return {name: PairedContrast(*row) for name, *row in contrasts.itertuples()}


@lru_cache(maxsize=64)
def group_values(section: RunSection) -> dict[str, ValuesByGroup]:
    """The values of a section by key, by the name of the group, and by the order and seed of the run."""
    values: dict[str, ValuesByGroup] = {}
    for row in section.frame.itertuples():
        by_group = values.setdefault(row.key, defaultdict(dict))
        by_group[row.group][row.order, row.seed] = row.value
    return values


def find_group_values(section: RunSection, key: str) -> ValuesByGroup:
    """A value by the name of the group, and by the order and seed of the run."""
    return group_values(section).get(key, {})


@lru_cache(maxsize=1024)
def contrast_groups(section: RunSection, key: str) -> DataFrame:
    """A row for each group that shares an order and a seed with its baseline: its name as the index, and the
    columns of `PairedContrast`, group less baseline."""
    values_by_group = find_group_values(section, key)
    differences = {}
    for group_name, baseline in section.baselines.items():
        values = values_by_group.get(group_name, {})
        baseline_values = values_by_group.get(baseline.name, {})
        difference = compare_pairs(values, baseline_values)
        if difference.n > 0:
            differences[group_name] = difference
    return correct_differences(differences)


@lru_cache(maxsize=1024)
def find_contrasts(section: RunSection, key: str) -> dict[str, PairedContrast]:
    """The contrast of each group with its baseline, by the group's name."""
    return read_contrasts(contrast_groups(section, key))


def is_ranked(group: RunGroup, key: str) -> bool:
    """Whether a group is ranked by a measure."""
    return not group.trains_from_base or key.startswith(RANKED_WITHOUT_FINAL_MODEL)


def rank_groups(section: RunSection) -> DataFrame:
    """The mean rank (1: best) of each group among those of its model, in every tested measure.

    Columns: key, group, mean_rank, num_pairs. Ranks are over the pairs of order and seed that all ranked
    groups have. Groups with a single pair are left out where another has more."""
    rows = []
    for measure in select_measured(section, TESTED_MEASURES):
        values = find_group_values(section, measure.key)
        # Groups of one model (and of one order, if each order is a group) are ranked together.
        comparable: dict[tuple, ValuesByGroup] = defaultdict(dict)
        for group in section.groups:
            if group.name in values and is_ranked(group, measure.key):
                comparable[group.model, group.order][group.name] = values[group.name]

        for values_by_group in comparable.values():
            most_pairs = max(len(by_pair) for by_pair in values_by_group.values())
            min_pairs = min(2, most_pairs)
            ranked = {name: by_pair for name, by_pair in values_by_group.items() if len(by_pair) >= min_pairs}
            by_pair_and_group = DataFrame(ranked).dropna()
            num_pairs, num_groups = by_pair_and_group.shape
            if num_groups > 1 and num_pairs >= min_pairs:
                ranks = by_pair_and_group.rank(axis=1, ascending=not measure.higher_is_better)
                for group, mean_rank in ranks.mean().items():
                    rows.append((measure.key, group, mean_rank, num_pairs))

    return DataFrame(rows, columns=["key", "group", "mean_rank", "num_pairs"])


def group_by_sequence(section: RunSection) -> dict[tuple, list[RunGroup]]:
    """The groups that learned a sequence of domains, by model, and by order if each order is a group."""
    comparable = defaultdict(list)
    for group in section.groups:
        if not group.trains_from_base and group.mean("FG/nats") is not None:
            comparable[group.model, group.order].append(group)
    return comparable


def find_best(section: RunSection, groups: Sequence[RunGroup], measure: ComparedMeasure) -> BestGroup | None:
    """The group with the best mean over the pairs of order and seed that all groups have; None if no group
    has the measure. Without common pairs each mean is over all pairs of the group."""
    values = find_group_values(section, measure.key)
    measured = [group for group in groups if group.name in values]
    if not measured:
        return None

    common_pairs = sorted(set.intersection(*(set(values[group.name]) for group in measured)))
    means = {}
    for group in measured:
        pairs = common_pairs or list(values[group.name])
        means[group] = fmean(values[group.name][pair] for pair in pairs)

    # A run that diverged has no value. A group with such a run is the best only if all groups have one.
    complete = [group for group in measured if len(values[group.name]) == count_pairs(group)]
    candidates = complete or measured
    choose_best = max if measure.higher_is_better else min
    best = choose_best(candidates, key=lambda group: means[group])

    differences = {}
    for group in measured:
        if group is best:
            continue
        difference = compare_pairs(values[best.name], values[group.name])
        if difference.n > 0:
            differences[group.name] = difference
    return BestGroup(best, read_contrasts(correct_differences(differences)))


def is_significantly_better(contrast: PairedContrast, measure: ComparedMeasure) -> bool:
    """Whether a group is better than the one that it was compared with."""
    return contrast.p_holm < SIGNIFICANCE_LEVEL and (contrast.mean > 0) == measure.higher_is_better


def find_pareto_front(means: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names of the points (x, y) that no other dominates, by ascending x; lower is better in both."""
    front = []
    lowest = (math.inf, math.inf)
    for name in sorted(means, key=lambda name: means[name]):
        if means[name][1] < lowest[1] or means[name] == lowest:
            front.append(name)
            lowest = means[name]
    return front
