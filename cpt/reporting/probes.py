"""What a report says of a run's probes: a table, a column per task of the harness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpt.evaluation.probes.results import describe_task, last_value
from cpt.evaluation.scores import Scores
from cpt.reporting.frames import decimals
from cpt.reporting.page import Block, few

ABOUT = (
    "Tasks of the lm-evaluation-harness {harness}, on the model as it is, in the harness's own units; "
    "± standard error over the examples. Last row: what a guess reaches."
)


def build_probe_block(scores: Scores) -> Block:
    """Each task's value in every row that was measured, and chance where the harness tells it."""
    if not scores.probes:
        return Block()
    tasks = scores.probes["tasks"]
    rows = [row for row in range(len(scores.rows)) if any(row in measured(task) for task in tasks.values())]
    cells = [[scores.rows[row], *(show_cell(task, row) for task in tasks.values())] for row in rows]
    return Block(
        title="Probes",
        lines=[ABOUT.format(**scores.probes), few(map_facts(tasks), between="; ") + "."],
        head=["after", *(describe_task(name, task) for name, task in tasks.items())],
        cells=[*cells, ["chance", *(show_value(task["chance"]) for task in tasks.values())]],
    )


def map_facts(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a value of each task is a mean of, and what of it the model did not read."""
    return [
        f"{name}: {task['examples']:,} examples"
        + f", {task['truncated']:,} or more requests cut from the left" * bool(task["truncated"])
        + ", lower is better" * (not task["higher"])
        for name, task in tasks.items()
    ]


def format_probes(scores: Scores) -> str:
    """The last values for a console; "" where there are none."""
    tasks = scores.probes.get("tasks", {})
    told = [
        f"{describe_task(name, task)} {decimals(found[1])} (base {show_value(task['values'][0])})"
        for name, task in tasks.items()
        if (found := last_value(task))
    ]
    return f"probes: {few(told, between=', ')}" if told else ""


def measured(task: Mapping[str, Any]) -> list[int]:
    """The rows in which a task was measured."""
    return [row for row, value in enumerate(task["values"]) if value is not None]


def show_cell(task: Mapping[str, Any], row: int) -> str:
    if row not in measured(task):
        return "–"
    error = task["errors"][row]
    return decimals(task["values"][row]) + ("" if error is None else f" ± {decimals(error)}")


def show_value(value: float | None) -> str:
    return "–" if value is None else decimals(value)
