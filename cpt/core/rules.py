"""What a value of the config may be: a test, and the words for what it allows. Nothing here needs torch."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INTERVALS: dict[str, Callable[[float], bool]] = {
    "0 or more": lambda value: 0 <= value < math.inf,
    "above 0": lambda value: 0 < value < math.inf,
    "above 0 and below 1": lambda value: 0 < value < 1,
    "above 0, at most 1": lambda value: 0 < value <= 1,
    "0 to 1": lambda value: 0 <= value <= 1,
    "0 or more and below 1": lambda value: 0 <= value < 1,
}

TOO_LARGE = 2**63  # for a whole number: those of torch and numpy have 64 bits


@dataclass(frozen=True)
class Rule:
    """Which values there may be, and how that is said."""

    allows: Callable[[Any], bool]
    allowed: str

    def check(self, key: str, value: Any) -> None:
        """Raises ValueError, `key=value; allowed: …`, for a value that there may not be."""
        if not self.allows(value):
            below = ", below 2^63" if isinstance(value, int | float) and value >= TOO_LARGE else ""
            raise ValueError(f"{key}={show(value)}; allowed: {self.allowed}{below}")


Rules = Mapping[str, Rule]


def show(value: Any) -> str:
    """A value as one gives it on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    return {None: "null", True: "true", False: "false"}[value] if is_word(value) else str(value)


def is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < TOO_LARGE


def is_steps(value: Any) -> bool:
    """A whole number, also one written as 1e3."""
    return is_number(value) and 1 <= value < TOO_LARGE and float(value).is_integer()


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def is_list(value: Any, entry: Callable[[Any], bool]) -> bool:
    """Whether it is a list, and all in it is as `entry` says."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(entry, value))


def is_pattern(value: Any) -> bool:
    """Whether it is a regular expression."""
    try:
        re.compile(value)
    except (re.error, TypeError):
        return False
    return True


def number(interval: str) -> Rule:
    """A number of one of INTERVALS."""
    return Rule(lambda value: is_number(value) and INTERVALS[interval](value), interval)


def between(least: float, most: float) -> Rule:
    return Rule(lambda value: is_number(value) and least <= value <= most, f"{least:g} to {most:g}")


def whole(least: int) -> Rule:
    return Rule(lambda value: is_whole(value, least), f"a whole number, {least} or more")


def one_of(*choices: str | int) -> Rule:
    """One of some words or numbers."""
    known = [(type(choice), choice) for choice in choices]
    return Rule(lambda value: (type(value), value) in known, ", ".join(dict.fromkeys(map(str, choices))))


def some_of(*choices: str, none: bool = False) -> Rule:
    """A list of some words, each once; with `none` also the empty one."""

    def allows(value: Any) -> bool:
        known = is_list(value, lambda entry: entry in choices)
        return known and len(set(value)) == len(value) and (none or len(value) > 0)

    listed = ", ".join(choices)
    return Rule(allows, f"some of {listed}, or []" if none else f"one or more of {listed}")


def or_null(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.allows(value), f"null or {rule.allowed}")


YES_NO = Rule(lambda value: isinstance(value, bool), "true, false")
TEXT = Rule(is_text, "a text")
TEXTS = Rule(lambda value: is_list(value, is_text), "a list of texts")
TEXTS_NOT_NONE = Rule(lambda value: TEXTS.allows(value) and len(value) > 0, "a list of texts, one or more")
MAPPED_TEXTS = Rule(
    lambda value: isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values()),
    "keys with texts, {key: text}",
)
TEXTS_BY_KEY = Rule(
    lambda value: isinstance(value, Mapping) and all(map(TEXTS.allows, value.values())),
    "keys with lists of texts, {key: [text]}",
)
MAPPING = Rule(lambda value: isinstance(value, Mapping), "keys with values, {key: value}")
PATTERN = Rule(is_pattern, "a regular expression")
