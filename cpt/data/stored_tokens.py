"""The token ids of a text on disk: stored once, for rows of any length and packing.

ids.TYPE     the ids of all documents, one document after another: 2 bytes a token where the vocabulary
             has at most 65,536 entries, 4 where it has more
ends.TYPE    the position after the last token of each document
facts.json   counts
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.messages import count_noun
from cpt.data.corpus import Corpus
from cpt.data.number_files import NumberWriter, map_numbers, narrow_numbers, read_numbers
from cpt.data.text_format import TextFormat
from cpt.data.tokenize import COUNTS, choose_id_type, tokenize_corpus

FORMAT = 1  # part of the key of stored tokens: raise it when other ids are made of the same text
IDS, ENDS, FACTS = "ids", "ends", "facts.json"
BLOCK = 1 << 20  # tokens of documents that are read at once


@dataclass(frozen=True)
class DocumentBlock:
    """Some documents, one after another: their ids [tokens], and how many each has [documents]."""

    ids: np.ndarray
    sizes: np.ndarray


@dataclass(frozen=True)
class StoredTokens:
    """The token ids of a text; `facts` counts its tokens, and has the sums of COUNTS."""

    folder: Path
    facts: Mapping[str, int]

    def __reduce__(self) -> tuple[type[Self], tuple[Path, Mapping[str, int]]]:
        """A process that gets these tokens maps their files itself."""
        return type(self), (self.folder, self.facts)

    @cached_property
    def ids(self) -> np.ndarray:
        """The ids of all documents, [tokens], memory-mapped."""
        return map_numbers(self.folder, IDS)

    @cached_property
    def ends(self) -> np.ndarray:
        """The position after the last token of each document, [documents], memory-mapped."""
        return map_numbers(self.folder, ENDS)

    def documents_at(self, positions: np.ndarray) -> np.ndarray:
        """The documents that tokens are of, as int64, in the shape of `positions`."""
        # Positions of another type would have a copy of all ends made.
        return np.searchsorted(self.ends, positions.astype(self.ends.dtype), side="right")

    def blocks(self) -> Iterator[DocumentBlock]:
        """All documents in their order, about BLOCK tokens at once; a longer document is whole."""
        first_document = 0
        begin = 0
        while first_document < len(self.ends):
            last_position = min(begin + BLOCK, self.facts["tokens"])
            (num_whole,) = self.documents_at(np.array([last_position]))
            next_document = max(first_document + 1, int(num_whole))
            ends = self.ends[first_document:next_document].astype(np.int64)
            end = int(ends[-1])
            yield DocumentBlock(
                ids=read_numbers(self.folder, IDS, begin, end), sizes=np.diff(ends, prepend=begin)
            )
            first_document = next_document
            begin = end


def store_tokens(
    corpus: Corpus, split: str, *, format: TextFormat, name: str, cache: Path, workers: int | None
) -> StoredTokens:
    """The token ids of a split of a corpus, made once for all runs with this text and format, by `workers`
    processes, None: one per core. Raises ValueError for a damaged corpus."""

    def write(folder: Path) -> None:
        facts = dict.fromkeys(("documents", "tokens", *COUNTS), 0)
        shards = folder / "shards"
        batches = tokenize_corpus(corpus, split, format=format, name=name, folder=shards, workers=workers)
        with (
            closing(batches),
            NumberWriter(folder, IDS, choose_id_type(format.tokenizer)) as ids,
            NumberWriter(folder, ENDS, np.dtype(np.int64)) as ends,
        ):
            for batch in batches:
                ids.write(batch.ids)
                ends.write(facts["tokens"] + np.cumsum(batch.sizes, dtype=np.int64))
                facts["documents"] += len(batch.sizes)
                facts["tokens"] += len(batch.ids)
                for count in COUNTS:
                    facts[count] += batch.counts[count]
        narrow_numbers(folder, ENDS, facts["tokens"])

        # The shards are what a killed process continues from; a whole text needs them no more.
        shutil.rmtree(shards)
        (folder / FACTS).write_text(json.dumps(facts))
        expected = corpus.facts["documents"][split]
        if facts["documents"] != expected:
            document_count = count_noun(facts["documents"], "document")
            raise ValueError(
                f"{corpus.folder} is damaged: {document_count} in {split}, not {expected}; "
                "delete it, and the text is read again"
            )

    key_values = [FORMAT, corpus.facts["digest"], split, format.tokens_digest]
    folder = make_once(cache / "tokens" / f"{name}-{split}-{digest(key_values)}", make=write)
    return StoredTokens(folder, json.loads((folder / FACTS).read_text()))
