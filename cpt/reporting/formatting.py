"""Names and numbers as they are shown."""

import re

import numpy as np

# Control characters, separators of lines, and what turns the direction of writing around.
UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")


def strip_controls(text: str) -> str:
    """The text with a blank for whatever could end a line or speak to a terminal."""
    return UNSEEN.sub(" ", text)


def shorten(name: str, *, width: int) -> str:
    """The name in at most `width` characters, its middle left out: names often differ at their ends."""
    tail = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def pick_ends(size: int) -> list[int]:
    """The places of the first and last few; all if they are few."""
    return list(range(size)) if size <= 9 else [*range(4), *range(size - 4, size)]


def perplexity(value: float | None) -> str:
    """A perplexity, or a difference of two, in as many digits as one reads."""
    if value is None or np.isnan(value):
        return "nan"
    size = abs(value)
    return (
        f"{value:.{2 if size < 100 else 1}f}"
        if size < 1000
        else f"{value:,.0f}"
        if size < 1e6
        else f"{value:.1e}"
    )


def decimals(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4f}"


def percent(share: float) -> str:
    """A share of 1 in hundredths."""
    return f"{100 * share:.2f}"


def megabytes(size: float | None) -> str:
    """Bytes in units of 10^6, fewer than 100,000 in units that show them, in as many digits as one reads."""
    if size is None:
        return "–"
    if 0 <= size < 1e5:
        return f"{size:.0f} B" if size < 1e3 else f"{size / 1e3:.2f} kB"
    return f"{size / 1e6:,.{0 if size >= 1e8 else 2}f} MB"
