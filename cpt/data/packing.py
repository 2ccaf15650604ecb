"""A corpus as rows of token ids, which are cut from its tokens on disk."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.messages import count_noun
from cpt.core.randomness import key, permute
from cpt.data.collate import Sizes
from cpt.data.corpus import Corpus
from cpt.data.packers import PACKERS, PackedRows, Packer
from cpt.data.sources.base import CONCAT, DOCUMENT_MASK, NONE
from cpt.data.stored_tokens import FACTS, StoredTokens, store_tokens
from cpt.data.text_format import TextFormat
from cpt.data.token_rows import CutRows, RowWriter, TokenRows

log = logging.getLogger(__name__)
FORMAT = 3  # part of the key of cached rows: raise it when other rows are made of the same text
PADDING = -1  # the document of a token of padding


@dataclass(frozen=True)
class Packed:
    """Rows of token ids of one split, memory-mapped. `packing` says how documents fill them: with CONCAT only
    the last row may be shorter than `length`, else any row."""

    rows: TokenRows
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

    @property
    def text_tokens(self) -> np.ndarray:
        """Tokens of each row that are not special, [rows] int32."""
        return self.rows.text_tokens

    @property
    def inserted(self) -> np.ndarray:
        """Tokens of each row that packing inserted, [rows] int32; where `row_start` is not None."""
        return self.rows.inserted

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each row without padding, [rows] int64."""
        return self.rows.lengths

    @property
    def sharing(self) -> np.ndarray:
        """Documents in each row, [rows] int64, of DOCUMENT_MASK."""
        return self.rows.num_documents

    @property
    def tokens_per_row(self) -> float:
        """What a budget of tokens counts for a row."""
        return self.length if self.packing == CONCAT else float(self.row_lengths.mean())

    def answers(self, rows: np.ndarray) -> np.ndarray | None:
        """Which tokens are the answer, [B, length] bool; None for raw text."""
        return None

    def by_length(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of some rows [B], the longest first where a batch is as wide as its longest row; else
        as they are."""
        if self.packing != NONE and self.answers(rows[:1]) is None:
            return rows
        return rows[np.argsort(-self.row_lengths[rows], kind="stable")]

    def sizes(self, rows: np.ndarray | slice = slice(None)) -> Sizes:
        sharing = self.sharing[rows] if self.packing == DOCUMENT_MASK else None
        inserted = self.inserted[rows] if self.row_start is not None else None
        return Sizes(self.text_tokens[rows], self.row_lengths[rows], documents=sharing, inserted=inserted)

    def draw_rows(self, tokens: int, *, stream: int) -> np.ndarray:
        """The first rows of a fixed permutation until they have `tokens` tokens, their numbers [n]
        ascending."""
        drawn = permute(np.arange(len(self)), len(self), stream=stream)
        before = np.cumsum(self.row_lengths[drawn]) - self.row_lengths[drawn]
        return np.sort(drawn[before < tokens])

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Token ids, [B, length] int64, padded."""
        return self.rows.ids(rows).padded(self.length, self.pad)

    def document_of(self, rows: np.ndarray) -> np.ndarray:
        """The document that each token is of, [B, length] int64, -1 on padding."""
        return self.rows.documents(rows).padded(self.length, PADDING)


def balance_texts(texts: Mapping[str, Packed], *, tokens: int | None = None) -> dict[str, Packed]:
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
    token_count = count_noun(max_tokens, "token")
    log.info("Cutting each longer domain to %s (domains.balanced); the smallest is %s", token_count, smallest)
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

    tokens = store_tokens(corpus, split, format=format, name=name, cache=cache, workers=workers)

    def write(folder: Path) -> None:
        packer = PACKERS[packing](length, format.tokenizer.all_special_ids, format.row_start)
        writer = RowWriter(
            folder,
            length=length,
            num_tokens=tokens.facts["tokens"],
            has_start=format.row_start is not None,
            has_several_pieces=packing == DOCUMENT_MASK,
        )
        num_with_bos = 0
        with writer:
            for rows in pack_tokens(packer, tokens):
                writer.write(rows)
                num_with_bos += count_starts(rows, format.tokenizer.bos_token_id)
        (folder / FACTS).write_text(json.dumps({"rows_with_bos": num_with_bos}))

    # The default is left out of the key, which is older than the other packings.
    key_values = [FORMAT, corpus.facts["digest"], split, format.digest, length]
    if packing != CONCAT:
        key_values.append(packing)
    folder = make_once(cache / "packed" / f"{name}-{split}-{digest(key_values)}", make=write)
    return Packed(
        rows=CutRows(tokens, folder, row_start=format.row_start),
        length=length,
        pad=find_padding_id(format.tokenizer),
        documents=corpus.facts["documents"][split],
        bytes=corpus.facts["bytes"][split],
        packing=packing,
        row_start=format.row_start,
        facts={**tokens.facts, **json.loads((folder / FACTS).read_text())},
    )


def pack_tokens(packer: Packer, tokens: StoredTokens) -> Iterator[PackedRows]:
    """The rows of a text, some at a time."""
    for block in tokens.blocks():
        yield packer.add(block.ids, block.sizes)
    yield packer.finish()


def count_starts(rows: PackedRows, token_id: int | None) -> int:
    """How many rows begin with a token."""
    if token_id is None:
        return 0
    return int((rows.pieces["first_id"][rows.first_pieces] == token_id).sum())


def find_padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills short rows; any will do where there is no padding token, since it is masked out."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
