"""The documents of one domain on disk, without duplicates, split into train, valid and test."""

import hashlib
import json
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from datasets.arrow_writer import ArrowWriter

from cpt.core.cache import make_once
from cpt.core.randomness import key, sample_keys
from cpt.data.examples import read_example
from cpt.data.sources.base import EXAMPLES, TEXT, Source, read_members, stamp_of

log = logging.getLogger(__name__)
SPLITS = ("train", "valid", "test")
DROPPED, SPARED = -1, -2  # copies; held-out documents beyond the most that are asked for
BATCH, CHARACTERS = 1000, 1 << 18  # of documents, what is worked on at once


@dataclass(frozen=True)
class Corpus:
    """A domain's text; `facts` holds its digest and its counts of documents and bytes."""

    folder: Path
    facts: Mapping[str, Any]

    def documents(self, split: str) -> Dataset:
        """The documents of a split, memory-mapped, with a column `text`."""
        chosen = np.flatnonzero(np.load(self.folder / "splits.npy", mmap_mode="r") == SPLITS.index(split))
        return Dataset.from_file(str(self.folder / "documents.arrow")).select(chosen)


def in_batches(documents: Dataset) -> Iterator[list[str]]:
    """Documents in lists of BATCH, or fewer where they are long: memory does not grow with the text."""
    batch: list[str] = []
    size = 0
    for few in documents.iter(batch_size=16):
        for text in few["text"]:
            batch.append(text)
            size += len(text)
            if len(batch) == BATCH or size >= CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def make_corpus(source: Source, name: str, *, cache: Path) -> Corpus:
    """A domain's text as its source has it now, read once for all runs.

    Raises ValueError for a domain with too few documents to train on and hold some out, and for text that
    changes while it is read.
    """
    stamp = stamp_of(source, name)

    def make(partial: Path) -> None:
        write_documents(
            partial,
            read_members(source, name),
            name=name,
            held_out=source.held_out,
            form=source.form(name),
            per_class=source.class_limit,
        )
        if stamp_of(source, name) != stamp:
            raise ValueError(f"the text of {name} changed while it was read; start again when it is complete")

    folder = make_once(cache / "corpora" / stamp, make=make)
    return Corpus(folder, json.loads((folder / "facts.json").read_text()))


def facts_anew(source: Source, name: str) -> dict[str, Any]:
    """The facts of a domain's text, every document read again and nothing written."""
    form = source.form(name)
    counted = count_documents(encode_documents(read_members(source, name)), form=form)
    splits = split_documents(
        counted, name=name, held_out=source.held_out, form=form, per_class=source.class_limit
    )
    return describe_corpus(counted.hashes, counted.given, splits, counted.sizes)


def write_documents(
    folder: Path,
    documents: Iterable[tuple[str, str]],
    *,
    name: str,
    held_out: Mapping[str, float],
    form: str = TEXT,
    per_class: int | None = None,
) -> None:
    """Writes documents, their splits and the facts about them into a folder."""
    with ArrowWriter(
        path=str(folder / "documents.arrow"), features=Features({"text": Value("large_string")})
    ) as writer:
        counted = count_documents(load_corpus(writer, encode_documents(documents)), form=form)
        writer.finalize()
    splits = split_documents(counted, name=name, held_out=held_out, form=form, per_class=per_class)
    np.save(folder / "splits.npy", splits)
    facts = describe_corpus(counted.hashes, counted.given, splits, counted.sizes)
    if contradicted := count_contradictions(counted):
        log.warning(
            "%s: %d questions stand there with different answers; the first of each stays", name, contradicted
        )
    log.info("%s: %s", name, summarise_corpus(facts))
    (folder / "facts.json").write_text(json.dumps(facts))


def encode_documents(documents: Iterable[tuple[str, str]]) -> Iterator[tuple[str, bytes]]:
    """Documents as UTF-8, mended where they are no Unicode."""
    return ((split, text.encode(errors="replace")) for split, text in documents)


def load_corpus(writer: ArrowWriter, documents: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Hands documents on and writes them."""
    waiting = 0
    for split, raw in documents:
        writer.write({"text": raw.decode()})
        waiting += len(raw)
        if waiting >= CHARACTERS:
            writer.write_examples_on_file()
            waiting = 0
        yield split, raw


@dataclass(frozen=True)
class Counted:
    """All that memory holds of documents, each [documents]. Text is known by itself; an example by its
    question, so that one that stands in train and test is found whatever its answers are."""

    hashes: np.ndarray  # uint64, of the document
    known_by: np.ndarray  # uint64, of what equal documents share
    answers: np.ndarray  # uint64, of the answer; 0 for text
    given: np.ndarray  # int8, the split
    sizes: np.ndarray  # bytes


def count_documents(documents: Iterable[tuple[str, bytes]], *, form: str = TEXT) -> Counted:
    """The hashes, split and bytes of each document."""
    hashes, known_by, answers = array("Q"), array("Q"), array("Q")
    given, sizes = array("b"), array("Q")
    for split, raw in documents:
        hashes.append(hash_bytes(raw))
        given.append(SPLITS.index(split))
        if form == EXAMPLES:
            example = read_example(raw.decode())
            known_by.append(hash_bytes(example.question.encode()))
            answers.append(hash_bytes(example.target.encode()))
            sizes.append(example.bytes)
        else:
            sizes.append(len(raw))
    found = np.asarray(hashes, np.uint64)
    return Counted(
        hashes=found,
        known_by=np.asarray(known_by, np.uint64) if form == EXAMPLES else found,
        answers=np.asarray(answers, np.uint64) if form == EXAMPLES else np.zeros_like(found),
        given=np.asarray(given, np.int8),
        sizes=np.asarray(sizes, np.int64),
    )


def hash_bytes(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def count_contradictions(counted: Counted) -> int:
    """Questions that stand there with more than one answer."""
    pairs = np.unique(np.stack([counted.known_by, counted.answers]), axis=1)
    return int((np.unique(pairs[0], return_counts=True)[1] > 1).sum())


def split_documents(
    counted: Counted, *, name: str, held_out: Mapping[str, float], form: str, per_class: int | None
) -> np.ndarray:
    """The split of each document, as `assign`; of training examples at most `per_class` with each answer
    stay, those whose question has the smallest hash under the seed, the others are SPARED."""
    hint = "" if form == EXAMPLES else " (domains.document=line or paragraph makes more of a .txt file)"
    splits = assign(counted.known_by, counted.given, name=name, held_out=held_out, hint=hint)
    if form == EXAMPLES and per_class is not None:
        train = np.flatnonzero(splits == 0)
        stream = key("per class", int(held_out["seed"]))
        ranked = train[np.argsort(sample_keys(stream, counted.known_by[train]), kind="stable")]
        for answer in np.unique(counted.answers[train]):
            splits[ranked[counted.answers[ranked] == answer][per_class:]] = SPARED
    return splits


def assign(
    hashes: np.ndarray, given: np.ndarray, *, name: str, held_out: Mapping[str, float], hint: str = ""
) -> np.ndarray:
    """The split of each document, [documents] int8, DROPPED for copies.

    Of equal documents one stays, in train if it stands there. Where the source gives no valid or test split,
    its share of train is taken: the documents with the smallest hash under the seed, so the choice is the
    documents' own. SPARED are the held-out documents beyond the most."""
    if not len(hashes):
        raise ValueError(f"domain {name} has no text: its files are empty")
    order = np.lexsort((np.arange(len(given)), given))
    _, first = np.unique(hashes[order], return_index=True)
    splits = np.full(len(given), DROPPED, np.int8)
    splits[order[first]] = given[order[first]]
    train = np.flatnonzero(splits == 0)
    ranked = train[np.argsort(sample_keys(key("split", int(held_out["seed"])), hashes[train]), kind="stable")]
    taken = 0
    for split in ("valid", "test"):
        if not (given == SPLITS.index(split)).any():
            count = max(1, round(held_out[split] * len(train)))
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
    content = hashlib.blake2b(hashes.tobytes() + splits.tobytes(), digest_size=8)
    trained = hashlib.blake2b(hashes[splits == 0].tobytes(), digest_size=8)
    return {
        "digest": content.hexdigest(),
        "train_digest": trained.hexdigest(),
        "documents": {split: int((splits == number).sum()) for number, split in enumerate(SPLITS)},
        "bytes": {split: int(sizes[splits == number].sum()) for number, split in enumerate(SPLITS)},
        "duplicates": int((splits == DROPPED).sum()) - held_out_copies,
        "held_out_copies": held_out_copies,
    }


def summarise_corpus(facts: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count} {split}" for split, count in facts["documents"].items())
    return (
        f"{sum(facts['bytes'].values()) / 1e6:.2f} MB, documents: {counts}; "
        f"left out: {facts['duplicates']} duplicates and "
        f"{facts['held_out_copies']} valid or test documents that also stand elsewhere"
    )
