"""Messages: abbreviated names, truncated lines, durations, plurals of nouns, lines that are logged once."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable
from functools import cache
from logging import Logger
from pathlib import Path


def abbreviate(names: Iterable[object], limit: int = 3, *, with_count: bool = False) -> str:
    """The names with commas. Of more than `limit` names only the first are listed, then an ellipsis and,
    `with_count`, how many are left out.

    >>> abbreviate(["law", "food"])
    'law, food'
    >>> abbreviate(["law", "food", "space", "arts"])
    'law, food, space, …'
    >>> abbreviate(["law", "food", "space", "arts"], with_count=True)
    'law, food, space, … 1 more'
    """
    texts = [str(name) for name in names]
    num_hidden = len(texts) - limit
    if num_hidden <= 0:
        return ", ".join(texts)
    ellipsis = f"… {num_hidden} more" if with_count else "…"
    return ", ".join([*texts[:limit], ellipsis])


@cache
def log_once(log: Logger, message: str, *, level: int = logging.INFO) -> None:
    """Logs a message unless this run has already logged the same (`train` forgets those of another)."""
    log.log(level, "%s", message)


def truncate(text: str, width: int) -> str:
    """The text in at most `width` characters, of which the last is an ellipsis if some are left out.

    >>> truncate("a long line", 7)
    'a long…'
    """
    if len(text) <= width:
        return text
    return f"{text[: width - 1]}…"


def find_similar_path(path: Path) -> str:
    """The path of the file or folder with the most similar name where one is missing; empty for none."""
    try:
        names = os.listdir(path.parent)
    except OSError:  # missing as well, or not to be read
        return ""
    matches = difflib.get_close_matches(path.name, names, n=1)
    return str(path.parent / matches[0]) if matches else ""


def format_duration(seconds: float) -> str:
    """Minutes and seconds, from an hour on with hours, from a day on in days and hours.

    >>> format_duration(35.2), format_duration(3700), format_duration(100_000)
    ('0:35', '1:01:40', '1 d 3 h')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def count_noun(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun, in the plural unless it is 1. `plural`: other than the noun with an s.

    >>> count_noun(1, "run"), count_noun(3, "run"), count_noun(2000, "token")
    ('1 run', '3 runs', '2,000 tokens')
    >>> count_noun(1, "entry", "entries"), count_noun(2, "entry", "entries")
    ('1 entry', '2 entries')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {plural or noun + 's'}"
