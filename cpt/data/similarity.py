"""How alike the texts of domains are, and the orders that follow from it.

Yildiz et al. 2024 (arXiv 2402.17400) lay coarse domains out by the closeness of their mean embeddings, and
fine ones within them; where a chain begins, how it goes on and what breaks a tie is ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpt.data.sources.m2d2 import parse_name

Array = np.ndarray
DECIMALS = 4  # of a cosine: what differs less is a tie, whatever machine it was computed on


@dataclass(frozen=True)
class Similarity:
    """Cosines between the mean embeddings of domains, [N, N], and with the general text, [N]: of their
    differences from the mean of the domains, without which all would be close to 1. `names` are sorted."""

    names: list[str]
    matrix: Array
    general: Array

    @classmethod
    def of(cls, means: Mapping[str, Array], *, general: Array) -> "Similarity":
        """From the mean embedding of each domain, [D], and that of the general text."""
        names = sorted(means)
        table = np.stack([np.asarray(means[name], float) for name in names])
        middle = table.mean(0)
        units = normalise(table - middle)
        towards = units @ normalise((np.asarray(general, float) - middle)[None])[0]
        return cls(names, round_cosines(units @ units.T), round_cosines(towards))

    @classmethod
    def load(cls, told: Mapping[str, Any]) -> "Similarity":
        return cls(list(told["names"]), np.array(told["matrix"]), np.array(told["general"]))

    def tell(self, order: Sequence[str]) -> dict[str, Any]:
        """The same as JSON values, in an order of the names."""
        places = [self.names.index(name) for name in order]
        matrix = self.matrix[np.ix_(places, places)]
        return {"names": list(order), "matrix": matrix.tolist(), "general": self.general[places].tolist()}


def normalise(rows: Array) -> Array:
    """Rows [N, D] of length 1; those of length 0 stay."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def round_cosines(values: Array) -> Array:
    return np.round(np.clip(values, -1, 1), DECIMALS) + 0.0  # no -0


def chain(matrix: Array, start: Array, *, farthest: bool = False) -> list[int]:
    """The places 0..N-1 one after another: the greatest of `start` first, then always the nearest to the last
    that is left, or the farthest; of equals the first."""
    signed = -matrix if farthest else matrix
    left = np.ones(len(start), bool)
    order = [int(np.argmax(start))]
    while len(order) < len(start):
        left[order[-1]] = False
        order.append(int(np.argmax(np.where(left, signed[order[-1]], -np.inf))))
    return order


def order_similar(given: Similarity) -> list[str]:
    """From the domain nearest to the general text on, always the nearest next."""
    return [given.names[place] for place in chain(given.matrix, given.general)]


def order_dissimilar(given: Similarity) -> list[str]:
    """From the domain nearest to the general text on, always the farthest next."""
    return [given.names[place] for place in chain(given.matrix, given.general, farthest=True)]


def order_tree(given: Similarity) -> list[str]:
    """Coarse domains first, by the mean similarity of their members, from the one nearest to the general text
    on; within each its members, from the one nearest to the last that was learned on."""
    groups = group_places(given.names)
    labels = sorted(groups)
    between = [[given.matrix[np.ix_(groups[a], groups[b])].mean() for b in labels] for a in labels]
    towards = np.array([given.general[groups[label]].mean() for label in labels])
    order: list[int] = []
    for number in chain(round_cosines(np.array(between)), round_cosines(towards)):
        members = groups[labels[number]]
        start = given.matrix[order[-1]] if order else given.general
        order += [members[place] for place in chain(given.matrix[np.ix_(members, members)], start[members])]
    return [given.names[place] for place in order]


def group_places(names: Sequence[str]) -> dict[str, list[int]]:
    """The places of names by the coarse domain that they are within."""
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        groups.setdefault(parse_name(name).coarse, []).append(place)
    return groups


def check_groups(names: Sequence[str]) -> None:
    """Raises ValueError where names make no tree: no two of them, or all, are within one coarse domain."""
    groups = group_places(names)
    if len(groups) in (1, len(names)):
        raise ValueError(
            f"order=similar_tree: the {len(names)} domains are within {len(groups)} coarse ones, by their "
            "names; allowed: order=similar, or several coarse ones like those of cs.AI, cs.LG and math.AG"
        )


ORDERS: Mapping[str, Callable[[Similarity], list[str]]] = {
    "similar": order_similar,
    "similar_tree": order_tree,
    "dissimilar": order_dissimilar,
}
