"""Differences of groups from their baselines, and ranks: what a comparison concludes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cpt.evaluation.metrics import Array
from cpt.evaluation.predictions import correct
from cpt.evaluation.statistics import Difference, compare_examples, compare_pairs, rank_rows
from cpt.evaluation.task_metrics import describe_task
from cpt.reporting.comparison.groups import ComparedRuns, Group
from cpt.reporting.comparison.measures import COMPARED, Measure, measure_probe
from cpt.reporting.comparison.notes import is_ranked
from cpt.reporting.comparison.runs import Run


@dataclass(frozen=True, kw_only=True)
class CorrectedDifference:
    """A group's difference from its baseline, and its p-values corrected for the number of groups compared:
    of the sign-flip test, and of the paired t test (None where there is none)."""

    difference: Difference
    holm: float
    holm_t: float | None


def list_present(section: ComparedRuns, measures: Sequence[Measure]) -> list[Measure]:
    """Those that some group has."""
    return [
        measure
        for measure in measures
        if any(group.mean(measure.key) is not None for group in section.groups)
    ]


def probed_tasks(section: ComparedRuns) -> dict[str, Mapping[str, Any]]:
    """The tasks of the harness by their descriptions."""
    return {
        describe_task(name, task): task
        for run in section.runs
        for name, task in run.scores.probes.get("tasks", {}).items()
    }


def measures_of_probes(section: ComparedRuns) -> list[Measure]:
    return [measure_probe(told, higher=task["higher"]) for told, task in probed_tasks(section).items()]


@lru_cache(maxsize=256)  # tables and exports ask for the same ones
def contrasts(section: ComparedRuns, measure: Measure) -> dict[str, CorrectedDifference]:
    """By group, its mean difference from its baseline over the orders and seeds that both have."""
    found = {}
    for group in section.groups:
        if baseline := section.baselines.get(group.name):
            found[group.name] = compare_pairs(group.by_pair(measure.key), baseline.by_pair(measure.key))
    return correct_holm({name: each for name, each in found.items() if each.n})


def correct_holm(found: Mapping[str, Difference]) -> dict[str, CorrectedDifference]:
    """Both p-values by Holm's procedure; a difference without a t test counts as one of p = 1."""
    flipped = adjust_holm({name: each.p for name, each in found.items()})
    by_t = adjust_holm({name: 1.0 if each.p_t is None else each.p_t for name, each in found.items()})
    return {
        name: CorrectedDifference(
            difference=each, holm=flipped[name], holm_t=None if each.p_t is None else by_t[name]
        )
        for name, each in found.items()
    }


def adjust_holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down procedure (Holm 1979): the k-th smallest of m p-values times m - k + 1, never below
    the one before it, at most 1."""
    ordered = sorted(p, key=lambda name: p[name])
    raised = [p[name] * (len(ordered) - place) for place, name in enumerate(ordered)]
    return dict(zip(ordered, np.minimum(1, np.maximum.accumulate(raised)).tolist(), strict=True))


def rank_groups(section: ComparedRuns) -> dict[str, dict[str, float]]:
    """By measure, the mean rank of each group that has it, among those of one model (and order, if groups are
    told apart by it), over the orders and seeds that all these have."""
    beside = defaultdict(list)
    for group in section.groups:
        beside[group.model, group.order].append(group)
    measures = list_present(section, COMPARED)
    return {
        measure.key: {name: rank for each in beside.values() for name, rank in _ranks(each, measure).items()}
        for measure in measures
    }


def _ranks(groups: Sequence[Group], measure: Measure) -> dict[str, float]:
    sign = -1 if measure.higher else 1
    having = [g for g in groups if g.mean(measure.key) is not None and is_ranked(g, measure.key)]
    table = {
        group.name: {pair: sign * value for pair, value in group.by_pair(measure.key).items()}
        for group in having
    }
    return (
        {name: rank for name, rank in rank_rows(table).items() if math.isfinite(rank)}
        if len(table) > 1
        else {}
    )


@lru_cache(maxsize=16)
def on_examples(section: ComparedRuns) -> tuple[dict[str, CorrectedDifference], list[str]]:
    """Differences in accuracy over the test examples of the end tasks, by group, where the predictions are
    kept; and a line for each group of which they cannot be read."""
    found, failed = {}, []
    loaded: dict[str, dict] = {}
    for group in section.groups:
        if baseline := section.baselines.get(group.name):
            try:
                pairs = _share_keys(*(_predicted(each, loaded) for each in (group, baseline)))
                found[group.name] = compare_examples(pairs)
            except ValueError as error:
                failed.append(f"{group.name}: {error}")
    return correct_holm({name: each for name, each in found.items() if each.n}), failed


def _share_keys(one: Mapping, other: Mapping) -> dict[tuple, tuple[Array, Array]]:
    return {key: (one[key], other[key]) for key in one if key in other}


def _predicted(group: Group, loaded: dict[str, dict]) -> dict[tuple, Array]:
    """Which examples were right, by task, and order, seed and end-task seed; read once."""
    if group.name not in loaded:
        told = defaultdict(list)
        for run in group.runs:
            for (task, seed), right in _correct(run).items():
                told[task, (*run.pair, seed)].append(right)
        loaded[group.name] = {key: arrays[0] for key, arrays in told.items()}
    return loaded[group.name]


def _correct(run: Run) -> dict[tuple[str, int], Array]:
    there = correct(run.folder, run.scores.rows, run.scores.endtasks)
    return {key: right for key, right in there.items() if not run.domains or key[0] in run.domains}
