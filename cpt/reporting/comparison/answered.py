"""Groups and their baselines on the same examples of the tasks that both were asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from cpt.evaluation.metrics import Array
from cpt.evaluation.predictions import Marked, answers_in, join_examples, mark_answers, rows_asked
from cpt.evaluation.statistics import Difference, compare_differences, mcnemar
from cpt.reporting.comparison.differences import CorrectedDifference, correct_holm
from cpt.reporting.comparison.groups import ComparedRuns, Group
from cpt.reporting.comparison.notes import list_measures
from cpt.reporting.comparison.runs import Pair, Run, tasks_of
from cpt.reporting.page import few


@dataclass(frozen=True)
class Paired:
    """A group and its baseline on the same examples of a task: the differences in what it is known by,
    [example], each a mean over the pairs of runs. And how many answers are right in both (of a graded
    measure: as good), and in one of the two alone (better there), once for each pair of runs."""

    measure: str
    differences: Array
    both: int
    group: int
    baseline: int
    pairs: int
    left_out: int  # examples that one of them was not asked

    def test(self) -> Difference:
        """Of one pair of runs and of right and wrong, the p-value is that of McNemar's exact test."""
        found = compare_differences([self.differences])
        if self.pairs == 1 and set(np.unique(self.differences)) <= {-1, 0, 1}:
            return found._replace(p=mcnemar(self.group, self.baseline))
        return found


@dataclass(frozen=True)
class Line:
    """What is shown of a group and its baseline: over all tasks, or of one."""

    difference: CorrectedDifference
    both: int
    group: int
    baseline: int
    measures: Sequence[str]  # what each of its tasks is known by


@dataclass(frozen=True)
class AnswersCompared:
    """By group, over all tasks and by task; and what could not be compared, or read."""

    whole: Mapping[str, Line]
    by_task: Mapping[str, Mapping[str, Line]]  # task, group
    notes: Sequence[str]
    failed: Sequence[str]


@dataclass
class Reader:
    """Reads the last answers of runs to a task, each file once, and keeps what cannot be read."""

    gone: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # tasks by run folder
    failed: list[str] = field(default_factory=list)

    def read(self, runs: Sequence[Run], task: str, measure: str) -> dict[Run, Marked]:
        """The answers of those runs that have some."""
        found = ((run, self.load(run, task, measure)) for run in runs)
        return {run: marked for run, marked in found if marked is not None}

    def load(self, run: Run, task: str, measure: str) -> Marked | None:
        told = tasks_of(run).get(task)
        if told is None or not (asked := rows_asked(told)):
            return None
        try:
            return mark_answers(answers_in(run.folder, run.scores.rows, asked[-1], task), measure)
        except FileNotFoundError:
            self.gone[str(run.folder)].append(task)
        except ValueError as error:
            self.failed.append(str(error))
        return None

    @property
    def notes(self) -> list[str]:
        """A line for all runs that lack the files of the same tasks."""
        folders = defaultdict(list)
        for folder, tasks in self.gone.items():
            folders[few(tasks, between=", ")].append(folder)
        return [
            f"{first} has no files of the answers to {tasks}"
            + (f", nor have {len(others)} more runs." if others else ".")
            for tasks, (first, *others) in folders.items()
        ]


@lru_cache(maxsize=16)  # tables and exports ask for the same
def on_answers(section: ComparedRuns) -> AnswersCompared:
    """Each group minus its baseline over the examples that both were asked; the files of one task are read
    after those of another, and of them the differences kept."""
    known_by = list_measures(section)
    reader, found = Reader(), defaultdict(dict)
    measures = {task: names[0] for task, names in known_by.items() if len(names) == 1}
    notes = [
        f"{task} is left out, as {' and '.join(known_by[task])} are different measures."
        for task in known_by
        if task not in measures
    ]
    compared = [group for group in section.groups if group.name in section.baselines]
    runs = dict.fromkeys(
        run for group in compared for each in (group, section.baselines[group.name]) for run in each.runs
    )
    for task, measure in measures.items():
        marked = reader.read(list(runs), task, measure)
        for group in compared:
            try:
                paired = pair_groups(group, section.baselines[group.name], marked, measure)
            except ValueError as error:
                reader.failed.append(f"{group.name}, {task}: {error}")
                continue
            if paired is not None:
                found[task][group.name] = paired
    by_task = {
        task: describe_lines({name: [each] for name, each in groups.items()})
        for task, groups in found.items()
    }
    over_tasks: dict[str, list[Paired]] = defaultdict(list)
    for groups in found.values():
        for name, each in groups.items():
            over_tasks[name].append(each)
    notes += [line for name, each in over_tasks.items() for line in tell_left_out(name, each)]
    return AnswersCompared(describe_lines(over_tasks), by_task, [*notes, *reader.notes], reader.failed)


def tell_left_out(name: str, tasks: Sequence[Paired]) -> list[str]:
    """A line where one of two groups was asked more examples than the other."""
    fewer = [each.left_out for each in tasks if each.left_out]
    told = f"{name}: left out are {sum(fewer):,} examples of {len(fewer)} task{'s' * (len(fewer) > 1)}"
    return [f"{told}, which not all runs of it and of its baseline were asked."] * bool(fewer)


def pair_groups(group: Group, baseline: Group, marked: Mapping[Run, Marked], measure: str) -> Paired | None:
    """A group and its baseline in the runs of the orders and seeds that both have; None where there are none.
    Raises ValueError where their examples cannot be joined."""
    ours, theirs = (runs_by_pair(each, marked) for each in (group, baseline))
    shared = [pair for pair in ours if pair in theirs]
    if not shared:
        return None
    runs = [each[pair] for pair in shared for each in (ours, theirs)]
    told = f"{runs[0].folder} and {runs[1].folder}"
    joined = np.array([each.values for each in join_examples([marked[run] for run in runs], what=told)])
    one, other = joined[::2].astype(float), joined[1::2].astype(float)
    if not one.size:
        return None
    higher, lower = int((one > other).sum()), int((one < other).sum())
    graded = not set(np.unique(joined)) <= {0, 1}
    both = one.size - higher - lower if graded else int((one * other).sum())
    left_out = max(len(marked[run].ids) for run in runs) - one.shape[1]
    return Paired(measure, (one - other).mean(0), both, higher, lower, len(shared), left_out)


def runs_by_pair(group: Group, marked: Mapping[Run, Marked]) -> dict[Pair, Run]:
    """The first run of each order and seed, of those that have answers."""
    return {run.pair: run for run in reversed(group.runs) if run in marked}


def describe_lines(found: Mapping[str, Sequence[Paired]]) -> dict[str, Line]:
    """By group, the difference over some tasks, which weigh alike."""
    tested = {
        name: tasks[0].test() if len(tasks) == 1 else compare_differences(each.differences for each in tasks)
        for name, tasks in found.items()
    }
    corrected = correct_holm(tested)
    return {
        name: Line(
            corrected[name],
            *(sum(getattr(each, count) for each in tasks) for count in ("both", "group", "baseline")),
            [each.measure for each in tasks],
        )
        for name, tasks in found.items()
    }
