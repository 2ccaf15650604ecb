"""Which documents of a corpus stay, and in which split: by their hashes alone."""

import hashlib
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from cpt.core.randomness import key, sample_keys
from cpt.data.example import read_example
from cpt.data.sources.base import EXAMPLES

SPLITS = ("train", "valid", "test")
DROPPED, SPARED = -1, -2  # copies; held-out documents beyond the most that are asked for


class DocumentHashes:
    """What memory holds of the documents of a corpus, in their order, by column: their `hash`, the split
    that the source has `given`, their `size` in bytes, and a `key` that equal documents share. 25 bytes of
    a text, whose key is its words, whatever white space is between them; 33 of an example, whose key is its
    question, with the hash of its `answer`."""

    def __init__(self, form: str) -> None:
        self.form = form
        types = {"hash": "Q", "key": "Q", "answer": "Q", "given": "b", "size": "q"}
        self.columns = {name: array(kind) for name, kind in types.items()}

    def __getitem__(self, column: str) -> np.ndarray:
        return np.asarray(self.columns[column])

    def add(self, split: str, raw: bytes) -> None:
        """Adds a document, UTF-8."""
        if self.form == EXAMPLES:
            example = read_example(raw.decode())
            shared, size = example.question, example.bytes
            self.columns["answer"].append(hash_bytes(example.target.encode()))
        else:
            shared, size = " ".join(raw.decode().split()), len(raw)
        self.columns["key"].append(hash_bytes(shared.encode()))
        self.columns["hash"].append(hash_bytes(raw))
        self.columns["given"].append(SPLITS.index(split))
        self.columns["size"].append(size)


def hash_bytes(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def split_documents(
    documents: DocumentHashes, *, name: str, held_out: Mapping[str, Any], per_class: int | None = None
) -> np.ndarray:
    """The split of each document, as `assign`; of training examples at most `per_class` with each answer
    stay, those whose question has the smallest hash under the seed, the others are SPARED."""
    keys, given = documents["key"], documents["given"]
    if documents.form != EXAMPLES:
        hint = " (domains.document=line or paragraph makes more of a .txt file)"
        return assign(documents["hash"], given, name=name, held_out=held_out, hint=hint, known_by=keys)
    splits = assign(keys, given, name=name, held_out=held_out)
    if per_class is not None:
        train, answers = np.flatnonzero(splits == 0), documents["answer"]
        stream = key("per class", int(held_out["seed"]))
        ranked = train[np.argsort(sample_keys(stream, keys[train]), kind="stable")]
        for answer in np.unique(answers[train]):
            splits[ranked[answers[ranked] == answer][per_class:]] = SPARED
    return splits


def assign(
    hashes: np.ndarray,
    given: np.ndarray,
    *,
    name: str,
    held_out: Mapping[str, Any],
    hint: str = "",
    known_by: np.ndarray | None = None,
) -> np.ndarray:
    """The split of each document, [documents] int8; DROPPED for copies, which are `known_by` the same
    (None: hash), SPARED for held-out documents beyond `most`.

    Of equal documents the first stays, in train rather than in valid rather than in test. Where the source
    gives no valid or test split, its share of train is held out. The documents with the smallest hashes
    under the seed are chosen, so that the choice is the documents' own. Raises ValueError where a split
    would be empty."""
    if not len(hashes):
        raise ValueError(f"domain {name} has no text: its files are empty")
    known_by, seed = hashes if known_by is None else known_by, int(held_out["seed"])
    order = np.argsort(given, kind="stable")
    order = order[np.argsort(known_by[order], kind="stable")]
    shared = known_by[order]
    first = order[np.append(True, shared[1:] != shared[:-1])]
    splits = np.full(len(given), DROPPED, np.int8)
    splits[first] = given[first]
    del order, shared, first
    train, taken = np.flatnonzero(splits == 0), 0
    keys = np.empty(len(train), np.uint64)
    for at in range(0, len(train), 1 << 16):  # what it takes in addition is small
        keys[at : at + (1 << 16)] = sample_keys(key("split", seed), hashes[train[at : at + (1 << 16)]])
    missing = [split for split in (1, 2) if not (given == split).any()]
    counts = [max(1, round(held_out[SPLITS[split]] * len(train))) for split in missing]
    ranked = train[np.argsort(keys, kind="stable")[: sum(counts)]]
    for split, count in zip(missing, counts, strict=True):
        splits[ranked[taken : taken + count]] = split
        taken += count
    for split in (1, 2):
        held = np.flatnonzero(splits == split)
        held = held[np.argsort(sample_keys(key("most", seed), hashes[held]), kind="stable")]
        splits[held[held_out.get("most") or len(held) :]] = SPARED
    left = [int((splits == split).sum()) for split in range(len(SPLITS))]
    if min(left) == 0:
        found = ", ".join(f"{count} {split}" for count, split in zip(left, SPLITS, strict=True))
        raise ValueError(
            f"domain {name} has {len(given)} documents, too few to train, validate and test on ({found}); "
            f"allowed: at least one for each, all different{hint}"
        )
    return splits


def describe_corpus(documents: DocumentHashes, splits: np.ndarray) -> dict[str, Any]:
    """Digests of the text with its splits and of what is trained on, documents and bytes per split, and how
    many copies were left out."""
    hashes, sizes = documents["hash"], documents["size"]
    held_out_copies = int(((splits == DROPPED) & (documents["given"] > 0)).sum())
    return {
        "digest": hashlib.blake2b(hashes.tobytes() + splits.tobytes(), digest_size=8).hexdigest(),
        "train_digest": hashlib.blake2b(hashes[splits == 0].tobytes(), digest_size=8).hexdigest(),
        "documents": {split: int((splits == number).sum()) for number, split in enumerate(SPLITS)},
        "bytes": {split: int(sizes[splits == number].sum()) for number, split in enumerate(SPLITS)},
        "duplicates": int((splits == DROPPED).sum()) - held_out_copies,
        "held_out_copies": held_out_copies,
    }
