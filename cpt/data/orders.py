"""In which order the domains are learned."""

import random
from collections.abc import Sequence

from cpt.core.rules import show

RESERVED = ("base", "joint", "general")


def resolve_order(
    order: int | str | Sequence[str],
    *,
    names: Sequence[str],
    orders: Sequence[Sequence[str]] | None,
    seed: int,
) -> list[str]:
    """The domains to learn: a named order by number, `reverse` or `random` (of order 0), or the given list.

    Raises ValueError for an order or a domain that does not exist; the message lists what does.
    """
    named = [list(each) for each in orders] if orders else [sorted(names)]
    if isinstance(order, str):
        chosen = by_word(order, named[0], names, seed)
    elif isinstance(order, Sequence):
        chosen = [str(name) for name in order]
    else:
        chosen = named[order] if isinstance(order, int) and 0 <= order < len(named) else None
    if chosen is None:
        listed = ", ".join(f"{number} ({' '.join(each)})" for number, each in enumerate(named))
        raise ValueError(
            f"order={show(order)} is not known; allowed: {listed}, reverse, random, or a list like [b,a,c]"
        )
    return check_order(chosen, names)


def by_word(word: str, first: list[str], names: Sequence[str], seed: int) -> list[str] | None:
    if word == "random":
        return random.Random(seed).sample(first, len(first))
    return {"reverse": first[::-1]}.get(word, [word] if word in names else None)


def check_order(chosen: list[str], names: Sequence[str]) -> list[str]:
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise ValueError(f"unknown domain {', '.join(unknown)}; there are: {', '.join(sorted(names))}")
    if len(set(chosen)) < len(chosen) or not chosen:
        raise ValueError(f"order={show(chosen)} must name at least one domain, and each only once")
    if reserved := sorted(set(chosen) & set(RESERVED)):
        raise ValueError(f"a domain may not be called {', '.join(reserved)}: scores.json uses that name")
    return chosen
