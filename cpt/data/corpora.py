"""The text of a run: every corpus read, and packed for the model's tokenizer."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from cpt.core.config import digest
from cpt.core.processes import is_first_process
from cpt.data.corpus import Corpus, make_corpus
from cpt.data.packing import Packed, pack
from cpt.data.sources.base import CONCAT, GENERAL, Encoding, Source, TextOptions
from cpt.data.text_format import TextFormat
from cpt.data.tokenized_tasks import Encoder, encode_corpus
from cpt.data.tokenizer_hash import rows_digest, tokenizer_digest

log = logging.getLogger(__name__)
SHOWN = 3  # pairs that a message names


@dataclass(frozen=True)
class Corpora:
    """The corpora of a run by name: the domains in their order, then the general text."""

    by_name: dict[str, Corpus]
    cache: Path
    encoding: Encoding | None = None  # how examples become rows; None: the domains are text
    isolated: bool = False  # whether the samples of a batch share rows
    workers: int | None = None  # processes that tokenize a text; None: one per core
    packing: str = CONCAT  # how rows of text are filled
    text_options: TextOptions = TextOptions()  # how raw text becomes ids

    @classmethod
    def read(cls, source: Source, order: Sequence[str], *, cache: Path, workers: int | None = None) -> Self:
        by_name = {name: make_corpus(source, name, cache=cache) for name in (*order, GENERAL)}
        if (shared := find_shared(by_name)) and is_first_process():
            few = ", ".join(f"{count} of {held} in {trained}" for held, trained, count in shared[:SHOWN])
            more = f" and {len(shared) - SHOWN} more pairs" * (len(shared) > SHOWN)
            told = "Held-out documents in the training text of other domains bias the losses: %s%s"
            log.warning(told, few, more)
        log_near_duplicates(by_name)
        return cls(
            by_name,
            cache,
            encoding=source.encoding,
            isolated=source.isolated,
            workers=workers,
            packing=source.text_packing,
            text_options=source.text_options,
        )

    @property
    def general(self) -> Corpus:
        return self.by_name[GENERAL]

    def packed(
        self,
        name: str,
        split: str,
        *,
        format: TextFormat,
        length: int,
        seq2seq: bool = False,
        packing: str | None = None,
    ) -> Packed:
        """A split: text in rows of `length` tokens, or a row for each example."""
        if self.encoding is not None and name != GENERAL:
            return encode_corpus(
                self.by_name[name],
                split,
                encoder=self.encoder(format.tokenizer, length, seq2seq=seq2seq),
                name=name,
                cache=self.cache,
                rows_digest=with_template(rows_digest(format.tokenizer), format.tokenizer),
            )
        return pack(
            self.by_name[name],
            split,
            format=format,
            length=length,
            name=name,
            cache=self.cache,
            packing=packing or self.packing,
            workers=self.workers,
        )

    def encoder(self, tokenizer: PreTrainedTokenizerBase, length: int, *, seq2seq: bool) -> Encoder:
        """What makes rows and prompts of examples. Raises ValueError where the domains are none."""
        if self.encoding is None:
            raise ValueError("domains is invalid: raw text has no questions. Allowed: domains=tasks")
        return Encoder(tokenizer, length, self.encoding, seq2seq)

    def tokenizer_digest(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """A hash of what decides the rows of the domains: the tokenizer, and its template for examples."""
        tokenizer_hash = tokenizer_digest(tokenizer)
        return tokenizer_hash if self.encoding is None else with_template(tokenizer_hash, tokenizer)


def with_template(tokenizer_hash: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of a tokenizer and its chat template, if it has one."""
    template = getattr(tokenizer, "chat_template", None)
    return digest([tokenizer_hash, template]) if template else tokenizer_hash


def log_near_duplicates(corpora: Mapping[str, Corpus]) -> None:
    """Warns of texts whose held-out documents are almost in their training text, those with the largest
    share first."""
    shares: dict[str, float] = {}
    counts: dict[str, str] = {}
    for name, corpus in corpora.items():
        near = corpus.facts["near_duplicates"]
        if near["found"]:
            shares[name] = near["found"] / near["compared"]
            counts[name] = f"{near['found']} of {near['compared']} ({shares[name]:.1%}) of {name}"
            if near["train_share"] < 1:
                counts[name] += f" in {near['train_share']:.0%} of the training text"
    if not counts or not is_first_process():
        return

    names = sorted(shares, key=lambda name: -shares[name])
    more = f" and {len(names) - SHOWN} more texts" if len(names) > SHOWN else ""
    message = "Held-out documents with a near-duplicate in their domain's training text bias the losses: "
    message += "%s%s (of a sample; similarity .5 or more)"
    log.warning(message, "; ".join(counts[name] for name in names[:SHOWN]), more)


def find_shared(corpora: Mapping[str, Corpus]) -> list[tuple[str, str, int]]:
    """(text, other text, number) of held-out documents of a text in the training text of another, the most
    first; of a document that several hold out one is counted."""
    names = list(corpora)
    held, trained = (
        [corpora[name].keys(*splits) for name in names] for splits in (("valid", "test"), ("train",))
    )
    keys, first = np.unique(np.concatenate(held), return_index=True)
    holders = np.repeat(np.arange(len(names)), [len(each) for each in held])[first]
    counts = np.zeros((len(names), len(names)), np.int64)
    for number, own in enumerate(trained):
        places = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
        np.add.at(counts, (holders[places[keys[places] == own]], number), 1)
    np.fill_diagonal(counts, 0)
    pairs = [(names[a], names[b], int(counts[a, b])) for a, b in np.argwhere(counts)]
    return sorted(pairs, key=lambda pair: -pair[2])
