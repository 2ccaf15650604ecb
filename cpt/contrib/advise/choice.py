"""From what arms learned and forgot to the one that is recommended. Small pure functions, in nats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Point(NamedTuple):
    """Nats per token that were learned and forgotten."""

    learned: float
    forgotten: float


class Wish(NamedTuple):
    """What is wanted: the most learned with at most `bound` forgotten, or where that is None the most of
    learned - `weight` x forgotten."""

    bound: float | None
    weight: float


class Choice(NamedTuple):
    """The arm, and why it in words."""

    arm: str
    why: str


def find_front(points: Mapping[str, Point]) -> list[str]:
    """Arms that no other one beats in both, or in one and equals in the other; most learned first."""
    ordered = sorted(points, key=lambda arm: (-points[arm].learned, points[arm].forgotten))
    front: list[str] = []
    for arm in ordered:
        if not front or points[arm].forgotten < points[front[-1]].forgotten:
            front.append(arm)
    return front


def worth(point: Point, weight: float) -> float:
    return point.learned - weight * point.forgotten


def choose(points: Mapping[str, Point], highest: Mapping[str, float], wish: Wish) -> Choice:
    """The arm to recommend; `highest` is the upper end of the interval of what each forgets, nan where it
    has none. An arm whose whole interval holds the bound is preferred to one whose mean alone does."""
    if wish.bound is None:
        best = max(points, key=lambda arm: worth(points[arm], wish.weight))
        return Choice(best, f"the most of learned - {wish.weight:g} x forgotten")
    shown = [arm for arm in points if highest[arm] <= wish.bound]
    held = [arm for arm, point in points.items() if point.forgotten <= wish.bound]
    for kept, sure in ((shown, "by the whole of its interval"), (held, "by its mean, not by its interval")):
        if kept:
            best = max(kept, key=lambda arm: points[arm].learned)
            return Choice(best, f"the most learned of those that forget at most {wish.bound:g} nats, {sure}")
    least = min(points, key=lambda arm: points[arm].forgotten)
    return Choice(least, f"no arm forgets at most {wish.bound:g} nats; this one forgets least")


def weigh_lengths(lengths: Sequence[float], at: float) -> np.ndarray:
    """How much the value at each length counts in that at another: of the line of least squares through the
    values over the logarithm of the tokens, [length]. Raises ValueError for fewer than two lengths."""
    if len(set(lengths)) < 2:
        raise ValueError(f"{len(set(lengths))} length; needed: two or more")
    places = np.log(np.asarray(lengths, float))
    off = places - places.mean()
    return 1 / len(places) + (np.log(at) - places.mean()) * off / (off @ off)


def shortfall(points: Mapping[str, Point], arm: str, wish: Wish) -> float:
    """By which share an arm misses the best worth there is among those that the wish allows, of that worth;
    0 is the front. nan where the arm breaks the bound, or where the best is worth nothing."""
    bound = np.inf if wish.bound is None else wish.bound
    weight = wish.weight if wish.bound is None else 0.0
    allowed = {name: worth(point, weight) for name, point in points.items() if point.forgotten <= bound}
    best = max(allowed.values(), default=0.0)
    return (best - allowed[arm]) / best if arm in allowed and best > 0 else float("nan")
