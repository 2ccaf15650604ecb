"""How documents fill rows of token ids: one after another, whole ones that fit together, or one in each row.

Each takes documents as they come and holds little of them, so that a text larger than memory is packed;
what it makes is a function of the documents alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

OPEN = 128  # rows that wait for documents that fit


@dataclass
class Cut:
    """Rows of `length` ids, cut from documents as they come, each token with the number of its document; what
    does not fill a row waits for the next documents. Only the last row may be short."""

    length: int
    special: Sequence[int]
    schema: pa.Schema
    count: int = 0  # documents so far
    waiting: np.ndarray = field(default_factory=lambda: np.empty((2, 0), np.int32))  # ids, documents

    def go_on(self, place: dict[str, Any] | None) -> dict[str, int]:
        """Takes over what waited at a place; gives where in the corpus that was, or its beginning."""
        if place is None:
            return {"begin": 0, "first": 0, "bytes": 0}
        self.count, self.waiting = place["count"], np.array(place["waiting"], np.int32)
        return {name: place[name] for name in ("begin", "first", "bytes")}

    def left(self) -> dict[str, Any]:
        """What waits, as JSON."""
        return {"count": self.count, "waiting": self.waiting.tolist()}

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> pa.RecordBatch:
        """The rows that are full with further documents: ids [tokens], and how many each has, [documents]."""
        before = self.waiting.shape[1]
        tokens = np.empty((2, before + len(ids)), np.int32)
        tokens[:, :before] = self.waiting
        tokens[0, before:] = ids
        tokens[1, before:] = np.repeat(np.arange(self.count, self.count + len(sizes)), sizes)
        whole = tokens.shape[1] // self.length * self.length
        self.count, self.waiting = self.count + len(sizes), tokens[:, whole:].copy()
        return self.batch(tokens[:, :whole])

    def rest(self) -> pa.RecordBatch:
        """The last row, where there is one that is not full."""
        return self.batch(self.waiting)

    def batch(self, tokens: np.ndarray) -> pa.RecordBatch:
        """Ids and documents [2, tokens] as rows, of which only the last may be short."""
        return self.made(tokens, np.append(np.arange(0, tokens.shape[1], self.length), tokens.shape[1]))

    def made(self, tokens: np.ndarray, ends: np.ndarray) -> pa.RecordBatch:
        """Ids and documents [2, tokens] as rows between `ends`, [rows + 1]."""
        ends = ends.astype(np.int32)
        special = np.isin(tokens[0], np.asarray(sorted(self.special), np.int32))
        text = np.zeros(len(special) + 1, np.int32)
        np.cumsum(~special, out=text[1:])
        lists = [pa.ListArray.from_arrays(ends, values) for values in tokens]
        return pa.RecordBatch.from_arrays([*lists, pa.array(np.diff(text[ends]))], schema=self.schema)

    def batch_of(self, rows: Sequence[np.ndarray]) -> pa.RecordBatch:
        """Rows [2, t] of any number of tokens."""
        ends = np.cumsum([0, *(row.shape[1] for row in rows)])
        return self.made(np.concatenate([np.empty((2, 0), np.int32), *rows], axis=1), ends)


@dataclass
class Alone(Cut):
    """A row for each document; one that is longer than a row goes on in the next."""

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> pa.RecordBatch:
        return self.batch_of([row for piece in self.pieces(ids, sizes) for row in self.place(piece)])

    def pieces(self, ids: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
        """Documents as ids and their number [2, t], none longer than a row."""
        ends = np.cumsum(sizes)
        for begin, end in zip(ends - sizes, ends, strict=True):
            for at in range(begin, end, self.length):
                own = ids[at : min(at + self.length, end)]
                yield np.stack([own, np.full_like(own, self.count)])
            self.count += 1

    def place(self, piece: np.ndarray) -> list[np.ndarray]:
        """The rows that are done with a further piece [2, t]."""
        return [piece]


@dataclass
class Fit(Alone):
    """Whole documents that fit into a row together; of one that is longer than a row what is left behind
    its full rows. Each goes where it leaves the least room (best fit: Johnson, Demers, Ullman, Garey,
    Graham, SIAM Journal on Computing 3(4), 1974; of documents: Ding et al., ICML 2024, arXiv 2404.10830), of
    OPEN rows that wait; where it fits into none and no more may wait, the fullest is done."""

    open: list[np.ndarray] = field(default_factory=list)  # rows [2, t] that wait, the oldest first

    def go_on(self, place: dict[str, Any] | None) -> dict[str, int]:
        if place is not None:
            self.open = [np.array(row, np.int32) for row in place["open"]]
        return super().go_on(place)

    def left(self) -> dict[str, Any]:
        return super().left() | {"open": [row.tolist() for row in self.open]}

    def rest(self) -> pa.RecordBatch:
        rows, self.open = self.open, []
        return self.batch_of(rows)

    def place(self, piece: np.ndarray) -> list[np.ndarray]:
        size = piece.shape[1]
        filled = np.array([row.shape[1] for row in self.open], np.int64)
        fitting = np.where(filled + size <= self.length, filled, 0)
        if len(fitting) and fitting.max():
            best = int(fitting.argmax())
            self.open[best] = np.concatenate([self.open[best], piece], axis=1)
            return [self.open.pop(best)] if filled[best] + size == self.length else []
        if size == self.length:
            return [piece]
        done = [self.open.pop(int(filled.argmax()))] if len(filled) == OPEN else []
        self.open.append(piece)
        return done
