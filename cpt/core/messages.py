"""Lists and counts in messages: abbreviated names, truncated lines, and nouns in the plural."""

from __future__ import annotations

from collections.abc import Iterable


def abbreviate(names: Iterable[object], limit: int = 3) -> str:
    """The names with commas; of more than `limit` the first, and an ellipsis.

    >>> abbreviate(["law", "food"])
    'law, food'
    >>> abbreviate(["law", "food", "space", "arts"])
    'law, food, space, …'
    """
    texts = [str(name) for name in names]
    if len(texts) > limit:
        texts = [*texts[:limit], "…"]
    return ", ".join(texts)


def truncate(text: str, width: int) -> str:
    """The text in at most `width` characters, of which the last is an ellipsis if some are left out.

    >>> truncate("a long line", 7)
    'a long…'
    """
    if len(text) <= width:
        return text
    return f"{text[: width - 1]}…"


def count_noun(count: int, noun: str) -> str:
    """A count with its noun, in the plural unless it is 1.

    >>> count_noun(1, "run"), count_noun(3, "run")
    ('1 run', '3 runs')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"
