"""Rows that `scores.json` does not have yet: `rows/NUMBER.json`, a file for each.

All of a run's cells are in `scores.json`, so that writing it takes longer with each row. A run of many rows
writes it only from time to time, and a file of the one row meanwhile. Only rows that follow those of
`scores.json` count, up to the first whose file is missing: files of rows that it has are left over from a
process that was killed before it removed them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpt.core.cache import discard
from cpt.core.files import read_checked_json, sync, write_checked_json

ROWS_PER_NEW_ROW = 16  # rows in scores.json for each row that may be missing in it
FOLDER = "rows"


def is_file_of_all_rows_due(number: int, *, num_rows: int, num_stored: int) -> bool:
    """Whether `scores.json` is to be written after a change of row `number`, when it has the first
    `num_stored` of `num_rows` rows. At 0 it is to be: then this process has not written it. Up to 31 rows it
    is after each row."""
    is_stored_row = number < num_stored  # which a file of its own would not replace
    num_missing = num_rows - num_stored
    return is_stored_row or num_missing >= max(1, num_rows // ROWS_PER_NEW_ROW)


def row_file(run: Path, number: int) -> Path:
    return run / FOLDER / f"{number:03d}.json"


def find_row_files(run: Path, *, first: int) -> Iterator[Path]:
    """The files of the rows from number `first` on that follow each other without a gap."""
    number = first
    while row_file(run, number).exists():
        yield row_file(run, number)
        number += 1


def write_row_file(run: Path, number: int, row: Any) -> None:
    """Writes a row, a JSON value, with its hash, atomically."""
    path = row_file(run, number)
    is_new_folder = not path.parent.exists()
    write_checked_json(path, row)
    if is_new_folder:
        sync(run)  # the name of the folder has to be on the disk, too


def read_row_files(run: Path, *, first: int) -> Iterator[Any]:
    """The rows from number `first` on. Raises ValueError for a damaged file."""
    for path in find_row_files(run, first=first):
        yield read_checked_json(path, remedy=f"restore it from a backup, or delete {run} to train again")


def remove_row_files(run: Path) -> None:
    discard(run / FOLDER)
