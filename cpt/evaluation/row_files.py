"""Rows that `scores.json` does not have yet: `rows/NUMBER.json`, a file for each.

`scores.json` has all cells of a run, so that writing it takes longer with each row. A run of many rows writes
it from time to time only, and in between a small file for each new row.

The rows of a run are those of `scores.json` and the row files that follow them without a gap. Row files of
earlier numbers do not count: they are left over from a process that was killed after it had written
`scores.json`, before it removed them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpt.core.cache import discard
from cpt.core.files import read_checked_json, sync, write_checked_json

ROWS_PER_MISSING_ROW = 16  # rows of a run for each row that scores.json may lack
FOLDER = "rows"


def is_file_of_all_rows_due(number: int, *, num_rows: int, num_stored: int) -> bool:
    """Whether `scores.json` is to be written after a change of row `number`, instead of a file of this row.

    `scores.json` has the first `num_stored` of `num_rows` rows; 0: this process has not written it yet, so it
    is due. Below 32 rows it is due after each row."""
    if number < num_stored:  # a row file would not count
        return True
    num_missing = num_rows - num_stored
    return num_missing >= max(1, num_rows // ROWS_PER_MISSING_ROW)


def row_file(run: Path, number: int) -> Path:
    return run / FOLDER / f"{number:03d}.json"


def find_row_files(run: Path, *, first: int) -> Iterator[Path]:
    """The row files from number `first` on, up to the first that is missing."""
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
    """The content of the row files from number `first` on. Raises ValueError for a damaged one."""
    for path in find_row_files(run, first=first):
        yield read_checked_json(path, remedy=f"restore it from a backup, or delete {run} to train again")


def remove_row_files(run: Path) -> None:
    discard(run / FOLDER)
