"""Journal of a run's rows: `scores.jsonl`, with a line for each row that `scores.json` does not have yet.

A run rewrites `scores.json` after a share of its rows. A reader takes the journal first: a line may be
applied twice, and counts when it ends in a newline. So a process may be killed between any two writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cpt.core.files import sync
from cpt.core.schema import check_types

MetricRecord = dict[str, Any]  # what was measured of a row: the fields of RECORD, and costs
RECORD = {"row": int, "name": str, "nll": dict[str, float | None], "modules": dict[str, dict[str, float]]}
RECORD |= {"phases": dict[str, float], "monitor": dict[str, dict[str, Any]]}


def journal_file(scores: Path) -> Path:
    return Path(scores).with_suffix(".jsonl")


def append_row(scores: Path, line: str) -> None:
    """Appends a line to the journal of a `scores.json`, and flushes it to disk."""
    path = journal_file(scores)
    is_new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    sync(path)
    if is_new:
        sync(path.parent)


def read_journal(scores: Path) -> list[MetricRecord]:
    """The journal of a `scores.json`, if any. Raises ValueError for a damaged one."""
    path, records = journal_file(scores), []
    raw = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            record = json.loads(line)
            check_types(record, RECORD)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from None
        records.append(record)
    return records


def rows_so_far(scores: Path, rows: int) -> int:
    """The rows of a run whose `scores.json` has `rows`. Raises ValueError for a damaged line."""
    return max([rows, *(record["row"] + 1 for record in read_journal(scores))])
