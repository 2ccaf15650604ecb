"""Orders of the domains: named ones, words, lists, and orders by the similarity of the domains' texts.

Yildiz et al. 2024 (arXiv 2402.17400) order coarse domains by the similarity of their mean embeddings, and
fine ones within them. Where a chain starts, how it continues and what breaks a tie is our choice."""

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from cpt.core.exceptions import format_value
from cpt.core.schema import unknown_name
from cpt.data.sources.base import parse_name

SWAPPED = "swapped"  # alone, or after another word: the second half first
BY_TEXTS = ("similar", "similar_tree", "dissimilar")
WORDS = ("reverse", "random", *BY_TEXTS)
DECIMALS = 4  # of a cosine: a smaller difference is a tie, on any machine
BUCKETS = 1 << 15  # that words are hashed into
LETTERS = re.compile(r"[^\W\d_]{2,}")


def resolve_order(
    order: int | str | Sequence[Any],
    *,
    names: Sequence[str],
    orders: Sequence[Sequence[str]] | Mapping[int, Sequence[str]] | None,
    seed: int,
) -> list[str]:
    """The domains to train on: a named order by its number, a word about the first one, one domain, or a
    list. Orders by similarity are the first one until `arrange_domains`. ValueError for an unknown order or
    domain."""
    given = orders or [sorted(names)]
    numbered = given.items() if isinstance(given, Mapping) else enumerate(given)
    named = {int(number): list(each) for number, each in numbered}
    chosen = named.get(order) if isinstance(order, int) else None
    if isinstance(order, str):
        first, (stem, is_swapped) = next(iter(named.values())), split_word(order)
        if stem == "similar_tree" and len(groups := group_coarse(first)) in (1, len(first)):
            told = f"order=similar_tree is invalid: {len(first)} domains within {len(groups)} coarse ones"
            raise ValueError(f"{told}. Allowed: order=similar, or domains like cs.AI, cs.CL and math.AG")
        words = {"": first, "reverse": first[::-1], "random": random.Random(seed).sample(first, len(first))}
        if stem in BY_TEXTS:
            chosen = first
        elif order and stem in words:
            chosen = swap_halves(words[stem]) if is_swapped else words[stem]
        elif order in names:
            chosen = [order]
    elif isinstance(order, Sequence):
        if other := [name for name in order if not isinstance(name, str) and type(name) is not int]:
            told = f"order={format_value(order)} is invalid: {format_value(other[0])} is no text"
            allowed = "names, those that read as a number, true or null in quotes: \"order=['3.10',b]\""
            raise ValueError(f"{told}. Allowed: {allowed}")
        chosen = [str(name) for name in order]
    if chosen is None:
        listed = ", ".join(f"{number} ({' '.join(each)})" for number, each in named.items())
        told = f"order={format_value(order)} is invalid: unknown order. Allowed: {listed}, {', '.join(WORDS)}"
        raise ValueError(f"{told}, {SWAPPED}, such a word with _{SWAPPED}, or a list like [b,a,c]")
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(unknown_name(f"order={unknown[0]}", sorted(names)))
    if len(set(chosen)) < len(chosen) or not chosen:
        raise ValueError(
            f"order={format_value(chosen)} is invalid. Allowed: one or more domains, each only once"
        )
    if reserved := ", ".join(sorted({"base", "joint", "general"} & set(chosen))):
        told = f"order={format_value(chosen)} is invalid: scores.json uses {reserved} itself"
        raise ValueError(f"{told}. Allowed: another name of the folder, or domains.ignore=[{reserved}]")
    return chosen


def split_word(word: str) -> tuple[str, bool]:
    """A word without the suffix that swaps its halves, and whether it has one."""
    stem = "" if word == SWAPPED else word.removesuffix(f"_{SWAPPED}")
    return (stem, stem != word) if word == SWAPPED or stem in WORDS else (word, False)


def swap_halves(order: Sequence[str]) -> list[str]:
    """The second half first; the first half has the one in the middle."""
    middle = (len(order) + 1) // 2
    return [*order[middle:], *order[:middle]]


def by_texts(order: int | str | Sequence[str]) -> bool:
    """Whether the similarity of the texts decides an order."""
    return isinstance(order, str) and split_word(order)[0] in BY_TEXTS


@dataclass(frozen=True)
class Similarity:
    """Cosines between the centered mean embeddings of domains, [N, N], and with the general text's, [N]."""

    names: list[str]
    matrix: np.ndarray
    general: np.ndarray

    @classmethod
    def of(cls, means: Mapping[str, np.ndarray], *, general: np.ndarray) -> "Similarity":
        """From the mean embedding of each domain, [D], and that of the general text."""
        names = sorted(means)
        rows = np.array([*(means[name] for name in names), general], float)
        rows = rows - rows[:-1].mean(0)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        units = rows / np.where(lengths > 0, lengths, 1)
        return cls(names, round_cosines(units[:-1] @ units[:-1].T), round_cosines(units[:-1] @ units[-1]))

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> "Similarity":
        return cls(list(values["names"]), np.array(values["matrix"]), np.array(values["general"]))

    def tell(self, order: Sequence[str]) -> dict[str, Any]:
        """The same as JSON values, in an order of the names."""
        places = [self.names.index(name) for name in order]
        matrix = self.matrix[np.ix_(places, places)]
        return {"names": list(order), "matrix": matrix.tolist(), "general": self.general[places].tolist()}


def round_cosines(values: np.ndarray) -> np.ndarray:
    return np.round(np.clip(values, -1, 1), DECIMALS) + 0.0  # no -0


def arrange_domains(word: str, given: Similarity) -> list[str]:
    """The order that a word of BY_TEXTS gives, from the domain nearest to the general text on: always the
    nearest next (similar) or the farthest (dissimilar). similar_tree: coarse domains by the mean similarity
    of their members, and within each its members, from the one nearest to the last trained on."""

    def chain(matrix: np.ndarray, start: np.ndarray) -> list[int]:
        """The greatest of `start` first, then the remaining one that is greatest in the row of the last."""
        found, left = [int(np.argmax(start))], np.ones(len(start), bool)
        while len(found) < len(start):
            left[found[-1]] = False
            found.append(int(np.argmax(np.where(left, matrix[found[-1]], -np.inf))))
        return found

    (stem, is_swapped), matrix, order = split_word(word), given.matrix, list[int]()
    if stem == "similar_tree":
        groups = [members for _, members in sorted(group_coarse(given.names).items())]
        between = np.array([[matrix[np.ix_(a, b)].mean() for b in groups] for a in groups])
        towards = np.array([given.general[members].mean() for members in groups])
        for members in (groups[at] for at in chain(round_cosines(between), round_cosines(towards))):
            start = matrix[order[-1]] if order else given.general
            order += [members[at] for at in chain(matrix[np.ix_(members, members)], start[members])]
    else:
        order = chain(-matrix if stem == "dissimilar" else matrix, given.general)
    names = [given.names[place] for place in order]
    return swap_halves(names) if is_swapped else names


def group_coarse(names: Sequence[str]) -> dict[str, list[int]]:
    """The places of names by their coarse domain."""
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        groups.setdefault(parse_name(name)[0], []).append(place)
    return groups


def embed_by_words(texts: Mapping[str, Iterable[list[str]]]) -> dict[str, np.ndarray]:
    """Mean TF-IDF vector of each text, [BUCKETS]: a document is the logarithms of its hashed words' counts,
    of length 1; words are weighted by inverse document frequency."""
    sums, counts = {name: np.zeros(BUCKETS) for name in texts}, dict.fromkeys(texts, 0)
    having = np.zeros(BUCKETS)
    for name, batches in texts.items():
        for document in (document for batch in batches for document in batch):
            found = Counter[int]()
            for word, count in Counter(LETTERS.findall(document.lower())).items():
                found[xxhash.xxh32_intdigest(word.encode()) % BUCKETS] += count
            places = np.fromiter(found, np.int64, len(found))
            weights = np.array([1 + math.log(count) for count in found.values()])
            sums[name][places] += weights / (np.linalg.norm(weights) or 1)
            having[places] += 1
            counts[name] += 1
    rarity = np.log((1 + sum(counts.values())) / (1 + having)) + 1
    return {name: rarity * total / max(1, counts[name]) for name, total in sums.items()}
