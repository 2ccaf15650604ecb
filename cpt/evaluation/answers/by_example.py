"""Answers of two models to the same examples, joined by the examples' ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpt.evaluation.answers.files import load_answers, path_of
from cpt.evaluation.answers.metrics import MEASURES, RANKED
from cpt.evaluation.answers.results import head_of
from cpt.evaluation.examples import AGAIN, Array, count_transitions

BASE = "base"


@dataclass(frozen=True)
class Marked:
    """The examples of a task, [example] each: id, right answer, and how good a model's answer is."""

    ids: Array
    references: Array
    values: Array

    def take(self, places: Array) -> Marked:
        return Marked(self.ids[places], self.references[places], self.values[places])


@dataclass(frozen=True)
class Moved:
    """What became of the examples of a task since a row of the matrix, by the last model that was asked."""

    task: str
    since: str
    counts: Mapping[str, float]  # see count_transitions


def answers_in(folder: Path, rows: Sequence[str], row: int, task: str) -> Path:
    """The file of the answers to a task in a row of a run folder."""
    return path_of(Path(folder) / "answers" / f"{row:03d}-{rows[row]}", task)


def rows_asked(task: Mapping[str, Any]) -> list[int]:
    """The rows in which a task was asked."""
    return [row for row, value in enumerate(task["measures"][head_of(task)]) if value is not None]


def mark_answers(path: Path, measure: str) -> Marked:
    """The answers of a file in a measure. Raises FileNotFoundError, of the path alone, where there is none;
    ValueError where it is damaged, or lacks what the measure is of."""
    try:
        ids, answered, _ = load_answers(path)
    except FileNotFoundError:
        raise FileNotFoundError(str(path)) from None
    except ValueError as error:
        raise ValueError(f"{error}; {AGAIN}") from None
    if missing := [name for name in MEASURES[measure].needs if getattr(answered, name) is None]:
        raise ValueError(f"{path} has no column of the {missing[0]}, which {measure} is of; {AGAIN}")
    return Marked(np.array(ids), np.array(answered.references), MEASURES[measure].compute(answered))


def join_examples(marked: Sequence[Marked], *, what: str) -> list[Marked]:
    """The examples that all have, in one order. Raises ValueError where an id stands for several examples of
    a file, or for another question in the next."""
    first = marked[0]
    if any(not np.array_equal(first.ids, each.ids) for each in marked[1:]):
        for each in marked:
            if len(set(each.ids.tolist())) < len(each.ids):
                raise ValueError(f"{what}: the examples differ, and their ids do not tell them apart")
        shared = set(first.ids.tolist()).intersection(*(each.ids.tolist() for each in marked[1:]))
        order = [name for name in first.ids.tolist() if name in shared]
        places = [dict(zip(each.ids.tolist(), range(len(each.ids)), strict=True)) for each in marked]
        marked = [
            each.take(np.array([place[name] for name in order], dtype=int))
            for each, place in zip(marked, places, strict=True)
        ]
    if any(not np.array_equal(marked[0].references, each.references) for each in marked[1:]):
        raise ValueError(f"{what}: other right answers for the same ids, so these are other examples")
    return list(marked)


def follow_answers(
    folder: Path, rows: Sequence[str], answers: Mapping[str, Any]
) -> Iterator[Moved | FileNotFoundError | ValueError]:
    """What became of the examples of each task from its own stage to the last row, and from the base: a task
    after another, of which no more than two files are held. Of files that are gone or damaged the error."""
    for task, told in answers["tasks"].items():
        asked, measure = rows_asked(told), head_of(told)
        since = [row for row, name in enumerate(rows) if name in (BASE, task) and row in asked[:-1]]
        classes = 1 / told["chance"] if measure in RANKED and told["chance"] else None
        try:
            last = mark_answers(answers_in(folder, rows, asked[-1], task), measure) if since else None
            for row in since:
                path = answers_in(folder, rows, row, task)
                then, now = join_examples([mark_answers(path, measure), last], what=f"{folder}: {task}")
                yield Moved(task, rows[row], count_transitions(then.values, now.values, classes=classes))
        except (FileNotFoundError, ValueError) as error:
            yield error
