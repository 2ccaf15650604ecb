"""The text of a run: every corpus read, and packed for the model's tokenizer."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from cpt.core.config import digest
from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.data.chats import TEMPLATE_DATE
from cpt.data.corpus import Corpus, make_corpus
from cpt.data.packed_chats import pack_chats
from cpt.data.packing import Packed, pack
from cpt.data.sources.base import CONCAT, GENERAL, NONE, Encoding, Source, TextOptions
from cpt.data.sources.mixed import MixedReader, MixedSource
from cpt.data.text_format import TextFormat
from cpt.data.tokenized_tasks import Encoder, encode_corpus
from cpt.data.tokenizer_hash import hash_row_format, hash_tokenizer

log = logging.getLogger(__name__)
MAX_SHOWN = 3  # pairs of texts, or texts, that a message names


@dataclass(frozen=True)
class MixedCorpus:
    """The text of a source of `replay.sources`, all of which is trained on."""

    options: MixedSource
    corpus: Corpus


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
    mixed: Mapping[str, MixedCorpus] = field(default_factory=dict)  # the sources of replay, by name

    @classmethod
    def read(
        cls,
        source: Source,
        order: Sequence[str],
        *,
        cache: Path,
        workers: int | None = None,
        mixed: Mapping[str, MixedReader] | None = None,
    ) -> Self:
        """The texts of domains in their order, the general text, and those of `mixed` sources; logs which
        held-out documents are also trained on."""
        mixed_corpora = {}
        for name, reader in (mixed or {}).items():
            mixed_corpora[name] = MixedCorpus(reader.options, make_corpus(reader, name, cache=cache))
        by_name = {name: make_corpus(source, name, cache=cache) for name in (*order, GENERAL)}
        mixed_by_name = {f"replay.sources.{name}": part.corpus for name, part in mixed_corpora.items()}
        log_shared(by_name | mixed_by_name)
        log_near_duplicates(by_name)
        return cls(
            by_name,
            cache,
            encoding=source.encoding,
            isolated=source.isolated,
            workers=workers,
            packing=source.text_packing,
            text_options=source.text_options,
            mixed=mixed_corpora,
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
                rows_digest=hash_with_template(hash_row_format(format.tokenizer), format.tokenizer),
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

    @property
    def trained_examples(self) -> dict[str, Corpus]:
        """The corpora of examples that are trained on, by the name that messages have for them."""
        examples = {}
        for name, corpus in self.by_name.items():
            if self.encoding is not None and name != GENERAL:
                examples[name] = corpus
        for name, part in self.mixed.items():
            if part.options.has_chats:
                examples[f"replay.sources.{name}"] = part.corpus
        return examples

    @property
    def mixes_chats(self) -> bool:
        """Whether chats are mixed into raw text."""
        return self.encoding is None and any(part.options.has_chats for part in self.mixed.values())

    def packed_source(self, name: str, *, format: TextFormat, length: int, seq2seq: bool = False) -> Packed:
        """The training text of a source of replay. Rows of chats are filled as those of the domains' text:
        with several chats, isolated from each other or not, or with one each."""
        part = self.mixed[name]
        if not part.options.has_chats:
            return pack(
                part.corpus,
                "train",
                format=format,
                length=length,
                name=name,
                cache=self.cache,
                packing=self.packing,
                workers=self.workers,
            )

        # Domains of chats print the day of the run's start, which the sources' chats print as well.
        date = TEMPLATE_DATE if self.encoding is None else self.encoding.date
        encoding = Encoding(
            truncate="tail",
            scored_turns="all",
            on_bad_example=part.options.on_bad_example,
            date=date or TEMPLATE_DATE,
        )
        template_digest = hash_with_template(hash_row_format(format.tokenizer), format.tokenizer)
        chats = encode_corpus(
            part.corpus,
            "train",
            encoder=Encoder(format.tokenizer, length, encoding, seq2seq),
            name=name,
            cache=self.cache,
            rows_digest=template_digest,
            skip_option=f"replay.sources.{name}.on_bad_example",
        )
        # Domains of examples have a row for each, of which batches make fuller ones.
        if self.encoding is not None or self.packing == NONE:
            return chats
        return pack_chats(
            chats,
            length=length,
            packing=self.packing,
            special=format.tokenizer.all_special_ids,
            name=name,
            cache=self.cache,
        )

    def encoder(self, tokenizer: PreTrainedTokenizerBase, length: int, *, seq2seq: bool) -> Encoder:
        """What makes rows and prompts of examples. Raises ValueError where the domains are none."""
        if self.encoding is None:
            raise ValueError("domains is invalid: raw text has no questions. Allowed: domains=tasks")
        return Encoder(tokenizer, length, self.encoding, seq2seq)

    def tokenizer_digest(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """A hash of what decides the rows of the domains: the tokenizer, and its template for examples."""
        tokenizer_hash = hash_tokenizer(tokenizer)
        if self.encoding is None:  # chats of sources of replay change no loss on held-out text
            return tokenizer_hash
        return hash_with_template(tokenizer_hash, tokenizer)


def hash_with_template(tokenizer_hash: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of a tokenizer and its chat template, if it has one."""
    template = getattr(tokenizer, "chat_template", None)
    return digest([tokenizer_hash, template]) if template else tokenizer_hash


def log_shared(corpora: Mapping[str, Corpus]) -> None:
    """Warns of held-out documents of a text that are in the training text of another."""
    pairs = find_shared_documents(corpora)
    if not pairs or not is_first_process():
        return
    first_pairs = ", ".join(
        f"{pair.count} of {pair.held_out} in {pair.trained}" for pair in pairs[:MAX_SHOWN]
    )
    log.warning(
        "Held-out documents in the training text of other domains bias the losses: %s%s",
        first_pairs,
        count_unnamed(len(pairs), "pair"),
    )


def log_near_duplicates(corpora: Mapping[str, Corpus]) -> None:
    """Warns of texts whose held-out documents are almost in their training text, those with the largest
    share first."""
    shares: dict[str, float] = {}
    descriptions: dict[str, str] = {}
    for name, corpus in corpora.items():
        facts = corpus.facts["near_duplicates"]
        if not facts["found"]:
            continue
        shares[name] = facts["found"] / facts["compared"]
        descriptions[name] = f"{facts['found']} of {facts['compared']} ({shares[name]:.1%}) of {name}"
        if facts["train_share"] < 1:
            descriptions[name] += f" in {facts['train_share']:.0%} of the training text"
    if not shares or not is_first_process():
        return

    names = sorted(shares, key=lambda name: -shares[name])
    log.warning(
        "Held-out documents with a near-duplicate in their domain's training text bias the losses: "
        "%s%s (of a sample; similarity .5 or more)",
        "; ".join(descriptions[name] for name in names[:MAX_SHOWN]),
        count_unnamed(len(names), "text"),
    )


def count_unnamed(count: int, noun: str) -> str:
    """How many more there are than a message names; empty if it names all.

    >>> count_unnamed(MAX_SHOWN + 1, "text"), count_unnamed(MAX_SHOWN, "text")
    (' and 1 other text', '')
    """
    return f" and {count_noun(count - MAX_SHOWN, f'other {noun}')}" if count > MAX_SHOWN else ""


@dataclass(frozen=True)
class SharedDocuments:
    """Held-out documents of a text that are in the training text of another."""

    held_out: str
    trained: str
    count: int


def find_shared_documents(corpora: Mapping[str, Corpus]) -> list[SharedDocuments]:
    """The pairs of texts of which one holds out documents that the other trains on, those with most first. A
    document that several texts hold out counts once, for the first of them."""
    names = list(corpora)
    held_out_keys = [corpora[name].keys("valid", "test") for name in names]
    train_keys = [corpora[name].keys("train") for name in names]

    # Each key once, and the text that holds it out first: otherwise a document that all texts hold out would
    # be counted for each of them.
    keys, first_positions = np.unique(np.concatenate(held_out_keys), return_index=True)
    text_of_position = np.repeat(np.arange(len(names)), [len(text_keys) for text_keys in held_out_keys])
    holders = text_of_position[first_positions]

    counts = np.zeros((len(names), len(names)), np.int64)  # held out by the row, trained on by the column
    for column, text_keys in enumerate(train_keys):
        # The position at which a key would be inserted has the key itself, or it is not held out.
        positions = np.minimum(np.searchsorted(keys, text_keys), len(keys) - 1)
        is_held_out = keys[positions] == text_keys
        np.add.at(counts, (holders[positions[is_held_out]], column), 1)
    np.fill_diagonal(counts, 0)  # within a text a key is in one split

    pairs = []
    for row, column in np.argwhere(counts):
        pairs.append(
            SharedDocuments(held_out=names[row], trained=names[column], count=int(counts[row, column]))
        )
    return sorted(pairs, key=lambda pair: -pair.count)
