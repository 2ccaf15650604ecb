"""Differences of groups from their baselines over test examples, of end tasks and of tasks with answers.

The value of an example is 1 (right), 0 (wrong), or a graded score, from the predictions of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from pandas import DataFrame, concat

from cpt.evaluation import predictions
from cpt.evaluation.statistics import compare_differences, mcnemar
from cpt.evaluation.task_metrics import find_main_measure
from cpt.reporting.contrasts import correct_differences
from cpt.reporting.load_runs import MeasuredRun, Pair
from cpt.reporting.sections import RunGroup, RunSection

NO_SEED = 0  # in place of a fine-tuning seed: the models that answer are not fine-tuned
# By run and fine-tuning seed (answers: NO_SEED): the columns `reference` and `value`, indexed by example id.
ExamplesByRun = dict[tuple[MeasuredRun, int], DataFrame]


class Task(NamedTuple):
    """A task; the name and the measure are empty for all tasks of a kind together."""

    kind: str  # `end tasks` or `answers`
    name: str
    measure: str


@dataclass(frozen=True)
class Outcomes:
    """Numbers of examples, over all pairs of runs; in brackets what they are for a graded measure."""

    both: int  # both are right (equal)
    only_group: int  # only the group is right (is better)
    only_baseline: int


@dataclass(frozen=True)
class TaskDifference:
    """The difference of a group from its baseline in one task, over the examples that both have."""

    by_example: np.ndarray  # [example], mean over pairs of runs
    num_pairs: int
    outcomes: Outcomes


@dataclass(frozen=True)
class ExampleContrasts:
    """`table` has a row for each group and task, and one for all tasks of a kind, whose `task` is empty. Its
    columns: kind, task, measure, num_tasks, group, baseline, both, only_group, only_baseline, and those of
    `PairedContrast`."""

    table: DataFrame
    unreadable: list[str]  # a message for each file that cannot be used


@lru_cache(maxsize=16)
def contrast_examples(section: RunSection) -> ExampleContrasts:
    """Each group minus its baseline, over the examples that both were given."""
    compared_groups = [group for group in section.groups if group.name in section.baselines]
    runs: dict[MeasuredRun, None] = {}  # an ordered set: a baseline may be that of several groups
    for group in [*compared_groups, *section.baselines.values()]:
        for run in group.runs:
            runs[run] = None

    damage_messages: list[str] = []
    differences: dict[Task, dict[str, list[TaskDifference]]] = defaultdict(lambda: defaultdict(list))
    for task, examples in read_tasks(list(runs), damage_messages):
        for group in compared_groups:
            baseline = section.baselines[group.name]
            try:
                difference = subtract_baseline(examples, group, baseline, task.name)
            except ValueError as error:  # ids stand for other examples
                damage_messages.append(str(error))
                continue
            if difference is not None:
                # It counts twice: for its task, and in the mean over all tasks of this kind.
                all_tasks = Task(kind=task.kind, name="", measure="")
                differences[all_tasks][group.name].append(difference)
                differences[task][group.name].append(difference)

    tables = [contrast_task(task, differences_by_group) for task, differences_by_group in differences.items()]
    if not tables:
        return ExampleContrasts(table=DataFrame(), unreadable=damage_messages)
    table = concat(tables, ignore_index=True)
    table["baseline"] = [section.baselines[group].name for group in table["group"]]
    # The page begins with the rows over all tasks.
    over_all_tasks = table[table["task"] == ""]
    by_task = table[table["task"] != ""]
    sorted_table = concat([over_all_tasks, by_task], ignore_index=True)
    return ExampleContrasts(table=sorted_table, unreadable=damage_messages)


def read_tasks(
    runs: Sequence[MeasuredRun], damage_messages: list[str]
) -> Iterator[tuple[Task, ExamplesByRun]]:
    """Each task with its examples. Answers are read task by task: those of one task only are in memory.

    Missing files are left out. `damage_messages` is filled: a message for each damaged file is appended."""
    for name, examples in read_end_tasks(runs, damage_messages).items():
        yield Task(kind="end tasks", name=name, measure="accuracy"), examples

    runs_by_task: dict[Task, list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        if is_comparable(run, "answers"):
            for name, answers in run.scores.answers.get("tasks", {}).items():
                task = Task(kind="answers", name=name, measure=find_main_measure(answers))
                runs_by_task[task].append(run)
    for task, asked_runs in runs_by_task.items():
        yield task, read_answers(task, asked_runs, damage_messages)


def is_comparable(run: MeasuredRun, protocol: str) -> bool:
    """Whether a run measured its tasks of a config group by the protocol of most runs."""
    return all(left_out.name != protocol for left_out in run.left_out)


def read_end_tasks(runs: Sequence[MeasuredRun], damage_messages: list[str]) -> dict[str, ExamplesByRun]:
    """The examples of every end task by its name. They have no ids, and are joined by their index. A message
    for each run with a damaged file is appended to `damage_messages`."""
    examples: dict[str, ExamplesByRun] = defaultdict(dict)
    for run in runs:
        if not is_comparable(run, "endtask"):
            continue
        try:
            correct = predictions.load_correctness(run.folder, run.scores.rows, run.scores.endtasks)
        except ValueError as error:
            damage_messages.append(str(error))
            continue
        for (name, seed), is_correct in correct.items():
            num_examples = len(is_correct)
            # The size of the test set stands for the reference: sets of different sizes cannot be joined.
            references = [num_examples] * num_examples
            frame = predictions.mark_examples(list(range(num_examples)), references, is_correct)
            examples[name][run, seed] = frame
    return examples


def read_answers(task: Task, runs: Sequence[MeasuredRun], damage_messages: list[str]) -> ExamplesByRun:
    """The examples of a task with answers, from the last row of each run in which the task was asked. A run
    without the file is left out; a message for each damaged file is appended to `damage_messages`."""
    examples: ExamplesByRun = {}
    for run in runs:
        last_row = predictions.list_asked_rows(run.scores.answers["tasks"][task.name])[-1]
        try:
            path = predictions.find_answers_file(run.folder, run.scores.rows, last_row, task.name)
            examples[run, NO_SEED] = predictions.mark_answers(path, task.measure)
        except FileNotFoundError:
            continue
        except ValueError as error:
            damage_messages.append(str(error))
    return examples


def subtract_baseline(
    examples: ExamplesByRun, group: RunGroup, baseline: RunGroup, task: str
) -> TaskDifference | None:
    """The difference over the pairs of runs with the same order, seed and fine-tuning seed; None without such
    pairs or common examples. Raises ValueError where equal ids stand for other examples."""
    group_examples = select_runs(examples, group)
    baseline_examples = select_runs(examples, baseline)
    shared_pairs = [pair for pair in group_examples if pair in baseline_examples]
    if not shared_pairs:
        return None

    frames = [group_examples[pair] for pair in shared_pairs]
    frames += [baseline_examples[pair] for pair in shared_pairs]
    joined = predictions.join_examples(frames, label=f"{group.name}, {task}")
    values = np.array([frame["value"] for frame in joined]).astype(float)  # [frame, example]
    if values.size == 0:
        return None

    num_pairs = len(shared_pairs)
    group_values = values[:num_pairs]
    baseline_values = values[num_pairs:]
    return TaskDifference(
        by_example=(group_values - baseline_values).mean(0),
        num_pairs=num_pairs,
        outcomes=count_outcomes(group_values, baseline_values),
    )


def select_runs(examples: ExamplesByRun, group: RunGroup) -> dict[tuple[Pair, int], DataFrame]:
    """The examples of a group's runs, by order and seed of the run, and fine-tuning seed. The first of two
    runs with one order and seed counts."""
    selected: dict[tuple[Pair, int], DataFrame] = {}
    for (run, seed), frame in examples.items():
        if run in group.runs:
            selected.setdefault((run.pair, seed), frame)
    return selected


def count_outcomes(group_values: np.ndarray, baseline_values: np.ndarray) -> Outcomes:
    """The outcomes of the values of two groups, of the same shape. Both are right where both are 1, or for
    graded values, which are not only 0 and 1, where they are equal."""
    is_graded = not set(np.unique([group_values, baseline_values])) <= {0, 1}
    is_both = group_values == baseline_values
    if not is_graded:
        is_both = is_both & (group_values == 1)
    return Outcomes(
        both=int(is_both.sum()),
        only_group=int((group_values > baseline_values).sum()),
        only_baseline=int((group_values < baseline_values).sum()),
    )


def contrast_task(task: Task, differences_by_group: Mapping[str, Sequence[TaskDifference]]) -> DataFrame:
    """A row for each group: its mean difference over the examples of one task, or of all tasks of a kind."""
    mean_differences = {}
    counts = []
    for group, task_differences in differences_by_group.items():
        mean_difference = compare_differences(difference.by_example for difference in task_differences)
        outcomes = [difference.outcomes for difference in task_differences]
        if is_binary_pair(task_differences):  # for which there is an exact test
            exact_p = mcnemar(outcomes[0].only_group, outcomes[0].only_baseline)
            mean_difference = mean_difference._replace(p=exact_p)
        mean_differences[group] = mean_difference
        counts.append(
            {
                "num_tasks": len(task_differences),
                "both": sum(outcome.both for outcome in outcomes),
                "only_group": sum(outcome.only_group for outcome in outcomes),
                "only_baseline": sum(outcome.only_baseline for outcome in outcomes),
            }
        )

    contrasts = correct_differences(mean_differences).reset_index(names="group")
    contrasts = contrasts.assign(kind=task.kind, task=task.name, measure=task.measure)
    return contrasts.join(DataFrame(counts))


def is_binary_pair(differences: Sequence[TaskDifference]) -> bool:
    """Whether there are one task and one pair of runs, in which examples are right or wrong."""
    if len(differences) > 1 or differences[0].num_pairs > 1:
        return False
    return set(np.unique(differences[0].by_example)) <= {-1, 0, 1}
