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
from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.core.randomness import key, sample_keys
from cpt.data.near_duplicates import (
    BATCH_DOCUMENTS,
    MAX_HELD_OUT,
    NearDuplicates,
    count_near_duplicates,
)
from cpt.data.sources.base import EXAMPLES, DocumentSource, make_stamp
from cpt.data.sources.examples import log_skipped, read_example

log = logging.getLogger(__name__)
SPLITS = ("train", "valid", "test")
HELD_OUT_SPLITS = (1, 2)  # indices in SPLITS
DROPPED, SPARED = -1, -2  # copies; held-out documents beyond the most that are asked for
BATCH = 10_000  # documents that are written at once, or fewer:
NOTHING_HELD_OUT = NearDuplicates(found=0, compared=0, train_share=0.0)
MAX_WAITING_BYTES = 1 << 20  # bytes of documents after which they are written


@dataclass(frozen=True)
class Corpus:
    """A domain's text; `facts` holds its digest and its counts of documents and bytes."""

    folder: Path
    facts: Mapping[str, Any]

    def documents(self, split: str, shard: int = 0, shards: int = 1) -> Dataset:
        """The documents of a split, or a shard of them, memory-mapped, with a column `text`."""
        chosen = np.flatnonzero(np.load(self.folder / "splits.npy", mmap_mode="r") == SPLITS.index(split))
        begin = len(chosen) * shard // shards
        end = len(chosen) * (shard + 1) // shards
        return Dataset.from_file(str(self.folder / "documents.arrow")).select(chosen[begin:end])

    def keys(self, *splits: str) -> np.ndarray:
        """The hashes by which documents are equal, of those in some splits, [documents] uint64."""
        numbers = [SPLITS.index(split) for split in splits]
        chosen = np.isin(np.load(self.folder / "splits.npy"), numbers)
        return np.load(self.folder / "keys.npy", mmap_mode="r")[chosen]


def make_corpus(source: DocumentSource, name: str, *, cache: Path) -> Corpus:
    """A domain's text as its source has it now, read once for all runs.

    Raises ValueError for a domain with too few documents to train on and hold some out, and for text that
    changes while it is read."""
    stamp = make_stamp(source, name)

    def write(folder: Path) -> None:
        write_corpus(source, name, folder)
        if make_stamp(source, name) != stamp:
            raise ValueError(f"the text of {name} changed while it was read; start again when it is complete")

    folder = make_once(cache / "corpora" / stamp, make=write)
    facts = json.loads((folder / "facts.json").read_text())
    if is_first_process():
        log_skipped(name, facts.get("skipped", {}))
    return Corpus(folder, facts)


class DocumentWriter:
    """Writes documents to an Arrow file, about MAX_WAITING_BYTES at once."""

    def __init__(self, path: Path) -> None:
        features = Features({"text": Value("large_string")})
        self.writer = ArrowWriter(path=str(path), features=features, writer_batch_size=BATCH)
        self.waiting = 0  # bytes that are not on disk yet

    def write(self, raw: bytes) -> None:
        """Adds a document in UTF-8."""
        self.writer.write({"text": raw.decode()})
        self.waiting += len(raw)
        if self.waiting >= MAX_WAITING_BYTES:
            self.writer.write_examples_on_file()
            self.waiting = 0


def write_corpus(source: DocumentSource, name: str, folder: Path) -> None:
    """Reads the text of a domain into a folder, compares its splits, and logs what was read."""
    documents = DocumentWriter(folder / "documents.arrow")
    with documents.writer:
        content = read_documents(source, name, keep=documents.write)
        documents.writer.finalize()
    facts = content.facts
    np.save(folder / "splits.npy", content.splits)
    np.save(folder / "keys.npy", content.keys)

    # The files above make a corpus; its facts are written last, with what the comparison finds in it.
    near_duplicates = NOTHING_HELD_OUT
    if source.held_out:
        near_duplicates = compare_splits(Corpus(folder, facts), name, form=source.form(name))
    facts["near_duplicates"] = asdict(near_duplicates)
    (folder / "facts.json").write_text(json.dumps(facts))

    if content.num_contradicted:
        log.warning(
            "Keeping the first of different answers to %s in %s",
            count_noun(content.num_contradicted, "question"),
            name,
        )
    if content.num_repaired:
        log.warning(
            "Replacing characters that are not Unicode, like half of an emoji, by question marks in %s of %s",
            count_noun(content.num_repaired, "document"),
            name,
        )
    log.info(
        "Read %s: %.2f MB, documents: %s; left out: %s and %s",
        name,
        sum(facts["bytes"].values()) / 1e6,
        ", ".join(f"{count} {split}" for split, count in facts["documents"].items()),
        count_noun(facts["duplicates"], "duplicate"),
        count_noun(facts["held_out_copies"], "valid or test copy", "valid or test copies"),
    )


def compare_splits(corpus: Corpus, name: str, *, form: str) -> NearDuplicates:
    """Looks for near-duplicates of held-out documents among the training documents, of at most MAX_HELD_OUT
    for each split, at even distances. `form` is TEXT or EXAMPLES."""
    samples = []
    for split in ("valid", "test"):
        documents = corpus.documents(split)
        positions = np.unique(np.linspace(0, len(documents) - 1, MAX_HELD_OUT, dtype=int))
        samples.append(select_compared_texts(documents.select(positions), form))
    return count_near_duplicates(
        chain.from_iterable(samples),
        select_compared_texts(corpus.documents("train"), form),
        name=name,
        num_training=corpus.facts["documents"]["train"],
        train_bytes=corpus.facts["bytes"]["train"],
    )


def select_compared_texts(documents: Dataset, form: str) -> Iterator[str]:
    """The texts by which documents are compared: for examples, what they ask about without their prompt."""
    for begin in range(0, len(documents), BATCH_DOCUMENTS):
        for document in documents[begin : begin + BATCH_DOCUMENTS]["text"]:
            if form == EXAMPLES:
                example = read_example(document)
                begin_in_source, end_in_source = example.text_span
                yield example.source[begin_in_source:end_in_source] or example.question
            else:
                yield document


@dataclass(frozen=True)
class CorpusContent:
    """What is found out about the documents of a domain while they are read."""

    splits: np.ndarray  # [documents] int8: index in SPLITS, DROPPED or SPARED
    keys: np.ndarray  # [documents] uint64: hashes by which documents are equal
    facts: dict[str, Any]  # as JSON: digests, documents and bytes per split, copies left out
    num_contradicted: int  # questions with several answers
    num_repaired: int  # documents with characters that are not Unicode


class DocumentHashes:
    """Hashes of the documents of a domain in their order: 25 bytes of each are in memory."""

    def __init__(self) -> None:
        self.documents = array("Q")  # of all of a document
        self.keys = array("Q")  # of what decides whether two are equal
        self.answers = array("Q")  # of an example's answer; of text nothing
        self.splits = array("b")  # index in SPLITS, as the source has it
        self.sizes = array("q")  # bytes

    def add_text(self, split: str, raw: bytes) -> None:
        """Adds a document of text in UTF-8. Texts with the same words are equal."""
        self.documents.append(hash_bytes(raw))
        self.keys.append(hash_bytes(" ".join(raw.decode().split()).encode()))
        self.splits.append(SPLITS.index(split))
        self.sizes.append(len(raw))

    def add_example(self, split: str, raw: bytes) -> None:
        """Adds an example as a document in UTF-8. Examples with the same question are equal."""
        example = read_example(raw.decode())
        self.documents.append(hash_bytes(raw))
        self.keys.append(hash_bytes(example.question.encode()))
        self.answers.append(hash_bytes(example.target.encode()))
        self.splits.append(SPLITS.index(split))

        texts = [example.source, example.target, *(turn.content for turn in example.turns[:-1])]
        self.sizes.append(len("".join(texts).encode()))


def hash_bytes(value: bytes) -> int:
    """A 64-bit hash."""
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little")


def read_documents(
    source: DocumentSource, name: str, *, keep: Callable[[bytes], None] = lambda raw: None
) -> CorpusContent:
    """Reads the documents of a domain, in UTF-8 given to `keep`, and finds the split of each.

    Equal are texts of the same words, and examples of the same question. With a `class_limit` those training
    examples of each answer stay whose question has the smallest hash under the seed."""
    is_examples = source.form(name) == EXAMPLES
    members = source.members(name)
    hashes = DocumentHashes()
    add_document = hashes.add_example if is_examples else hashes.add_text
    num_repaired = 0
    for split, text in chain.from_iterable(map(source.read, members)):
        try:
            raw = text.encode()
        except UnicodeEncodeError:  # like "\ud83d" of JSON, half an emoji
            raw = text.encode(errors="replace")
            num_repaired += 1
        keep(raw)
        add_document(split, raw)

    # Text is split by hashes of all of its bytes, examples by those of their questions. Of
    # documents with the same key the first stays.
    document_hashes = np.asarray(hashes.documents)
    keys = np.asarray(hashes.keys)
    answers = np.asarray(hashes.answers)
    source_splits = np.asarray(hashes.splits)
    if is_examples:
        splits = assign_splits(keys, source_splits, name=name, held_out=source.held_out)
        if source.class_limit is not None:
            seed = int(source.held_out["seed"])
            limit_classes(splits, keys, answers, limit=source.class_limit, seed=seed)
    else:
        splits = assign_splits(
            document_hashes,
            source_splits,
            name=name,
            held_out=source.held_out,
            hint=" (domains.document=line or paragraph makes more of a .txt file)",
            keys=keys,
        )

    # Sources say what they skipped only after they were read.
    facts = describe_splits(splits, document_hashes, source_splits, np.asarray(hashes.sizes))
    skipped = [source.skipped[member] for member in members if source.skipped.get(member)]
    if skipped:
        facts["skipped"] = join_skipped(skipped)
    return CorpusContent(
        splits=splits,
        keys=keys,
        facts=facts,
        num_contradicted=count_contradicted(keys, answers),
        num_repaired=num_repaired,
    )


def limit_classes(
    splits: np.ndarray, keys: np.ndarray, answers: np.ndarray, *, limit: int, seed: int
) -> None:
    """Marks the training examples of each answer beyond `limit` as SPARED, by the hashes of the questions
    under the seed."""
    train = np.flatnonzero(splits == 0)
    order = sample_keys(key("per class", seed), keys[train])
    ranked = train[np.argsort(order, kind="stable")]
    grouped = ranked[np.argsort(answers[ranked], kind="stable")]  # by answer, then by rank
    _, first, counts = np.unique(answers[grouped], return_index=True, return_counts=True)
    rank_in_class = np.arange(len(grouped)) - np.repeat(first, counts)
    splits[grouped[rank_in_class >= limit]] = SPARED


def describe_splits(
    splits: np.ndarray, document_hashes: np.ndarray, source_splits: np.ndarray, sizes: np.ndarray
) -> dict[str, Any]:
    """The facts of a text. Each array has an entry for each document, [documents]: its split, its hash, the
    split that its source says, and its size in bytes."""
    num_dropped = int((splits == DROPPED).sum())
    num_held_out_copies = int(((splits == DROPPED) & (source_splits > 0)).sum())
    return {
        "digest": hashlib.blake2b(document_hashes.tobytes() + splits.tobytes(), digest_size=8).hexdigest(),
        "train_digest": hashlib.blake2b(document_hashes[splits == 0].tobytes(), digest_size=8).hexdigest(),
        "documents": {split: int((splits == number).sum()) for number, split in enumerate(SPLITS)},
        "bytes": {split: int(sizes[splits == number].sum()) for number, split in enumerate(SPLITS)},
        "duplicates": num_dropped - num_held_out_copies,
        "held_out_copies": num_held_out_copies,
    }


def count_contradicted(keys: np.ndarray, answers: np.ndarray) -> int:
    """How many questions have several answers; `answers` is empty for text."""
    pairs = np.unique(np.stack([keys[: len(answers)], answers]), axis=1)  # [2, n]: each once
    _, num_answers = np.unique(pairs[0], return_counts=True)
    return int((num_answers > 1).sum())


def join_skipped(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """`BadExamples.facts` of several texts as those of one."""
    joined: dict[str, dict[str, Any]] = {}
    for part in parts:
        for kind, facts in part.items():
            entry = joined.setdefault(kind, {"count": 0, "first": facts["first"]})
            entry["count"] += facts["count"]
    return joined


def assign_splits(
    hashes: np.ndarray,
    source_splits: np.ndarray,
    *,
    name: str,
    held_out: Mapping[str, Any],
    hint: str = "",
    keys: np.ndarray | None = None,
) -> np.ndarray:
    """The split of each document, [documents] int8: an index in SPLITS, DROPPED or SPARED.

    Of documents with one key (by default `keys` are the hashes) the first stays, in train rather than in
    valid or test, and the others are DROPPED. A split that the source does not have is held out of train, by
    hashes; with an empty `held_out` none is. Held-out documents beyond `max_documents` are SPARED. Raises
    ValueError for an empty split."""
    if not len(hashes):
        raise ValueError(f"domain {name} has no text: its files are empty")
    if keys is None:
        keys = hashes
    splits = np.full(len(source_splits), DROPPED, np.int8)
    originals = find_originals(keys, source_splits)
    splits[originals] = source_splits[originals]
    if not held_out:
        return splits

    # Hashes rank the documents, so that the splits do not depend on their order in the files.
    seed = int(held_out["seed"])
    train = rank_by_hash(splits, 0, hashes, stream=key("split", seed))
    begin = 0
    for split in HELD_OUT_SPLITS:
        if (source_splits == split).any():
            continue
        count = max(1, round(held_out[SPLITS[split]] * len(train)))
        splits[train[begin : begin + count]] = split
        begin += count

    max_documents = held_out.get("max_documents")
    if max_documents:
        for split in HELD_OUT_SPLITS:
            ranked = rank_by_hash(splits, split, hashes, stream=key("most", seed))
            splits[ranked[max_documents:]] = SPARED

    counts = [int((splits == split).sum()) for split in range(len(SPLITS))]
    if min(counts) == 0:
        listed = ", ".join(f"{count} {split}" for count, split in zip(counts, SPLITS, strict=True))
        raise ValueError(
            f"domain {name} has {count_noun(len(source_splits), 'document')}, too few to train, validate and "
            f"test on ({listed}). Allowed: at least one for each, all different{hint}"
        )
    return splits


def find_originals(keys: np.ndarray, source_splits: np.ndarray) -> np.ndarray:
    """The positions [keys] of the documents that are not copies: the first of each key, of train before valid
    before test."""
    order = np.argsort(source_splits, kind="stable")
    order = order[np.argsort(keys[order], kind="stable")]
    sorted_keys = keys[order]
    return order[np.append(True, sorted_keys[1:] != sorted_keys[:-1])]


def rank_by_hash(splits: np.ndarray, split: int, hashes: np.ndarray, *, stream: int) -> np.ndarray:
    """The positions [documents of the split], in an order that the hashes of the documents decide."""
    positions = np.flatnonzero(splits == split)
    return positions[np.argsort(sample_keys(stream, hashes[positions]), kind="stable")]
