"""The metrics of a run on some of its domains alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cpt.data.sources.base import GENERAL
from cpt.evaluation.metrics import Layout, compute_values
from cpt.evaluation.scores import Scores
from cpt.evaluation.task_metrics import compute_metrics, matrix_of

Metrics = dict[str, dict[str, float]]


def restrict_scores(scores: Scores, names: Collection[str]) -> Scores:
    """With the metrics, end tasks and answers of these domains alone."""
    return replace(
        scores,
        metrics=metrics_on(scores, names),
        endtasks=tasks_on(scores.endtasks, names),
        answers=answers_on(scores, names),
    )


def metrics_on(scores: Scores, names: Collection[str]) -> Metrics:
    """ZS, CPT, LC, FG, BWT_zs, BWT_gem, FWT_zs and general drift with means over these domains only.

    LC, FG and BWT take the last model of the whole run; a domain is forgotten since its own row, and the last
    of the whole order cannot be. FWT_zs is that of the shortened sequence. FG_max and FWT_gem are left out:
    their terms lie in the rows of other domains.
    """
    columns = [name for name in scores.domains if name in names or name == GENERAL]
    learned = [name for name in scores.learned if name in names]
    whole = ["ZS", "LC", "general_drift"]
    told = _taken(scores, rows=scores.rows, columns=columns, metrics=whole)
    told |= _taken(scores, rows=["base", *learned], columns=columns, metrics=["CPT", "FWT_zs"])
    ended = [*learned, *(name for name in scores.learned[-1:] if name not in learned)]
    columns = [*ended, *(name for name in columns if name == GENERAL)]
    return told | _taken(scores, rows=["base", *ended], columns=columns, metrics=["FG", "BWT_zs", "BWT_gem"])


def _taken(scores: Scores, *, rows: list[str], columns: list[str], metrics: list[str]) -> Metrics:
    """These metrics of a part of the matrix, as far as their terms exist."""
    if not scores.rows or not columns or set(columns) == {GENERAL}:
        return {}
    places = [scores.domains.index(name) for name in columns]
    sizes = [[numbers[place] for place in places] for numbers in (scores.tokens, scores.bytes)]
    layout = Layout(rows=rows, domains=columns, tokens=sizes[0], bytes=sizes[1])
    matrix = scores.matrix[np.ix_([scores.rows.index(row) for row in rows], places)]
    there = compute_values(matrix, layout=layout)
    return {name: {unit: float(x) for unit, x in there[name].items()} for name in metrics if name in there}


def answers_on(scores: Scores, names: Collection[str]) -> dict[str, Any]:
    """Answers to the tasks of these domains only, with AP, LA and BWT over them: a task is forgotten since
    its own row, the last of the whole order cannot be. F and FWT are left out: their terms lie in the rows
    of others."""
    answers = scores.answers
    tasks = {name: told for name, told in answers.get("tasks", {}).items() if name in names}
    if not tasks:
        return {}
    there, matrix = list(answers["tasks"]), matrix_of(answers)
    learned = [name for name in scores.learned if name in tasks]
    ended = [*learned, *(name for name in scores.learned[-1:] if name not in learned and name in there)]
    wanted = {"AP": (scores.rows, list(tasks)), "LA": (["base", *learned], learned)}
    wanted["BWT"] = (["base", *ended], ended)
    metrics = {}
    for metric, (rows, columns) in wanted.items():
        if metric in answers["metrics"] and columns:
            part = matrix[np.ix_(list(map(scores.rows.index, rows)), list(map(there.index, columns)))]
            found = compute_metrics(part, rows=rows, tasks=columns)
            metrics |= {metric: float(found[metric])} if metric in found else {}
    return {**answers, "tasks": tasks, "metrics": metrics, "intervals": {}}


def tasks_on(endtasks: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """End tasks of these domains only."""
    places = [place for place, task in enumerate(endtasks.get("tasks", ())) if task in names]
    if not places:
        return {}
    tasks = [endtasks["tasks"][place] for place in places]
    per_task = {
        key: {task: endtasks[key][task] for task in tasks} for key in ("metric", "classes", "examples")
    }
    scores = {
        name: [[row[place] for place in places] for row in rows] for name, rows in endtasks["scores"].items()
    }
    return {**endtasks, **per_task, "tasks": tasks, "scores": scores}
