"""Metrics of a run's matrix of losses: each a mean of terms, with its median and a bootstrap interval.

A cell that was not measured is nan; so are the terms that need it, and the mean is over those left.

L[i][j] is the mean negative log-likelihood (nats per scored token) on test text j after i stages; L[0] is the
base model. Domains are numbered 1..N in the order of learning, so that L[j][j] is the model that has just
learned domain j; n is the number of stages so far, N at the end. The general text, g, enters no average.

Yildiz et al. 2024 (arXiv 2402.17400): ZS, CPT, LC, transfer relative to zero-shot. Lopez-Paz and Ranzato 2017
(GEM, arXiv 1706.08840): BWT_gem, FWT_gem. Chaudhry et al. 2018 (arXiv 1801.10112): FG_max, intransigence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun
from cpt.data.sources.base import GENERAL
from cpt.evaluation.score_schema import UNITS

Array = np.ndarray
Arrays = Sequence[np.ndarray]
Losses = Mapping[str, np.ndarray]  # by text [2, documents]: nats and scored tokens of each document
ByMetricAndUnit = dict[str, dict[str, Array]]
Intervals = dict[str, dict[str, list[float]]]  # by metric and unit: [low, high]
CHANGE_REPLICATES = 2000
PERPLEXITY = "perplexity"
LEAST_LOSS = {"nats": 0.0, PERPLEXITY: 1.0, "bits_per_byte": 0.0}  # by unit
MIN_ITEMS = 3  # documents that an interval needs
MIN_BOOTSTRAP_ITEMS = 30  # documents from which on the percentiles of a bootstrap are wide enough
MIN_ITEMS_PER_COLUMN = 20  # the same in each of many columns
MAX_ARRAY_SIZE = 1 << 21  # numbers that the bootstrap holds in one array


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A mean of terms, and the least that a matrix has to have for them to exist.

    `compute_terms` gives them as [..., K] from the matrix [..., row, column], whose columns are in the order
    of learning, and from the number of its domains."""

    meaning: str
    formula: str
    compute_terms: Callable[[Array, int], Array]
    min_stages: int = 0
    min_domains: int = 1
    min_rows: int = 1
    needs_general: bool = False
    is_level: bool = False  # a loss, not a difference of losses
    is_nested: bool = False  # a mean over stages of means over domains
    first_column: int = 0  # of the domains in the order of learning: that of the first term

    def is_defined(self, layout: MatrixLayout) -> bool:
        """Whether a matrix has the stages, domains, rows and texts that the terms are of."""
        return (
            len(layout.learned) >= self.min_stages
            and layout.num_domains >= self.min_domains
            and len(layout.rows) >= self.min_rows
            and (layout.has_general or not self.needs_general)
        )


def select_base(nll: Array, num_domains: int) -> Array:
    return nll[..., 0, :num_domains]


def select_final(nll: Array, num_domains: int) -> Array:
    return nll[..., -1, :num_domains]


def select_just_learned(nll: Array, num_domains: int) -> Array:
    """The diagonal [..., n]: each domain that was learned, after its own stage."""
    return np.diagonal(nll[..., 1:, :], axis1=-2, axis2=-1)


def select_earlier_domains(nll: Array) -> Array:
    """The columns of the domains that were learned before the last, [..., row, n - 1]: a matrix of n stages
    has n + 1 rows."""
    return nll[..., : nll.shape[-2] - 2]


def learned_terms(nll: Array, num_domains: int) -> Array:
    just_learned = select_just_learned(nll, num_domains)
    return nll[..., 0, : just_learned.shape[-1]] - just_learned


def forgetting_terms(nll: Array, num_domains: int) -> Array:
    just_learned = select_just_learned(nll, num_domains)
    return select_earlier_domains(nll)[..., -1, :] - just_learned[..., :-1]


def forgetting_since_best_terms(nll: Array, num_domains: int) -> Array:
    """The best row may precede its domain, but is neither the base (Chaudhry: 1..k-1) nor the last."""
    earlier = select_earlier_domains(nll)
    return earlier[..., -1, :] - np.fmin.reduce(earlier[..., 1:-1, :], axis=-2)


def backward_zero_shot_terms(nll: Array, num_domains: int) -> Array:
    earlier = select_earlier_domains(nll)
    return earlier[..., 0, :] - earlier[..., -1, :]


def backward_gem_terms(nll: Array, num_domains: int) -> Array:
    return -forgetting_terms(nll, num_domains)


def forward_zero_shot_terms(nll: Array, num_domains: int) -> Array:
    """The terms are [..., i, j], nan where j is not ahead of i."""
    num_stages = min(nll.shape[-2], num_domains)
    # [i, j]: domain j comes after stage i
    is_ahead = np.arange(num_domains) >= np.arange(1, num_stages)[:, None]

    terms = nll[..., :1, :num_domains] - nll[..., 1:num_stages, :num_domains]
    terms[..., ~is_ahead] = np.nan
    return terms


def forward_gem_terms(nll: Array, num_domains: int) -> Array:
    """GEM takes random weights where we take the base model."""
    columns = np.arange(1, min(nll.shape[-2], num_domains))
    return nll[..., 0, columns] - nll[..., columns, columns]  # row j is before the stage of domain j


def general_drift_terms(nll: Array, num_domains: int) -> Array:
    return nll[..., -1, num_domains:] - nll[..., 0, num_domains:]


METRICS: Mapping[str, Metric] = {
    "ZS": Metric(
        meaning="Loss of the base model",
        formula="mean_j L[0][j]",
        compute_terms=select_base,
        is_level=True,
    ),
    "CPT": Metric(
        meaning="Loss on each domain just after its stage",
        formula="mean_{j<=n} L[j][j]",
        compute_terms=select_just_learned,
        min_stages=1,
        is_level=True,
    ),
    "LC": Metric(
        meaning="Loss of the last model on all domains",
        formula="mean_j L[n][j]",
        compute_terms=select_final,
        is_level=True,
    ),
    "learned": Metric(
        meaning="Fall of the loss on each domain, base to its own stage, > 0 is good",
        formula="mean_{j<=n} (L[0][j] - L[j][j])",
        compute_terms=learned_terms,
        min_stages=1,
    ),
    "FG": Metric(
        meaning="Rise of the loss on earlier domains since their stages, > 0 is bad",
        formula="mean_{j<n} (L[n][j] - L[j][j])",
        compute_terms=forgetting_terms,
        min_stages=2,
    ),
    "FG_max": Metric(
        meaning="Rise of the loss since the best model, > 0 is bad",
        formula="mean_{j<n} (L[n][j] - min_{1<=i<=n-1} L[i][j])",
        compute_terms=forgetting_since_best_terms,
        min_stages=2,
    ),
    "BWT_zs": Metric(
        meaning="Backward transfer, against zero-shot, > 0 is good",
        formula="mean_{j<n} (L[0][j] - L[n][j])",
        compute_terms=backward_zero_shot_terms,
        min_stages=2,
    ),
    "BWT_gem": Metric(
        meaning="Backward transfer, by GEM, > 0 is good",
        formula="mean_{j<n} (L[j][j] - L[n][j]) = -FG",
        compute_terms=backward_gem_terms,
        min_stages=2,
    ),
    "FWT_zs": Metric(
        meaning="Forward transfer, against zero-shot, > 0 is good",
        formula="mean_{1<=i<=min(n,N-1)} mean_{j>i} (L[0][j] - L[i][j])",
        compute_terms=forward_zero_shot_terms,
        min_stages=1,
        min_domains=2,
        is_nested=True,
    ),
    "FWT_gem": Metric(
        meaning="Forward transfer, by GEM, > 0 is good",
        formula="mean_{2<=j<=min(n+1,N)} (L[0][j] - L[j-1][j])",
        compute_terms=forward_gem_terms,
        min_stages=1,
        min_domains=2,
        first_column=1,
    ),
    "general_drift": Metric(
        meaning="Rise of the loss on general text since the base, > 0 is bad",
        formula="L[n][g] - L[0][g]",
        compute_terms=general_drift_terms,
        min_rows=2,
        needs_general=True,
    ),
}
TITLES = {"ZS": "base (ZS)", "CPT": "just learned (CPT)", "LC": "final (LC)", "FG": "forgetting (FG)"}


def intransigence(diagonal: Array, *, reference: Array) -> Array:
    """Cost against learning each domain alone (method `one`, whose diagonal is the reference), > 0 is bad:
    `mean_j (L[j][j] - ONE[j][j])`."""
    return (np.asarray(diagonal) - np.asarray(reference)).mean(-1)


@dataclass(kw_only=True)
class MatrixLayout:
    """What the rows and columns of a matrix stand for."""

    rows: list[str] = field(default_factory=list)  # "base", then the stages done
    domains: list[str]  # columns: d1..dN, then "general" if there is general text
    tokens: list[int]  # per column, tokens of the test text that the objective may score
    bytes: list[int]  # per column, UTF-8 bytes of the test text

    @property
    def learned(self) -> list[str]:
        """The domains in the order of learning so far; none if a row stands for a mixture of domains."""
        stages = self.rows[1:]
        is_one_domain_each = set(stages) <= set(self.domains) - {GENERAL}
        return stages if is_one_domain_each else []

    @property
    def num_domains(self) -> int:
        return len(set(self.domains) - {GENERAL})

    @property
    def has_general(self) -> bool:
        return GENERAL in self.domains


def order_columns(layout: MatrixLayout) -> list[str]:
    """The columns in the order of learning; the general text stays last."""
    return list(dict.fromkeys([*layout.learned, *layout.domains]))


def compute_terms(nll: Array, *, layout: MatrixLayout) -> dict[str, Array]:
    """The terms of every metric that has any; nll is [..., row, column] as in the layout."""
    in_order = order_columns(layout)
    aligned = nll
    if in_order != layout.domains:  # in a run they are equal, and nothing is copied
        aligned = nll[..., [layout.domains.index(name) for name in in_order]]

    terms = {}
    for name, metric in METRICS.items():
        if metric.is_defined(layout):
            terms[name] = metric.compute_terms(aligned, layout.num_domains)
    return terms


@np.errstate(invalid="ignore")
def average_terms(terms: Array, is_measured: Array, *, is_nested: bool = False) -> Array:
    """The mean of the terms that were measured, [..., K] or nested [..., i, j]; nan where none was."""
    if not is_nested and is_measured.all():
        return terms.mean(-1)
    counts = is_measured.sum(-1)
    means = np.where(is_measured, terms, 0).sum(-1) / counts
    return average_terms(means, counts > 0) if is_nested else means


def compute_means(matrix: Array, *, layout: MatrixLayout, higher_is_better: bool = False) -> dict[str, Array]:
    """Every metric whose terms exist, each value [...]; the matrix is [..., row, column] as in the layout.
    With `higher_is_better` it is of scores, not of losses: a level is then their mean, and a gain is still a
    gain."""
    losses = -matrix if higher_is_better else matrix

    means = {}
    for name, terms in compute_terms(losses, layout=layout).items():
        metric = METRICS[name]
        mean = average_terms(terms, ~np.isnan(terms), is_nested=metric.is_nested)
        means[name] = -mean if higher_is_better and metric.is_level else mean
    return means


@np.errstate(over="ignore")
def convert_units(nats: Array, *, layout: MatrixLayout) -> dict[str, Array]:
    """The matrix in nats, as perplexity exp(nats) and in bits per byte, nats * tokens / bytes / ln 2."""
    per_byte = np.asarray(layout.tokens, float) / np.asarray(layout.bytes, float) / np.log(2)
    return dict(zip(UNITS, (nats, np.exp(nats), nats * per_byte), strict=True))


def compute_terms_in_units(nats: Array, *, layout: MatrixLayout) -> dict[str, dict[str, Array]]:
    """{unit: {metric: terms}}."""
    matrices = convert_units(nats, layout=layout)
    return {unit: compute_terms(matrix, layout=layout) for unit, matrix in matrices.items()}


@np.errstate(invalid="ignore", over="ignore")  # a perplexity that overflows gives inf - inf
def compute_values(nats: Array, *, layout: MatrixLayout) -> ByMetricAndUnit:
    """{metric: {unit: [...]}}: a metric in a unit is the metric of the matrix in that unit."""
    terms = compute_terms_in_units(nats, layout=layout)

    values: ByMetricAndUnit = {}
    for name, terms_in_nats in terms["nats"].items():
        is_measured = ~np.isnan(terms_in_nats)  # not of another unit: that may overflow
        is_nested = METRICS[name].is_nested
        values[name] = {
            unit: average_terms(terms[unit][name], is_measured, is_nested=is_nested) for unit in UNITS
        }
    return values


@np.errstate(invalid="ignore", over="ignore")
def summarise_matrix(nats: Array, *, layout: MatrixLayout) -> dict[str, dict[str, Any]]:
    """{metric: its means by unit, `median` by unit, and `terms` [measured, all] where some are missing} of
    one matrix [row, column]. A median is over the terms that were measured, of nested ones over all of
    them: a mean is dominated by outliers, a median is not."""
    terms = compute_terms_in_units(nats, layout=layout)
    # Zeros for what was measured, so that no term of infinite losses is inf - inf.
    terms_if_measured = compute_terms(np.where(np.isnan(nats), np.nan, 0.0), layout=layout)
    all_terms = compute_terms(np.zeros_like(nats), layout=layout)

    summaries: dict[str, dict[str, Any]] = {}
    for name, means in compute_values(nats, layout=layout).items():
        summary: dict[str, Any] = {unit: float(mean) for unit, mean in means.items()}

        num_measured = count_numbers(terms_if_measured[name])
        num_terms = count_numbers(all_terms[name])
        if num_measured < num_terms:
            summary["terms"] = [num_measured, num_terms]

        is_measured = ~np.isnan(terms["nats"][name])
        summary["median"] = {unit: find_median(terms[unit][name][is_measured]) for unit in UNITS}
        summaries[name] = summary
    return summaries


def count_numbers(values: Array) -> int:
    return int((~np.isnan(values)).sum())


def find_median(values: Array) -> float:
    return float(np.median(values)) if values.size else math.nan


def find_intervals(
    nll_sums: Arrays, *, counts: Arrays, layout: MatrixLayout, replicates: int = 1000, seed: int = 0
) -> Intervals:
    """95 % percentile bootstrap over documents (Efron 1979), redrawn alike for every row: {metric: {unit:
    [low, high]}}. Per column, nll_sums is [row, document] (nats; nan where not measured), counts [document]
    (scored tokens). Raises ValueError for other shapes, and for a column without a token."""
    samples = []
    for name, sums, count in zip(layout.domains, nll_sums, counts, strict=True):
        if np.shape(sums) != (len(layout.rows), len(count)):
            raise ValueError(f"{name}: nll_sums is {np.shape(sums)}, needed {(len(layout.rows), len(count))}")
        is_scored = np.asarray(count) > 0
        if not is_scored.any():
            document_count = count_noun(len(count), "document")
            raise ValueError(f"{name}: none of {document_count} has a scored token, one is needed")
        samples.append((np.asarray(sums, float)[..., is_scored], np.asarray(count, float)[is_scored]))

    are_measured = np.stack([~np.isnan(sums).any(-1) for sums, _ in samples], -1)
    levels = [name for name, metric in METRICS.items() if metric.is_level]
    intervals = bootstrap(
        samples,
        partial(compute_values, layout=layout),
        replicates=replicates,
        seed=seed,
        adjusted=True,
        averaged_columns=find_averaged_columns(are_measured, layout=layout),
        levels=levels,
    )
    # Student's interval of few documents would reach below what a loss can be.
    for name in levels:
        for unit, (low, high) in intervals.get(name, {}).items():
            intervals[name][unit] = [low if math.isnan(low) else max(low, LEAST_LOSS[unit]), high]
    return intervals


def find_averaged_columns(are_measured: Array, *, layout: MatrixLayout) -> dict[str, list[int]]:
    """By metric, the columns that its mean is over: those whose terms were measured. `are_measured` [row,
    column] says which cells of the matrix were."""
    in_order = order_columns(layout)
    terms_if_measured = compute_terms(np.where(are_measured, 0.0, np.nan), layout=layout)

    averaged_columns = {}
    for name, terms in terms_if_measured.items():
        metric = METRICS[name]
        has_term = ~np.isnan(terms)
        if metric.is_nested:
            has_term = has_term.any(0)
        first_column = layout.num_domains if metric.needs_general else metric.first_column
        term_columns = in_order[first_column:]
        averaged_columns[name] = [
            layout.domains.index(term_columns[number]) for number in np.flatnonzero(has_term).tolist()
        ]
    return averaged_columns


@np.errstate(invalid="ignore", over="ignore")
def bootstrap(
    samples: Sequence[Sequence[Array]],
    compute: Callable[[Array], ByMetricAndUnit],
    *,
    replicates: int = 1000,
    seed: int = 0,
    adjusted: bool = False,
    averaged_columns: Mapping[str, Sequence[int]] | None = None,
    levels: Collection[str] = (),
) -> Intervals:
    """The 2.5 and 97.5 percentiles of the values that are computed from a matrix [..., row, column] of means,
    over draws of the samples: per column sums [row, item] and counts [item]. An item is drawn for all rows.

    The percentiles of few items are too narrow. `adjusted`: with less freedom than MIN_BOOTSTRAP_ITEMS of one
    column have, or with fewer than MIN_ITEMS_PER_COLUMN items in a column (their harmonic mean), Student's t
    interval by the standard deviation of the draws, times sqrt(n / (n - 1)); with less freedom than MIN_ITEMS
    have, none. K columns of n_c items have the freedom K^2 / sum_c 1 / (n_c - 1): Satterthwaite (1946) for
    equal variances. `averaged_columns`: by the name of a value, the columns that it is a mean over; default:
    all. `levels`: names of values that are losses, no differences of losses: Student's interval of their
    perplexity is exp of that of its logarithm."""
    drawn_values = compute_draws(samples, compute, replicates=replicates, seed=seed)
    observed_matrix = np.stack([sums.sum(-1) / counts.sum() for sums, counts in samples], -1)
    observed = compute(observed_matrix[None])

    intervals: Intervals = {}
    for name, draws_by_unit in drawn_values.items():
        columns: Sequence[int] = range(len(samples))
        if averaged_columns is not None:
            columns = averaged_columns[name]
        if not columns:  # nothing of it was measured
            intervals[name] = {unit: [math.nan, math.nan] for unit in draws_by_unit}
            continue

        # Columns of few items make the spread of their mean uncertain, and the percentiles too narrow.
        sizes = np.array([samples[column][1].size for column in columns], float)
        freedom = len(sizes) ** 2 / (1 / np.maximum(sizes - 1, 0.5)).sum()
        spread_share = 1 - (1 / sizes).mean()  # (n - 1) / n for the harmonic mean n of the sizes

        has_enough_items = freedom >= MIN_BOOTSTRAP_ITEMS - 1 and spread_share >= 1 - 1 / MIN_ITEMS_PER_COLUMN
        if not adjusted or has_enough_items:
            intervals[name] = {
                unit: np.percentile(draws, [2.5, 97.5]).tolist() for unit, draws in draws_by_unit.items()
            }
        else:
            scale = find_t_scale(freedom, spread_share)
            intervals[name] = {}
            for unit, draws in draws_by_unit.items():
                center = observed[name][unit][0]
                if unit == PERPLEXITY and name in levels:
                    log_bounds = t_interval(np.log(center), np.log(draws), scale=scale)
                    intervals[name][unit] = np.exp(log_bounds).tolist()
                else:
                    intervals[name][unit] = t_interval(center, draws, scale=scale)
    return intervals


def compute_draws(
    samples: Sequence[Sequence[Array]],
    compute: Callable[[Array], ByMetricAndUnit],
    *,
    replicates: int,
    seed: int,
) -> ByMetricAndUnit:
    """What is computed of the drawn matrices of means, as `bootstrap` has them: each value [replicate]."""
    # A generator for each column: the documents of two texts are drawn independently.
    generators = [np.random.default_rng([seed, column]) for column in range(len(samples))]

    # For each replicate an array holds a weight for each item of a column, or a mean for each row and column.
    num_rows = len(samples[0][0])
    max_items = max(counts.size for _, counts in samples)
    chunk_size = max(1, MAX_ARRAY_SIZE // max(num_rows * len(samples), max_items))

    chunks = []
    for begin in range(0, replicates, chunk_size):
        size = min(chunk_size, replicates - begin)
        columns = [
            draw_means(sums, counts, size=size, generator=generator)
            for (sums, counts), generator in zip(samples, generators, strict=True)
        ]
        chunks.append(compute(np.stack(columns, -1)))

    values: ByMetricAndUnit = {}
    for name, by_unit in chunks[0].items():
        values[name] = {}
        for unit in by_unit:
            values[name][unit] = np.concatenate([chunk[name][unit] for chunk in chunks])
    return values


def draw_means(sums: Array, counts: Array, *, size: int, generator: np.random.Generator) -> Array:
    """Means of redrawn items, [size, row], from sums [row, item] and counts [item]. A row with a nan gives
    nan."""
    drawn = generator.integers(counts.size, size=(size, counts.size))

    # How often each item was drawn in each replicate, by one count over all replicates.
    drawn += np.arange(size)[:, None] * counts.size
    weights = np.bincount(drawn.ravel(), minlength=size * counts.size).reshape(size, -1).astype(float)
    return (weights @ sums.T) / (weights @ counts)[:, None]


def find_t_scale(freedom: float, spread_share: float) -> float:
    """Half the width of Student's 95 % interval, in standard deviations of the draws; nan if undefined."""
    from scipy.special import stdtrit  # not for a plan

    has_interval = freedom >= MIN_ITEMS - 1 and spread_share > 0  # 0: one item in each column
    if not has_interval:
        return math.nan
    return float(stdtrit(freedom, 0.975)) / math.sqrt(spread_share)


def t_interval(center: Array, draws: Array, *, scale: float) -> list[float]:
    half_width = scale * draws.std()
    return [float(center - half_width), float(center + half_width)]


def split_metric(name: str) -> tuple[str, str]:
    """The metric and the unit of a name like LC/perplexity, which W&B and the tables have, or like
    LC.perplexity.

    >>> split_metric("LC/perplexity"), split_metric("LC.perplexity")
    (('LC', 'perplexity'), ('LC', 'perplexity'))
    """
    metric, _, unit = name.replace("/", ".").partition(".")
    return metric, unit


def find_objective_value(metrics: Mapping[str, Mapping[str, Any]], objective: str) -> float | None:
    """The value of `objective`, METRIC.UNIT of the matrix of losses, from the metrics of a finished run; None
    if it was not measured or is not finite. Raises ValueError for another metric or unit: the metrics of end
    tasks, which the message names too, are those of `run_objective` in task_metrics.py, which calls this for
    the others."""
    metric, unit = split_metric(objective)
    if metric not in METRICS or unit not in UNITS:
        names = f"{', '.join(METRICS)} and {', '.join(UNITS)}"
        raise InvalidOptionError(
            "optimized_metric",
            objective,
            allowed=f"METRIC.UNIT or METRIC/UNIT of {names}; of end tasks MF1, Acc",
        )
    value = metrics.get(metric, {}).get(unit)
    return value if value is None or math.isfinite(value) else None


@dataclass(frozen=True)
class Change:
    """A text's loss by two models, nats per token, and the 95 % interval of the difference."""

    text: str
    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        return self.after - self.before


def compare_losses(texts: Sequence[str], before: Losses, after: Losses) -> Iterator[Change]:
    """The change of each text's loss from a model `before` to one `after`. The interval is a bootstrap over
    documents, drawn alike for both models; its bounds are nan for fewer than MIN_ITEMS documents. All values
    of a text without a scored token are nan."""

    def compute_difference(means: Array) -> ByMetricAndUnit:
        """The loss after less the one before, [draw], from means [draw, model, 1]."""
        mean_before = means[..., 0, 0]
        mean_after = means[..., 1, 0]
        return {"loss": {"nats": mean_after - mean_before}}

    for text in texts:
        nll_before, counts = np.asarray(before[text], float)  # [document]: nats, scored tokens
        nll_after, _ = np.asarray(after[text], float)
        is_scored = counts > 0
        if not is_scored.any():
            yield Change(text, before=math.nan, after=math.nan, low=math.nan, high=math.nan)
            continue
        nll_sums = np.stack([nll_before, nll_after])[:, is_scored]  # [model, document]
        scored_counts = counts[is_scored]

        # For the bootstrap, a matrix with a row for each model and the text as its only column.
        samples = [(nll_sums, scored_counts)]
        intervals = bootstrap(samples, compute_difference, replicates=CHANGE_REPLICATES, adjusted=True)
        low, high = intervals["loss"]["nats"]
        mean_before, mean_after = (nll_sums.sum(1) / scored_counts.sum()).tolist()
        yield Change(text, mean_before, mean_after, low, high)
