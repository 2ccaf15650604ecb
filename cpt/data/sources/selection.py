"""Which domains of a source are trained on: patterns of names, and M2D2's fine and coarse domains.

M2D2 (Reid et al., EMNLP 2022) lists 239 names: 22 coarse domains, 214 fine ones, and three that are not
domains. Some are misspelt there (`General_referece`, `Human_activites`); these are the real ones."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from annotated_types import MinLen, Predicate

from cpt.core.schema import Allowed, Text, fits, is_pattern, show

COARSE, FINE = "coarse", "fine"
NOT_DOMAINS = ("eval_sets", "only_text", "only_txt2")
COARSE_OF_WIKIPEDIA = (
    "Culture_and_the_arts",
    "General_referece",
    "Health_and_fitness",
    "History_and_events",
    "Human_activites",
    "Mathematics_and_logic",
    "Natural_and_physical_sciences",
    "Philosophy_and_thinking",
    "Religion_and_belief_systems",
    "Society_and_social_sciences",
    "Technology_and_applied_sciences",
)


def is_name_pattern(value: Any) -> bool:
    return fits(value, Text) and (not is_expression(value) or is_pattern(value[1:-1]))


def is_expression(pattern: str) -> bool:
    """Whether it is a regular expression: what stands between slashes."""
    return len(pattern) > 2 and pattern[0] == pattern[-1] == "/"


NamePattern = Annotated[str, Predicate(is_name_pattern)]
NamePatterns = Annotated[
    NamePattern | Annotated[tuple[NamePattern, ...], MinLen(1)] | None,
    Allowed("null, names or patterns like [cs.*,Art], or a regular expression between slashes"),
]


def parse_name(name: str) -> tuple[str, str | None]:
    """The coarse and the fine domain of a name of M2D2: `A__b` of Wikipedia, `cs.AI` of S2ORC; None for
    fine of a coarse name. An archive without classes, like `hep-th`, is a coarse domain's only fine one.
    Raises ValueError for a name of the list that is not a domain."""
    if name in NOT_DOMAINS:
        raise ValueError(
            f"{name} stands in M2D2's list and is no domain; leave it out: domains.ignore=[{name}]"
        )
    if name in COARSE_OF_WIKIPEDIA or name.endswith("_l1"):
        return name.removesuffix("_l1"), None
    coarse, _, fine = name.partition("__" if "__" in name else ".")
    return coarse, fine or coarse


def group_names(names: Sequence[str], by: str | None) -> dict[str, list[str]]:
    """The domains that names make, each with the names whose text it has: the names as they are; M2D2's
    fine domains alone; or the coarse ones by name, joined of their fine ones, of the coarse name where
    there are none. Raises ValueError as `parse_name`."""
    if by is None:
        return {name: [name] for name in names}
    parsed = {name: parse_name(name) for name in names}
    if by == FINE:
        return {name: [name] for name, (_, fine) in parsed.items() if fine is not None}
    groups: dict[str, list[str]] = {}
    for name, (coarse, fine) in sorted(
        parsed.items(), key=lambda item: item[1][1] is None
    ):  # fine ones first
        if fine is not None or coarse not in groups:
            groups.setdefault(coarse, []).append(name)
    return dict(sorted(groups.items()))


def select_domains(
    groups: Mapping[str, list[str]], patterns: str | Sequence[str] | None
) -> dict[str, list[str]]:
    """The domains whose whole name matches a pattern; all without patterns. Raises ValueError where none is
    left."""
    if patterns is None:
        return dict(groups)
    listed = [patterns] if isinstance(patterns, str) else patterns
    chosen = {
        name: members
        for name, members in groups.items()
        if any(
            re.fullmatch(each[1:-1], name) if is_expression(each) else fnmatchcase(name, each)
            for each in listed
        )
    }
    if not chosen:
        names = sorted(groups)
        told = ", ".join(names[:8]) + f", … ({len(names)})" * (len(names) > 8)
        raise ValueError(f"domains.only={show(patterns)} leaves no domain; there are: {told}")
    return chosen
