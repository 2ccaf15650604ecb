"""The text of a run: every corpus read, and packed for the model's tokenizer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from cpt.core.config import digest
from cpt.data.corpus import Corpus, make_corpus
from cpt.data.packing import Packed, pack
from cpt.data.sources.base import CONCAT, GENERAL, Encoding, Source
from cpt.data.tokenized_tasks import Encoder, encode_corpus


@dataclass(frozen=True)
class Corpora:
    """The corpora of a run by name: the domains in their order, then the general text."""

    by_name: dict[str, Corpus]
    cache: Path
    encoding: Encoding | None = None  # how examples become rows; None: the domains are text
    isolated: bool = False  # whether the samples of a batch share rows
    workers: int | None = None  # processes that tokenize a text; None: one per core
    packing: str = CONCAT  # how rows of text are filled

    @classmethod
    def read(cls, source: Source, order: Sequence[str], *, cache: Path, workers: int | None = None) -> Self:
        by_name = {name: make_corpus(source, name, cache=cache) for name in (*order, GENERAL)}
        return cls(by_name, cache, source.encoding, source.isolated, workers, source.text_packing)

    @property
    def general(self) -> Corpus:
        return self.by_name[GENERAL]

    def packed(
        self,
        name: str,
        split: str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        seq2seq: bool = False,
        packing: str | None = None,
    ) -> Packed:
        """A split: text in rows of `length` tokens, or a row for each example."""
        corpus, how = self.by_name[name], dict[str, Any](name=name, cache=self.cache)
        if self.encoding is not None and name != GENERAL:
            encoder = self.encoder(tokenizer, length, seq2seq=seq2seq)
            known_by = self.tokenizer_digest(tokenizer)
            return encode_corpus(corpus, split, encoder=encoder, tokenizer_digest=known_by, **how)
        how |= {"tokenizer_digest": tokenizer_digest(tokenizer), "packing": packing or self.packing}
        return pack(corpus, split, tokenizer=tokenizer, length=length, workers=self.workers, **how)

    def encoder(self, tokenizer: PreTrainedTokenizerBase, length: int, *, seq2seq: bool) -> Encoder:
        """What makes rows and prompts of examples. Raises ValueError where the domains are none."""
        if self.encoding is None:
            raise ValueError("domains is invalid: raw text has no questions. Allowed: domains=tasks")
        return Encoder(tokenizer, length, self.encoding, seq2seq)

    def tokenizer_digest(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """A hash of what decides the rows of the domains: the tokenizer, and its template for examples."""
        known_by, template = tokenizer_digest(tokenizer), getattr(tokenizer, "chat_template", None)
        return known_by if self.encoding is None or not template else digest([known_by, template])


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what decides what a tokenizer gives; not of truncation and padding, which the calls set."""
    made_of: dict[str, Any] = tokenizer.get_vocab()
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        made_of = {**json.loads(fast.to_str()), "truncation": None, "padding": None}
    return digest([type(tokenizer).__name__, made_of, tokenizer.special_tokens_map])
