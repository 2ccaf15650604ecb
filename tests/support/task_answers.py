"""Answers to tasks as a run has them in its scores, and as it stores them in files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpt.evaluation.predictions import ANSWER_COLUMNS, answers_file, save_predictions
from cpt.evaluation.task_metrics import (
    TaskAnswers,
    build_answer_matrix,
    collect_task,
    compute_metrics,
    summarise_answers,
)

CHOICES = ("yes", "no")


def choose_answers(is_right: Sequence[bool]) -> TaskAnswers:
    """Answers to questions with two choices, ranked by the model; right where `is_right` says so."""
    references = [CHOICES[number % 2] for number in range(len(is_right))]
    chosen = []
    for reference, right in zip(references, is_right, strict=True):
        wrong_choice = CHOICES[1 - CHOICES.index(reference)]
        chosen.append(reference if right else wrong_choice)
    return TaskAnswers(references, [CHOICES] * len(is_right), None, chosen, chosen)


def write_answers(written: Sequence[str], references: Sequence[str]) -> TaskAnswers:
    """Answers in free text."""
    return TaskAnswers(references, [()] * len(references), written, None, None)


def save_answers(
    folder: Path, answers_by_task: Mapping[str, Sequence[TaskAnswers]], *, rows: Sequence[str]
) -> dict[str, Any]:
    """Writes the files of a run's answers, by task and row; returns the `answers` of its scores.json."""
    for task, answers_by_row in answers_by_task.items():
        for number, answers in enumerate(answers_by_row):
            ids = [f"{task}-{index}" for index in range(len(answers.references))]
            columns = [ids, answers.references, answers.written, answers.ranked, answers.ranked_mean]
            metadata = {
                "digest": "d",
                "seconds": 1.0,
                "choices": [list(choices) for choices in answers.choices],
            }
            path = answers_file(folder / "answers" / f"{number:03d}-{rows[number]}", task)
            save_predictions(path, dict(zip(ANSWER_COLUMNS, columns, strict=True)), metadata=metadata)

    tasks = {}
    for task, answers_by_row in answers_by_task.items():
        summaries = [summarise_answers(answers) for answers in answers_by_row]
        tasks[task] = collect_task(summaries)

    scores = {"when": "each", "seconds": 2.5, "tasks": tasks, "intervals": {}, "hash": "d"}
    metrics = compute_metrics(build_answer_matrix(scores), rows=rows, tasks=list(tasks))
    return scores | {"metrics": {name: float(value) for name, value in metrics.items()}}
