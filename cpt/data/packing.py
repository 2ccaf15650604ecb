"""A corpus as token ids in rows of equal length: documents one after another, separated, nothing dropped."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from datasets.arrow_writer import ArrowWriter
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.randomness import shuffle
from cpt.data.batch import Sizes
from cpt.data.corpus import Corpus, in_batches

FORMAT = 1
PADDING = -1
COLUMNS = Features(
    {"ids": ListOf(Value("int32")), "documents": ListOf(Value("int32")), "text_tokens": Value("int32")}
)


@dataclass(frozen=True)
class Packed:
    """Rows of token ids of one split, memory-mapped; only the last row may be shorter than `length`."""

    rows: Dataset
    length: int
    pad: int
    documents: int
    bytes: int

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def text_tokens(self) -> np.ndarray:
        """Tokens of each row that are not special, [rows] int32."""
        return self.column("text_tokens")

    @property
    def tokens_per_row(self) -> float:
        """What a budget of tokens counts for a row."""
        return self.length

    def answers(self, rows: np.ndarray) -> np.ndarray | None:
        """Which tokens are the answer, [B, length] bool; None for raw text."""
        return None

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each row without padding, [rows]."""
        lengths = np.full(len(self), self.length)
        lengths[-1] = len(self.rows[len(self) - 1]["ids"])
        return lengths

    def sizes(self, rows: np.ndarray | slice = slice(None)) -> Sizes:
        """What is known of rows before they are read."""
        return Sizes(self.text_tokens[rows], self.row_lengths[rows])

    def column(self, name: str) -> np.ndarray:
        chunks = self.rows.with_format("arrow", columns=[name])[:].column(name).chunks
        return np.concatenate([chunk.to_numpy(zero_copy_only=False) for chunk in chunks])

    def draw_rows(self, tokens: int, *, stream: int) -> np.ndarray:
        """The first rows of a fixed permutation whose tokens come to so many, so that more of them contain
        fewer; ascending."""
        drawn = shuffle(np.arange(len(self)), len(self), stream=stream)
        before = np.cumsum(self.row_lengths[drawn]) - self.row_lengths[drawn]
        return np.sort(drawn[before < tokens])

    @cached_property
    def columns(self) -> dict[str, Dataset]:
        """The rows as Arrow lists, by column: making a view takes longer than reading a batch from it."""
        return {name: self.rows.with_format("arrow", columns=[name]) for name in ("ids", "documents")}

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Token ids, [B, length] int64, padded."""
        return self.table(rows, "ids", self.pad)

    def document_of(self, rows: np.ndarray) -> np.ndarray:
        """The document that each token is of, [B, length] int64, -1 on padding."""
        return self.table(rows, "documents", PADDING)

    def table(self, rows: np.ndarray, name: str, filler: int) -> np.ndarray:
        lists = self.columns[name][rows.tolist()].column(name).combine_chunks()
        lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
        values, ends = lists.flatten().to_numpy(), np.diff(lists.offsets.to_numpy())
        table = np.full((len(rows), self.length), filler, np.int64)
        table[np.arange(self.length) < ends[:, None]] = values
        return table


def pack(
    corpus: Corpus,
    split: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    name: str,
    cache: Path,
    tokenizer_digest: str,
) -> Packed:
    """A split of a corpus in rows of `length` tokens, made once for all runs with this text, tokenizer and
    length."""
    made_of = [FORMAT, corpus.facts["digest"], split, tokenizer_digest, length]
    folder = make_once(
        cache / "packed" / f"{name}-{split}-{digest(made_of)}",
        make=lambda partial: write_rows(
            partial, corpus.documents(split), tokenizer=tokenizer, length=length, name=name
        ),
    )
    rows = Dataset.from_file(str(folder / "rows.arrow"))
    return Packed(
        rows, length, padding_id(tokenizer), corpus.facts["documents"][split], corpus.facts["bytes"][split]
    )


def write_rows(
    folder: Path, documents: Dataset, *, tokenizer: PreTrainedTokenizerBase, length: int, name: str
) -> None:
    """Writes the rows of documents into a folder, a batch of documents at a time."""
    progress = tqdm(
        total=len(documents), desc=f"tokenising {name}", unit=" documents", disable=None, leave=False
    )
    batches = tokenise(documents, tokenizer, progress)
    with progress, ArrowWriter(path=str(folder / "rows.arrow"), features=COLUMNS) as writer:
        for table in cut_rows(batches, length=length, special=tokenizer.all_special_ids):
            writer.write_table(table)
        writer.finalize()


def tokenise(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase, progress: tqdm
) -> Iterator[list[list[int]]]:
    """The ids of each document, batch by batch, with the tokenizer's own special tokens around them.

    Special tokens that are spelled out in the text stay text (not with unigram tokenizers, which know no such
    switch). A tokenizer that ends no document gets its end-of-sequence token there; otherwise a causal model
    could not tell where one ends.
    """
    ending = terminator(tokenizer)
    for texts in in_batches(documents):
        encoded = tokenizer(texts, split_special_tokens=True, return_attention_mask=False, verbose=False)
        yield [ids + ending for ids in encoded["input_ids"]]
        progress.update(len(texts))


def terminator(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What has to be put after each document: nothing if the tokenizer ends it itself, else its end of
    sequence or its separator."""
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    around = tokenizer("a", verbose=False)["input_ids"]
    if around[-len(bare) :] != bare:
        return []
    ending = [each for each in (tokenizer.eos_token_id, tokenizer.sep_token_id) if each is not None]
    if not ending:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has no token to separate documents (eos or sep)"
        )
    return ending[:1]


def cut_rows(
    batches: Iterable[list[list[int]]], *, length: int, special: Sequence[int]
) -> Iterator[pa.Table]:
    """Tables of rows of `length` ids from batches of documents, each token with the number of its document;
    what does not fill a row waits for the next batch."""
    specials, count = np.asarray(sorted(special), np.int32), 0
    tokens = np.empty((2, 0), np.int32)
    for batch in batches:
        sizes = [len(ids) for ids in batch]
        ids = np.fromiter(chain.from_iterable(batch), np.int32, sum(sizes))
        owners = np.repeat(np.arange(count, count + len(batch), dtype=np.int32), sizes)
        tokens = np.concatenate([tokens, [ids, owners]], axis=1)
        whole = tokens.shape[1] // length * length
        yield rows_of_documents(tokens[:, :whole], length=length, specials=specials)
        tokens, count = tokens[:, whole:], count + len(batch)
    yield rows_of_documents(tokens, length=length, specials=specials)


def rows_of_documents(tokens: np.ndarray, *, length: int, specials: np.ndarray) -> pa.Table:
    """Ids and documents [2, tokens] as rows, of which only the last may be short."""
    ends = np.append(np.arange(0, tokens.shape[1], length), tokens.shape[1]).astype(np.int32)
    text = np.concatenate([[0], np.cumsum(~np.isin(tokens[0], specials), dtype=np.int32)])
    columns = {"ids": tokens[0], "documents": tokens[1]}
    lists = {name: pa.ListArray.from_arrays(ends, values) for name, values in columns.items()}
    return pa.table({**lists, "text_tokens": np.diff(text[ends])})


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills the last row; any will do where there is no padding token, since it is masked out."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
