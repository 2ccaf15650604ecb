"""Answers to tasks as a run has them in its scores, and as it keeps them in files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpt.evaluation.predictions import ANSWER_COLUMNS, SOURCE, answers_file, save_predictions
from cpt.evaluation.task_metrics import (
    TaskAnswers,
    collect_task,
    compute_metrics,
    matrix_of,
    summarise_answers,
)

CHOICES = ("yes", "no")


def answers(values: dict[str, Sequence[float]], *, rows: Sequence[str]) -> dict[str, Any]:
    """The `answers` of scores.json of tasks whose ranked accuracy has these values in the rows."""
    about = {"examples": 40, "chance": 0.25, "majority": 0.3}
    tasks = {
        name: about | {"measures": {"accuracy_ranked": list(each), "invalid": [0.5] * len(each)}}
        for name, each in values.items()
    }
    return collected(tasks, rows=rows) | {"intervals": {"AP": [0.1, 0.9]}}


def collected(tasks: Mapping[str, Any], *, rows: Sequence[str]) -> dict[str, Any]:
    made = {"when": "each", "seconds": 2.5, "tasks": dict(tasks), "intervals": {}}
    found = compute_metrics(matrix_of(made), rows=rows, tasks=list(tasks))
    return made | {"metrics": {name: float(value) for name, value in found.items()}, "hash": "d"}


def ranked(right: Sequence[bool]) -> TaskAnswers:
    references = [CHOICES[number % 2] for number in range(len(right))]
    chosen = [
        name if each else CHOICES[1 - CHOICES.index(name)]
        for name, each in zip(references, right, strict=True)
    ]
    return TaskAnswers(references, [CHOICES] * len(right), None, chosen, chosen)


def opened(written: Sequence[str], references: Sequence[str]) -> TaskAnswers:
    return TaskAnswers(references, [()] * len(references), written, None, None)


def save_answers(path: Path, ids: Sequence[str], answered: TaskAnswers) -> None:
    given = [ids, answered.references, answered.written, answered.ranked, answered.ranked_mean]
    columns = dict(zip(ANSWER_COLUMNS, given, strict=True))
    columns |= {SOURCE: answered.sources} if answered.sources else {}
    about = {"digest": "d", "seconds": 1.0, "choices": [list(each) for each in answered.choices]}
    save_predictions(path, columns, about=about)


def kept(
    folder: Path,
    given: Mapping[str, Sequence[TaskAnswers]],
    *,
    rows: Sequence[str],
    ids: Sequence[str] | None = None,
    known_by: str | None = None,
) -> dict[str, Any]:
    """Writes the files of a run's answers, by task and row, and gives the `answers` of its scores.json."""
    for task, each in given.items():
        for row, answered in enumerate(each):
            names = ids or [f"{task}-{number}" for number in range(len(answered.references))]
            path = answers_file(folder / "answers" / f"{row:03d}-{rows[row]}", task)
            save_answers(path, names, answered)
    told = {task: [summarise_answers(row, known_by=known_by) for row in each] for task, each in given.items()}
    tasks = {task: collect_task(each) for task, each in told.items()}
    return collected(tasks, rows=rows)
