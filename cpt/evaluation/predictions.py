"""Predictions by example: a parquet file for each (stage, task), or (stage, task, seed) of an end task. In
its metadata is what is known `about` them: `digest` of all that they depend on besides the model, `seconds`,
and what the kind of task adds."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute, parquet

from cpt.core.config import digest as hash_of
from cpt.core.files import replacing
from cpt.core.schema import check_types
from cpt.evaluation.metrics import Array
from cpt.evaluation.task_metrics import MEASURES, TaskAnswers, head_of, headline, last_measured

log = logging.getLogger(__name__)
KEY = b"cpt"
ENDTASK_COLUMNS = ("id", "label", "prediction")
ANSWER_COLUMNS = ("id", "reference", "written", "ranked", "ranked_mean")
RESULTS = {"digest": str, "seconds": float, "metrics": dict[str, dict[str, Any]]}
SOURCE = "source"  # the texts that were asked about, where a measure is of them
LONGEST_NAME = 200  # characters of a file's
AGAIN = "delete it and give the run again"


def endtask_file(folder: Path, task: str, seed: int) -> Path:
    """The predictions of an end task and a seed in a stage's folder."""
    return folder / f"{task}-{seed}.parquet"


def answers_file(folder: Path, task: str) -> Path:
    """The answers to a task in a stage's folder."""
    return folder / f"{file_name(task)}.parquet"


def file_name(task: str) -> str:
    """The name of a task's file, percent-encoded, of at most 200 characters."""
    quoted = quote(task, safe="")
    return quoted if len(quoted) <= LONGEST_NAME else f"{quoted[: LONGEST_NAME - 17]}-{hash_of(task)}"


def save_predictions(
    path: Path, columns: Mapping[str, Sequence[str] | None], *, about: Mapping[str, Any]
) -> None:
    """Writes a row for each example; a column without value is null. The file appears whole or not at all."""
    count = len(columns["id"] or ())
    rows: dict[str, Sequence[str | None]] = {name: each or [None] * count for name, each in columns.items()}
    table = pa.table({name: pa.array(each, pa.string()) for name, each in rows.items()})
    with replacing(path) as partial:
        table = table.replace_schema_metadata({KEY: json.dumps(dict(about))})
        parquet.write_table(table, partial, write_page_checksum=True)


def load_predictions(
    path: Path, columns: Sequence[str] = (), *, optional: Sequence[str] = ()
) -> tuple[pa.Table, dict[str, Any]]:
    """Columns of a file, every byte of them checked, those that are optional where it has them, and what is
    known about them. Raises FileNotFoundError where there is no file, ValueError where it is damaged."""
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            wanted = [*columns, *(name for name in optional if name in file.schema_arrow.names)]
            about = json.loads((file.schema_arrow.metadata or {}).get(KEY, b"{}"))
            return file.read(columns=wanted).select(wanted), about
    except FileNotFoundError:
        raise FileNotFoundError(str(path)) from None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise ValueError(f"{path}: damaged predictions ({' '.join(str(error).split())}); {AGAIN}") from None


def find_predictions(
    path: Path, columns: Sequence[str] = (), *, optional: Sequence[str] = (), digest: str
) -> tuple[pa.Table, dict[str, Any]] | None:
    """The same; None where there is no file, one of another digest, or a damaged one, which is logged."""
    try:
        table, about = load_predictions(path, columns, optional=optional)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.info("Measuring again: %s", error)
        return None
    return (table, about) if about.get("digest") == digest else None


def answers_of(table: pa.Table, about: Mapping[str, Any]) -> TaskAnswers:
    """What a file of ANSWER_COLUMNS, and of SOURCE where it has it, says that a model has answered."""
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    given = {name: None if None in columns[name] else columns[name] for name in ANSWER_COLUMNS[2:]}
    choices = [tuple(each) for each in about["choices"]]
    return TaskAnswers(columns["reference"], choices, **given, sources=columns.get(SOURCE))


def mark_examples(ids: Sequence[Any], references: Sequence[Any], values: Array) -> pd.DataFrame:
    """The examples of a task by id: the right answer, and how good a model's answer is."""
    return pd.DataFrame({"reference": references, "value": values}, index=pd.Index(ids))


def answers_in(folder: Path, rows: Sequence[str], row: int, task: str) -> Path:
    """The file of the answers to a task in a row of a run folder."""
    return answers_file(Path(folder) / "answers" / f"{row:03d}-{rows[row]}", task)


def rows_asked(task: Mapping[str, Any]) -> list[int]:
    """The rows in which a task was asked."""
    return [row for row, value in enumerate(task["measures"][head_of(task)]) if value is not None]


def mark_answers(path: Path, measure: str) -> pd.DataFrame:
    """The answers of a file in a measure. Raises FileNotFoundError, and ValueError for a damaged file."""
    table, about = load_predictions(path, ANSWER_COLUMNS, optional=[SOURCE])
    answered = answers_of(table, about)
    if missing := [name for name in MEASURES[measure].needs if getattr(answered, name) is None]:
        raise ValueError(f"{path} has no column of the {missing[0]}, which {measure} is of; {AGAIN}")
    return mark_examples(table["id"].to_pylist(), answered.references, MEASURES[measure].compute(answered))


def join_examples(marked: Sequence[pd.DataFrame], *, what: str) -> list[pd.DataFrame]:
    """The examples that all have, in one order. Raises ValueError where ids stand for other examples."""
    first, *others = marked
    if not all(first.index.equals(each.index) for each in others):
        if any(each.index.has_duplicates for each in marked):
            raise ValueError(f"{what}: the examples differ, and their ids do not tell them apart")
        there = np.all([first.index.isin(each.index) for each in others], axis=0)
        marked = [each.loc[first.index[there]] for each in marked]
    if not all(marked[0]["reference"].equals(each["reference"]) for each in marked[1:]):
        raise ValueError(f"{what}: other right answers for the same ids, so these are other examples")
    return list(marked)


def correct(folder: Path, rows: Sequence[str], endtasks: Mapping[str, Any]) -> dict[tuple[str, int], Array]:
    """{(task, seed): whether each test example was right}, bool [example], in the last row in which the task
    was measured; without what has no file. ValueError if a file is damaged."""
    found = {}
    last = last_measured(headline(endtasks)[: len(rows)]) if endtasks else []
    for task, row in zip(endtasks.get("tasks", ()), last, strict=True):
        if row is None:
            continue
        for seed in endtasks["seeds"]:
            with suppress(FileNotFoundError):
                path = endtask_file(Path(folder) / "endtasks" / f"{row:03d}-{rows[row]}", task, seed)
                found[task, seed] = compute.equal(*load_predictions(path, ENDTASK_COLUMNS[1:])[0].columns)
    return {key: each.to_numpy() for key, each in found.items()}


def results_file(folder: Path, task: str) -> Path:
    """The results of a task of the lm-evaluation-harness in a stage's folder: numbers alone, as JSON."""
    return folder / f"{file_name(task)}.json"


def load_results(path: Path) -> dict[str, Any]:
    """The content of such a file. Raises ValueError where it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        check_types(found, RESULTS)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error})") from None
    return found
