"""The text of a run: every corpus read, and packed for the model's tokenizer."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cpt.core.config import digest
from cpt.data.corpus import Corpus, make_corpus
from cpt.data.packing import Packed, pack
from cpt.data.sources.base import CONCAT, GENERAL, Encoding, Source
from cpt.data.tokenized_tasks import Encoder, Prompt, encode_corpus, read_examples


@dataclass(frozen=True)
class Corpora:
    """The corpora of a run by name: the domains in their order, then the general text. `encoding` says how
    the domains become rows where they are examples; None where they are text. With `isolated`, the samples
    of a batch share rows. Rows of text are filled by `packing`. `workers` tokenise a text, None: as many as
    there are cores."""

    by_name: dict[str, Corpus]
    cache: Path
    encoding: Encoding | None = None
    isolated: bool = False
    workers: int | None = None
    packing: str = CONCAT

    @classmethod
    def read(
        cls, source: Source, order: Sequence[str], *, cache: Path, workers: int | None = None
    ) -> "Corpora":
        return cls(
            {name: make_corpus(source, name, cache=cache) for name in (*order, GENERAL)},
            cache,
            source.encoding,
            source.isolated,
            workers,
            source.text_packing,
        )

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
        """A split of one name: text in rows of `length` tokens, by another `packing` where one is given, or a
        row for each example, as a causal or a `seq2seq` model takes it."""
        corpus = self.by_name[name]
        if self.encoding is None or name == GENERAL:
            return pack(
                corpus,
                split,
                tokenizer=tokenizer,
                length=length,
                name=name,
                cache=self.cache,
                tokenizer_digest=tokenizer_digest(tokenizer),
                packing=packing or self.packing,
                workers=self.workers,
            )
        return encode_corpus(
            corpus,
            split,
            encoder=Encoder(tokenizer, length, self.encoding, seq2seq),
            name=name,
            cache=self.cache,
            tokenizer_digest=self.tokenizer_digest(tokenizer),
        )

    def encoder(self, tokenizer: PreTrainedTokenizerBase, length: int, *, seq2seq: bool) -> Encoder:
        """What makes rows of examples. Raises ValueError where the domains are none."""
        if self.encoding is None:
            raise ValueError("the domains are raw text, which asks nothing; allowed: domains=tasks")
        return Encoder(tokenizer, length, self.encoding, seq2seq)

    def tokenizer_digest(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """A hash of what decides the rows of the domains: what the tokenizer gives, and where they may be
        chats its template."""
        known_by, template = tokenizer_digest(tokenizer), getattr(tokenizer, "chat_template", None)
        return known_by if self.encoding is None or not template else digest([known_by, template])

    def prompts(
        self,
        name: str,
        split: str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        seq2seq: bool = False,
    ) -> Iterator[Prompt]:
        """The examples of a domain's split as prompts, in the order of its rows."""
        if self.encoding is None:
            raise ValueError(f"domain {name} is raw text, which asks nothing; allowed: domains=tasks")
        encoder = Encoder(tokenizer, length, self.encoding, seq2seq)
        return map(encoder.prompt, read_examples(self.by_name[name], split))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that decides what a tokenizer gives; not of its truncation and padding, which the
    calls themselves set."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        made_of: dict[str, Any] = tokenizer.get_vocab()
    else:
        made_of = {**json.loads(fast.to_str()), "truncation": None, "padding": None}
    return digest([type(tokenizer).__name__, made_of, tokenizer.special_tokens_map])
