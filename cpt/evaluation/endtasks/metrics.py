"""End tasks: numbers from the scores in `scores.json` and from the predictions beside it.

A[t][u] is the score on the end task of domain u after the model of row t was fine-tuned on it, a mean over
seeds; tasks stand in the order of learning. Ke et al. 2023 (DAS, ICLR): MF1, accuracy, forget rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cpt.core.schema import check_types
from cpt.evaluation.examples import AGAIN, count_transitions, read_columns

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, Table

Array = np.ndarray
KINDS = ("macro_f1", "micro_f1", "accuracy")
COLUMNS = ("id", "label", "prediction")
FIELDS = {"when": str, "tasks": list[str], "seeds": list[int], "metric": dict[str, str], "seconds": float}
FIELDS |= {"classes": dict[str, int], "examples": dict[str, int], "scores": dict[str, Any]}
MEANINGS = {
    "MF1": ("Mean over the tasks of each task's own metric, last model", "mean_u A[n][u]"),
    "Acc": ("Accuracy, a mean over the tasks, last model", "mean_u A_accuracy[n][u]"),
    "forward": ("Each task just after its domain was learned", "mean_u A[u][u]"),
    "forget_rate": (
        "Lost since each task's domain was learned, > 0 is bad",
        "mean_{u<n} (A[u][u] - A[n][u])",
    ),
}


def check_endtasks(endtasks: Mapping[str, Any], *, rows: Sequence[str]) -> None:
    """Raises ValueError for what is neither empty nor the `endtasks` of a run with these rows."""
    if not endtasks:
        return
    check_types(endtasks, FIELDS, of="endtasks")
    tasks = endtasks["tasks"]
    for name in ("metric", "classes", "examples"):
        if sorted(endtasks[name]) != sorted(tasks):
            raise ValueError(
                f"endtasks.{name} is of {sorted(endtasks[name])}, needed is one for each of {tasks}"
            )
    if unknown := sorted(set(endtasks["metric"].values()) - set(KINDS)):
        raise ValueError(f"endtasks.metric is {', '.join(unknown)}; allowed: {', '.join(KINDS)}")
    for kind in KINDS:
        check_types(endtasks["scores"], {kind: list[Any]}, of="endtasks.scores")
        if (measured := len(cube(endtasks, kind))) > len(rows):
            raise ValueError(f"end tasks: {kind} has {measured} rows; needed: at most {len(rows)}")


def cube(endtasks: Mapping[str, Any], metric: str) -> Array:
    """Scores in 0..1 as [row, task, seed]; nan where not measured. ValueError if they are no such array."""
    needed = (len(endtasks["tasks"]), len(endtasks["seeds"]))
    try:
        scores = np.array(endtasks["scores"][metric] or np.empty((0, *needed)), dtype=float)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"end tasks: {metric} is damaged ({error}); needed: [row][task][seed]") from None
    if scores.shape[1:] != needed:
        raise ValueError(
            f"end tasks: {metric} is {list(scores.shape)}; needed: [rows, {needed[0]}, {needed[1]}]"
        )
    return scores


def headline(endtasks: Mapping[str, Any]) -> Array:
    """Each task in its own metric, as micro-F1 for ChemProt: [row, task, seed]; nan where not measured."""
    own = [endtasks["metric"][task] for task in endtasks["tasks"]]
    cubes = {kind: cube(endtasks, kind) for kind in set(own)}
    return np.stack([cubes[kind][:, place] for place, kind in enumerate(own)], axis=1)


def over_seeds(scores: Array) -> Array:
    """[row, task, seed] to A as [row, task]: the mean over the seeds there are; nan where there is none."""
    there = np.isfinite(scores)
    count = there.sum(-1)
    return np.where(count > 0, np.where(there, scores, 0).sum(-1) / np.maximum(count, 1), np.nan)


def sd_over_seeds(scores: Array) -> Array:
    """[row, task, seed] to [row, task]: standard deviation over seeds (n - 1); nan below two of them."""
    there = np.isfinite(scores)
    count = there.sum(-1)
    squares = np.where(there, (scores - over_seeds(scores)[..., None]) ** 2, 0).sum(-1)
    return np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)


def last_measured(scores: Array) -> list[int | None]:
    """Per task of [row, task, ...], the last row with a score; None if there is none."""
    there = np.isfinite(scores).any(tuple(range(2, scores.ndim)))
    return [int(np.flatnonzero(column)[-1]) if column.any() else None for column in there.T]


def pick_final(scores: Array) -> Array:
    """A of the last row in which each task was measured: [row, task, ...] to [task, ...]; nan if never.

    That is the last model, or for a method that learns each domain from the base the model of the domain.
    """
    return _pick_rows(scores, last_measured(scores))


def forward(scores: Array, rows: Sequence[str], tasks: Sequence[str]) -> Array:
    """The diagonal A[u][u]: [row, task, ...] to [task, ...]; nan where a domain has no row (joint)."""
    own = [rows.index(task) if task in rows[: len(scores)] else None for task in tasks]
    return _pick_rows(scores, own)


def forget_rate(scores: Array, rows: Sequence[str], tasks: Sequence[str]) -> float:
    """`1/(T-1) sum_{u<T-1} (A[u][u] - A[T-1][u])`, > 0 is forgetting; nan if a term is missing.

    A is [row, task]. The task of the last stage never enters; a run that is not finished ends with its last
    row. Where the last domain has no task, all learned tasks enter.
    """
    learned = [place for place, task in enumerate(tasks) if task in rows[: len(scores)][:-1]]
    if not learned:
        return float("nan")
    return float((forward(scores, rows, tasks) - scores[-1])[learned].mean())


def forward_transfer(diagonal: Array, *, one: Array) -> float:
    """What the domains before have brought, > 0 is good: `mean_j (A[j][j] - ONE[j][j])`, both [task]."""
    return float((np.asarray(diagonal) - np.asarray(one)).mean())


def summarise_endtasks(endtasks: Mapping[str, Any], rows: Sequence[str]) -> dict[str, float]:
    """MF1, Acc, forward and forget_rate, on seed means; without those that lack a term.

    `when: diagonal` measures no last model: it has neither MF1 nor Acc.
    """
    if not endtasks:
        return {}
    scores, tasks = over_seeds(headline(endtasks)), endtasks["tasks"]
    found = {"forward": forward(scores, rows, tasks).mean(), "forget_rate": forget_rate(scores, rows, tasks)}
    if endtasks["when"] != "diagonal":
        accuracy = over_seeds(cube(endtasks, "accuracy"))
        found = {"MF1": pick_final(scores).mean(), "Acc": pick_final(accuracy).mean()} | found
    return {name: float(value) for name, value in found.items() if np.isfinite(value)}


def transitions(label: Array, before: Array, after: Array, *, classes: int | None = None) -> dict[str, float]:
    """What became of each prediction, [example] each: see count_transitions."""
    right, still = (np.asarray(given) == np.asarray(label) for given in (before, after))
    return count_transitions(right, still, classes=classes)


def transitions_of(
    folder: Path, rows: Sequence[str], endtasks: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """{task: transitions} from each domain's own stage to the last row, the examples of all seeds together.

    Without the tasks that have one row, or lack a file. ValueError if a file is damaged, or the two rows were
    measured on different examples.
    """
    found = {}
    for task, last in _last_rows(rows, endtasks):
        own = rows.index(task) if task in rows else last
        ends = [_seeds(folder, rows, row, task=task, seeds=endtasks["seeds"]) for row in (own, last)]
        if own < last and all(ends):
            before, after = (
                {name: np.concatenate([t[name] for t in end]) for name in COLUMNS} for end in ends
            )
            _same_examples(before, after, what=f"{folder}: {task}")
            told = [before["label"], before["prediction"], after["prediction"]]
            found[task] = transitions(*told, classes=endtasks["classes"][task])
    return found


def correct(folder: Path, rows: Sequence[str], endtasks: Mapping[str, Any]) -> dict[tuple[str, int], Array]:
    """{(task, seed): whether each test example was right}, bool [example], in the last row in which the task
    was measured; without what has no file. ValueError if a file is damaged."""
    found = {}
    for task, last in _last_rows(rows, endtasks):
        for seed in endtasks["seeds"]:
            table = _read_columns(_file(folder, rows, last, task=task, seed=seed), COLUMNS[1:])
            if table is not None:
                found[task, seed] = _equal(*table.columns)
    return found


def predictions(path: Path) -> dict[str, Array] | None:
    """A file's COLUMNS, [example] each, in the order of the test data; None if there is no file. ValueError
    if it is damaged."""
    table = _read_columns(path, COLUMNS)
    return None if table is None else {name: table[name].to_numpy() for name in COLUMNS}


def _read_columns(path: Path, columns: Sequence[str]) -> Table | None:
    try:
        return read_columns(path, columns, what="predictions")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{error}; {AGAIN}") from None


def _equal(label: ChunkedArray, prediction: ChunkedArray) -> Array:
    """Without a Python object per example: a comparison reads thousands of files."""
    from pyarrow.compute import equal

    return equal(label, prediction).to_numpy()


def _pick_rows(scores: Array, chosen: Sequence[int | None]) -> Array:
    """The score of each task in the row chosen for it."""
    nothing = np.full(scores.shape[2:], np.nan)
    return np.array([nothing if row is None else scores[row, task] for task, row in enumerate(chosen)])


def _last_rows(rows: Sequence[str], endtasks: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Each task that was measured, and the last row in which it was."""
    last = last_measured(headline(endtasks)[: len(rows)]) if endtasks else []
    tasks = endtasks["tasks"] if endtasks else []
    return [(task, row) for task, row in zip(tasks, last, strict=True) if row is not None]


def _file(folder: Path, rows: Sequence[str], row: int, *, task: str, seed: int) -> Path:
    return Path(folder) / "endtasks" / f"{row:03d}-{rows[row]}" / f"{task}-{seed}.parquet"


def _seeds(
    folder: Path, rows: Sequence[str], row: int, *, task: str, seeds: Sequence[int]
) -> list[dict[str, Array]]:
    """The predictions of all seeds; none of them if one has no file."""
    tables = [predictions(_file(folder, rows, row, task=task, seed=seed)) for seed in seeds]
    return [] if any(table is None for table in tables) else tables


def _same_examples(one: Mapping[str, Array], other: Mapping[str, Array], *, what: str) -> None:
    if any(not np.array_equal(one[name], other[name]) for name in ("id", "label")):
        raise ValueError(f"{what}: the predictions of two rows are on different test examples")
