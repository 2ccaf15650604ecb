"""In which order the domains are learned."""

import random
from collections.abc import Mapping, Sequence

from cpt.core.rules import show

RESERVED = ("base", "joint", "general")


def resolve_order(
    order: int | str | Sequence[str],
    *,
    names: Sequence[str],
    orders: Sequence[Sequence[str]] | Mapping[int, Sequence[str]] | None,
    seed: int,
) -> list[str]:
    """The domains to learn: a named order by number, `reverse` or `random` (of the first), or the given list.

    Raises ValueError for an order or a domain that does not exist; the message lists what does.
    """
    named = number_orders(orders or [sorted(names)])
    if isinstance(order, str):
        chosen = by_word(order, next(iter(named.values())), names, seed)
    elif isinstance(order, Sequence):
        chosen = [str(name) for name in order]
    else:
        chosen = named.get(order) if isinstance(order, int) else None
    if chosen is None:
        listed = ", ".join(f"{number} ({' '.join(each)})" for number, each in named.items())
        raise ValueError(
            f"order={show(order)} is not known; allowed: {listed}, reverse, random, or a list like [b,a,c]"
        )
    return check_order(chosen, names)


def number_orders(orders: Sequence[Sequence[str]] | Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
    """Named orders by number: their own numbers, or those of their places."""
    numbered = orders.items() if isinstance(orders, Mapping) else enumerate(orders)
    return {int(number): list(each) for number, each in numbered}


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
