"""A corpus as rows of token ids: how documents fill them, and the rows on disk, memory-mapped.

Packers take documents as they come and hold little of them, so that a text larger than memory is packed; what
they make is a function of the documents alone."""

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
from cpt.core.randomness import key, shuffle
from cpt.data.collate import Sizes
from cpt.data.corpus import Corpus
from cpt.data.sources.base import CONCAT, DOCUMENT_MASK, NONE
from cpt.data.tokenize import tokenize_corpus

log = logging.getLogger(__name__)
FORMAT = 1
ROWS = "rows.arrow"
PADDING = -1  # the document of a token of padding
OPEN_ROWS = 128  # rows that wait for documents that fit
IDS = List(Value("int32"))
COLUMNS = Features({"ids": IDS, "documents": IDS, "text_tokens": Value("int32")})


def rows_table(tokens: np.ndarray, ends: np.ndarray, special: Sequence[int]) -> pa.Table:
    """Ids and documents [2, tokens] int32 as rows between `ends` [rows + 1]; `special` ids are no text."""
    ends = ends.astype(np.int32)
    text = np.zeros(tokens.shape[1] + 1, np.int32)
    np.cumsum(~np.isin(tokens[0], np.asarray(sorted(special), np.int32)), out=text[1:])
    ids, documents = (pa.ListArray.from_arrays(ends, values) for values in tokens)
    table = {"ids": ids, "documents": documents, "text_tokens": pa.array(np.diff(text[ends]))}
    return pa.table(table, schema=COLUMNS.arrow_schema)


class ConcatPacker:
    """Rows of `length` ids, cut from documents one after another; only the last row may be short."""

    def __init__(self, length: int, special: Sequence[int]) -> None:
        self.length, self.special = length, special
        self.documents = 0  # so far
        self.rest = np.empty((2, 0), np.int32)  # tokens that do not fill a row yet: ids, documents

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> pa.Table:
        """The rows that are full with further documents: ids [tokens], and how many each has [documents]."""
        owners = np.repeat(np.arange(self.documents, self.documents + len(sizes), dtype=np.int32), sizes)
        tokens = np.concatenate([self.rest, [ids, owners]], axis=1, dtype=np.int32)
        full = tokens.shape[1] // self.length * self.length
        self.documents += len(sizes)
        self.rest = tokens[:, full:].copy()
        return rows_table(tokens[:, :full], np.arange(0, full + 1, self.length), self.special)

    def finish(self) -> pa.Table:
        rest, self.rest = self.rest, self.rest[:, :0]
        return rows_table(rest, np.unique([0, rest.shape[1]]), self.special)


class DocumentPacker:
    """Whole documents in rows; a longer one continues in the next. With `open_rows`, those that fit into a
    row together share it, each where it leaves the least room (best fit: Ding et al., ICML 2024, arXiv
    2404.10830); if it fits into none of the open rows, the fullest is closed."""

    def __init__(self, length: int, special: Sequence[int], *, open_rows: int) -> None:
        self.length, self.special, self.open_rows = length, special, open_rows
        self.documents = 0
        self.open: list[np.ndarray] = []  # rows [2, t], the oldest first

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> pa.Table:
        """The rows that are done with further documents: ids [tokens], and how many each has [documents]."""
        done = []
        for end, size in zip(np.cumsum(sizes), sizes, strict=True):
            document = np.stack([ids[end - size : end], np.full(size, self.documents, np.int32)])
            self.documents += 1
            for at in range(0, size, self.length):
                done += self.place(document[:, at : at + self.length])
        return self.table(done)

    def place(self, piece: np.ndarray) -> list[np.ndarray]:
        """The rows [2, t] that are done with a piece [2, t] of a document, no longer than a row."""
        size = piece.shape[1]
        filled = np.array([row.shape[1] for row in self.open], np.int64)
        fitting = np.where(filled + size <= self.length, filled, 0)
        if len(fitting) and fitting.max():
            best = int(fitting.argmax())
            self.open[best] = np.concatenate([self.open[best], piece], axis=1)
            return [self.open.pop(best)] if filled[best] + size == self.length else []
        if size == self.length or not self.open_rows:
            return [piece]
        done = [self.open.pop(int(filled.argmax()))] if len(filled) == self.open_rows else []
        self.open.append(piece)
        return done

    def table(self, rows: Sequence[np.ndarray]) -> pa.Table:
        tokens = np.concatenate([np.empty((2, 0), np.int32), *rows], axis=1)
        return rows_table(tokens, np.cumsum([0, *(row.shape[1] for row in rows)]), self.special)

    def finish(self) -> pa.Table:
        rows, self.open = self.open, []
        return self.table(rows)


PACKERS: dict[str, Callable[[int, Sequence[int]], ConcatPacker | DocumentPacker]] = {
    CONCAT: ConcatPacker,
    DOCUMENT_MASK: partial(DocumentPacker, open_rows=OPEN_ROWS),
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

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def text_tokens(self) -> np.ndarray:
        """Tokens of each row that are not special, [rows] int32."""
        return self.column("text_tokens")

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each row without padding, [rows] int64."""
        sizes = [np.diff(each.offsets.to_numpy()) for each in self.lists("ids")]
        return np.concatenate(sizes).astype(np.int64)

    @cached_property
    def sharing(self) -> np.ndarray:
        """Documents in each row, [rows] int64: runs of equal numbers; no row is empty."""
        counts = []
        for lists in self.lists("documents"):
            values, offsets = lists.flatten().to_numpy(), lists.offsets.to_numpy() - lists.offsets[0].as_py()
            begins = np.ones(len(values), np.int64)
            begins[1:] = values[1:] != values[:-1]
            begins[offsets[:-1]] = 1
            counts.append(np.add.reduceat(begins, offsets[:-1]))
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
        return Sizes(self.text_tokens[rows], self.row_lengths[rows], documents=sharing)

    def draw_rows(self, tokens: int, *, stream: int) -> np.ndarray:
        """The first rows of a fixed permutation whose tokens add up to a number, ascending."""
        drawn = shuffle(np.arange(len(self)), len(self), stream=stream)
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
        lists = self.columns[name][rows.tolist()].column(name).combine_chunks()
        lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
        values, ends = lists.flatten().to_numpy(), np.diff(lists.offsets.to_numpy())
        table = np.full((len(rows), self.length), filler, np.int64)
        table[np.arange(self.length) < ends[:, None]] = values
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
    budget, balanced = sizes[smallest] if tokens is None else tokens, dict(texts)
    for name in (name for name, size in sizes.items() if size > budget):
        drawn = texts[name].draw_rows(budget, stream=key("balanced", name))
        balanced[name] = replace(texts[name], rows=texts[name].rows.select(drawn))
    log.info("Cutting the domains to %d tokens, at least those of %s", budget, smallest)
    return balanced


def pack(
    corpus: Corpus,
    split: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    name: str,
    cache: Path,
    tokenizer_digest: str,
    packing: str = CONCAT,
    workers: int | None = None,
) -> Packed:
    """A split of a corpus in rows of at most `length` tokens, made once for all runs with this text,
    tokenizer, length and packing, by `workers` processes, None: one per core. Raises ValueError for a
    damaged corpus."""

    def write(folder: Path) -> None:
        packer = PACKERS[packing](length, tokenizer.all_special_ids)
        how = {"tokenizer": tokenizer, "ending": terminator(tokenizer), "name": name, "workers": workers}
        batches = tokenize_corpus(corpus, split, folder=folder / "tokens", **how)
        with closing(batches), ArrowWriter(path=str(folder / ROWS), features=COLUMNS) as writer:
            for ids, sizes in batches:
                writer.write_table(packer.add(ids, sizes))
            writer.write_table(packer.finish())
            writer.finalize()
        shutil.rmtree(folder / "tokens")
        if packer.documents != (expected := corpus.facts["documents"][split]):
            told = f"{corpus.folder} is damaged: {packer.documents} documents in {split}, not {expected}; "
            raise ValueError(f"{told}delete it, and the text is read again")

    made_of = [FORMAT, corpus.facts["digest"], split, tokenizer_digest, length]
    made_of += [] if packing == CONCAT else [packing]
    folder = make_once(cache / "packed" / f"{name}-{split}-{digest(made_of)}", make=write)
    rows, facts = Dataset.from_file(str(folder / ROWS)), corpus.facts
    counts = (facts["documents"][split], facts["bytes"][split])
    return Packed(rows, length, padding_id(tokenizer), *counts, packing)


def frame_of(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and after a text."""
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    around = tokenizer("a", verbose=False)["input_ids"]
    begin = next(at for at in range(len(around)) if around[at : at + len(bare)] == bare)
    return around[:begin], around[begin + len(bare) :]


def terminator(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The id to append to each document: none if the tokenizer ends it itself, else its eos or sep."""
    if frame_of(tokenizer)[1]:
        return []
    ending = [each for each in (tokenizer.eos_token_id, tokenizer.sep_token_id) if each is not None]
    if not ending:
        told = f"the tokenizer {tokenizer.name_or_path} has no token to separate documents"
        raise ValueError(f"{told}. Allowed: one with an eos or sep token")
    return ending[:1]


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills short rows; any will do where there is no padding token, since it is masked out."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
