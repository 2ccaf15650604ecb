"""A corpus as rows of token ids: how documents fill them, and the rows on disk, memory-mapped.

Packers take documents as they come and hold little of them, so that a text larger than memory is packed; what
they make is a function of the documents alone."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerBase

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.randomness import key, permute
from cpt.data.collate import Sizes
from cpt.data.corpus import Corpus
from cpt.data.sources.base import CONCAT, DOCUMENT_MASK, NONE
from cpt.data.text_format import TextFormat
from cpt.data.tokenize import COUNTS, tokenize_corpus

log = logging.getLogger(__name__)
FORMAT = 2  # part of the key of cached rows: raise it when other rows are made of the same text
ROWS, FACTS = "rows.arrow", "facts.json"
PADDING = -1  # the document of a token of padding
NUM_OPEN_ROWS = 128  # rows that wait for documents that fit
IDS = List(Value("int32"))
COLUMNS = Features({"ids": IDS, "documents": IDS, "text_tokens": Value("int32")})
# Also the tokens of a row that packing has inserted, where each row begins with the same token.
COLUMNS_WITH_STARTS = Features({**COLUMNS, "inserted": Value("int32")})


class RowWriter:
    """Makes tables of rows. Tokens are [3, tokens] int32: their ids, their documents, and 1 where packing has
    inserted one to begin a row. `special` ids are no text."""

    def __init__(self, special: Sequence[int], row_start: int | None) -> None:
        self.special = np.asarray(sorted(special), np.int32)
        self.row_start = row_start
        self.features = COLUMNS if row_start is None else COLUMNS_WITH_STARTS

    def table(self, rows: Sequence[np.ndarray]) -> pa.Table:
        """Rows [3, t], each of any length."""
        tokens = np.concatenate([np.empty((3, 0), np.int32), *rows], axis=1)
        ends = np.cumsum([0, *(row.shape[1] for row in rows)])
        return self.cut(tokens, ends)

    def cut(self, tokens: np.ndarray, ends: np.ndarray) -> pa.Table:
        """Tokens [3, tokens] as rows between `ends` [rows + 1]."""
        ends = ends.astype(np.int32)
        columns = {
            "ids": pa.ListArray.from_arrays(ends, tokens[0]),
            "documents": pa.ListArray.from_arrays(ends, tokens[1]),
            "text_tokens": count_between(~np.isin(tokens[0], self.special), ends),
        }
        if self.row_start is not None:
            columns["inserted"] = count_between(tokens[2] == 1, ends)
        return pa.table(columns, schema=self.features.arrow_schema)

    def begin(self, row: np.ndarray) -> np.ndarray:
        """A row [3, t] with the token that begins each row, inserted where it does not have it."""
        if self.row_start is None or row[0, 0] == self.row_start:
            return row
        start = np.array([[self.row_start], [row[1, 0]], [1]], np.int32)
        return np.concatenate([start, row], axis=1)

    def room(self, first_id: int, length: int) -> int:
        """How many tokens fit into a row of `length` whose first would be `first_id`."""
        return length if self.row_start in (None, first_id) else length - 1


def count_between(chosen: np.ndarray, ends: np.ndarray) -> pa.Array:
    """How many of the tokens between `ends` [rows + 1] are chosen, [rows] int32."""
    counts = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(chosen, out=counts[1:])
    return pa.array(np.diff(counts[ends]))


def mark_documents(ids: np.ndarray, sizes: np.ndarray, first_document: int) -> np.ndarray:
    """Documents one after another as tokens [3, tokens] for a RowWriter, numbered from `first_document`."""
    owners = np.repeat(np.arange(first_document, first_document + len(sizes)), sizes)
    return np.stack([ids, owners, np.zeros_like(owners)]).astype(np.int32)


class ConcatPacker:
    """Rows of `length` ids, cut from documents one after another; only the last row may be short. With
    `row_start` each begins with this id."""

    def __init__(self, length: int, special: Sequence[int], row_start: int | None = None) -> None:
        self.length = length
        self.writer = RowWriter(special, row_start)
        self.documents = 0  # so far
        self.rest = np.empty((3, 0), np.int32)  # tokens that do not fill a row yet

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> pa.Table:
        """The rows that are full with further documents: ids [tokens], and how many each has [documents]."""
        tokens = np.concatenate([self.rest, mark_documents(ids, sizes, self.documents)], axis=1)
        self.documents += len(sizes)
        if self.writer.row_start is None:
            full = tokens.shape[1] // self.length * self.length
            self.rest = tokens[:, full:].copy()
            return self.writer.cut(tokens[:, :full], np.arange(0, full + 1, self.length))

        rows, begin = [], 0
        while begin < tokens.shape[1]:
            end = begin + self.writer.room(tokens[0, begin], self.length)
            if end > tokens.shape[1]:
                break
            rows.append(self.writer.begin(tokens[:, begin:end]))
            begin = end
        self.rest = tokens[:, begin:].copy()
        return self.writer.table(rows)

    def finish(self) -> pa.Table:
        """The last row, of the tokens that do not fill one."""
        rows = [self.writer.begin(self.rest)] if self.rest.shape[1] else []
        self.rest = self.rest[:, :0]
        return self.writer.table(rows)


class DocumentPacker:
    """Whole documents in rows; a longer one continues in the next. With `open_rows`, those that fit into a
    row together share it, each where it leaves the least room (best fit: Ding et al., ICML 2024, arXiv
    2404.10830); if it fits into none of the open rows, the fullest is closed. With `row_start` each piece of
    a document begins with this id, as no attention passes between documents."""

    def __init__(
        self, length: int, special: Sequence[int], row_start: int | None = None, *, open_rows: int
    ) -> None:
        self.length = length
        self.open_rows = open_rows  # at most; 0: each document has rows of its own
        self.writer = RowWriter(special, row_start)
        self.documents = 0
        self.open: list[np.ndarray] = []  # rows [3, t], the oldest first

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> pa.Table:
        """The rows that are done with further documents: ids [tokens], and how many each has [documents]."""
        tokens = mark_documents(ids, sizes, self.documents)
        closed_rows = []
        self.documents += len(sizes)
        for end, size in zip(np.cumsum(sizes), sizes, strict=True):
            begin = end - size
            while begin < end:
                piece_end = min(end, begin + self.writer.room(tokens[0, begin], self.length))
                closed_rows += self.place(self.writer.begin(tokens[:, begin:piece_end]))
                begin = piece_end
        return self.writer.table(closed_rows)

    def place(self, piece: np.ndarray) -> list[np.ndarray]:
        """Puts a piece [3, t] of a document, no longer than a row, into an open row or a new one. Returns the
        rows [3, t] that are closed by it: a full one, or one that makes room."""
        size = piece.shape[1]
        row_sizes = np.array([row.shape[1] for row in self.open], np.int64)
        # The fullest of the rows into which the piece fits leaves the least room.
        fitting_sizes = np.where(row_sizes + size <= self.length, row_sizes, 0)
        if len(fitting_sizes) and fitting_sizes.max():
            best = int(fitting_sizes.argmax())
            self.open[best] = np.concatenate([self.open[best], piece], axis=1)
            is_full = row_sizes[best] + size == self.length
            return [self.open.pop(best)] if is_full else []
        if size == self.length or not self.open_rows:
            return [piece]

        # Of as many open rows as there may be, the fullest makes room.
        closed_rows = []
        if len(self.open) == self.open_rows:
            closed_rows.append(self.open.pop(int(row_sizes.argmax())))
        self.open.append(piece)
        return closed_rows

    def finish(self) -> pa.Table:
        """The rows that are still open."""
        rows = self.open
        self.open = []
        return self.writer.table(rows)


PACKERS: dict[str, Callable[..., ConcatPacker | DocumentPacker]] = {
    CONCAT: ConcatPacker,
    DOCUMENT_MASK: partial(DocumentPacker, open_rows=NUM_OPEN_ROWS),
    NONE: partial(DocumentPacker, open_rows=0),
}


@dataclass(frozen=True)
class Packed:
    """Rows of token ids of one split, memory-mapped. `packing` says how documents fill them: of CONCAT only
    the last row may be shorter than `length`, of others any."""

    rows: Dataset
    length: int
    pad: int
    documents: int
    bytes: int
    packing: str = CONCAT
    skipped: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # examples without a row, by kind
    row_start: int | None = None  # the id that each row begins with; None: whatever comes first
    facts: Mapping[str, int] = field(default_factory=dict)  # tokens, rows_with_bos, COUNTS

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def text_tokens(self) -> np.ndarray:
        """Tokens of each row that are not special, [rows] int32."""
        return self.column("text_tokens")

    @cached_property
    def inserted(self) -> np.ndarray:
        """Tokens of each row that packing inserted, [rows] int32; where `row_start` is not None."""
        return self.column("inserted")

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each row without padding, [rows] int64."""
        sizes = [np.diff(lists.offsets.to_numpy()) for lists in self.lists("ids")]
        return np.concatenate(sizes).astype(np.int64)

    @cached_property
    def sharing(self) -> np.ndarray:
        """Documents in each row, [rows] int64: runs of equal numbers; no row is empty."""
        counts = []
        for lists in self.lists("documents"):
            documents = lists.flatten().to_numpy()
            row_begins = lists.offsets.to_numpy()[:-1] - lists.offsets[0].as_py()
            is_begin = np.ones(len(documents), np.int64)
            is_begin[1:] = documents[1:] != documents[:-1]
            is_begin[row_begins] = 1  # also where the row before ends with the same document
            counts.append(np.add.reduceat(is_begin, row_begins))
        return np.concatenate(counts)

    @property
    def tokens_per_row(self) -> float:
        """What a budget of tokens counts for a row."""
        return self.length if self.packing == CONCAT else float(self.row_lengths.mean())

    def answers(self, rows: np.ndarray) -> np.ndarray | None:
        """Which tokens are the answer, [B, length] bool; None for raw text."""
        return None

    def by_length(self, rows: np.ndarray) -> np.ndarray:
        """Rows, the longest first where a batch is as wide as its longest row; else as they are."""
        if self.packing != NONE and self.answers(rows[:1]) is None:
            return rows
        return rows[np.argsort(-self.row_lengths[rows], kind="stable")]

    def sizes(self, rows: np.ndarray | slice = slice(None)) -> Sizes:
        sharing = self.sharing[rows] if self.packing == DOCUMENT_MASK else None
        inserted = self.inserted[rows] if self.row_start is not None else None
        return Sizes(self.text_tokens[rows], self.row_lengths[rows], documents=sharing, inserted=inserted)

    def draw_rows(self, tokens: int, *, stream: int) -> np.ndarray:
        """The first rows of a fixed permutation whose tokens add up to a number, ascending."""
        drawn = permute(np.arange(len(self)), len(self), stream=stream)
        before = np.cumsum(self.row_lengths[drawn]) - self.row_lengths[drawn]
        return np.sort(drawn[before < tokens])

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Token ids, [B, length] int64, padded."""
        return self.table(rows, "ids", self.pad)

    def document_of(self, rows: np.ndarray) -> np.ndarray:
        """The document that each token is of, [B, length] int64, -1 on padding."""
        return self.table(rows, "documents", PADDING)

    @cached_property
    def columns(self) -> dict[str, Dataset]:
        """The rows as Arrow lists, by column: making a view takes longer than reading a batch from it."""
        return {name: self.rows.with_format("arrow", columns=[name]) for name in self.rows.column_names}

    def table(self, rows: np.ndarray, name: str, filler: int) -> np.ndarray:
        """Lists of a column, [B, length] int64, filled up."""
        column = self.columns[name][rows.tolist()].column(name).combine_chunks()
        lists = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        lengths = np.diff(lists.offsets.to_numpy())
        table = np.full((len(rows), self.length), filler, np.int64)
        table[np.arange(self.length) < lengths[:, None]] = lists.flatten().to_numpy()
        return table

    def lists(self, name: str) -> Iterator[pa.ListArray]:
        """The lists of a column, some thousands at a time."""
        for table in self.columns[name].iter(batch_size=10_000):
            yield from (chunk for chunk in table.column(name).chunks if len(chunk))

    def column(self, name: str) -> np.ndarray:
        return np.asarray(self.columns[name][:].column(name).to_numpy())


def balance(texts: Mapping[str, Packed], *, tokens: int | None = None) -> dict[str, Packed]:
    """Texts by name, each cut to `tokens`, None: those of the smallest; `documents` and `bytes` are still of
    the whole. The rows are drawn by the name."""
    sizes = {name: int(text.row_lengths.sum()) for name, text in texts.items()}
    smallest = min(sizes, key=lambda name: (sizes[name], name))
    max_tokens = sizes[smallest] if tokens is None else tokens
    balanced = dict(texts)
    for name, text in texts.items():
        if sizes[name] > max_tokens:
            drawn = text.draw_rows(max_tokens, stream=key("balanced", name))
            balanced[name] = replace(text, rows=text.rows.select(drawn))
    log.info("Cutting the domains to %d tokens, at least those of %s", max_tokens, smallest)
    return balanced


def pack(
    corpus: Corpus,
    split: str,
    *,
    format: TextFormat,
    length: int,
    name: str,
    cache: Path,
    packing: str = CONCAT,
    workers: int | None = None,
) -> Packed:
    """A split of a corpus in rows of at most `length` tokens, made once for all runs with this text, format,
    length and packing, by `workers` processes, None: one per core. Raises ValueError for a damaged corpus."""

    def write(folder: Path) -> None:
        packer = PACKERS[packing](length, format.tokenizer.all_special_ids, format.row_start)
        facts = dict.fromkeys(("tokens", "rows_with_bos", *COUNTS), 0)

        def write_rows(table: pa.Table) -> None:
            facts["rows_with_bos"] += count_starts(table, format.tokenizer.bos_token_id)
            writer.write_table(table)

        batches = tokenize_corpus(
            corpus, split, format=format, name=name, folder=folder / "tokens", workers=workers
        )
        with (
            closing(batches),
            ArrowWriter(path=str(folder / ROWS), features=packer.writer.features) as writer,
        ):
            for batch in batches:
                facts["tokens"] += len(batch.ids)
                for count in COUNTS:
                    facts[count] += batch.counts[count]
                write_rows(packer.add(batch.ids, batch.sizes))
            write_rows(packer.finish())
            writer.finalize()

        # The shards are what a killed process continues from; whole rows need them no more.
        shutil.rmtree(folder / "tokens")
        (folder / FACTS).write_text(json.dumps(facts))
        expected = corpus.facts["documents"][split]
        if packer.documents != expected:
            raise ValueError(
                f"{corpus.folder} is damaged: {packer.documents} documents in {split}, not {expected}; "
                "delete it, and the text is read again"
            )

    # The default is left out of the key, which is older than the other packings.
    key_values = [FORMAT, corpus.facts["digest"], split, format.digest, length]
    if packing != CONCAT:
        key_values.append(packing)
    folder = make_once(cache / "packed" / f"{name}-{split}-{digest(key_values)}", make=write)
    return Packed(
        rows=Dataset.from_file(str(folder / ROWS)),
        length=length,
        pad=padding_id(format.tokenizer),
        documents=corpus.facts["documents"][split],
        bytes=corpus.facts["bytes"][split],
        packing=packing,
        row_start=format.row_start,
        facts=json.loads((folder / FACTS).read_text()),
    )


def count_starts(table: pa.Table, token_id: int | None) -> int:
    """How many rows of a table begin with a token."""
    rows = table.column("ids").combine_chunks()
    starts = rows.values.to_numpy()[rows.offsets.to_numpy()[:-1]]
    return int((starts == token_id).sum()) if token_id is not None else 0


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills short rows; any will do where there is no padding token, since it is masked out."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
