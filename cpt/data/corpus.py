"""The documents of a domain on disk, without duplicates, split into train, valid and test."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from datasets.arrow_writer import ArrowWriter

from cpt.core.cache import make_once
from cpt.data.sources.base import Source, read_members, stamp_of
from cpt.data.splitting import SPLITS, DocumentHashes, describe_corpus, split_documents

log = logging.getLogger(__name__)
DOCUMENTS, SPLIT_OF = "documents.arrow", "splits.npy"
BATCH, BYTES = 10_000, 1 << 20  # documents, or what comes first, that are written at once


@dataclass(frozen=True)
class Corpus:
    """A domain's text; `facts` holds its digest and its counts of documents and bytes."""

    folder: Path
    facts: Mapping[str, Any]

    def documents(self, split: str, shard: int = 0, shards: int = 1) -> Dataset:
        """The documents of a split, or a shard of them, memory-mapped, with a column `text`."""
        chosen = np.flatnonzero(np.load(self.folder / SPLIT_OF, mmap_mode="r") == SPLITS.index(split))
        begin, end = len(chosen) * shard // shards, len(chosen) * (shard + 1) // shards
        return Dataset.from_file(str(self.folder / DOCUMENTS)).select(chosen[begin:end])


def in_batches(documents: Dataset) -> Iterator[list[str]]:
    """Documents in lists that are small."""
    return (few["text"] for few in documents.iter(batch_size=16))


def encode_members(source: Source, name: str) -> Iterator[tuple[str, bytes]]:
    """(split, document) of a domain in UTF-8, repaired where a document is not Unicode."""
    return ((split, text.encode(errors="replace")) for split, text in read_members(source, name))


def make_corpus(source: Source, name: str, *, cache: Path) -> Corpus:
    """A domain's text as its source has it now, read once for all runs.

    Raises ValueError for a domain with too few documents to train on and hold some out, and for text that
    changes while it is read."""
    stamp = stamp_of(source, name)

    def write(folder: Path) -> None:
        documents, waiting = DocumentHashes(source.form(name)), 0
        features = Features({"text": Value("large_string")})
        with ArrowWriter(path=str(folder / DOCUMENTS), features=features, writer_batch_size=BATCH) as writer:
            for split, raw in encode_members(source, name):
                documents.add(split, raw)
                writer.write({"text": raw.decode()})
                waiting += len(raw)
                if waiting >= BYTES:
                    writer.write_examples_on_file()
                    waiting = 0
            writer.finalize()
        splits = split_documents(documents, name=name, held_out=source.held_out, per_class=source.class_limit)
        facts = describe_corpus(documents, splits)
        np.save(folder / SPLIT_OF, splits)
        (folder / "facts.json").write_text(json.dumps(facts))
        pairs = np.unique(
            np.stack([documents["key"][: len(documents["answer"])], documents["answer"]]), axis=1
        )
        if contradicted := int((np.unique(pairs[0], return_counts=True)[1] > 1).sum()):
            message = "%s: %d questions stand there with different answers; the first of each stays"
            log.warning(message, name, contradicted)
        log.info(
            "%s: %.2f MB, documents: %s; left out: %d duplicates and %d valid or test documents that also "
            "stand elsewhere",
            *(name, sum(facts["bytes"].values()) / 1e6),
            ", ".join(f"{count} {split}" for split, count in facts["documents"].items()),
            *(facts["duplicates"], facts["held_out_copies"]),
        )
        if stamp_of(source, name) != stamp:
            raise ValueError(f"the text of {name} changed while it was read; start again when it is complete")

    folder = make_once(cache / "corpora" / stamp, make=write)
    return Corpus(folder, json.loads((folder / "facts.json").read_text()))


def facts_anew(source: Source, name: str) -> dict[str, Any]:
    """The facts of a domain's text, every document read again and nothing written."""
    documents = DocumentHashes(source.form(name))
    for split, raw in encode_members(source, name):
        documents.add(split, raw)
    held_out, per_class = source.held_out, source.class_limit
    return describe_corpus(
        documents, split_documents(documents, name=name, held_out=held_out, per_class=per_class)
    )
