"""How reports write numbers, intervals and names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isnan
from pathlib import PurePath
from typing import Any

MAX_LISTED = 12  # up to this number, domains are drawn or named one by one
MISSING = "–"
PATH_BEGINNINGS = ("/", "./", "../", "~/")  # of a value that is a path
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")  # line ends, terminal codes, bidi

Format = Callable[[float], str]  # a negative value that rounds to zero has no sign: `z` in the format


def format_perplexity(value: float) -> str:
    """A perplexity, or a difference of two, in as many digits as one reads."""
    size = abs(value)
    if size < 1e6:
        return f"{value:z,.{count_decimals(size)}f}"
    return f"{value:.1e}"


def count_decimals(perplexity: float) -> int:
    """The decimals with which a perplexity is written."""
    if perplexity < 100:
        return 2
    return 1 if perplexity < 1000 else 0


def format_decimals(value: float) -> str:
    return f"{value:z.4f}"


def format_percent(share: float) -> str:
    return f"{100 * share:z.2f}"


def format_thousandths(value: float) -> str:
    return f"{value:z.3f}".replace("-", "−")


def format_signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def format_integer(value: float) -> str:
    return f"{value:,.0f}"


def format_bytes(size: float | None) -> str:
    """Bytes in units of 10^6; less than 100,000 in kB or B."""
    if size is None:
        return MISSING
    if 0 <= size < 1e3:
        return f"{size:.0f} B"
    if 0 <= size < 1e5:
        return f"{size / 1e3:.2f} kB"
    if size >= 1e8:
        return f"{size / 1e6:,.0f} MB"
    return f"{size / 1e6:,.2f} MB"


def format_or_dash(value: float | None, format_value: Format) -> str:
    """A dash where the value is missing or not a number."""
    if value is None or isnan(value):
        return MISSING
    return format_value(value)


def format_deviation(deviation: float, mean: float, format_value: Format) -> str:
    """A standard deviation with as many decimals as its mean: 4.5 of 568.9, where format_perplexity writes
    4.45."""
    if format_value is format_perplexity and abs(mean) < 1e6:
        return f"{deviation:,.{count_decimals(abs(mean))}f}"
    return format_value(deviation)


def format_interval(low: float | None, high: float | None, format_value: Format) -> str:
    """` [52.80, 53.40]`, with a leading blank; empty without an interval."""
    if low is None or high is None or isnan(low):
        return ""
    return f" [{format_value(low)}, {format_value(high)}]"


def strip_controls(text: str) -> str:
    """The text on one line, without characters that a terminal would interpret."""
    return CONTROLS.sub(" ", text)


def shorten(name: str, *, width: int) -> str:
    """The name in at most `width` characters, its middle left out: names often differ at their ends."""
    if len(name) <= width:
        return name
    num_last = (width - 1) // 2
    num_first = width - 1 - num_last
    return f"{name[:num_first]}…{name[len(name) - num_last :]}"


def list_names(names: Sequence[str], *, separator: str = ", ") -> str:
    """All names; if they are more than MAX_LISTED, the first and last three."""
    if len(names) > MAX_LISTED:
        names = [*names[:3], f"… {len(names) - 6} more …", *names[-3:]]
    return separator.join(names)


def list_order(domains: Sequence[str]) -> str:
    """Domains in the order in which they were learned: `law → food → space`."""
    return list_names(domains, separator=" → ")


def label_run(run: Mapping[str, Any], *, shared_values: Collection[str] = ()) -> str:
    """`das + migu + replay past (temperature=0.1)`, without the values that all runs share.

    `run` is that of scores.json."""
    label = run["method"]
    if run["mask"] != "none":
        label += f" + {run['mask']}"
    if run["replay"] != "none":
        label += f" + replay {run['replay']}"
    values = [value for value in split_variant(run) if value not in shared_values]
    if values:
        label += f" ({', '.join(values)})"
    return label


def label_single_run(run: Mapping[str, Any]) -> str:
    """The label of a run that is shown alone: of a value that is a path the last part."""
    values = []
    for value in split_variant(run):
        key, _, text = value.partition("=")
        is_path = text.startswith(PATH_BEGINNINGS)
        values.append(f"{key}={PurePath(text).name}" if is_path else value)
    return label_run({**run, "variant": "; ".join(values)})


def split_variant(run: Mapping[str, Any]) -> list[str]:
    """The values given for a run, as `key=value`."""
    return [value for value in run["variant"].split("; ") if value]
