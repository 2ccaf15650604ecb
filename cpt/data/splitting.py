"""Which documents of a text stay, and in which split: by their hashes alone, in memory."""

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpt.core.randomness import key, sample_keys
from cpt.data.example import read_example
from cpt.data.sources.base import EXAMPLES, TEXT

SPLITS = ("train", "valid", "test")
AT_ONCE = 1 << 16  # documents
DROPPED, SPARED = -1, -2  # copies; held-out documents beyond the most that are asked for
OF_ALL = {"hashes": "Q", "known_by": "Q", "given": "b", "sizes": "Q"}
OF_EXAMPLES = {"answers": "Q"}


@dataclass(frozen=True)
class Counted:
    """All that memory holds of documents, each [documents]. Text is known by its words, whatever white space
    is between them; an example by its question, so that one that is in train and test is found whatever its
    answers are."""

    hashes: np.ndarray  # uint64, of the document
    known_by: np.ndarray  # uint64, of what equal documents share
    answers: np.ndarray | None  # uint64, of the answer; None for text
    given: np.ndarray  # int8, the split
    sizes: np.ndarray  # bytes


class Counting:
    """The hashes, split and bytes of documents, as they are read: 25 bytes of a text, 33 of an example."""

    def __init__(self, form: str) -> None:
        self.is_text = form != EXAMPLES
        kinds = OF_ALL if self.is_text else OF_ALL | OF_EXAMPLES
        self.columns = {name: array(kind) for name, kind in kinds.items()}

    def __len__(self) -> int:
        return len(self.columns["given"])

    def add(self, split: str, raw: bytes) -> None:
        size = len(raw)
        if self.is_text:
            self.columns["known_by"].append(hash_bytes(" ".join(raw.decode().split()).encode()))
        else:
            example = read_example(raw.decode())
            self.columns["known_by"].append(hash_bytes(example.question.encode()))
            self.columns["answers"].append(hash_bytes(example.target.encode()))
            size = example.bytes
        self.columns["hashes"].append(hash_bytes(raw))
        self.columns["given"].append(SPLITS.index(split))
        self.columns["sizes"].append(size)

    def load(self, folder: Path) -> None:
        """Takes over what was written of the columns."""
        for name, column in self.columns.items():
            column.frombytes((folder / name).read_bytes())

    def counted(self) -> Counted:
        found = {name: np.asarray(column) for name, column in self.columns.items()}
        return Counted(
            hashes=found["hashes"],
            known_by=found["known_by"],
            answers=found.get("answers"),
            given=found["given"],
            sizes=found["sizes"].view(np.int64),
        )


def count_documents(documents: Iterable[tuple[str, bytes]], *, form: str = TEXT) -> Counted:
    """The hashes, split and bytes of each document."""
    counting = Counting(form)
    for split, raw in documents:
        counting.add(split, raw)
    return counting.counted()


def hash_bytes(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def count_contradictions(counted: Counted) -> int:
    """Questions that stand there with more than one answer."""
    if counted.answers is None:
        return 0
    pairs = np.unique(np.stack([counted.known_by, counted.answers]), axis=1)
    return int((np.unique(pairs[0], return_counts=True)[1] > 1).sum())


def split_documents(
    counted: Counted, *, name: str, held_out: Mapping[str, float], form: str, per_class: int | None
) -> np.ndarray:
    """The split of each document, as `assign`; of training examples at most `per_class` with each answer
    stay, those whose question has the smallest hash under the seed, the others are SPARED."""
    hint = "" if form == EXAMPLES else " (domains.document=line or paragraph makes more of a .txt file)"
    drawn_by = counted.hashes if counted.answers is None else counted.known_by
    known_by = counted.known_by
    splits = assign(drawn_by, counted.given, name=name, held_out=held_out, hint=hint, known_by=known_by)
    if counted.answers is not None and per_class is not None:
        train = np.flatnonzero(splits == 0)
        stream = key("per class", int(held_out["seed"]))
        ranked = train[np.argsort(sample_keys(stream, counted.known_by[train]), kind="stable")]
        for answer in np.unique(counted.answers[train]):
            splits[ranked[counted.answers[ranked] == answer][per_class:]] = SPARED
    return splits


def assign(
    hashes: np.ndarray,
    given: np.ndarray,
    *,
    name: str,
    held_out: Mapping[str, float],
    hint: str = "",
    known_by: np.ndarray | None = None,
) -> np.ndarray:
    """The split of each document, [documents] int8, DROPPED for copies: those of which `known_by` (None: the
    hash) is equal.

    Of equal documents one stays, in train if it stands there. Where the source gives no valid or test split,
    its share of train is taken: the documents with the smallest hash under the seed, so the choice is the
    documents' own. SPARED are the held-out documents beyond the most."""
    if not len(hashes):
        raise ValueError(f"domain {name} has no text: its files are empty")
    first = find_first(hashes if known_by is None else known_by, given)
    splits = np.full(len(given), DROPPED, np.int8)
    splits[first] = given[first]
    del first
    train = np.flatnonzero(splits == 0)
    counts = {
        split: max(1, round(held_out[split] * len(train)))
        for split in ("valid", "test")
        if not (given == SPLITS.index(split)).any()
    }
    ranked = train[smallest(drawn_keys(hashes, train, seed=int(held_out["seed"])), sum(counts.values()))]
    taken = 0
    for split, count in counts.items():
        splits[ranked[taken : taken + count]] = SPLITS.index(split)
        taken += count
    spare(splits, hashes, held_out=held_out)
    left = [int((splits == number).sum()) for number in range(len(SPLITS))]
    if min(left) == 0:
        found = ", ".join(f"{count} {split}" for count, split in zip(left, SPLITS, strict=True))
        raise ValueError(
            f"domain {name} has {len(given)} documents, too few to train, validate and test on ({found}); "
            f"allowed: at least one for each, all different{hint}"
        )
    return splits


def drawn_keys(hashes: np.ndarray, places: np.ndarray, *, seed: int) -> np.ndarray:
    """A key of each document at some places, [places] uint64; little is held beside them."""
    stream, found = key("split", seed), np.empty(len(places), np.uint64)
    for at in range(0, len(places), AT_ONCE):
        found[at : at + AT_ONCE] = sample_keys(stream, hashes[places[at : at + AT_ONCE]])
    return found


def smallest(keys: np.ndarray, count: int) -> np.ndarray:
    """Where the smallest keys stand, in their order, of equal ones the first: as the beginning of a stable
    argsort of all, with less memory."""
    if count < len(keys):
        few = np.flatnonzero(keys <= np.partition(keys, count)[count])
    else:
        few = np.arange(len(keys))
    return few[np.argsort(keys[few], kind="stable")][:count]


def find_first(hashes: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Of equal documents the place of that which stays: the first, in train rather than in valid rather than
    in test."""
    order = np.argsort(given, kind="stable")
    order = order[np.argsort(hashes[order], kind="stable")]
    sorted_hashes = hashes[order]
    return order[np.append(True, sorted_hashes[1:] != sorted_hashes[:-1])]


def spare(splits: np.ndarray, hashes: np.ndarray, *, held_out: Mapping[str, float]) -> None:
    """Keeps at most `most` documents of each held-out split, those with the smallest hash under the seed."""
    stream = key("most", int(held_out["seed"]))
    for split in (1, 2):
        held = np.flatnonzero(splits == split)
        ranked = held[np.argsort(sample_keys(stream, hashes[held]), kind="stable")]
        splits[ranked[held_out.get("most") or len(ranked) :]] = SPARED


def describe_corpus(
    hashes: np.ndarray, given: np.ndarray, splits: np.ndarray, sizes: np.ndarray
) -> dict[str, Any]:
    """Digests of the text with its splits and of what is trained on, documents and bytes per split, and how
    many copies were left out."""
    held_out_copies = int(((splits == DROPPED) & (given > 0)).sum())
    content, trained = hashlib.blake2b(hashes.data, digest_size=8), hashlib.blake2b(digest_size=8)
    content.update(splits.data)
    trained.update(hashes[splits == 0].data)
    return {
        "digest": content.hexdigest(),
        "train_digest": trained.hexdigest(),
        "documents": {split: int((splits == number).sum()) for number, split in enumerate(SPLITS)},
        "bytes": {split: int(sizes[splits == number].sum()) for number, split in enumerate(SPLITS)},
        "duplicates": int((splits == DROPPED).sum()) - held_out_copies,
        "held_out_copies": held_out_copies,
    }
