"""Which domains of a source are learned: those whose names match, and coarse ones joined of fine ones."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from cpt.core.rules import Rule, is_list, is_pattern, is_text, show
from cpt.data.sources.m2d2 import group_fine, parse_name

COARSE, FINE = "coarse", "fine"


def is_name_pattern(value: Any) -> bool:
    return is_text(value) and (not is_expression(value) or is_pattern(value[1:-1]))


def is_expression(pattern: str) -> bool:
    """Whether it is a regular expression: what stands between slashes."""
    return len(pattern) > 2 and pattern[0] == pattern[-1] == "/"


PATTERNS = Rule(
    lambda value: (
        value is None or is_name_pattern(value) or (is_list(value, is_name_pattern) and len(value) > 0)
    ),
    "null, names or patterns like [cs.*,Art], or a regular expression between slashes",
)


def matches(name: str, patterns: str | Sequence[str]) -> bool:
    """Whether one of some patterns is for a name as a whole."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(
        re.fullmatch(each[1:-1], name) is not None if is_expression(each) else fnmatchcase(name, each)
        for each in listed
    )


def group_names(names: Sequence[str], by: str | None) -> dict[str, list[str]]:
    """The domains that names make, each with the names whose text it has, by name: as they are; the fine ones
    of M2D2-like names; or its coarse ones, joined of the fine. Raises ValueError for a stray of M2D2's."""
    if by is None:
        return {name: [name] for name in names}
    if by == FINE:
        return {name: [name] for name in names if parse_name(name).fine is not None}
    groups = group_fine(names)
    return {name: groups[name] for name in sorted(groups)}


def choose_domains(
    groups: Mapping[str, list[str]], patterns: str | Sequence[str] | None
) -> dict[str, list[str]]:
    """The domains whose names match; all without patterns. Raises ValueError where none is left."""
    if patterns is None:
        return dict(groups)
    chosen = {name: members for name, members in groups.items() if matches(name, patterns)}
    if not chosen:
        listed = sorted(groups)
        told = ", ".join(listed[:8]) + f", … ({len(listed)})" * (len(listed) > 8)
        raise ValueError(f"domains.only={show(patterns)} leaves no domain; there are: {told}")
    return chosen
