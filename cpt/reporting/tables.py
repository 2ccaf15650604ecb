"""A run's tables and its curves over the stages, as a dashboard plots them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cpt.evaluation.metrics import METRICS, UNITS, describe_metric
from cpt.evaluation.scores import Scores
from cpt.reporting.frames import (
    COST_COLUMNS,
    costs_by_stage,
    escape_name,
    list_endtasks,
    list_losses,
    tidy_scores,
)

if TYPE_CHECKING:
    from pandas import DataFrame

CURVES = ("tokens", "flops", "memory", "trained", "stored", "seconds_learn")  # of costs over the stages
CUMULATED = ("tokens", "flops", "seconds_learn")  # what the run has taken up to a stage
WHERE = ["stage", "after"]


def tabulate(scores: Scores) -> dict[str, DataFrame]:
    """Every table that has lines, by name. `matrix` is the report's perplexities (row: after a stage, column:
    test text), `losses` the same with one line per cell in every unit. The last stages first: W&B shows the
    first 10,000 lines of a table."""
    kinds = dict(list(tidy_scores(scores).groupby("kind")))
    columns = {"metric": "name", "row": "after", "text": "on"}
    kinds = {kind: frame.rename(columns=columns) for kind, frame in kinds.items()}
    made = {name: make(kinds[kind], scores) for name, (kind, make) in TABLES.items() if kind in kinds}
    for name in {"losses", "endtasks", "answers", "probes", "parts"} & made.keys():
        made[name] = made[name].sort_values("stage", ascending=False, kind="stable")
    return {name: _nullify(frame) for name, frame in made.items() if len(frame)}


def _nullify(frame: DataFrame) -> DataFrame:
    """With None for what is not there or not finite."""
    known = frame.replace([np.inf, -np.inf], np.nan)
    return known.astype(object).where(known.notna(), None)


def _tabulate_matrix(table: DataFrame, scores: Scores) -> DataFrame:
    return _widen(table[table["unit"] == "perplexity"], ["after"], "on", scores.domains)


def _tabulate_losses(table: DataFrame, scores: Scores) -> DataFrame:
    cells = _widen(table, [*WHERE, "on"], "unit", UNITS).rename(columns={"on": "text"})
    rows = {stage: row for row, stage in enumerate(scores.rows) if row}
    learned = cells["text"].map(rows).fillna(np.inf) <= cells["stage"].astype(int)
    cells.insert(3, "learned", learned)
    return cells


def _tabulate_metrics(table: DataFrame, scores: Scores) -> DataFrame:
    lines = table[table["name"].isin(METRICS)].rename(columns={"name": "metric"})
    for place, column in enumerate(("meaning", "formula")):
        lines[column] = [describe_metric(METRICS[name].compute)[place] for name in lines["metric"]]
    return lines[["metric", "meaning", "formula", "unit", "value", "low", "high"]]


def _tabulate_endtasks(table: DataFrame, scores: Scores) -> DataFrame:
    lines = table.rename(columns={"on": "task", "name": "metric"})
    lines["own_metric"] = lines["task"].map(scores.endtasks["metric"]) == lines["metric"]
    return lines[[*WHERE, "task", "seed", "metric", "own_metric", "value"]]


def _tabulate_answers(table: DataFrame, scores: Scores) -> DataFrame:
    lines = table.rename(columns={"on": "task", "name": "measure"})
    for level in ("chance", "majority"):
        lines[level] = [scores.answers["tasks"][task][level] for task in lines["task"]]
    return lines[[*WHERE, "task", "measure", "value", "chance", "majority"]]


def _tabulate_probes(table: DataFrame, scores: Scores) -> DataFrame:
    lines = table.rename(columns={"on": "task", "name": "metric"})
    for fact in ("chance", "shots", "limit", "version"):
        lines[fact] = [scores.probes["tasks"][task][fact] for task in lines["task"]]
    facts = ["metric", "value", "low", "high", "chance", "shots", "limit", "version"]
    return lines[[*WHERE, "task", *facts]]


def _tabulate_parts(table: DataFrame, scores: Scores) -> DataFrame:
    lines = table.rename(columns={"on": "text", "value": "weight"})
    return lines[[*WHERE, "text", "part", "weight"]]


def _tabulate_costs(table: DataFrame, scores: Scores) -> DataFrame:
    return _widen(table[table["stage"].notna()], WHERE, "name", COST_COLUMNS)


def _tabulate_seconds(table: DataFrame, scores: Scores) -> DataFrame:
    lines = table.rename(columns={"name": "phase", "after": "stage", "stage": "", "value": "seconds"})
    return lines[["phase", "stage", "seconds"]]


def _tabulate_texts(table: DataFrame, scores: Scores) -> DataFrame:
    sizes = _widen(table, ["on"], "name", ("tokens", "scored", "bytes")).rename(columns={"on": "text"})
    for fact in ("documents", "digest"):
        sizes[fact] = [str(scores.texts.get(text, {}).get(fact, "")) for text in sizes["text"]]
    return sizes


def _widen(table: DataFrame, index: list[str], names: str, columns: Sequence[str]) -> DataFrame:
    """A line per place, with a column per name."""
    cells = table.set_index([*index, names])["value"].unstack(sort=False)
    return cells.reindex(columns=columns).reset_index()


TABLES: dict[str, tuple[str, Callable[[DataFrame, Scores], DataFrame]]] = {
    "matrix": ("loss", _tabulate_matrix),
    "losses": ("loss", _tabulate_losses),
    "metrics": ("metric", _tabulate_metrics),
    "endtasks": ("endtask", _tabulate_endtasks),
    "answers": ("answer", _tabulate_answers),
    "probes": ("probe", _tabulate_probes),
    "parts": ("part", _tabulate_parts),
    "costs": ("cost", _tabulate_costs),
    "seconds": ("phase", _tabulate_seconds),
    "texts": ("text", _tabulate_texts),
}


def stage_row(scores: Scores, row: int) -> dict[str, float]:
    """The points over `stage` after so many stages: `ppl/<text>`, the perplexity on each test text; of
    `stages/…`, `learned` is its mean over the domains learned so far, `tokens`, `flops` and `seconds` (of
    learning) are what the run has taken up to here, `memory`, `trained`, `stored` and `leak` are the stage's
    own."""
    losses = [line for line in list_losses(scores, [row]) if line.unit == "perplexity"]
    learned = set(scores.rows[1 : row + 1])
    so_far = [line.value for line in losses if line.text in learned]
    points = {f"ppl/{escape_name(line.text)}": line.value for line in losses if not np.isnan(line.value)}
    points |= {"stages/learned": float(np.mean(so_far))} if so_far and not np.isnan(so_far).any() else {}
    for name in CURVES:
        taken = costs_by_stage(scores, name)[: row + 1]
        if name in CUMULATED:
            points[f"stages/{name.removesuffix('_learn')}"] = sum(taken)
        elif len(taken) > row:
            points[f"stages/{name}"] = taken[row]
    points |= {"stages/leak": scores.leak[row][0]} if row < len(scores.leak) and scores.leak[row] else {}
    return {"stage": row, **points}


def task_rows(scores: Scores) -> list[dict[str, float]]:
    """The points of the end tasks over `stage`: `tasks/<task>` in its own metric, a mean over seeds."""
    points: dict[int, dict[str, list[float]]] = {}
    for line in list_endtasks(scores):
        if line.metric == scores.endtasks["metric"][line.text]:
            measured = points.setdefault(line.stage, {})
            measured.setdefault(f"tasks/{escape_name(line.text)}", []).append(line.value)
    return [
        {"stage": row, **{name: float(np.mean(each)) for name, each in measured.items()}}
        for row, measured in sorted(points.items())
    ]
