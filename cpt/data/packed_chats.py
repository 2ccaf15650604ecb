"""Chats in rows as raw text has them: whole chats, several in a row, of which the answers are scored."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.data.collate import Sizes
from cpt.data.number_files import NumberWriter, read_numbers
from cpt.data.packers import NUM_OPEN_ROWS, DocumentPacker, PackedRows
from cpt.data.packing import Packed
from cpt.data.sources.base import DOCUMENT_MASK
from cpt.data.token_rows import ArrowRows, Lists, join_ranges
from cpt.data.tokenized_tasks import TokenizedTask

FORMAT = 1  # part of the key of cached rows: raise it when other rows are made of the same chats
BATCH = 10_000  # chats that are packed at once
CHATS, ENDS = "chats", "ends"  # files of numbers, see ChatRows


class ChatRows:
    """Rows of whole chats: `chats` are the chats of all rows, one row after another, and `ends` the number of
    chats up to the end of each row."""

    def __init__(self, examples: ArrowRows, chats: np.ndarray, ends: np.ndarray) -> None:
        self.examples = examples
        self.chats = chats
        self.ends = ends

    def __len__(self) -> int:
        return len(self.ends)

    def select(self, numbers: np.ndarray) -> "ChatRows":
        chats, num_chats = self.chats_of(np.asarray(numbers, np.int64))
        return ChatRows(self.examples, chats, np.cumsum(num_chats))

    def chats_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The chats of some rows, one row after another, and how many each row has, [numbers]."""
        begins = np.where(numbers > 0, self.ends[numbers - 1], 0).astype(np.int64)
        num_chats = self.ends[numbers].astype(np.int64) - begins
        return self.chats[join_ranges(begins, num_chats)].astype(np.int64), num_chats

    def sum_by_row(self, values: np.ndarray) -> np.ndarray:
        """The sums over rows of values by chat, [rows] int64."""
        begins = np.concatenate([[0], self.ends[:-1]]).astype(np.int64)
        return np.add.reduceat(values[self.chats].astype(np.int64), begins)

    @cached_property
    def text_tokens(self) -> np.ndarray:
        return self.sum_by_row(self.examples.text_tokens).astype(np.int32)

    @cached_property
    def inserted(self) -> np.ndarray:
        """Nothing is inserted: a chat begins as its template writes it."""
        return np.zeros(len(self), np.int32)

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.sum_by_row(self.examples.lengths)

    @cached_property
    def num_documents(self) -> np.ndarray:
        return np.diff(self.ends.astype(np.int64), prepend=0)

    def ids(self, numbers: np.ndarray) -> Lists:
        return self.read("ids", numbers)

    def documents(self, numbers: np.ndarray) -> Lists:
        """The chat of each token of some rows."""
        chats, num_chats = self.chats_of(numbers)
        sizes = self.examples.lengths[chats]
        return Lists(np.repeat(chats, sizes), sum_parts(sizes, num_chats))

    def read(self, name: str, numbers: np.ndarray) -> Lists:
        """A column of the chats, `ids` or `answers`, by row."""
        chats, num_chats = self.chats_of(numbers)
        lists = self.examples.read(name, chats)
        return Lists(lists.values, sum_parts(lists.lengths, num_chats))


def sum_parts(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The sums [n] of parts of `values`, which follow one another and have the `sizes` [n], above 0."""
    return np.add.reduceat(values.astype(np.int64), np.cumsum(sizes) - sizes)


@dataclass(frozen=True)
class PackedChats(Packed):
    """Rows of whole chats; `documents` are rows of `chats`, and `bytes` those of the answers."""

    rows: ChatRows
    answer_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # of each row

    def sizes(self, rows: np.ndarray | slice = slice(None)) -> Sizes:
        documents = self.sharing[rows] if self.packing == DOCUMENT_MASK else None
        return Sizes(
            text=self.text_tokens[rows],
            all=self.row_lengths[rows],
            answers=self.answer_tokens[rows],
            documents=documents,
        )

    def answers(self, rows: np.ndarray) -> np.ndarray:
        return self.rows.read("answers", rows).padded(self.length, 0).astype(bool)


def pack_chats(
    chats: TokenizedTask, *, length: int, packing: str, special: Sequence[int], name: str, cache: Path
) -> PackedChats:
    """Chats, none longer than `length`, in as few rows of `length` as best fit finds, which is done once for
    all runs with these chats and length. Between the chats of a row there is attention with `packing` CONCAT,
    and none with DOCUMENT_MASK."""
    lengths = chats.rows.lengths

    def write(folder: Path) -> None:
        packer = DocumentPacker(length, special, open_rows=NUM_OPEN_ROWS)
        begins = np.cumsum(lengths) - lengths
        num_packed = 0
        with (
            NumberWriter(folder, CHATS, np.dtype(np.int64)) as chat_indices,  # in the order of the rows
            NumberWriter(folder, ENDS, np.dtype(np.int64)) as ends,  # of each row, among these indices
        ):
            for packed in pack_examples(packer, chats.rows):
                # A piece is a whole chat: its first token says which.
                chat_indices.write(np.searchsorted(begins, packed.pieces["begin"]))
                ends.write(num_packed + np.cumsum(packed.num_pieces))
                num_packed += len(packed.pieces)
        (folder / "facts.json").write_text(json.dumps({"chats": num_packed}))

    key = digest([FORMAT, length, lengths.tolist()])  # rows depend on the chats' lengths alone
    folder = make_once(cache / "packed" / f"{name}-train-{key}", make=write)
    rows = ChatRows(chats.rows, read_numbers(folder, CHATS), read_numbers(folder, ENDS))
    return PackedChats(
        rows=rows,
        length=length,
        pad=chats.pad,
        documents=chats.documents,
        bytes=chats.bytes,
        packing=packing,
        skipped=chats.skipped,
        answer_tokens=rows.sum_by_row(chats.answer_tokens),
    )


def pack_examples(packer: DocumentPacker, examples: ArrowRows) -> list[PackedRows]:
    """The rows of examples, BATCH at a time."""
    blocks = []
    for begin in range(0, len(examples), BATCH):
        lists = examples.ids(np.arange(begin, min(begin + BATCH, len(examples))))
        blocks.append(packer.add(lists.values, lists.lengths))
    return [*blocks, packer.finish()]
