"""How documents fill rows of token ids.

Packers take documents as they come and hold little of them, so that a text larger than memory is packed; what
they make is a function of the documents alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Self

import numpy as np

from cpt.data.sources.base import CONCAT, DOCUMENT_MASK, NONE

NUM_OPEN_ROWS = 128  # rows that wait for documents that fit

# A piece of a text's tokens, within a row: the position of its first token in the text; its tokens, and those
# of them that are not special; the id that it begins with in the row, and whether this id was inserted.
PIECE = np.dtype(
    [
        ("begin", np.int64),
        ("size", np.int64),
        ("text_tokens", np.int64),
        ("first_id", np.int64),
        ("is_opened", bool),
    ]
)
Piece = tuple[int, ...]  # its values, while its row waits for others


@dataclass(frozen=True)
class PackedRows:
    """Rows, one after another, by the pieces that they consist of."""

    pieces: np.ndarray  # [pieces] PIECE
    num_pieces: np.ndarray  # [rows] int64

    @property
    def first_pieces(self) -> np.ndarray:
        """The number of each row's first piece, [rows]."""
        return np.cumsum(self.num_pieces) - self.num_pieces

    @classmethod
    def of_one(cls, pieces: np.ndarray) -> Self:
        """A row for each piece."""
        return cls(pieces, np.ones(len(pieces), np.int64))

    @classmethod
    def of_several(cls, rows: Sequence[Sequence[Piece]]) -> Self:
        """Rows of pieces."""
        pieces = np.array(list(chain.from_iterable(rows)), PIECE)
        return cls(pieces, np.array([len(row) for row in rows], np.int64))


def count_row_tokens(pieces: np.ndarray) -> np.ndarray:
    """The tokens that pieces take in their rows, [pieces]: with the inserted ones."""
    return pieces["size"] + pieces["is_opened"]


class Cutter:
    """Cuts documents into pieces that fill rows of `length` tokens. `special` ids are not text. With
    `row_start` a piece begins with this id, which is inserted where it does not."""

    def __init__(self, length: int, special: Sequence[int], row_start: int | None) -> None:
        self.length = length
        self.special = np.asarray(sorted(special), np.int64)
        self.row_start = row_start

    def room(self, first_id: int) -> int:
        """How many tokens fit into a row whose first would be `first_id`."""
        return self.length if self.row_start in (None, first_id) else self.length - 1

    def cut(self, ids: np.ndarray, sizes: np.ndarray, position: int) -> np.ndarray:
        """The pieces of documents, [pieces] PIECE: their ids [tokens], the first of which is at `position` in
        the text, and how many each has [documents]. All pieces of a document but the last fill a row."""
        begins = []
        ends = []
        document_end = 0
        for size in sizes.tolist():
            begin = document_end
            document_end += size
            while begin < document_end:
                end = min(document_end, begin + self.room(ids[begin]))
                begins.append(begin)
                ends.append(end)
                begin = end

        pieces = np.zeros(len(begins), PIECE)
        pieces["begin"] = begins
        pieces["size"] = np.subtract(ends, begins)
        num_text = np.zeros(len(ids) + 1, np.int64)  # before each token, and in all
        np.cumsum(~np.isin(ids, self.special), out=num_text[1:])
        pieces["text_tokens"] = num_text[ends] - num_text[begins]
        pieces["first_id"] = ids[begins]
        pieces["begin"] += position
        if self.row_start is not None:
            pieces["is_opened"] = pieces["first_id"] != self.row_start
            pieces["first_id"] = self.row_start
        return pieces


class ConcatPacker:
    """Rows of `length` ids, cut from documents one after another; only the last row may be short. With
    `row_start` each begins with this id."""

    def __init__(self, length: int, special: Sequence[int], row_start: int | None = None) -> None:
        self.cutter = Cutter(length, special, row_start)
        self.position = 0  # of the first token that is in no row yet
        self.waiting_ids = np.empty(0, np.int32)  # those from there on, fewer than a row has

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> PackedRows:
        """The rows that are full with further documents: ids [tokens], and how many each has [documents]."""
        waiting_ids = np.concatenate([self.waiting_ids, ids])
        pieces = self.cutter.cut(waiting_ids, np.array([len(waiting_ids)]), self.position)
        full_pieces = pieces[count_row_tokens(pieces) == self.cutter.length]
        num_tokens = int(full_pieces["size"].sum())
        self.position += num_tokens
        self.waiting_ids = waiting_ids[num_tokens:].copy()
        return PackedRows.of_one(full_pieces)

    def finish(self) -> PackedRows:
        """The last row, of the tokens that do not fill one."""
        ids = self.waiting_ids
        self.waiting_ids = ids[:0]
        return PackedRows.of_one(self.cutter.cut(ids, np.array([len(ids)]), self.position))


class DocumentPacker:
    """Whole documents in rows; a longer one continues in the next. With `open_rows`, those that fit into a
    row together share it, each where it leaves the least room (best fit: Ding et al., ICML 2024, arXiv
    2404.10830); if it fits into none of the open rows, the fullest is closed. With `row_start` each piece of
    a document begins with this id, as no attention passes between documents."""

    def __init__(
        self, length: int, special: Sequence[int], row_start: int | None = None, *, open_rows: int
    ) -> None:
        self.cutter = Cutter(length, special, row_start)
        self.open_rows = open_rows  # at most; 0: each document has rows of its own
        self.position = 0  # of the next document's first token
        self.open: list[list[Piece]] = []  # rows of pieces, the oldest first
        self.open_sizes: list[int] = []  # their tokens

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> PackedRows:
        """Adds documents, as ids [tokens] and sizes [documents] in tokens; returns the rows they fill."""
        pieces = self.cutter.cut(ids, sizes, self.position)
        self.position += len(ids)
        if not self.open_rows:
            return PackedRows.of_one(pieces)
        closed_rows = []
        for piece, size in zip(pieces.tolist(), count_row_tokens(pieces).tolist(), strict=True):
            closed_rows += self.place(piece, size)
        return PackedRows.of_several(closed_rows)

    def place(self, piece: Piece, size: int) -> list[list[Piece]]:
        """Puts a piece of a document, of `size` tokens in its row, into an open row or a new one. Returns the
        rows that are closed by it: a full one, or one that makes room."""
        # The fullest of the rows into which the piece fits leaves the least room.
        max_size = self.cutter.length - size
        fullest = max((row_size for row_size in self.open_sizes if row_size <= max_size), default=None)
        if fullest is not None:
            index = self.open_sizes.index(fullest)
            self.open[index].append(piece)
            self.open_sizes[index] += size
            return [self.close(index)] if fullest + size == self.cutter.length else []
        if size == self.cutter.length:
            return [[piece]]

        # Where as many rows are open as may be, the fullest is closed.
        closed_rows = []
        if len(self.open) == self.open_rows:
            closed_rows.append(self.close(self.open_sizes.index(max(self.open_sizes))))
        self.open.append([piece])
        self.open_sizes.append(size)
        return closed_rows

    def close(self, index: int) -> list[Piece]:
        """The pieces of an open row, which is open no longer."""
        self.open_sizes.pop(index)
        return self.open.pop(index)

    def finish(self) -> PackedRows:
        """The rows that are still open."""
        rows = self.open
        self.open = []
        self.open_sizes = []
        return PackedRows.of_several(rows)


Packer = ConcatPacker | DocumentPacker
PACKERS: dict[str, Callable[..., Packer]] = {
    CONCAT: ConcatPacker,
    DOCUMENT_MASK: partial(DocumentPacker, open_rows=NUM_OPEN_ROWS),
    NONE: partial(DocumentPacker, open_rows=0),
}
