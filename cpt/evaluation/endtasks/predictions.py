"""Predictions of an end task by example: a parquet file for each (stage, task, seed)."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cpt.core.files import replacing

log = logging.getLogger(__name__)
KEY = b"cpt"
COLUMNS = ("id", "label", "prediction")
NEEDED = {"digest", "metric", "classes", "macro_f1", "micro_f1", "accuracy", "seconds", "epochs"}


def save_predictions(path: Path, columns: Mapping[str, Sequence[str]], *, about: Mapping[str, Any]) -> None:
    """Writes COLUMNS, a row for each test example in the order of its file, and what is known `about` them;
    the file appears whole or not at all."""
    table = pa.table({name: pa.array(columns[name], pa.string()) for name in COLUMNS})
    table = table.replace_schema_metadata({KEY: json.dumps(dict(about))})
    with replacing(path) as partial:
        pq.write_table(table, partial, write_page_checksum=True)


def about(path: Path) -> dict[str, Any] | None:
    """What a file says about its predictions; None where there is no file, or a damaged one."""
    try:
        found = json.loads((pq.read_schema(path).metadata or {}).get(KEY, b"null"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, pa.ArrowException) as error:
        log.info("%s is damaged (%s) and is made again", path, " ".join(str(error).split()))
        return None
    return found if isinstance(found, dict) and found.keys() >= NEEDED else None


def is_whole_file(path: Path, *, digest: str, examples: int) -> bool:
    """Whether a file has the predictions that the digest stands for, every byte of them."""
    found = about(path)
    if found is None or found["digest"] != digest:
        return False
    try:
        table = pq.read_table(path, page_checksum_verification=True, columns=list(COLUMNS))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        log.info("%s is damaged (%s) and is made again", path, " ".join(str(error).split()))
        return False
    return table.num_rows == examples
