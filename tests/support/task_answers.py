"""Answers to tasks as a run has them in its scores, and as it keeps them in files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpt.evaluation.predictions import ANSWER_COLUMNS, answers_file, save_predictions
from cpt.evaluation.task_metrics import (
    TaskAnswers,
    collect_task,
    compute_metrics,
    matrix_of,
    summarise_answers,
)

CHOICES = ("yes", "no")


def choose_answers(right: Sequence[bool]) -> TaskAnswers:
    references = [CHOICES[number % 2] for number in range(len(right))]
    chosen = [
        name if each else CHOICES[1 - CHOICES.index(name)]
        for name, each in zip(references, right, strict=True)
    ]
    return TaskAnswers(references, [CHOICES] * len(right), None, chosen, chosen)


def write_answers(written: Sequence[str], references: Sequence[str]) -> TaskAnswers:
    return TaskAnswers(references, [()] * len(references), written, None, None)


def save_answers(
    folder: Path, answers_by_task: Mapping[str, Sequence[TaskAnswers]], *, rows: Sequence[str]
) -> dict[str, Any]:
    """Writes the files of a run's answers, by task and row, and gives the `answers` of its scores.json."""
    for task, each in answers_by_task.items():
        for row, told in enumerate(each):
            ids = [f"{task}-{number}" for number in range(len(told.references))]
            columns = [ids, told.references, told.written, told.ranked, told.ranked_mean]
            about = {"digest": "d", "seconds": 1.0, "choices": [list(choices) for choices in told.choices]}
            path = answers_file(folder / "answers" / f"{row:03d}-{rows[row]}", task)
            save_predictions(path, dict(zip(ANSWER_COLUMNS, columns, strict=True)), about=about)
    tasks = {task: collect_task([*map(summarise_answers, each)]) for task, each in answers_by_task.items()}
    made = {"when": "each", "seconds": 2.5, "tasks": tasks, "intervals": {}, "hash": "d"}
    found = compute_metrics(matrix_of(made), rows=rows, tasks=list(tasks))
    return made | {"metrics": {name: float(value) for name, value in found.items()}}
