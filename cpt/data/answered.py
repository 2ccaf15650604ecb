"""A corpus of examples on disk, as rows of token ids of which the answer's are marked."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from datasets.arrow_writer import ArrowWriter
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.files import replace
from cpt.data.batch import Sizes
from cpt.data.corpus import Corpus, in_batches
from cpt.data.encoding import Encoder
from cpt.data.examples import read_example
from cpt.data.packing import PADDING, Packed, padding_id

log = logging.getLogger(__name__)
FORMAT = 1
COLUMNS = Features(
    {
        "ids": ListOf(Value("int32")),
        "answers": ListOf(Value("int32")),
        "text_tokens": Value("int32"),
        "answer_tokens": Value("int32"),
        "lengths": Value("int32"),
        "bytes": Value("int32"),
    }
)


@dataclass(frozen=True)
class Answered(Packed):
    """Rows of one example each, in the order of the corpus; `bytes` are those of the answers."""

    @cached_property
    def row_lengths(self) -> np.ndarray:
        return self.column("lengths").astype(np.int64)

    @property
    def tokens_per_row(self) -> float:
        return float(self.row_lengths.mean())

    @cached_property
    def answer_tokens(self) -> np.ndarray:
        """Tokens of each answer, its end of sequence with them, [rows]."""
        return self.column("answer_tokens").astype(np.int64)

    @cached_property
    def columns(self) -> dict[str, Dataset]:
        return {name: self.rows.with_format("arrow", columns=[name]) for name in ("ids", "answers")}

    def sizes(self, rows: np.ndarray | slice = slice(None)) -> Sizes:
        return Sizes(self.text_tokens[rows], self.row_lengths[rows], self.answer_tokens[rows])

    def answers(self, rows: np.ndarray) -> np.ndarray:
        return self.table(rows, "answers", 0).astype(bool)

    def document_of(self, rows: np.ndarray) -> np.ndarray:
        """The example that each token is of, [B, length] int64, -1 on padding."""
        present = np.arange(self.length) < self.row_lengths[rows][:, None]
        return np.where(present, np.asarray(rows)[:, None], PADDING)


def encode_corpus(
    corpus: Corpus, split: str, *, encoder: Encoder, name: str, cache: Path, tokenizer_digest: str
) -> Answered:
    """The rows of a split, made once for all runs with these examples, tokenizer and encoding.

    Raises ValueError for an example that does not fit."""
    options = [vars(encoder.encoding), encoder.length, encoder.seq2seq]
    made_of = ["examples", FORMAT, corpus.facts["digest"], split, tokenizer_digest, options]
    folder = make_once(
        cache / "packed" / f"{name}-{split}-{digest(made_of)}",
        make=lambda partial: write_examples(partial, corpus.documents(split), encoder=encoder, name=name),
    )
    rows = Dataset.from_file(str(folder / "rows.arrow"))
    tell_cut(folder, name=name, split=split, examples=len(rows), encoder=encoder)
    pad, documents = padding_id(encoder.tokenizer), corpus.facts["documents"][split]
    known = Answered(rows, 0, pad, documents, 0)
    return Answered(rows, int(known.row_lengths.max()), pad, documents, int(known.column("bytes").sum()))


def write_examples(folder: Path, documents: Dataset, *, encoder: Encoder, name: str) -> None:
    """Writes the rows of examples into a folder, a batch at a time."""
    progress = tqdm(
        total=len(documents), desc=f"tokenising {name}", unit=" examples", disable=None, leave=False
    )
    cut = 0
    with progress, ArrowWriter(path=str(folder / "rows.arrow"), features=COLUMNS) as writer:
        for texts in in_batches(documents):
            examples = [read_example(text) for text in texts]
            for example, row in zip(examples, encoder.encode_all(examples), strict=True):
                cut += row.cut > 0
                writer.write(row_of(row.ids, row.answer, example.target, encoder.tokenizer))
            progress.update(len(texts))
        writer.finalize()
    replace(folder / "cut", str(cut))


def row_of(ids: list[int], answer: list[bool], target: str, tokenizer: PreTrainedTokenizerBase) -> dict:
    special = set(tokenizer.all_special_ids)
    return {
        "ids": ids,
        "answers": [int(each) for each in answer],
        "text_tokens": sum(each not in special for each in ids),
        "answer_tokens": sum(answer),
        "lengths": len(ids),
        "bytes": len(target.encode()),
    }


def tell_cut(folder: Path, *, name: str, split: str, examples: int, encoder: Encoder) -> None:
    """Tells, in a line, how many examples were cut."""
    if cut := int((folder / "cut").read_text()):
        log.info(
            "%s, %s: %d of %d examples are cut to model.length=%d (domains.truncate=%s)",
            name, split, cut, examples, encoder.length, encoder.encoding.truncate,
        )  # fmt: skip


def examples_of(corpus: Corpus, split: str) -> Iterator:
    """The examples of a split, in the order of its rows."""
    for texts in in_batches(corpus.documents(split)):
        yield from map(read_example, texts)
