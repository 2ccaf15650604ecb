"""In which order the domains are learned."""

import random
from collections.abc import Mapping, Sequence

from cpt.core.rules import show
from cpt.data.similarity import ORDERS, Similarity, check_groups

RESERVED = ("base", "joint", "general")
SWAPPED = "swapped"  # alone, or behind another word: its second half first
WORDS = ("reverse", "random", *ORDERS)


def resolve_order(
    order: int | str | Sequence[str],
    *,
    names: Sequence[str],
    orders: Sequence[Sequence[str]] | Mapping[int, Sequence[str]] | None,
    seed: int,
) -> list[str]:
    """The domains to learn: a named order by number, a word about the first, or the given list. What the
    texts decide (`by_texts`) is in the first order still.

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
            f"order={show(order)} is not known; allowed: {listed}, {', '.join(WORDS)}, {SWAPPED}, such a "
            f"word with _{SWAPPED}, or a list like [b,a,c]"
        )
    return check_order(chosen, names)


def number_orders(orders: Sequence[Sequence[str]] | Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
    """Named orders by number: their own numbers, or those of their places."""
    numbered = orders.items() if isinstance(orders, Mapping) else enumerate(orders)
    return {int(number): list(each) for number, each in numbered}


def by_word(word: str, first: list[str], names: Sequence[str], seed: int) -> list[str] | None:
    stem, swapped = split_word(word)
    if stem in ORDERS:
        if stem == "similar_tree":
            check_groups(first)
        return first
    known = {"": first, "reverse": first[::-1], "random": random.Random(seed).sample(first, len(first))}
    if stem in known and word:
        return swap_halves(known[stem]) if swapped else known[stem]
    return [word] if word in names else None


def split_word(word: str) -> tuple[str, bool]:
    """A word without what says that its halves are swapped, and whether that is said."""
    if word == SWAPPED:
        return "", True
    stem = word.removesuffix(f"_{SWAPPED}")
    return (stem, stem != word) if stem in WORDS else (word, False)


def swap_halves(order: Sequence[str]) -> list[str]:
    """The second half first; the first half has the one in the middle."""
    middle = (len(order) + 1) // 2
    return [*order[middle:], *order[:middle]]


def by_texts(order: int | str | Sequence[str]) -> bool:
    """Whether an order is known only where the texts are."""
    return isinstance(order, str) and split_word(order)[0] in ORDERS


def arrange_domains(word: str, similarity: Similarity) -> list[str]:
    """The order that such a word means for these texts."""
    stem, swapped = split_word(word)
    order = ORDERS[stem](similarity)
    return swap_halves(order) if swapped else order


def check_order(chosen: list[str], names: Sequence[str]) -> list[str]:
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise ValueError(f"order: unknown domain {', '.join(unknown)}; there are: {', '.join(sorted(names))}")
    if len(set(chosen)) < len(chosen) or not chosen:
        raise ValueError(f"order={show(chosen)} must name at least one domain, and each only once")
    if reserved := sorted(set(chosen) & set(RESERVED)):
        raise ValueError(
            f"a domain may not be called {', '.join(reserved)}: scores.json uses it; allowed: another name"
        )
    return chosen
