"""Predictions by example: a parquet file for each (stage, task), or (stage, task, seed) of an end task.

Its metadata have the `digest` of all that the predictions depend on besides the model, `seconds`, and what
the kind of task adds."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute, parquet

from cpt.core.config import digest as hash_of
from cpt.core.files import replacing
from cpt.core.messages import log_once
from cpt.core.schema import check_types
from cpt.evaluation.metrics import Array
from cpt.evaluation.task_metrics import (
    MEASURES,
    TaskAnswers,
    find_last_measured,
    find_main_measure,
    select_headline_scores,
)

log = logging.getLogger(__name__)
KEY = b"cpt"
ENDTASK_COLUMNS = ("id", "label", "prediction")
ANSWER_COLUMNS = ("id", "reference", "written", "ranked", "ranked_mean")
RESULT_TYPES = {"digest": str, "seconds": float, "metrics": dict[str, dict[str, Any]]}
SOURCE = "source"  # the texts that were asked about, where a measure is of them
MAX_NAME_LENGTH = 200  # characters of a file's name
REMEDY = "delete it and give the run again"


def endtask_file(folder: Path, task: str, seed: int) -> Path:
    """The predictions of an end task and a seed in a stage's folder."""
    return folder / f"{task}-{seed}.parquet"


def answers_file(folder: Path, task: str) -> Path:
    """The answers to a task in a stage's folder."""
    return folder / f"{file_name(task)}.parquet"


def file_name(task: str) -> str:
    """The name of a task's file, percent-encoded, of at most 200 characters."""
    quoted = quote(task, safe="")
    if len(quoted) <= MAX_NAME_LENGTH:
        return quoted
    return f"{quoted[: MAX_NAME_LENGTH - 17]}-{hash_of(task)}"


def save_predictions(
    path: Path, columns: Mapping[str, Sequence[str] | None], *, metadata: Mapping[str, Any]
) -> None:
    """Writes a row for each example, and the file's metadata; a column without value is null. The file
    appears whole or not at all."""
    num_examples = len(columns["id"] or ())
    arrays = {}
    for name, values in columns.items():
        texts: Sequence[str | None] = values or [None] * num_examples
        arrays[name] = pa.array(texts, pa.string())

    table = pa.table(arrays)
    with replacing(path) as partial_path:
        table = table.replace_schema_metadata({KEY: json.dumps(dict(metadata))})
        parquet.write_table(table, partial_path, write_page_checksum=True)


def load_predictions(
    path: Path, columns: Sequence[str] = (), *, optional: Sequence[str] = ()
) -> tuple[pa.Table, dict[str, Any]]:
    """Columns of a file, every byte of them checked, those that are optional where it has them, and its
    metadata. Raises FileNotFoundError where there is no file, ValueError where it is damaged."""
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            names = [*columns, *(name for name in optional if name in schema.names)]
            metadata = json.loads((schema.metadata or {}).get(KEY, b"{}"))
            return file.read(columns=names).select(names), metadata
    except FileNotFoundError:
        raise FileNotFoundError(str(path)) from None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: damaged predictions ({reason}); {REMEDY}") from None


def find_predictions(
    path: Path, columns: Sequence[str] = (), *, optional: Sequence[str] = (), digest: str
) -> tuple[pa.Table, dict[str, Any]] | None:
    """What `load_predictions` gives; None where there is no file, one of another digest, or a damaged one,
    which is logged."""
    try:
        table, metadata = load_predictions(path, columns, optional=optional)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log_once(log, f"Measuring again: {error}")
        return None
    return (table, metadata) if metadata.get("digest") == digest else None


def parse_answer_table(table: pa.Table, metadata: Mapping[str, Any]) -> TaskAnswers:
    """What a file of ANSWER_COLUMNS, and of SOURCE where it has it, says that a model has answered."""
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    return TaskAnswers(
        references=columns["reference"],
        choices=[tuple(choices) for choices in metadata["choices"]],
        written=keep_if_complete(columns["written"]),
        ranked=keep_if_complete(columns["ranked"]),
        ranked_mean=keep_if_complete(columns["ranked_mean"]),
        sources=columns.get(SOURCE),
    )


def keep_if_complete(values: list[str | None]) -> list[str] | None:
    """A column of texts; None where one is missing."""
    texts = [value for value in values if value is not None]
    return texts if len(texts) == len(values) else None


def mark_examples(ids: Sequence[Any], references: Sequence[Any], values: Array) -> pd.DataFrame:
    """The examples of a task by id: the right answer, and how good a model's answer is."""
    return pd.DataFrame({"reference": references, "value": values}, index=pd.Index(ids))


def find_answers_file(folder: Path, rows: Sequence[str], row: int, task: str) -> Path:
    """The file of the answers to a task in a row of a run folder."""
    return answers_file(Path(folder) / "answers" / f"{row:03d}-{rows[row]}", task)


def list_asked_rows(task: Mapping[str, Any]) -> list[int]:
    """The rows in which a task was asked."""
    values = task["measures"][find_main_measure(task)]
    return [row for row, value in enumerate(values) if value is not None]


def mark_answers(path: Path, measure: str) -> pd.DataFrame:
    """The answers of a file in a measure. Raises FileNotFoundError, and ValueError for a damaged file."""
    table, metadata = load_predictions(path, ANSWER_COLUMNS, optional=[SOURCE])
    answers = parse_answer_table(table, metadata)
    for name in MEASURES[measure].fields:
        if getattr(answers, name) is None:
            raise ValueError(f"{path} has no column of the {name}, which {measure} is of; {REMEDY}")
    return mark_examples(table["id"].to_pylist(), answers.references, MEASURES[measure].compute(answers))


def join_examples(marked: Sequence[pd.DataFrame], *, label: str) -> list[pd.DataFrame]:
    """The examples that all have, in one order; `label` says in an error whose they are. Raises ValueError
    where ids stand for other examples."""
    first, *other_frames = marked
    # Frames with the same ids in the same order are joined row by row, even where ids occur twice.
    if not all(first.index.equals(frame.index) for frame in other_frames):
        if any(frame.index.has_duplicates for frame in marked):
            raise ValueError(f"{label}: the examples differ, and their ids do not tell them apart")
        is_shared = np.all([first.index.isin(frame.index) for frame in other_frames], axis=0)
        shared_ids = first.index[is_shared]
        marked = [frame.loc[shared_ids] for frame in marked]

    references = marked[0]["reference"]
    if not all(references.equals(frame["reference"]) for frame in marked[1:]):
        raise ValueError(f"{label}: other right answers for the same ids, so these are other examples")
    return list(marked)


def load_correctness(
    folder: Path, rows: Sequence[str], endtasks: Mapping[str, Any]
) -> dict[tuple[str, int], Array]:
    """{(task, seed): whether each test example was right}, bool [example], in the last row in which the task
    was measured; without what has no file. Raises ValueError if a file is damaged."""
    if not endtasks:
        return {}
    is_right = {}
    last_rows = find_last_measured(select_headline_scores(endtasks)[: len(rows)])
    for task, row in zip(endtasks["tasks"], last_rows, strict=True):
        if row is None:
            continue
        stage_folder = Path(folder) / "endtasks" / f"{row:03d}-{rows[row]}"
        for seed in endtasks["seeds"]:
            try:
                table, _ = load_predictions(endtask_file(stage_folder, task, seed), ("label", "prediction"))
            except FileNotFoundError:
                continue
            is_right[task, seed] = compute.equal(table["label"], table["prediction"]).to_numpy()
    return is_right


def results_file(folder: Path, task: str) -> Path:
    """The results of a task of the lm-evaluation-harness in a stage's folder: numbers alone, as JSON."""
    return folder / f"{file_name(task)}.json"


def load_results(path: Path) -> dict[str, Any]:
    """The content of a `results_file`. Raises ValueError where it is damaged."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        check_types(results, RESULT_TYPES)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error})") from None
    return results
