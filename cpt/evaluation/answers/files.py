"""What models have answered: a parquet file for each (stage, task) in a run folder."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from cpt.core.files import replacing
from cpt.core.schema import check_types
from cpt.evaluation.answers.metrics import Answered
from cpt.evaluation.examples import read_columns

log = logging.getLogger(__name__)
KEY = b"cpt"
COLUMNS = ("id", "reference", "written", "ranked", "ranked_mean")
SOURCE = "source"  # where a measure is of it
ABOUT = {"digest": str, "seconds": float, "choices": list[Any]}


def path_of(folder: Path, task: str) -> Path:
    """The answers to a task in a stage's folder."""
    return folder / f"{quote(task, safe='')}.parquet"


def save_answers(path: Path, ids: Sequence[str], answered: Answered, *, digest: str, seconds: float) -> None:
    """Writes what was answered, a row for each example; the file appears whole or not at all."""
    values = {"id": ids, "reference": answered.references}
    values |= {name: getattr(answered, name) for name in ("written", "ranked", "ranked_mean")}
    nothing = [None] * len(ids)
    columns = COLUMNS
    if answered.sources is not None:
        columns, values[SOURCE] = (*COLUMNS, SOURCE), answered.sources
    table = pa.table({name: pa.array(values[name] or nothing, pa.string()) for name in columns})
    about = {"digest": digest, "seconds": seconds, "choices": list(answered.choices)}
    table = table.replace_schema_metadata({KEY: json.dumps(about)})
    with replacing(path) as partial:
        pq.write_table(table, partial, write_page_checksum=True)


def read_answers(path: Path, *, digest: str | None = None) -> tuple[Answered, float] | None:
    """What was answered with the settings and data that the digest stands for, and the seconds that it took;
    None where there is no such file, or a damaged one."""
    try:
        _, answered, about = load_answers(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.info("%s, which are made again", error)
        return None
    if digest is not None and about["digest"] != digest:
        return None
    return answered, about["seconds"]


def load_answers(path: Path) -> tuple[list[str], Answered, dict[str, Any]]:
    """The examples' ids, what was answered, and what the file says of it. Raises FileNotFoundError where
    there is no file, ValueError where it is damaged."""
    table = read_columns(path, COLUMNS, what="answers", beside=[SOURCE])
    try:
        about = json.loads((table.schema.metadata or {}).get(KEY, b"{}"))
        check_types(about, ABOUT)
    except ValueError as error:
        raise ValueError(f"{path}: damaged answers ({error})") from None
    columns = {name: table.column(name).to_pylist() for name in COLUMNS}
    given = {name: None if None in columns[name] else columns[name] for name in COLUMNS[2:]}
    if SOURCE in table.column_names:
        given["sources"] = table.column(SOURCE).to_pylist()
    choices = [tuple(each) for each in about["choices"]]
    return columns["id"], Answered(columns["reference"], choices, **given), about
