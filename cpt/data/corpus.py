"""The documents of one domain on disk, without duplicates, split into train, valid and test."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Value

from cpt.core.cache import make_once
from cpt.core.growing import Growing
from cpt.data.arrow import END, schema_of
from cpt.data.sources.base import FORMAT, TEXT, Reading, Source, read_members, stamp_of
from cpt.data.splitting import (
    SPLITS,
    Counting,
    count_contradictions,
    count_documents,
    describe_corpus,
    split_documents,
)
from cpt.data.tokenising import DOCUMENTS, SPLIT_OF

log = logging.getLogger(__name__)
COLUMNS = {"text": Value("large_string")}
BATCH, CHARACTERS = 1000, 1 << 18  # of documents, what is worked on at once


@dataclass(frozen=True)
class Corpus:
    """A domain's text; `facts` holds its digest and its counts of documents and bytes."""

    folder: Path
    facts: Mapping[str, Any]

    def documents(self, split: str) -> Dataset:
        """The documents of a split, memory-mapped, with a column `text`."""
        chosen = np.flatnonzero(np.load(self.folder / SPLIT_OF, mmap_mode="r") == SPLITS.index(split))
        return Dataset.from_file(str(self.folder / DOCUMENTS)).select(chosen)


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
            lambda place: read_members(source, name, place),
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
    read_on: Callable[[Any], Reading],
    *,
    name: str,
    held_out: Mapping[str, float],
    form: str = TEXT,
    per_class: int | None = None,
) -> None:
    """Writes documents, their splits and the facts about them into a folder; `read_on` gives them from a
    place on, where a kill has ended it and the source tells such places."""
    counting = Counting(form)
    files = Growing(folder, [DOCUMENTS, *counting.columns], form=[FORMAT, form])
    with closing(files):
        append_documents(files, read_on, counting)
        files.finish()
    for column in counting.columns:
        (folder / column).unlink()
    counted = counting.counted()
    splits = split_documents(counted, name=name, held_out=held_out, form=form, per_class=per_class)
    np.save(folder / SPLIT_OF, splits)
    facts = describe_corpus(counted.hashes, counted.given, splits, counted.sizes)
    if contradicted := count_contradictions(counted):
        log.warning(
            "%s: %d questions stand there with different answers; the first of each stays", name, contradicted
        )
    log.info("%s: %s", name, summarise_corpus(facts))
    (folder / "facts.json").write_text(json.dumps(facts))


def append_documents(files: Growing, read_on: Callable[[Any], Reading], counting: Counting) -> None:
    """Appends documents, and what is counted of them, to what is there."""
    writer = Writer(files, counting)
    place = writer.begin(files.place)
    reading = read_on(place)
    for split, raw in encode_documents(reading):
        counting.add(split, raw)
        if writer.add(raw) and files.due and (place := reading.place()) is not None:
            writer.commit(place)
    writer.flush()
    files.append(DOCUMENTS, END)


@dataclass
class Writer:
    """Documents as record batches: BATCH of them, or fewer where they are long."""

    files: Growing
    counting: Counting
    schema: pa.Schema = field(default_factory=lambda: schema_of(COLUMNS))
    texts: list[bytes] = field(default_factory=list)
    size: int = 0  # bytes since CHARACTERS were last reached
    written: int = 0  # documents whose columns are

    def begin(self, known: Any) -> Any:
        """Takes over what is there; gives the place of the reading, None at the beginning."""
        if known is None:
            self.files.append(DOCUMENTS, self.schema.serialize())
            return None
        self.counting.load(self.files.folder)
        self.size, self.written = known["size"], len(self.counting)
        log.info("%s: going on behind %d documents", self.files.folder, self.written)
        return known["reading"]

    def add(self, raw: bytes) -> bool:
        """Takes a document; says whether no document waits now."""
        self.texts.append(raw)
        self.size += len(raw)
        if self.size >= CHARACTERS or len(self.texts) == BATCH:
            self.flush()
            self.size = 0 if self.size >= CHARACTERS else self.size
        return not self.texts

    def flush(self) -> None:
        if self.texts:
            column = pa.array(self.texts, pa.large_binary()).view(pa.large_string())
            batch = pa.RecordBatch.from_arrays([column], schema=self.schema)
            self.files.append(DOCUMENTS, batch.serialize())
            self.texts = []

    def commit(self, place: Any) -> None:
        for name, column in self.counting.columns.items():
            self.files.append(name, column[self.written :].tobytes())
        self.written = len(self.counting)
        self.files.commit({"reading": place, "size": self.size})


def encode_documents(documents: Iterable[tuple[str, str]]) -> Iterator[tuple[str, bytes]]:
    """Documents as UTF-8, mended where they are no Unicode."""
    return ((split, text.encode(errors="replace")) for split, text in documents)


def summarise_corpus(facts: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count} {split}" for split, count in facts["documents"].items())
    return (
        f"{sum(facts['bytes'].values()) / 1e6:.2f} MB, documents: {counts}; "
        f"left out: {facts['duplicates']} duplicates and "
        f"{facts['held_out_copies']} valid or test documents that also stand elsewhere"
    )
