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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import ge
from typing import Any, NamedTuple

import numpy as np

from cpt.data.sources.base import GENERAL
from cpt.evaluation.score_schema import UNITS

Array = np.ndarray
Arrays = Sequence[np.ndarray]
Losses = Mapping[str, np.ndarray]  # by text [2, documents]: nats and scored tokens of each document
CHANGE_REPLICATES = 2000
LEAST_ITEMS, FEW_ITEMS = 3, 30  # documents that an interval needs, and of which a bootstrap is wide enough
FEW_IN_EACH = 20  # documents in each of many columns, of which it is
BUDGET = 1 << 21  # numbers that the bootstrap holds in one array


class Metric(NamedTuple):
    """A mean of terms, which `compute` gives as [..., K] of the matrix [..., row, column] and the number of
    its domains; and the least that has to be there for them to exist."""

    meaning: str
    formula: str
    compute: Callable[[Array, int], Array]
    stages: int = 0
    domains: int = 1
    rows: int = 1
    general: bool = False
    level: bool = False  # a loss, not a difference of losses
    nested: bool = False  # a mean over stages of means over domains


def just_learned(nll: Array, domains: int = 0) -> Array:
    return np.diagonal(nll[..., 1:, :], axis1=-2, axis2=-1)


def gain(nll: Array, domains: int = 0) -> Array:
    trained = just_learned(nll)
    return nll[..., 0, : trained.shape[-1]] - trained


def earlier(nll: Array) -> Array:
    """The columns of the domains that were learned before the last."""
    return nll[..., : nll.shape[-2] - 2]


def forgetting(nll: Array, domains: int = 0) -> Array:
    return earlier(nll)[..., -1, :] - just_learned(nll)[..., :-1]


def forward_zero_shot(nll: Array, domains: int) -> Array:
    """The terms are [..., i, j], nan where j is not ahead of i."""
    stages = min(nll.shape[-2], domains)
    ahead = np.arange(domains) >= np.arange(1, stages)[:, None]  # [i, j]: domain j comes after stage i
    gained = nll[..., :1, :domains] - nll[..., 1:stages, :domains]
    gained[..., ~ahead] = np.nan
    return gained


def forward_gem(nll: Array, domains: int) -> Array:
    ahead = np.arange(1, min(nll.shape[-2], domains))  # GEM takes random weights where we take the base model
    return nll[..., 0, ahead] - nll[..., ahead, ahead]


# FG_max, i: every learned row but the last, also those before j was learned; not the base (Chaudhry: 1..k-1).
# fmt: off
METRICS: Mapping[str, Metric] = {
    "ZS": Metric("Loss of the base model", "mean_j L[0][j]",
                 lambda nll, n: nll[..., 0, :n], level=True),
    "CPT": Metric("Loss on each domain just after its stage", "mean_{j<=n} L[j][j]",
                  just_learned, stages=1, level=True),
    "LC": Metric("Loss of the last model on all domains", "mean_j L[n][j]",
                 lambda nll, n: nll[..., -1, :n], level=True),
    "learned": Metric("Fall of the loss on each domain, base to its own stage, > 0 is good",
                      "mean_{j<=n} (L[0][j] - L[j][j])", gain, stages=1),
    "FG": Metric("Rise of the loss on earlier domains since their stages, > 0 is bad",
                 "mean_{j<n} (L[n][j] - L[j][j])", forgetting, stages=2),
    "FG_max": Metric("Rise of the loss since the best model, > 0 is bad",
                     "mean_{j<n} (L[n][j] - min_{1<=i<=n-1} L[i][j])",
                     lambda nll, n: earlier(nll)[..., -1, :]
                     - np.fmin.reduce(earlier(nll)[..., 1:-1, :], axis=-2), stages=2),
    "BWT_zs": Metric("Backward transfer, against zero-shot, > 0 is good", "mean_{j<n} (L[0][j] - L[n][j])",
                     lambda nll, n: earlier(nll)[..., 0, :] - earlier(nll)[..., -1, :], stages=2),
    "BWT_gem": Metric("Backward transfer, by GEM, > 0 is good",
                      "mean_{j<n} (L[j][j] - L[n][j]) = -FG", lambda nll, n: -forgetting(nll), stages=2),
    "FWT_zs": Metric("Forward transfer, against zero-shot, > 0 is good",
                     "mean_{1<=i<=min(n,N-1)} mean_{j>i} (L[0][j] - L[i][j])",
                     forward_zero_shot, stages=1, domains=2, nested=True),
    "FWT_gem": Metric("Forward transfer, by GEM, > 0 is good",
                      "mean_{2<=j<=min(n+1,N)} (L[0][j] - L[j-1][j])", forward_gem, stages=1, domains=2),
    "general_drift": Metric("Rise of the loss on general text since the base, > 0 is bad",
                            "L[n][g] - L[0][g]",
                            lambda nll, n: nll[..., -1, n:] - nll[..., 0, n:], rows=2, general=True),
}
# fmt: on
TITLES = {"ZS": "base (ZS)", "CPT": "just learned (CPT)", "LC": "final (LC)", "FG": "forgetting (FG)"}


def intransigence(diagonal: Array, *, one: Array) -> Array:
    """Cost against learning each domain alone (method `one`), > 0 is bad: `mean_j (L[j][j] - ONE[j][j])`."""
    return (np.asarray(diagonal) - np.asarray(one)).mean(-1)


@dataclass(kw_only=True)
class Layout:
    """What the rows and columns of a matrix stand for."""

    rows: list[str] = field(default_factory=list)  # "base", then the stages done
    domains: list[str]  # columns: d1..dN, then "general" if there is general text
    tokens: list[int]  # per column, tokens of the test text that the objective may score
    bytes: list[int]  # per column, UTF-8 bytes of the test text

    @property
    def learned(self) -> list[str]:
        """The domains in the order of learning so far; none if a row stands for a mixture of domains."""
        return self.rows[1:] if set(self.rows[1:]) <= set(self.domains) - {GENERAL} else []


def terms(nll: Array, *, layout: Layout) -> dict[str, Array]:
    """The terms of every metric that has any; nll is [..., row, column] as in the layout."""
    by_stage = dict.fromkeys([*layout.learned, *layout.domains])  # the general text stays last
    in_order = list(by_stage) == layout.domains  # as in a run; then nothing is copied
    aligned = nll if in_order else nll[..., [layout.domains.index(name) for name in by_stage]]
    domains = len(set(layout.domains) - {GENERAL})
    have = (len(layout.learned), domains, len(layout.rows), GENERAL in layout.domains)
    there = {name: metric for name, metric in METRICS.items() if all(map(ge, have, metric[3:7]))}
    return {name: metric.compute(aligned, domains) for name, metric in there.items()}


@np.errstate(invalid="ignore")
def average(values: Array, there: Array, *, nested: bool = False) -> Array:
    """The mean of the terms that are there, [..., K] or nested [..., i, j]; nan where none is."""
    if not nested and there.all():
        return values.mean(-1)
    counts = there.sum(-1)
    means = np.where(there, values, 0).sum(-1) / counts
    return average(means, counts > 0) if nested else means


def metrics(nll: Array, *, layout: Layout, higher: bool = False) -> dict[str, Array]:
    """Every metric whose terms exist; nll is [..., row, column] as in the layout, each value [...]. With
    `higher` it is of scores, not of losses: a level is then their mean, and a gain is still a gain."""
    found = {
        name: average(each, ~np.isnan(each), nested=METRICS[name].nested)
        for name, each in terms(-nll if higher else nll, layout=layout).items()
    }
    return {name: -value if higher and METRICS[name].level else value for name, value in found.items()}


@np.errstate(over="ignore")
def in_units(nats: Array, *, layout: Layout) -> dict[str, Array]:
    """The matrix in nats, as perplexity exp(nats) and in bits per byte, nats * tokens / bytes / ln 2."""
    per_byte = np.asarray(layout.tokens, float) / np.asarray(layout.bytes, float) / np.log(2)
    return dict(zip(UNITS, (nats, np.exp(nats), nats * per_byte), strict=True))


@np.errstate(invalid="ignore", over="ignore")  # a perplexity that overflows gives inf - inf
def compute_values(nats: Array, *, layout: Layout) -> dict[str, dict[str, Array]]:
    """{metric: {unit: [...]}}: a metric in a unit is the metric of the matrix in that unit."""
    units = {unit: terms(nll, layout=layout) for unit, nll in in_units(nats, layout=layout).items()}
    there = {name: ~np.isnan(each) for name, each in units["nats"].items()}  # not in another: it may overflow
    return {
        name: {unit: average(units[unit][name], seen, nested=METRICS[name].nested) for unit in UNITS}
        for name, seen in there.items()
    }


@np.errstate(invalid="ignore", over="ignore")
def summarise_matrix(nats: Array, *, layout: Layout) -> dict[str, dict[str, Any]]:
    """{metric: its means by unit, `median` by unit, and `terms` [measured, all] where some are missing} of
    one matrix [row, column]. A median is over the terms that were measured, of nested ones over all of
    them: a mean is dominated by outliers, a median is not."""
    units = {unit: terms(nll, layout=layout) for unit, nll in in_units(nats, layout=layout).items()}
    measured = terms(np.where(np.isnan(nats), np.nan, 0.0), layout=layout)  # also inf - inf
    whole, found = terms(np.zeros_like(nats), layout=layout), {}
    for name, means in compute_values(nats, layout=layout).items():
        there = ~np.isnan(units["nats"][name])
        counts = [int((~np.isnan(each[name])).sum()) for each in (measured, whole)]
        medians = {u: float(np.median(units[u][name][there])) if there.any() else math.nan for u in UNITS}
        missing = {"terms": counts} if counts[0] < counts[1] else {}
        found[name] = {unit: float(mean) for unit, mean in means.items()} | missing | {"median": medians}
    return found


def intervals(
    nll_sums: Arrays, *, counts: Arrays, layout: Layout, replicates: int = 1000, seed: int = 0
) -> dict[str, dict[str, list[float]]]:
    """95 % percentile bootstrap over documents (Efron 1979), redrawn alike for every row: {metric: {unit:
    [low, high]}}. Per column, nll_sums is [row, document] (nats; nan where not measured), counts [document]
    (scored tokens). Raises ValueError for other shapes, and for a column without a token."""
    samples = []
    for name, sums, count in zip(layout.domains, nll_sums, counts, strict=True):
        if np.shape(sums) != (len(layout.rows), len(count)):
            raise ValueError(f"{name}: nll_sums is {np.shape(sums)}, needed {(len(layout.rows), len(count))}")
        scored = np.asarray(count) > 0
        if not scored.any():
            raise ValueError(f"{name}: none of {len(count)} documents has a scored token, one is needed")
        samples.append([np.asarray(array, float)[..., scored] for array in (sums, count)])
    columns = {name: place for place, name in enumerate(layout.domains)}
    general = [columns.pop(GENERAL)] if GENERAL in columns else []
    own, earlier = [*columns.values()], [columns[name] for name in layout.learned[:-1]]
    uses = {
        name: general if metric.general else earlier if metric.stages == 2 else own
        for name, metric in METRICS.items()
    }
    how: dict[str, Any] = {"replicates": replicates, "seed": seed, "adjusted": True, "uses": uses}
    return bootstrap(samples, partial(compute_values, layout=layout), **how)


@np.errstate(invalid="ignore")
def bootstrap(
    samples: Sequence[Sequence[Array]],
    compute: Callable[[Array], dict[str, dict[str, Array]]],
    *,
    replicates: int = 1000,
    seed: int = 0,
    adjusted: bool = False,
    uses: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, dict[str, list[float]]]:
    """The 2.5 and 97.5 percentiles of what is computed of a matrix [..., row, column] of means, over draws of
    what the means are of: per column sums [row, item] and counts [item]. An item is drawn for all rows.

    The percentiles of few items are too narrow. `adjusted`: with less freedom than FEW_ITEMS of one column
    have, or with fewer than FEW_IN_EACH items in a column (their harmonic mean), Student's t interval by the
    standard deviation of the draws, times sqrt(n / (n - 1)); with less freedom than LEAST_ITEMS have, none.
    Of K columns of n_c items the freedom is K^2 / sum_c 1 / (n_c - 1): Satterthwaite (1946) for equal
    variances. `uses`: by the name of a value, the columns that it is a mean over; default: all."""
    from scipy.special import stdtrit  # not for a plan

    generators = [np.random.default_rng([seed, column]) for column in range(len(samples))]
    rows = len(samples[0][0])
    chunk = max(1, BUDGET // max(rows * len(samples), *(count.size for _, count in samples)))
    parts = []
    for first in range(0, replicates, chunk):
        size = min(chunk, replicates - first)
        means = []  # of each column, [size, row]
        for (sums, count), generator in zip(samples, generators, strict=True):
            drawn = generator.integers(count.size, size=(size, count.size))
            drawn += np.arange(size)[:, None] * count.size
            weight = np.bincount(drawn.ravel(), minlength=size * count.size).reshape(size, -1).astype(float)
            means.append((weight @ sums.T) / (weight @ count)[:, None])  # a row of nan gives nan
        parts.append(compute(np.stack(means, -1)))
    whole = {m: {u: np.concatenate([part[m][u] for part in parts]) for u in parts[0][m]} for m in parts[0]}
    observed = compute(np.stack([sums.sum(-1) / counts.sum() for sums, counts in samples], -1)[None])
    found: dict[str, dict[str, list[float]]] = {}
    for name, units in whole.items():
        places = range(len(samples)) if uses is None else uses[name]
        sizes = np.array([samples[place][1].size for place in places], float)
        freedom, left = (len(sizes) ** 2 / (1 / np.maximum(sizes - 1, 0.5)).sum(), 1 - (1 / sizes).mean())
        if not adjusted or (freedom >= FEW_ITEMS - 1 and left >= 1 - 1 / FEW_IN_EACH):
            found[name] = {unit: np.percentile(x, [2.5, 97.5]).tolist() for unit, x in units.items()}
            continue
        known = freedom >= LEAST_ITEMS - 1 and left > 0  # 0: one item in each column
        scale = float(stdtrit(freedom, 0.975)) / math.sqrt(left) if known else math.nan  # Student's t
        found[name] = {
            unit: [float(observed[name][unit][0] + sign * scale * x.std()) for sign in (-1, 1)]
            for unit, x in units.items()
        }
    return found


def objective_value(metrics: Mapping[str, Mapping[str, Any]], objective: str) -> float | None:
    """METRIC.UNIT of a finished run; None without it. Raises ValueError for an unknown one."""
    metric, _, unit = objective.partition(".")
    if metric not in METRICS or unit not in UNITS:
        told = f"optimized_metric={objective} is invalid"
        allowed = f"METRIC.UNIT of {', '.join(METRICS)} and {', '.join(UNITS)}; of end tasks MF1, Acc"
        raise ValueError(f"{told}. Allowed: {allowed}")
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
    """The change of each text, its documents drawn alike for both; nan bounds for fewer than LEAST_ITEMS
    documents."""

    def compute(means: Array) -> dict[str, dict[str, Array]]:  # [draw, model, text]
        return {"loss": {"nats": means[..., 1, 0] - means[..., 0, 0]}}

    for text in texts:
        (old, counts), (new, _) = (np.asarray(row[text], float) for row in (before, after))
        there = counts > 0
        sums, counts = np.stack([old, new])[:, there], counts[there]
        how: dict[str, Any] = {"replicates": CHANGE_REPLICATES, "adjusted": True}
        bounds = bootstrap([[sums, counts]], compute, **how)["loss"]["nats"]
        yield Change(text, *(sums.sum(1) / counts.sum()).tolist(), *bounds)
