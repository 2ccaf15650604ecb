"""Documents as token ids, a piece of the corpus at a time, by as many processes as there are cores.

A process that tokenises imports neither torch nor transformers: it has the tokenizer as `tokenizers` writes
it, and reads its pieces itself."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from cpt.core.processes import cores
from cpt.data.arrow import read_batches
from cpt.data.processes import in_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENTS, SPLIT_OF = "documents.arrow", "splits.npy"
PIECE = 1 << 20  # bytes of text that a process is given at once, to the end of their record batch
WORTH = 8 * PIECE  # bytes of text for which a process is started
WORTH_OF_ENTRY = 64  # bytes of text for each entry of a vocabulary for which a tokenizer is made anew
ENDED = (
    "a process that tokenises was ended, perhaps for want of memory; the same command goes on where it was; "
    "allowed: fewer of them (data.workers=1)"
)
Tokens = tuple[np.ndarray, np.ndarray]  # ids of all documents, [tokens] int32; how many each has, [documents]


class Encode(Protocol):
    """Gives the token ids of each document as bytes of int32."""

    def __call__(self, texts: list[str], /) -> list[bytes]: ...


def as_bytes(ids: Iterable[int]) -> bytes:
    """Ids as int32."""
    return array("i", ids).tobytes()


@dataclass(frozen=True)
class SlowEncoder:
    """A tokenizer as transformers calls it."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, texts: list[str]) -> list[bytes]:
        options = {"return_attention_mask": False, "verbose": False}
        found = self.tokenizer(texts, split_special_tokens=True, **options)["input_ids"]
        return list(map(as_bytes, found))


@dataclass(frozen=True)
class FastEncoder:
    """The same ids by the `tokenizers` library alone, from its JSON: it makes no offsets and needs no
    transformers in the process."""

    written: str

    @cached_property
    def backend(self) -> Tokenizer:
        made = Tokenizer.from_str(self.written)
        made.no_truncation()
        made.no_padding()
        made.encode_special_tokens = True  # special tokens that are spelled out in a text stay text
        return made

    def __call__(self, texts: list[str]) -> list[bytes]:
        return [as_bytes(each.ids) for each in self.backend.encode_batch_fast(texts)]


@dataclass(frozen=True)
class Piece:
    """Documents that stand one after another in a corpus: the positions in its file that they stand between,
    the numbers of the first and of the one behind them, and how many bytes of a split's text are in it."""

    begin: int
    end: int
    first: int
    behind: int
    bytes: int


def pieces(folder: Path, split: int, *, begin: int = 0, first: int = 0) -> Iterator[Piece]:
    """The pieces of a corpus from one that begins at a position with a document on; what they are is a
    function of the corpus alone."""
    splits = np.load(folder / SPLIT_OF, mmap_mode="r")
    behind, size, whole = first, 0, 0
    for end, batch in read_batches(folder / DOCUMENTS, begin):
        sizes = np.diff(offsets(batch.column("text")))
        size += int(sizes[splits[behind : behind + len(sizes)] == split].sum())
        whole, behind = whole + int(sizes.sum()), behind + len(sizes)
        if whole >= PIECE:
            yield Piece(begin, end, first, behind, size)
            begin, first, size, whole = end, behind, 0, 0
    if behind > first:
        yield Piece(begin, end, first, behind, size)


def offsets(texts: pa.Array) -> np.ndarray:
    """Where each of some texts ends in their bytes, the beginning of the first before it."""
    return np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]


def read_piece(folder: Path, split: int, piece: Piece) -> Iterator[list[str]]:
    """The documents of a split in a piece, in lists that are small."""
    splits = np.load(folder / SPLIT_OF, mmap_mode="r")
    first = piece.first
    for end, batch in read_batches(folder / DOCUMENTS, piece.begin):
        chosen = splits[first : first + len(batch)] == split
        first += len(batch)
        if chosen.any():
            yield batch.column("text").filter(pa.array(chosen)).to_pylist()
        if end == piece.end:
            return


def tokenise_piece(piece: Piece, *, folder: Path, split: int, encode: Encode, ending: list[int]) -> Tokens:
    """The ids of a piece's documents, `ending` after each."""
    end, found = as_bytes(ending), []
    for texts in read_piece(folder, split, piece):
        found += [each + end for each in encode(texts)]
    sizes = np.array([len(each) for each in found], np.int64) // np.dtype(np.int32).itemsize
    return np.frombuffer(b"".join(found), np.int32), sizes.astype(np.int32)


def choose_encoder(tokenizer: PreTrainedTokenizerBase, *, size: int) -> Encode:
    """The fast tokenizer without transformers, unless its class has code of its own or the text is too small
    (`size` in bytes) to be worth building it."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    methods = getattr(kind, "_encode_plus", None), kind.__call__
    plain = methods == (PreTrainedTokenizerFast._encode_plus, PreTrainedTokenizerBase.__call__)
    if not plain or size < min(WORTH, tokenizer.vocab_size * WORTH_OF_ENTRY):
        return SlowEncoder(tokenizer)
    try:
        return FastEncoder(tokenizer.backend_tokenizer.to_str())
    except Exception:  # raised by Rust: a component that is written in Python
        return SlowEncoder(tokenizer)


def count_workers(asked: int | None, *, size: int) -> int:
    """How many processes tokenise so many bytes of text."""
    return max(1, min(asked or cores(), size // WORTH))


def tokenise(
    folder: Path,
    split: int,
    found: Iterator[Piece],
    *,
    tokenizer: PreTrainedTokenizerBase,
    ending: list[int],
    size: int,
    workers: int | None,
) -> Generator[tuple[Piece, Tokens]]:
    """Pieces with their tokens, in their order; `size` is about how many bytes of text they have.

    Raises ValueError where a process that tokenises is ended."""
    first = next(found, None)
    if first is None:
        return
    found = chain([first], found)
    encode = choose_encoder(tokenizer, size=size)
    number = 1 if isinstance(encode, SlowEncoder) else count_workers(workers, size=size)
    work = partial(tokenise_piece, folder=folder, split=split, encode=encode, ending=ending)
    if number == 1:
        yield from ((piece, work(piece)) for piece in found)
        return
    with closing(in_order(work, found, number, told=ENDED)) as made:
        yield from made
