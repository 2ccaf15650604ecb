"""The options of a method, checked where they are given."""

import math
from collections.abc import Callable, Sequence

INTERVALS: dict[str, Callable[[float], bool]] = {
    "0 or more": lambda value: 0 <= value < math.inf,
    "above 0": lambda value: 0 < value < math.inf,
    "above 0 and below 1": lambda value: 0 < value < 1,
    "0 to 1": lambda value: 0 <= value <= 1,
    "0 or more and below 1": lambda value: 0 <= value < 1,
}


def number(name: str, value: float, *, allowed: str) -> float:
    """The value, a number of one of INTERVALS; raises ValueError if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not INTERVALS[allowed](value):
        raise ValueError(f"method.{name}={value}; allowed: {allowed}")
    return value


def choice(name: str, value: str, *, allowed: Sequence[str]) -> str:
    """The value, one of those allowed; raises ValueError if it is not."""
    if value not in allowed:
        raise ValueError(f"method.{name}={value}; allowed: {', '.join(allowed)}")
    return value
