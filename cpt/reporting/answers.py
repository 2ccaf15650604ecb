"""What a report says of the answers to a run's tasks: the second matrix, of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cpt.evaluation.answers.by_example import BASE, Moved, follow_answers
from cpt.evaluation.answers.results import MEANINGS, head_of, matrix_of
from cpt.evaluation.scores import Scores
from cpt.reporting.drawing import FEW, draw_scores
from cpt.reporting.endtasks import format_moved
from cpt.reporting.frames import percent, pick_ends, shorten
from cpt.reporting.page import Block, align_columns, few

FORMULAS = (
    "a[i][j]: score on the held-out examples of task j after i stages, without any further learning; all in "
    "%, higher is better but for what is invalid. [95 % bootstrap over the examples of each task]."
)
MOVED = (
    "From a task's own stage, and from the base, to the last model, each task in the measure that it is "
    "known by: 1→0 were right and no longer are, 0→1 the reverse; of a graded measure: fell, rose. Beyond "
    "chance: max(0, share - (1 - a) (1 - b) / (C - 1)) for the accuracies a, b and C choices, as if each "
    "example were known or guessed (arXiv 2510.17776)."
)
MOVED_HEAD = ("task", "since", "examples", "score then", "score now")
MOVED_HEAD += ("1→0", "share", "beyond chance", "0→1", "share", "beyond chance", "stayed")
NAMES = {
    "accuracy_ranked": "accuracy of the likeliest choice",
    "exact_match": "exact match of what is written",
    "invalid": "written, but none of the choices",
    "accuracy_valid": "exact match of those that are",
    "accuracy_ranked_mean": "likeliest choice by its mean token",
    "rouge_l": "ROUGE-L",
    "edit_similarity": "edit similarity",
    "sari": "SARI",
    "first_character": "first character of what is written",
}


def build_answer_blocks(scores: Scores) -> list[Block]:
    """The matrix of scores with a picture, its metrics, and every measure of the last model."""
    if not scores.answers.get("tasks"):
        return []
    tasks = scores.answers["tasks"]
    return [_show_matrix(scores, tasks), _show_metrics(scores.answers), _show_last(scores, tasks)]


def _show_matrix(scores: Scores, tasks: Mapping[str, Any]) -> Block:
    """Each task in the measure that it is known by, what a guess and the most frequent answer reach."""
    matrix = matrix_of(scores.answers)
    rows = _asked(matrix)
    measures = [f"{name} {NAMES[head_of(task)]}" for name, task in tasks.items()]
    same = len({head_of(task) for task in tasks.values()}) == 1
    told = NAMES[head_of(next(iter(tasks.values())))] if same else few(measures, between=", ")
    return Block(
        title=f"Answers to each task (column) after each stage (row): {told}",
        lines=["Framed: a task's own stage. Dark: better."],
        picture=_draw(scores, matrix, rows, list(tasks)),
        name="answers",
        head=["after", *tasks],
        cells=[*_cells(scores, matrix, rows), *_levels(tasks)],
    )


def _asked(matrix: np.ndarray) -> list[int]:
    """The rows in which a task was asked."""
    return [row for row in range(len(matrix)) if np.isfinite(matrix[row]).any()]


def _cells(scores: Scores, matrix: np.ndarray, rows: Sequence[int]) -> list[list[str]]:
    return [[scores.rows[row], *map(_percent, matrix[row])] for row in rows]


def _levels(tasks: Mapping[str, Any]) -> list[list[str]]:
    """What a guess and the most frequent answer reach, where there are choices."""
    levels = [[name, *(_percent(task[name]) for task in tasks.values())] for name in ("chance", "majority")]
    return [level for level in levels if set(level[1:]) != {"–"}]


def _draw(scores: Scores, matrix: np.ndarray, rows: Sequence[int], tasks: Sequence[str]) -> bytes:
    names = [scores.rows[row] for row in rows]
    last = [f"{task} {_percent(value)} %" for task, value in zip(tasks, matrix[rows[-1]], strict=True)]
    told = f"Scores of {len(rows)} models; after {names[-1]}: {few(last, between=', ')}"
    return draw_scores(matrix[rows], rows=names, columns=tasks, across="task", told=told)


def _show_metrics(answers: Mapping[str, Any]) -> Block:
    cells = [
        [name, *MEANINGS[name], percent(value) + _interval(answers["intervals"].get(name))]
        for name, value in answers["metrics"].items()
    ]
    lines = [FORMULAS, f"answers.when={answers['when']}, {answers['seconds']:,.1f} seconds."]
    head = ("number", "meaning", "formula", "%")
    return Block(title="Scores", lines=lines, head=head, cells=cells, words=3, chosen=(0, 1, 3))


def _show_last(scores: Scores, tasks: Mapping[str, Any]) -> Block:
    """Every measure of each task, in the last row in which it was asked."""
    there = [name for name in NAMES if any(name in task["measures"] for task in tasks.values())]
    cells = [
        [name, *(_last(task["measures"].get(measure, [])) for measure in there)]
        for name, task in tasks.items()
    ]
    return Block(
        title="Answers of the last model",
        head=["task", *(NAMES[name] for name in there)],
        cells=cells,
        folded=f"{len(there)} measures of {len(tasks)} tasks",
    )


def build_answer_moves(scores: Scores, folder: Path) -> Block:
    """What became of each example, of the files that a run has kept; of those that are gone or damaged a
    line."""
    if not scores.answers.get("tasks"):
        return Block()
    found = list(follow_answers(folder, scores.rows, scores.answers))
    moves = [each for each in found if isinstance(each, Moved)]
    gone = [str(each) for each in found if isinstance(each, FileNotFoundError)]
    lines = [MOVED, *_sum_moves(moves)] if moves else []
    if gone:
        lines.append(f"Files of answers that are not there: {len(gone)}, like {gone[0]}.")
    lines += [str(each) for each in found if isinstance(each, ValueError)]
    return Block(
        title="Answers: what became of the examples",
        lines=lines,
        head=MOVED_HEAD,
        cells=[_show_moved(each) for each in moves],
        words=2,
        folded=f"{len(moves)} comparisons" if len(moves) > 2 * FEW else "",
    )


def _sum_moves(moves: Sequence[Moved]) -> list[str]:
    """A line for the base and one for the tasks' own stages."""
    lines = []
    for since, told in (("the base", True), ("each task's own stage", False)):
        chosen = [each.counts for each in moves if (each.since == BASE) is told]
        total, fell, rose = (
            sum(each[name] for each in chosen) for name in ("examples", "forgotten", "gained")
        )
        counts = f"{fell:,} of {total:,} examples 1→0, {rose:,} 0→1, {total - fell - rose:,} stayed"
        lines += [f"Since {since}, {len(chosen)} task{'s' * (len(chosen) > 1)}: {counts}."] * bool(chosen)
    return lines


def _show_moved(moved: Moved) -> list[str]:
    counts = moved.counts
    stayed = counts["examples"] - counts["forgotten"] - counts["gained"]
    return [moved.task, moved.since, *format_moved(counts), f"{stayed:,}"]


def format_answers(scores: Scores) -> str:
    """The matrix of scores and the headline numbers for a console, of many tasks the first and last; "" where
    there are none."""
    tasks, found = scores.answers.get("tasks", {}), scores.answers.get("metrics", {})
    if not tasks:
        return ""
    matrix = matrix_of(scores.answers)
    asked = _asked(matrix)
    rows = [asked[place] for place in pick_ends(len(asked))]
    columns = pick_ends(len(tasks))
    names = [shorten(list(tasks)[column], width=min(24, 86 // len(columns) - 2)) for column in columns]
    cells = [
        [shorten(row[0], width=12), *(row[1:][column] for column in columns)]
        for row in [*_cells(scores, matrix, rows), *_levels(tasks)]
    ]
    told = ", ".join(f"{name} {percent(value)} %" for name, value in found.items())
    title = f"answers to {len(tasks)} tasks, in %{': ' * bool(told)}{told}"
    return f"{title}\n\n{align_columns(Block(head=['after', *names], cells=cells))}"


def _last(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _percent(known[-1]) if known else "–"


def _interval(bounds: Sequence[float] | None) -> str:
    return f" [{percent(bounds[0])}, {percent(bounds[1])}]" if bounds else ""


def _percent(value: float | None) -> str:
    return "–" if value is None or not np.isfinite(value) else percent(value)
