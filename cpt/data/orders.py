"""In which order domains are learned: a named order, a list, or one that the similarity of their texts gives.

Yildiz et al. 2024 (arXiv 2402.17400) order coarse domains by the similarity of their mean embeddings, and
fine ones within them. Where a chain starts, how it continues and what breaks a tie is our choice."""

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from cpt.core.rules import show
from cpt.data.sources.base import PACKAGES
from cpt.data.sources.selection import parse_name

RESERVED = ("base", "joint", "general")
SWAPPED = "swapped"  # alone, or after another word: its second half first
BY_TEXTS = ("similar", "similar_tree", "dissimilar")
WORDS = ("reverse", "random", *BY_TEXTS)
DECIMALS = 4  # of a cosine: a smaller difference is a tie, on any machine
BUCKETS = 1 << 15  # that words are hashed into
LETTERS = re.compile(r"[^\W\d_]{2,}")


def resolve_order(
    order: int | str | Sequence[str],
    *,
    names: Sequence[str],
    orders: Sequence[Sequence[str]] | Mapping[int, Sequence[str]] | None,
    seed: int,
) -> list[str]:
    """The domains to learn: a named order by number, a word about the first, or the given list. An order that
    the texts give (`by_texts`) is the first one until `arrange_domains`.

    Raises ValueError for an order or a domain that does not exist; the message lists what does.
    """
    given = orders or [sorted(names)]
    numbered = given.items() if isinstance(given, Mapping) else enumerate(given)
    named = {int(number): list(each) for number, each in numbered}
    chosen = named.get(order) if isinstance(order, int) else None
    if isinstance(order, str):
        first, (stem, swapped) = next(iter(named.values())), split_word(order)
        words = {"": first, "reverse": first[::-1], "random": random.Random(seed).sample(first, len(first))}
        if stem in BY_TEXTS:
            chosen = first
        elif order and stem in words:
            chosen = swap_halves(words[stem]) if swapped else words[stem]
        elif order in names:
            chosen = [order]
        if stem == "similar_tree" and len(groups := group_places(first)) in (1, len(first)):
            raise ValueError(
                f"order=similar_tree: the {len(first)} domains are within {len(groups)} coarse ones, by "
                "their names; allowed: order=similar, or several coarse ones like those of cs.AI, cs.LG and "
                "math.AG"
            )
    elif isinstance(order, Sequence):
        chosen = [str(name) for name in order]
    if chosen is None:
        listed = ", ".join(f"{number} ({' '.join(each)})" for number, each in named.items())
        raise ValueError(
            f"order={show(order)} is not known; allowed: {listed}, {', '.join(WORDS)}, {SWAPPED}, such a "
            f"word with _{SWAPPED}, or a list like [b,a,c]"
        )
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"order: unknown domain {', '.join(unknown)}; there are: {', '.join(sorted(names))}")
    if len(set(chosen)) < len(chosen) or not chosen:
        raise ValueError(f"order={show(chosen)} must name at least one domain, and each only once")
    if reserved := sorted(set(chosen) & set(RESERVED)):
        raise ValueError(
            f"a domain may not be called {', '.join(reserved)}: scores.json uses it; allowed: another name"
        )
    return chosen


def split_word(word: str) -> tuple[str, bool]:
    """A word without the suffix that swaps its halves, and whether it has one."""
    if word == SWAPPED:
        return "", True
    stem = word.removesuffix(f"_{SWAPPED}")
    return (stem, stem != word) if stem in WORDS else (word, False)


def swap_halves(order: Sequence[str]) -> list[str]:
    """The second half first; the first half has the one in the middle."""
    middle = (len(order) + 1) // 2
    return [*order[middle:], *order[:middle]]


def by_texts(order: int | str | Sequence[str]) -> bool:
    """Whether the similarity of the texts gives an order."""
    return isinstance(order, str) and split_word(order)[0] in BY_TEXTS


@dataclass(frozen=True)
class Similarity:
    """Cosines between the mean embeddings of domains, [N, N], and with the general text, [N]: of their
    differences from the mean of the domains, without which all would be close to 1. `names` are sorted."""

    names: list[str]
    matrix: np.ndarray
    general: np.ndarray

    @classmethod
    def of(cls, means: Mapping[str, np.ndarray], *, general: np.ndarray) -> "Similarity":
        """From the mean embedding of each domain, [D], and that of the general text."""
        names = sorted(means)
        table = np.stack([np.asarray(means[name], float) for name in names])
        middle = table.mean(0)
        units = unit_rows(table - middle)
        towards = units @ unit_rows((np.asarray(general, float) - middle)[None])[0]
        return cls(names, round_cosines(units @ units.T), round_cosines(towards))

    @classmethod
    def load(cls, told: Mapping[str, Any]) -> "Similarity":
        return cls(list(told["names"]), np.array(told["matrix"]), np.array(told["general"]))

    def tell(self, order: Sequence[str]) -> dict[str, Any]:
        """The same as JSON values, in an order of the names."""
        places = [self.names.index(name) for name in order]
        matrix = self.matrix[np.ix_(places, places)]
        return {"names": list(order), "matrix": matrix.tolist(), "general": self.general[places].tolist()}


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Rows [N, D] of length 1; those of length 0 are unchanged."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def round_cosines(values: np.ndarray) -> np.ndarray:
    return np.round(np.clip(values, -1, 1), DECIMALS) + 0.0  # no -0


def arrange_domains(word: str, given: Similarity) -> list[str]:
    """The order that a word of BY_TEXTS gives, from the domain nearest to the general text on: always the
    nearest next (similar), or the farthest (dissimilar). similar_tree: coarse domains, by the mean similarity
    of their members; within each its members, from the one nearest to the last learned on."""
    stem, swapped = split_word(word)
    order: list[int] = []
    if stem == "similar_tree":
        groups = sorted(group_places(given.names).items())
        between = [[given.matrix[np.ix_(a, b)].mean() for _, b in groups] for _, a in groups]
        towards = [given.general[members].mean() for _, members in groups]
        for number in chain(round_cosines(np.array(between)), round_cosines(np.array(towards))):
            members = groups[number][1]
            start = given.matrix[order[-1]] if order else given.general
            order += [members[at] for at in chain(given.matrix[np.ix_(members, members)], start[members])]
    else:
        order = chain(-given.matrix if stem == "dissimilar" else given.matrix, given.general)
    names = [given.names[place] for place in order]
    return swap_halves(names) if swapped else names


def chain(matrix: np.ndarray, start: np.ndarray) -> list[int]:
    """The places 0..N-1: the greatest of `start` first, then always the remaining one that is greatest in the
    row of the last; of equals the first."""
    left = np.ones(len(start), bool)
    order = [int(np.argmax(start))]
    while len(order) < len(start):
        left[order[-1]] = False
        order.append(int(np.argmax(np.where(left, matrix[order[-1]], -np.inf))))
    return order


def group_places(names: Sequence[str]) -> dict[str, list[int]]:
    """The places of names by their coarse domain."""
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        groups.setdefault(parse_name(name)[0], []).append(place)
    return groups


def embed_by_words(texts: Mapping[str, Iterable[list[str]]]) -> dict[str, np.ndarray]:
    """Mean TF-IDF vector of each text, [BUCKETS]: a document is the logarithms of its words' counts, hashed,
    of length 1; a word weighs by how few of all documents have it."""
    sums, counts = {name: np.zeros(BUCKETS) for name in texts}, dict.fromkeys(texts, 0)
    having = np.zeros(BUCKETS)
    for name, batches in texts.items():
        for document in (document for batch in batches for document in batch):
            found = Counter(map(bucket_of, LETTERS.findall(document.lower())))
            places = np.fromiter(found, np.int64, len(found))
            weights = np.array([1 + math.log(count) for count in found.values()])
            sums[name][places] += weights / (np.linalg.norm(weights) or 1)
            having[places] += 1
            counts[name] += 1
    rarity = np.log((1 + sum(counts.values())) / (1 + having)) + 1
    return {name: rarity * total / max(1, counts[name]) for name, total in sums.items()}


@lru_cache(maxsize=1 << 18)
def bucket_of(word: str) -> int:
    return xxhash.xxh32_intdigest(word.encode()) % BUCKETS


def embed_by_vectors(
    texts: Mapping[str, Iterable[list[str]]], encode: Callable[[list[str]], np.ndarray]
) -> dict[str, np.ndarray]:
    """Mean vector of each text's documents, [D]; `encode` gives those of a batch, [B, D]."""
    means = {}
    for name, batches in texts.items():
        total, count = np.zeros(1), 0
        for batch in batches:
            vectors = np.asarray(encode(batch), np.float64)
            total, count = total + vectors.sum(0), count + len(batch)
        means[name] = total / max(1, count)
    return means


def static_encoder() -> Callable[[list[str]], np.ndarray]:
    """A document is the mean of its tokens' rows of a table, that of the package wordllama (256 numbers a
    token). Its own loader is not used: it looks for the tokenizer on the network."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    spec = find_spec(PACKAGES["static"])
    places = list(spec.submodule_search_locations or ()) if spec else []
    tables, tokenizers = (
        sorted(path for place in places for path in Path(place).glob(pattern))
        for pattern in ("weights/*_256.safetensors", "tokenizers/*.json")
    )
    if not tables or not tokenizers:
        raise ValueError(f"the package wordllama in {', '.join(places)} has no table or no tokenizer with it")
    (table,) = load_file(tables[0]).values()
    tokenizer = Tokenizer.from_file(str(tokenizers[0]))

    def encode(documents: list[str]) -> np.ndarray:
        encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
        rows = [table[each.ids].astype(np.float32) for each in encoded]
        return np.stack([each.mean(0) if len(each) else np.zeros(each.shape[1], each.dtype) for each in rows])

    return encode


def sentence_encoder(folder: str) -> Callable[[list[str]], np.ndarray]:
    """A document is embedded by a sentence-transformers model."""
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(folder, local_files_only=True, trust_remote_code=False)
    return lambda documents: model.encode(documents, show_progress_bar=False, convert_to_numpy=True)
