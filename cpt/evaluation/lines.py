"""Rows that `scores.json` has not got yet as they are: a line for each in `scores.jsonl` beside it.

Of N domains `scores.json` has N x N cells, so that a run writes it anew where a share of its rows is behind,
and until then a line for each row: a row costs what it has measured, not what the run has. A reader takes
the lines first and `scores.json` then, which has nothing less than when the lines were read. A line says all
that a row has and may be taken twice; the last one counts when its end is there. So a process may be killed
between any two writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cpt.core.files import sync
from cpt.core.schema import check_types

LINE = {"row": int, "name": str, "nll": dict[str, float | None], "parts": dict[str, dict[str, float]]}
LINE |= {"phases": dict[str, float], "monitor": dict[str, dict[str, Any]]}
SHARE = 32  # of this many rows one may be behind


def lines_file(scores: Path) -> Path:
    """Where the lines of a `scores.json` are."""
    return Path(scores).with_suffix(".jsonl")


def add_line(scores: Path, line: str) -> None:
    """Adds a line; the disk holds it then."""
    path = lines_file(scores)
    is_new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync(path.parent)


def remove_lines(scores: Path) -> None:
    """Removes the lines that `scores.json` has by now: not before the disk holds it."""
    path = lines_file(scores)
    if path.exists():
        sync(path.parent)
        path.unlink()


def read_lines(scores: Path) -> list[dict[str, Any]]:
    """The lines beside a `scores.json`, none where there is no file. Raises ValueError for a damaged one."""
    path = lines_file(scores)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = raw[: raw.rfind(b"\n") + 1].splitlines()  # what a killed process was writing has no end
    return [read_line(line, f"{path.name}, line {number}") for number, line in enumerate(whole, start=1)]


def read_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        told = json.loads(line)
        check_types({"line": told}, {"line": dict[str, Any]})
        check_types(told, LINE)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {error}") from None
    return told


def count_rows(scores: Path, rows: int) -> int:
    """How many rows a run has of which `scores.json` has so many. Raises ValueError for a damaged line."""
    return max([rows, *(line["row"] + 1 for line in read_lines(scores))])


def is_behind(changed: int, rows: int) -> bool:
    """Whether so many changes of rows since `scores.json` was written are too many for a run of so many
    rows: with few rows each, and never more than a SHARE of them."""
    return changed > rows // SHARE
