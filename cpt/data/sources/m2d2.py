"""The names of M2D2's domains (Reid et al., EMNLP 2022): two parts, coarse domains, fine ones within them.

Its published list has 239 names: 22 coarse domains, 214 fine ones, and three that are no domain. Some are
misspelt there (`General_referece`, `Human_activites`); these are the real ones."""

from collections.abc import Sequence
from dataclasses import dataclass

WIKIPEDIA, S2ORC = "wikipedia", "s2orc"
STRAYS = ("eval_sets", "only_text", "only_txt2")
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
WITHIN, ROLLED_UP = "__", "_l1"


@dataclass(frozen=True)
class Place:
    """Where a domain stands; `fine` is None of a coarse domain."""

    part: str
    coarse: str
    fine: str | None


def parse_name(name: str) -> Place:
    """The place of a name: `A__b` is of Wikipedia, `cs.AI` of S2ORC; an archive without classes, like
    `hep-th`, is a coarse domain's only fine one. Raises ValueError for a stray of M2D2's list."""
    if name in STRAYS:
        raise ValueError(
            f"{name} stands in M2D2's list and is no domain; leave it out: domains.ignore=[{name}]"
        )
    if name in COARSE_OF_WIKIPEDIA:
        return Place(WIKIPEDIA, name, None)
    if WITHIN in name:
        coarse, _, fine = name.partition(WITHIN)
        return Place(WIKIPEDIA, coarse, fine)
    if name.endswith(ROLLED_UP):
        return Place(S2ORC, name.removesuffix(ROLLED_UP), None)
    coarse, _, fine = name.partition(".")
    return Place(S2ORC, coarse, fine or coarse)


def group_fine(names: Sequence[str]) -> dict[str, list[str]]:
    """The fine domains among some names by their coarse one, each in its order; of a coarse domain that has
    none its own name. Raises ValueError for a stray."""
    places = {name: parse_name(name) for name in names}
    groups: dict[str, list[str]] = {}
    for name, place in places.items():
        if place.fine is not None:
            groups.setdefault(place.coarse, []).append(name)
    for name, place in places.items():
        if place.fine is None and place.coarse not in groups:
            groups[place.coarse] = [name]
    return groups
