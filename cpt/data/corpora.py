"""The text of a run: every corpus read, and packed for the model's tokenizer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cpt.core.config import digest
from cpt.data.corpus import Corpus, make_corpus
from cpt.data.packing import Packed, pack
from cpt.data.sources.base import GENERAL, Source


@dataclass(frozen=True)
class Corpora:
    """The corpora of a run by name: the domains in their order, then the general text."""

    by_name: dict[str, Corpus]
    cache: Path

    @classmethod
    def read(cls, source: Source, order: Sequence[str], *, cache: Path) -> "Corpora":
        return cls({name: make_corpus(source, name, cache=cache) for name in (*order, GENERAL)}, cache)

    @property
    def general(self) -> Corpus:
        return self.by_name[GENERAL]

    def packed(self, name: str, split: str, *, tokenizer: PreTrainedTokenizerBase, length: int) -> Packed:
        """A split of one text in rows of `length` tokens."""
        return pack(
            self.by_name[name],
            split,
            tokenizer=tokenizer,
            length=length,
            name=name,
            cache=self.cache,
            tokenizer_digest=tokenizer_digest(tokenizer),
        )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that decides what a tokenizer gives; not of its truncation and padding, which the
    calls themselves set."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        made_of: dict[str, Any] = tokenizer.get_vocab()
    else:
        made_of = {**json.loads(fast.to_str()), "truncation": None, "padding": None}
    return digest([type(tokenizer).__name__, made_of, tokenizer.special_tokens_map])
