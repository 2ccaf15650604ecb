"""Rows of token ids on disk, read by their numbers: those of texts are cut from stored tokens when they are
read (CutRows), those of examples and of text that a model wrote are stored themselves (ArrowRows)."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value

from cpt.data.number_files import NumberWriter, find_smallest_type, map_numbers, read_numbers
from cpt.data.packers import PackedRows
from cpt.data.stored_tokens import StoredTokens

IDS = List(Value("int32"))
# Rows of text as Arrow lists, with the document of each token and the number of tokens that are not special.
COLUMNS = Features({"ids": IDS, "documents": IDS, "text_tokens": Value("int32")})
# Also the tokens of a row that packing has inserted, where each row begins with the same token.
COLUMNS_WITH_STARTS = Features({**COLUMNS, "inserted": Value("int32")})


@dataclass(frozen=True)
class Lists:
    """Lists of numbers of different lengths, one after another."""

    values: np.ndarray  # [sum of lengths]
    lengths: np.ndarray  # [lists]

    def padded(self, width: int, filler: int) -> np.ndarray:
        """The lists as rows of a table, [lists, width] int64, filled up."""
        table = np.full((len(self.lengths), width), filler, np.int64)
        table[np.arange(width) < self.lengths[:, None]] = self.values
        return table

    def split(self) -> list[list[int]]:
        """Each list."""
        return [part.tolist() for part in np.split(self.values, np.cumsum(self.lengths)[:-1])]


class TokenRows(Protocol):
    """Rows on disk. No row is empty."""

    def __len__(self) -> int: ...

    def select(self, numbers: np.ndarray) -> Self:
        """Some of the rows, as views of them."""

    @property
    def text_tokens(self) -> np.ndarray:
        """Tokens of each row that are not special, [rows] int32."""

    @property
    def inserted(self) -> np.ndarray:
        """Tokens of each row that packing inserted, [rows] int32; only where rows begin with the same id."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, [rows] int64."""

    @property
    def num_documents(self) -> np.ndarray:
        """Documents in each row, [rows] int64, where these are isolated from each other."""

    def ids(self, numbers: np.ndarray) -> Lists:
        """The token ids of some rows."""

    def documents(self, numbers: np.ndarray) -> Lists:
        """The document of each token of some rows."""


class ArrowRows:
    """Rows in an Arrow file, with columns of lists (`ids`, `documents`) and of numbers (`text_tokens`)."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def select(self, numbers: np.ndarray) -> "ArrowRows":
        return ArrowRows(self.dataset.select(numbers))

    @cached_property
    def text_tokens(self) -> np.ndarray:
        return self.column("text_tokens")

    @cached_property
    def inserted(self) -> np.ndarray:
        return self.column("inserted")

    @cached_property
    def lengths(self) -> np.ndarray:
        sizes = [np.diff(lists.offsets.to_numpy()) for lists in self.iterate_lists("ids")]
        return np.concatenate(sizes).astype(np.int64)

    @cached_property
    def num_documents(self) -> np.ndarray:
        """Runs of equal document numbers in each row, [rows]."""
        counts = []
        for lists in self.iterate_lists("documents"):
            documents = lists.flatten().to_numpy()
            row_begins = lists.offsets.to_numpy()[:-1] - lists.offsets[0].as_py()
            is_begin = np.ones(len(documents), np.int64)
            is_begin[1:] = documents[1:] != documents[:-1]
            is_begin[row_begins] = 1  # also where the row before ends with the same document
            counts.append(np.add.reduceat(is_begin, row_begins))
        return np.concatenate(counts)

    def ids(self, numbers: np.ndarray) -> Lists:
        return self.read("ids", numbers)

    def documents(self, numbers: np.ndarray) -> Lists:
        return self.read("documents", numbers)

    def read(self, name: str, numbers: np.ndarray) -> Lists:
        """Some lists of a column."""
        column = self.columns[name][numbers.tolist()].column(name).combine_chunks()
        lists = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        values = lists.flatten().to_numpy(zero_copy_only=False)  # truth values are bits in Arrow
        return Lists(values, np.diff(lists.offsets.to_numpy()))

    def column(self, name: str) -> np.ndarray:
        """All numbers of a column, [rows]."""
        return np.asarray(self.columns[name][:].column(name).to_numpy())

    @cached_property
    def columns(self) -> dict[str, Dataset]:
        """The rows as Arrow, by column: making a view takes longer than reading a batch from it."""
        names = self.dataset.column_names
        return {name: self.dataset.with_format("arrow", columns=[name]) for name in names}

    def iterate_lists(self, name: str) -> Iterator[pa.ListArray]:
        """The lists of a column, some thousands at a time."""
        for table in self.columns[name].iter(batch_size=10_000):
            yield from (chunk for chunk in table.column(name).chunks if len(chunk))


class CutRows:
    """Rows of one or several pieces of stored tokens, in files of a folder, each of numbers:

        begins       the position of each piece's first token
        sizes        the tokens of each piece
        ends         the number of pieces up to the end of each row; without it each row has one piece
        text_tokens  the tokens of each row that are not special
        inserted     where rows begin with an id: how often it was inserted

    `row_start` goes before each piece that does not begin with it. Of `chosen` rows only these are there."""

    def __init__(
        self, tokens: StoredTokens, folder: Path, *, row_start: int | None, chosen: np.ndarray | None = None
    ) -> None:
        self.tokens = tokens
        self.folder = folder
        self.row_start = row_start
        self.chosen = chosen

    def __getstate__(self) -> dict[str, object]:
        """A process that gets these rows maps their files itself."""
        names = ("tokens", "folder", "row_start", "chosen")
        return {name: getattr(self, name) for name in names}

    def __len__(self) -> int:
        return len(self.text_tokens)

    def select(self, numbers: np.ndarray) -> "CutRows":
        numbers = np.asarray(numbers, np.int64)
        chosen = numbers if self.chosen is None else self.chosen[numbers]
        return CutRows(self.tokens, self.folder, row_start=self.row_start, chosen=chosen)

    @cached_property
    def begins(self) -> np.ndarray:
        return map_numbers(self.folder, "begins")

    @cached_property
    def sizes(self) -> np.ndarray:
        return map_numbers(self.folder, "sizes")

    @cached_property
    def ends(self) -> np.ndarray | None:
        return map_numbers(self.folder, "ends") if list(self.folder.glob("ends.*")) else None

    @cached_property
    def text_tokens(self) -> np.ndarray:
        return self.count("text_tokens")

    @cached_property
    def inserted(self) -> np.ndarray:
        return self.count("inserted")

    def count(self, name: str) -> np.ndarray:
        """A count that is stored for each row, [rows] int32."""
        counts = read_numbers(self.folder, name)
        if self.chosen is not None:
            counts = counts[self.chosen]
        return counts.astype(np.int32)

    @cached_property
    def lengths(self) -> np.ndarray:
        sizes = read_numbers(self.folder, "sizes")
        if self.ends is not None:
            first_pieces = np.zeros(len(self.ends), np.int64)
            first_pieces[1:] = self.ends[:-1]
            sizes = np.add.reduceat(sizes, first_pieces, dtype=np.int64)
        if self.chosen is not None:
            sizes = sizes[self.chosen]
        lengths = sizes.astype(np.int64)
        return lengths if self.row_start is None else lengths + self.inserted

    @cached_property
    def num_documents(self) -> np.ndarray:
        """The pieces of each row, [rows]: where documents are isolated, each is of another document."""
        _, num_pieces = self.pieces_of(np.arange(len(self)))
        return num_pieces

    def pieces_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first piece of some rows, and how many each has, both [numbers] int64."""
        rows = numbers if self.chosen is None else self.chosen[numbers]
        if self.ends is None:
            return rows, np.ones(len(rows), np.int64)
        first_pieces = np.where(rows > 0, self.ends[rows - 1], 0).astype(np.int64)
        return first_pieces, self.ends[rows].astype(np.int64) - first_pieces

    def positions(self, numbers: np.ndarray) -> "CutPositions":
        """Where the tokens of some rows are stored."""
        first_pieces, num_pieces = self.pieces_of(numbers)
        pieces = join_ranges(first_pieces, num_pieces)
        begins = self.begins[pieces].astype(np.int64)
        sizes = self.sizes[pieces].astype(np.int64)
        positions = join_ranges(begins, sizes)
        is_inserted = np.zeros(len(positions), bool)

        # An inserted id stands at the position of the token after it, whose document is its own.
        if self.row_start is not None:
            lacks_start = self.tokens.ids[begins] != self.row_start
            offsets = (np.cumsum(sizes) - sizes)[lacks_start]
            positions = np.insert(positions, offsets, begins[lacks_start])
            is_inserted = np.insert(is_inserted, offsets, True)
            sizes = sizes + lacks_start
        first_of_row = np.cumsum(num_pieces) - num_pieces
        return CutPositions(positions, is_inserted, np.add.reduceat(sizes, first_of_row))

    def ids(self, numbers: np.ndarray) -> Lists:
        cut = self.positions(numbers)
        values = self.tokens.ids[cut.positions].astype(np.int64)
        if self.row_start is not None:
            values[cut.is_inserted] = self.row_start
        return Lists(values, cut.lengths)

    def documents(self, numbers: np.ndarray) -> Lists:
        cut = self.positions(numbers)
        return Lists(self.tokens.documents_at(cut.positions), cut.lengths)


@dataclass(frozen=True)
class CutPositions:
    """Where the tokens of rows, one after another, are stored."""

    positions: np.ndarray  # [tokens] int64: in the text
    is_inserted: np.ndarray  # [tokens] bool: a token is not stored, but begins the piece at its position
    lengths: np.ndarray  # [rows] int64: tokens of each row


def join_ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The numbers from each of `begins` [n] on, as many as its entry of `sizes` [n], one range after
    another."""
    offsets = np.cumsum(sizes) - sizes
    return np.repeat(begins - offsets, sizes) + np.arange(sizes.sum())


class RowWriter:
    """Writes the files of CutRows to a folder, for rows of at most `length` tokens from a text of
    `num_tokens`; `has_start` says that rows begin with an id. Within the context the files are open."""

    def __init__(
        self, folder: Path, *, length: int, num_tokens: int, has_start: bool, has_several_pieces: bool
    ) -> None:
        self.folder = folder
        self.count_type = find_smallest_type(length)  # of the tokens of a row
        self.position_type = find_smallest_type(num_tokens)  # of positions, and of numbers of pieces
        self.has_start = has_start
        self.has_several_pieces = has_several_pieces
        self.num_pieces = 0  # so far
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        self.begins = self.open("begins", self.position_type)
        self.sizes = self.open("sizes", self.count_type)
        self.text_tokens = self.open("text_tokens", self.count_type)
        if self.has_start:
            self.inserted = self.open("inserted", self.count_type)
        if self.has_several_pieces:
            self.ends = self.open("ends", self.position_type)
        return self

    def open(self, name: str, number_type: np.dtype) -> NumberWriter:
        return self.stack.enter_context(NumberWriter(self.folder, name, number_type))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stack.close()

    def write(self, rows: PackedRows) -> None:
        pieces = rows.pieces
        self.begins.write(pieces["begin"])
        self.sizes.write(pieces["size"])
        self.text_tokens.write(np.add.reduceat(pieces["text_tokens"], rows.first_pieces))
        if self.has_start:
            self.inserted.write(np.add.reduceat(pieces["is_opened"], rows.first_pieces, dtype=np.int64))
        if self.has_several_pieces:
            self.ends.write(self.num_pieces + np.cumsum(rows.num_pieces))
        self.num_pieces += len(pieces)
