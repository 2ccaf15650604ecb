"""Orders of the domains: named ones, words, lists, and orders by the similarity of the domains' texts.

Yildiz et al. 2024 (arXiv 2402.17400) order coarse domains by the similarity of their mean embeddings, and
fine ones within them. Where a chain starts, how it continues and what breaks a tie is our choice."""

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import count_noun
from cpt.core.schema import describe_unknown_name
from cpt.data.sources.base import GENERAL
from cpt.data.sources.m2d2 import parse_name

SWAPPED = "swapped"  # alone, or after another word: the second half first
TEXT_ORDERS = ("similar", "similar_tree", "dissimilar")
WORDS = ("reverse", "random", *TEXT_ORDERS)
COSINE_DECIMALS = 4  # of a cosine: a smaller difference is a tie, on any machine
NUM_BUCKETS = 1 << 15  # that words are hashed into
WORD_PATTERN = re.compile(r"[^\W\d_]{2,}")


def resolve_order(
    order: int | str | Sequence[Any],
    *,
    names: Sequence[str],
    orders: Sequence[Sequence[str]] | Mapping[int, Sequence[str]] | None,
    seed: int,
    find_exclusion: Callable[[str], str] = lambda name: "",
) -> list[str]:
    """The domains to train on: a named order by its number, a word about the first one, one domain, or a
    list. Orders by similarity are the first one until `arrange_domains`. `find_exclusion` gives the option
    that leaves a domain out of `names`, empty for none. Raises ValueError for an unknown order or domain."""
    named_orders = number_orders(orders or [sorted(names)])
    domains: list[str] | None = None
    if isinstance(order, int):
        domains = named_orders.get(order)
    elif isinstance(order, str):
        first_order = next(iter(named_orders.values()))
        domains = resolve_word(order, names=names, first_order=first_order, seed=seed)
    elif isinstance(order, Sequence):
        domains = read_list(order)

    check_exclusions([str(order)] if domains is None else domains, names, find_exclusion, typed_order=order)
    if domains is None:
        listed = ", ".join(f"{number} ({' '.join(domains)})" for number, domains in named_orders.items())
        raise InvalidOptionError(
            "order",
            order,
            reason="unknown order",
            allowed=(
                f"{listed}, {', '.join(WORDS)}, {SWAPPED}, such a word with _{SWAPPED}, "
                "or a list like [b,a,c]"
            ),
        )

    is_list = not isinstance(order, int | str)
    check_domains(domains, names, typed_order=domains if is_list else order)
    return domains


def number_orders(
    orders: Sequence[Sequence[str]] | Mapping[int, Sequence[str]],
) -> dict[int, list[str]]:
    """Orders by their numbers: their keys, else counted from 0."""
    numbered = orders.items() if isinstance(orders, Mapping) else enumerate(orders)
    return {int(number): list(domains) for number, domains in numbered}


def resolve_word(order: str, *, names: Sequence[str], first_order: list[str], seed: int) -> list[str] | None:
    """The domains of an order that is a word, or one domain; None for any other text. Raises ValueError for
    similar_tree if all domains have one coarse domain, or each has its own."""
    word, is_swapped = split_word(order)
    if word == "similar_tree":
        num_coarse = len(group_coarse(first_order))
        if num_coarse in (1, len(first_order)):
            raise InvalidOptionError(
                "order",
                "similar_tree",
                reason=f"{count_noun(len(first_order), 'domain')}, coarse ones: {num_coarse}",
                allowed="order=similar, or domains like cs.AI, cs.CL and math.AG",
            )

    if word in TEXT_ORDERS:
        return first_order
    words = {
        "": first_order,
        "reverse": first_order[::-1],
        "random": random.Random(seed).sample(first_order, len(first_order)),
    }
    if order and word in words:
        return swap_halves(words[word]) if is_swapped else words[word]
    return [order] if order in names else None


def read_list(order: Sequence[Any]) -> list[str]:
    """The domains of an order that is a list. Raises ValueError for what YAML has read as no text."""
    for name in order:
        if not isinstance(name, str) and type(name) is not int:
            raise InvalidOptionError(
                "order",
                order,
                reason=f"{format_value(name)} is no text",
                allowed="names, those that read as a number, true or null in quotes: \"order=['3.10',b]\"",
            )
    return [str(name) for name in order]


def check_exclusions(
    domains: Sequence[str], names: Sequence[str], find_exclusion: Callable[[str], str], *, typed_order: Any
) -> None:
    """Raises InvalidOptionError for a domain that is not unknown, but left out by an option."""
    for name in domains:
        is_missing = name not in names and name != GENERAL  # for which there is another message
        exclusion = find_exclusion(name) if is_missing else ""
        if exclusion:
            raise InvalidOptionError(
                "order",
                typed_order if isinstance(typed_order, int | str) else domains,
                context=f"with {exclusion}",
                reason=f"it leaves out {name}",
                allowed=", ".join(sorted(names)),
            )


def check_domains(domains: Sequence[str], names: Sequence[str], *, typed_order: Any) -> None:
    """Raises ValueError for an order with an unknown domain, with one twice, or with a name that the scores
    use for something else. `typed_order` is the order as the command gives it, by a number or a list."""
    unknown = [name for name in domains if name not in names]
    if GENERAL in unknown:
        raise InvalidOptionError(
            "order",
            typed_order,
            reason="general is the general text, not a domain",
            allowed=f"{', '.join(sorted(names))}; replay=general mixes general text into each batch",
        )
    if unknown:
        raise ValueError(
            describe_unknown_name(
                f"order={format_value(typed_order)}",
                sorted(names),
                name=unknown[0],
                kind=f"domain {unknown[0]}",
            )
        )
    if len(set(domains)) < len(domains) or not domains:
        raise InvalidOptionError("order", domains, allowed="one or more domains, each only once")

    reserved = ", ".join(sorted({"base", "joint", "general"} & set(domains)))
    if reserved:
        raise InvalidOptionError(
            "order",
            domains,
            reason=f"scores.json uses {reserved} itself",
            allowed=f"another name of the folder, or domains.ignore=[{reserved}]",
        )


def split_word(word: str) -> tuple[str, bool]:
    """A word without the suffix that swaps its halves, and whether it has one."""
    if word == SWAPPED:
        return "", True
    stem = word.removesuffix(f"_{SWAPPED}")
    if stem in WORDS:
        return stem, stem != word
    return word, False


def swap_halves(order: Sequence[str]) -> list[str]:
    """The second half first; the first half has the one in the middle."""
    middle = (len(order) + 1) // 2
    return [*order[middle:], *order[:middle]]


def is_decided_by_texts(order: int | str | Sequence[str]) -> bool:
    """Whether the similarity of the texts decides an order."""
    return isinstance(order, str) and split_word(order)[0] in TEXT_ORDERS


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
        embeddings = np.array([*(means[name] for name in names), general], float)  # [N + 1, D]
        # Words that all texts have make every cosine large: only what differs between domains is compared.
        centered = embeddings - embeddings[:-1].mean(0)
        lengths = np.linalg.norm(centered, axis=1, keepdims=True)
        units = centered / np.where(lengths > 0, lengths, 1)

        domain_units = units[:-1]
        general_unit = units[-1]
        matrix = round_cosines(domain_units @ domain_units.T)
        return cls(names, matrix, round_cosines(domain_units @ general_unit))

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> "Similarity":
        """From the values of `to_json`."""
        return cls(list(values["names"]), np.array(values["matrix"]), np.array(values["general"]))

    def reorder(self, order: Sequence[str]) -> "Similarity":
        """The similarity with its names, and the rows and columns of its matrix, in another order."""
        indices = [self.names.index(name) for name in order]
        return Similarity(
            names=list(order), matrix=self.matrix[np.ix_(indices, indices)], general=self.general[indices]
        )

    def to_json(self) -> dict[str, Any]:
        return {"names": self.names, "matrix": self.matrix.tolist(), "general": self.general.tolist()}


def round_cosines(values: np.ndarray) -> np.ndarray:
    return np.round(np.clip(values, -1, 1), COSINE_DECIMALS) + 0.0  # no -0


def arrange_domains(word: str, similarity: Similarity) -> list[str]:
    """The order that a word of TEXT_ORDERS gives, from the domain nearest to the general text on: always the
    nearest next (similar) or the farthest (dissimilar). similar_tree: coarse domains by the mean similarity
    of their members, and within each its members, from the one nearest to the last trained on."""
    stem, is_swapped = split_word(word)
    if stem == "similar_tree":
        indices = chain_tree(similarity)
    elif stem == "dissimilar":
        indices = chain_greatest(-similarity.matrix, similarity.general)
    else:
        indices = chain_greatest(similarity.matrix, similarity.general)
    names = [similarity.names[index] for index in indices]
    return swap_halves(names) if is_swapped else names


def chain_greatest(matrix: np.ndarray, start: np.ndarray) -> list[int]:
    """The index of the greatest of `start` [N] first, then always the remaining one that is greatest in the
    last one's row of `matrix` [N, N]."""
    indices = [int(np.argmax(start))]
    is_remaining = np.ones(len(start), bool)
    while len(indices) < len(start):
        last = indices[-1]
        is_remaining[last] = False
        indices.append(int(np.argmax(np.where(is_remaining, matrix[last], -np.inf))))
    return indices


def chain_tree(similarity: Similarity) -> list[int]:
    """The indices of the domains by order=similar_tree."""
    matrix = similarity.matrix
    groups = [members for _, members in sorted(group_coarse(similarity.names).items())]
    between_groups = np.empty((len(groups), len(groups)))
    for row, members in enumerate(groups):
        for column, column_members in enumerate(groups):
            between_groups[row, column] = matrix[np.ix_(members, column_members)].mean()
    to_general = np.array([similarity.general[members].mean() for members in groups])

    # Within a coarse domain the chain continues from the last fine one of the coarse domain before.
    indices: list[int] = []
    for group in chain_greatest(round_cosines(between_groups), round_cosines(to_general)):
        members = groups[group]
        start = matrix[indices[-1]] if indices else similarity.general
        for position in chain_greatest(matrix[np.ix_(members, members)], start[members]):
            indices.append(members[position])
    return indices


def group_coarse(names: Sequence[str]) -> dict[str, list[int]]:
    """The indices of names by their coarse domain."""
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(parse_name(name)[0], []).append(index)
    return groups


def embed_by_words(texts: Mapping[str, Iterable[list[str]]]) -> dict[str, np.ndarray]:
    """The mean TF-IDF vector of the documents of each text, [NUM_BUCKETS]. The vector of a document has the
    logarithms of the counts of its hashed words, scaled to length 1; the mean is weighted by inverse document
    frequency."""
    sums = {name: np.zeros(NUM_BUCKETS) for name in texts}
    num_documents = dict.fromkeys(texts, 0)
    document_frequency = np.zeros(NUM_BUCKETS)
    for name, batches in texts.items():
        for batch in batches:
            for document in batch:
                bucket_counts = count_buckets(document)
                buckets = np.fromiter(bucket_counts, np.int64, len(bucket_counts))
                weights = np.array([1 + math.log(count) for count in bucket_counts.values()])
                sums[name][buckets] += weights / (np.linalg.norm(weights) or 1)
                document_frequency[buckets] += 1
                num_documents[name] += 1
    inverse_frequency = np.log((1 + sum(num_documents.values())) / (1 + document_frequency)) + 1
    return {name: inverse_frequency * total / max(1, num_documents[name]) for name, total in sums.items()}


def count_buckets(document: str) -> Counter[int]:
    """How many words of a document are in each bucket, in the order in which the buckets first occur."""
    counts = Counter[int]()
    for word, count in Counter(WORD_PATTERN.findall(document.lower())).items():
        counts[xxhash.xxh32_intdigest(word.encode()) % NUM_BUCKETS] += count
    return counts
