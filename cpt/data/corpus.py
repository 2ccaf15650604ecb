"""The documents of a domain on disk, without duplicates, split into train, valid and test by their hashes."""

import hashlib
import json
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from datasets.arrow_writer import ArrowWriter

from cpt.core.cache import make_once
from cpt.core.processes import is_first_process
from cpt.core.randomness import key, sample_keys
from cpt.data.near_duplicates import (
    BATCH_DOCUMENTS,
    MAX_HELD_OUT,
    NearDuplicates,
    count_near_duplicates,
)
from cpt.data.sources.base import EXAMPLES, Source, log_skipped, read_example, stamp_of

log = logging.getLogger(__name__)
SPLITS = ("train", "valid", "test")
DROPPED, SPARED = -1, -2  # copies; held-out documents beyond the most that are asked for
BATCH, BYTES = 10_000, 1 << 20  # documents, or what comes first, that are written at once


@dataclass(frozen=True)
class Corpus:
    """A domain's text; `facts` holds its digest and its counts of documents and bytes."""

    folder: Path
    facts: Mapping[str, Any]

    def documents(self, split: str, shard: int = 0, shards: int = 1) -> Dataset:
        """The documents of a split, or a shard of them, memory-mapped, with a column `text`."""
        chosen = np.flatnonzero(np.load(self.folder / "splits.npy", mmap_mode="r") == SPLITS.index(split))
        begin, end = len(chosen) * shard // shards, len(chosen) * (shard + 1) // shards
        return Dataset.from_file(str(self.folder / "documents.arrow")).select(chosen[begin:end])

    def keys(self, *splits: str) -> np.ndarray:
        """The hashes by which documents are equal, of those in some splits, [documents] uint64."""
        numbers = [SPLITS.index(split) for split in splits]
        chosen = np.isin(np.load(self.folder / "splits.npy"), numbers)
        return np.load(self.folder / "keys.npy", mmap_mode="r")[chosen]


def make_corpus(source: Source, name: str, *, cache: Path) -> Corpus:
    """A domain's text as its source has it now, read once for all runs.

    Raises ValueError for a domain with too few documents to train on and hold some out, and for text that
    changes while it is read."""
    stamp = stamp_of(source, name)

    def write(folder: Path) -> None:
        write_corpus(source, name, folder)
        if stamp_of(source, name) != stamp:
            raise ValueError(f"the text of {name} changed while it was read; start again when it is complete")

    folder = make_once(cache / "corpora" / stamp, make=write)
    facts = json.loads((folder / "facts.json").read_text())
    if is_first_process():
        log_skipped(name, facts.get("skipped", {}))
    return Corpus(folder, facts)


def write_corpus(source: Source, name: str, folder: Path) -> None:
    """Reads the text of a domain into a folder, compares its splits, and logs what was read."""
    waiting = 0  # bytes that are not on disk yet

    def keep(raw: bytes) -> None:
        nonlocal waiting
        writer.write({"text": raw.decode()})
        waiting += len(raw)
        if waiting >= BYTES:
            writer.write_examples_on_file()
            waiting = 0

    path, features = str(folder / "documents.arrow"), Features({"text": Value("large_string")})
    with ArrowWriter(path=path, features=features, writer_batch_size=BATCH) as writer:
        splits, facts, contradicted, keys = read_documents(source, name, keep=keep)
        writer.finalize()
    np.save(folder / "splits.npy", splits)
    np.save(folder / "keys.npy", keys)
    facts["near_duplicates"] = asdict(compare_splits(Corpus(folder, facts), name, kind=source.form(name)))
    (folder / "facts.json").write_text(json.dumps(facts))

    if contradicted:
        log.warning("Keeping first answers in %s: %d questions have different ones", name, contradicted)
    counts = ", ".join(f"{count} {split}" for split, count in facts["documents"].items())
    message = "Read %s: %.2f MB, documents: %s; left out: %d duplicates and %d valid or test copies"
    size, copies = sum(facts["bytes"].values()) / 1e6, (facts["duplicates"], facts["held_out_copies"])
    log.info(message, name, size, counts, *copies)


def compare_splits(corpus: Corpus, name: str, *, kind: str) -> NearDuplicates:
    """Looks for near-duplicates of held-out documents, of at most MAX_HELD_OUT for each split at even
    distances, among the training documents."""
    samples = []
    for split in ("valid", "test"):
        documents = corpus.documents(split)
        positions = np.unique(np.linspace(0, len(documents) - 1, MAX_HELD_OUT, dtype=int))
        samples.append(compared_texts(documents.select(positions), kind))
    return count_near_duplicates(
        chain.from_iterable(samples),
        compared_texts(corpus.documents("train"), kind),
        name=name,
        num_training=corpus.facts["documents"]["train"],
        train_bytes=corpus.facts["bytes"]["train"],
    )


def compared_texts(documents: Dataset, kind: str) -> Iterator[str]:
    """The texts by which documents are compared: of examples what they ask about, without their prompt."""
    for begin in range(0, len(documents), BATCH_DOCUMENTS):
        for document in documents[begin : begin + BATCH_DOCUMENTS]["text"]:
            if kind == EXAMPLES:
                example = read_example(document)
                text_begin, text_end = example.text
                yield example.source[text_begin:text_end] or example.question
            else:
                yield document


def read_documents(
    source: Source, name: str, *, keep: Callable[[bytes], None] = lambda raw: None
) -> tuple[np.ndarray, dict[str, Any], int, np.ndarray]:
    """The split of each document of a domain, in UTF-8 given to `keep`; the facts of the text: digests,
    documents and bytes per split, copies left out; how many questions have several answers; and the hashes
    by which documents are equal.

    Equal are texts of the same words, and examples of the same question. With a `class_limit` those training
    examples of each answer stay whose question has the smallest hash under the seed."""
    asks, held_out = source.form(name) == EXAMPLES, source.held_out
    hashed = {each: array("Q") for each in ("document", "key", "answer")}  # 25 bytes of a text in memory
    numbers, lengths = array("b"), array("q")
    for split, text in chain.from_iterable(map(source.read, source.members(name))):
        raw = text.encode(errors="replace")  # repaired where it is not Unicode
        keep(raw)
        known_by, size = {"document": raw, "key": " ".join(raw.decode().split()).encode()}, len(raw)
        if asks:
            example = read_example(raw.decode())
            known_by |= {"key": example.question.encode(), "answer": example.target.encode()}
            said = (example.source, example.target, *(turn.content for turn in example.turns[:-1]))
            size = len("".join(said).encode())
        for each, value in known_by.items():
            digest = hashlib.blake2b(value, digest_size=8).digest()
            hashed[each].append(int.from_bytes(digest, "little"))
        numbers.append(SPLITS.index(split))
        lengths.append(size)
    documents, keys, answers = map(np.asarray, hashed.values())
    given, sizes = np.asarray(numbers), np.asarray(lengths)
    if asks:
        splits = assign(keys, given, name=name, held_out=held_out)
        train = np.flatnonzero(splits == 0)
        order = sample_keys(key("per class", int(held_out["seed"])), keys[train])
        ranked = train[np.argsort(order, kind="stable")]
        if source.class_limit is not None:
            grouped = ranked[np.argsort(answers[ranked], kind="stable")]
            _, first, counts = np.unique(answers[grouped], return_index=True, return_counts=True)
            splits[grouped[np.arange(len(grouped)) - np.repeat(first, counts) >= source.class_limit]] = SPARED
    else:
        hint = " (domains.document=line or paragraph makes more of a .txt file)"
        splits = assign(documents, given, name=name, held_out=held_out, hint=hint, known_by=keys)
    held_out_copies = int(((splits == DROPPED) & (given > 0)).sum())
    facts = {
        "digest": hashlib.blake2b(documents.tobytes() + splits.tobytes(), digest_size=8).hexdigest(),
        "train_digest": hashlib.blake2b(documents[splits == 0].tobytes(), digest_size=8).hexdigest(),
        "documents": {split: int((splits == number).sum()) for number, split in enumerate(SPLITS)},
        "bytes": {split: int(sizes[splits == number].sum()) for number, split in enumerate(SPLITS)},
        "duplicates": int((splits == DROPPED).sum()) - held_out_copies,
        "held_out_copies": held_out_copies,
    }
    skipped = {member: source.skipped.get(member) for member in source.members(name)}
    if any(skipped.values()):
        facts["skipped"] = join_skipped(filter(None, skipped.values()))
    questions = np.unique(np.stack([keys[: len(answers)], answers]), axis=1)[0]
    return splits, facts, int((np.unique(questions, return_counts=True)[1] > 1).sum()), keys


def join_skipped(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """`BadExamples.facts` of several texts as those of one."""
    joined: dict[str, dict[str, Any]] = {}
    for part in parts:
        for kind, facts in part.items():
            entry = joined.setdefault(kind, {"count": 0, "first": facts["first"]})
            entry["count"] += facts["count"]
    return joined


def assign(
    hashes: np.ndarray,
    given: np.ndarray,
    *,
    name: str,
    held_out: Mapping[str, Any],
    hint: str = "",
    known_by: np.ndarray | None = None,
) -> np.ndarray:
    """The split of each document, [documents] int8; DROPPED for copies, which are `known_by` the same,
    SPARED for held-out documents beyond the most. Of equal documents the first stays, in train rather than
    in valid or test. A split that the source does not give is held out of train, by hashes. ValueError for
    an empty split."""
    if not len(hashes):
        raise ValueError(f"domain {name} has no text: its files are empty")
    known_by, seed = hashes if known_by is None else known_by, int(held_out["seed"])
    order = np.argsort(given, kind="stable")
    order = order[np.argsort(known_by[order], kind="stable")]
    shared = known_by[order]
    first = order[np.append(True, shared[1:] != shared[:-1])]
    splits = np.full(len(given), DROPPED, np.int8)
    splits[first] = given[first]

    def ranked(split: int, purpose: str) -> np.ndarray:
        own = np.flatnonzero(splits == split)
        return own[np.argsort(sample_keys(key(purpose, seed), hashes[own]), kind="stable")]

    train, taken = ranked(0, "split"), 0
    for split in (each for each in (1, 2) if not (given == each).any()):
        count = max(1, round(held_out[SPLITS[split]] * len(train)))
        splits[train[taken : taken + count]] = split
        taken += count
    for split in (1, 2) if held_out.get("max_documents") else ():
        splits[ranked(split, "most")[held_out["max_documents"] :]] = SPARED
    left = [int((splits == split).sum()) for split in range(len(SPLITS))]
    if min(left) == 0:
        found = ", ".join(f"{count} {split}" for count, split in zip(left, SPLITS, strict=True))
        told = f"domain {name} has {len(given)} documents, too few to train, validate and test on ({found})"
        raise ValueError(f"{told}. Allowed: at least one for each, all different{hint}")
    return splits
