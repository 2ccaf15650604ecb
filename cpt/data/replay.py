"""Replay: text of earlier domains, general text, and further sources, in each batch of a domain.

Which row is drawn when is a function of the seed, the stage and the number of the draw, so nothing is stored.
Replayed samples displace new ones (Ibrahim et al., TMLR 2024, arXiv 2403.08763) or are added to them."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import count_noun
from cpt.core.randomness import key, permute, sample_keys
from cpt.core.schema import (
    Allowed,
    BelowOne,
    OpenShare,
    Options,
    Positive,
    Steps,
    config,
    option,
    read_options,
)
from cpt.data.options import Domain
from cpt.data.sources.base import GENERAL
from cpt.data.sources.mixed import MixedReader, MixedSource

if TYPE_CHECKING:  # a config is checked without torch
    from pathlib import Path

    import torch

    from cpt.data.packing import Packed

# What a sample of a batch is of, if not of a source by its name: of the stage's own text, of past domains, or
# of the general text. No source may have these names.
NEW = "new"
PAST = "past"
SOURCE_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")  # a part of the names of curves
SHARE_DIGITS = 9  # decimals to which a share of several sources is rounded, so that it is exact from there on


@dataclass(frozen=True)
class SourceShare:
    """The share of a batch that a source has at the beginning and the end of a stage; linear in between."""

    start: Fraction
    end: Fraction

    def count_draws(self, samples: int, *, stage_samples: int) -> int:
        """Draws in the first `samples` of a stage of `stage_samples`: their number times their mean share,
        which is that in their middle. Exact, since a float would drift."""
        mean_share = self.start + (self.end - self.start) * samples / (2 * stage_samples)
        return math.floor(mean_share * samples)


@config
class ReplayConfig(Options):
    """How much is replayed, and from where; a class of your own is chosen by `replay._target_`."""

    past_ratio: BelowOne = option("share of each batch from past domains, which take turns")
    general_ratio: BelowOne = option("share of the batch that is general text")
    mode: Literal["replace", "append"] = option("whether replayed samples replace new ones or are added")

    buffer_size: ClassVar[int | None] = None  # samples that are kept of all past domains together
    is_generated: ClassVar[bool] = False  # whether what is replayed depends on the model before the stage
    sources: ClassVar[Mapping[str, Any] | None] = None  # further text and chats by name, see MixedSource
    sources_ratio: ClassVar[float | None] = None  # share of the sources without a ratio
    sources_temperature: ClassVar[float] = 1  # of how these share it by their sizes

    def __post_init__(self) -> None:
        self.check_sources()
        if to_fraction(self.past_ratio) + to_fraction(self.general_ratio) >= 1:
            raise ValueError(
                f"past_ratio={self.past_ratio} with general_ratio={self.general_ratio} is invalid. "
                "Allowed: shares whose sum is below 1"
            )
        if self.buffer_size is not None and not self.past_ratio:
            raise InvalidOptionError(
                "buffer_size",
                self.buffer_size,
                reason=f"past_ratio={self.past_ratio} replays nothing",
                allowed="past_ratio above 0, or null",
            )

    @property
    def is_appended(self) -> bool:
        """Whether replayed samples are added to the new ones of a batch, and displace none."""
        return self.mode == "append"

    @cached_property
    def mixed_sources(self) -> dict[str, MixedSource]:
        """The sources by name. Raises ValueError for a name or an option that is not allowed."""
        sources = {}
        for name, entry in (self.sources or {}).items():
            if not SOURCE_NAME.fullmatch(str(name)) or name in (NEW, PAST, GENERAL):
                raise InvalidOptionError(
                    "sources",
                    name,
                    reason="it is no name of a source",
                    allowed=f"up to 40 letters, digits, - and _, but for {NEW}, {PAST}, {GENERAL}",
                )
            if not isinstance(entry, Mapping):
                raise InvalidOptionError(f"sources.{name}", entry, allowed="{path: …, ratio: …}")
            sources[name] = read_options(MixedSource, entry, section=f"sources.{name}")
        return sources

    @property
    def readers(self) -> dict[str, MixedReader]:
        """What reads the sources, by name."""
        return {name: MixedReader(name, source) for name, source in self.mixed_sources.items()}

    @property
    def source_share(self) -> Fraction:
        """The share of all sources together, at the beginning or the end of a stage, where it is larger."""
        start = to_fraction(self.sources_ratio or 0)
        end = start
        for source in self.mixed_sources.values():
            if source.ratio is not None:
                start += to_fraction(source.ratio)
                end += to_fraction(source.ratio if source.end_ratio is None else source.end_ratio)
        return max(start, end)

    def check_sources(self) -> None:
        """Raises ValueError for sources without a share, for options that have no effect, and for shares that
        leave nothing to new text."""
        without_ratio = [name for name, source in self.mixed_sources.items() if source.ratio is None]
        if without_ratio and self.sources_ratio is None:
            raise ValueError(
                f"sources.{without_ratio[0]}.ratio is missing. Allowed: a share, or sources_ratio=SHARE for "
                "all sources without one, by their sizes"
            )
        if not without_ratio:
            for name, neutral_value in (("sources_ratio", None), ("sources_temperature", 1)):
                value = getattr(self, name)
                if value != neutral_value:
                    reason = "every source has a ratio" if self.sources else "there are no sources"
                    raise InvalidOptionError(name, value, reason=reason, allowed=format_value(neutral_value))

        total = to_fraction(self.past_ratio) + to_fraction(self.general_ratio) + self.source_share
        if self.mixed_sources and total >= 1:
            raise InvalidOptionError(
                "sources",
                ", ".join(self.mixed_sources),
                context=f"with past_ratio={self.past_ratio} and general_ratio={self.general_ratio}",
                reason=f"all shares add up to {float(total):g}",
                allowed="shares whose sum is below 1",
            )

    def describe_sources(self) -> str:
        """The share of all sources, for a message; empty without any."""
        return f" and replay.sources of {float(self.source_share):g}" if self.mixed_sources else ""

    def find_source_shares(self, tokens: Mapping[str, int]) -> dict[str, SourceShare]:
        """The shares of sources by name, of `tokens` of training text each. Those without a ratio share
        `sources_ratio` in proportion to tokens^(1 / temperature): with temperature 1 by their sizes, the more
        alike the higher it is (temperature-based sampling: Arivazhagan et al., arXiv 1907.05019)."""
        open_names = [name for name, source in self.mixed_sources.items() if source.ratio is None]
        # Relative to the largest: a number of tokens to a large power is no float.
        largest = max((tokens[name] for name in open_names), default=1)
        powers = {name: (tokens[name] / largest) ** (1 / self.sources_temperature) for name in open_names}
        shares = {}
        for name, source in self.mixed_sources.items():
            if source.ratio is None:
                part = powers[name] / sum(powers.values())
                ratio = round(part * float(self.sources_ratio or 0), SHARE_DIGITS)
            else:
                ratio = source.ratio
            end_ratio = ratio if source.end_ratio is None else source.end_ratio
            shares[name] = SourceShare(to_fraction(ratio), to_fraction(end_ratio))
        return shares

    def check(self, *, domains: int, general: bool, batch_size: int) -> None:
        """Raises ValueError for a memory below one sample of each past domain, for missing general
        text, and for shares that leave no new sample in some batch."""
        if self.buffer_size is not None and self.buffer_size < domains:
            raise InvalidOptionError(
                "replay.buffer_size",
                self.buffer_size,
                context=f"for {count_noun(domains, 'past domain')}",
                allowed=f"{domains} or more, at least one sample of each domain, or null",
            )
        if self.general_ratio and not general:
            raise InvalidOptionError(
                "replay.general_ratio",
                self.general_ratio,
                reason="there is no general text to train on",
                allowed="0",
            )

        # Counts of all kinds may round up in the same step: each takes almost a sample more than its share.
        num_kinds = len(self.mixed_sources)
        if self.past_ratio:
            num_kinds += 1
        if self.general_ratio:
            num_kinds += 1
        num_new = batch_size * (1 - to_fraction(self.past_ratio) - to_fraction(self.general_ratio))
        num_new -= batch_size * self.source_share
        if num_kinds > 1 and not self.is_appended and num_new < num_kinds - 1:
            raise ValueError(
                f"replay.past_ratio={self.past_ratio} with replay.general_ratio={self.general_ratio}"
                f"{self.describe_sources()} is invalid: {float(num_new):g} new samples remain in a batch of "
                f"trainer.batch_size={batch_size}. Allowed: {num_kinds - 1} or more, or mode=append"
            )

    def check_conflicts(
        self,
        *,
        has_examples: bool,
        has_chats: bool,
        max_seq_length: int,
        batch_size: int,
        is_sharded: bool,
    ) -> None:
        """Raises ValueError for a plan that this replay does not support; here it supports all. Called before
        torch is imported."""

    def check_objective(self, objective: str, *, model: str, examples: bool) -> None:
        """Raises ValueError for a model whose objective does not go with this replay. Here: none."""

    def open_source(
        self, folder: Path, *, module: Any, data: Any, corpora: Any, base: Any, seed: int
    ) -> ReplaySource | None:
        """What provides the replayed text, with a `folder` of its own in the run's; None: training text."""
        return None

    def pools(
        self, past: Mapping[str, Packed], general: Mapping[str, Packed], *, stage: str, seed: int
    ) -> list[ReplayPool]:
        """What a stage draws from: the past domains' texts by name, and the general text."""
        pools = []
        if past and self.past_ratio:
            past_pool = ReplayPool(
                past,
                share=to_fraction(self.past_ratio),
                is_appended=self.is_appended,
                buffer_size=self.buffer_size,
                seed=seed,
                stream_name=(stage, "past"),
            )
            pools.append(past_pool)
        if general and self.general_ratio:
            general_pool = ReplayPool(
                general,
                share=to_fraction(self.general_ratio),
                is_appended=self.is_appended,
                buffer_size=None,
                seed=seed,
                stream_name=(stage, "general"),
            )
            pools.append(general_pool)
        return pools


@config
class Replay(ReplayConfig):
    """Training text of past domains, and general text."""

    buffer_size: Steps | None = option(  # type: ignore[misc]  # an option here, of other replay a constant
        "stored samples of all past domains together; null: all their text"
    )
    sources: Annotated[  # type: ignore[misc]
        Mapping[str, Any] | None, Allowed("null, or {NAME: {path: …, ratio: …}}")
    ] = option("further text and chats that are mixed into every stage, by name", default=None)
    sources_ratio: OpenShare | None = option(  # type: ignore[misc]
        "share of the batch for the sources without a ratio, by their sizes", default=None
    )
    sources_temperature: Positive = option(  # type: ignore[misc]
        "temperature of this sampling: in proportion to tokens^(1 / temperature)", default=1
    )


class ReplaySource(ABC):
    """Provides replayed texts in place of training text, e.g. texts that the model writes."""

    texts: Mapping[str, Packed]  # of the stage that was prepared last, by name

    @abstractmethod
    def prepare(self, number: int, stage: Domain, device: torch.device) -> None:
        """Makes `texts` for a stage (numbered from 1) with the module as it is after the stages before, or
        loads what was made for it before. Every process calls it before the stage, in a resumed run too."""

    def extra_pools(self, stage: Domain) -> Sequence[ReplayPool]:
        """What the batches of a stage draw from besides past and general text. Here: nothing."""
        return ()


class Samples(NamedTuple):
    """Rows of several texts, in the order in which they are trained on."""

    text_indices: np.ndarray  # [B] int64: the text of each sample among those of its stream or pool
    rows: np.ndarray  # [B] int64: its row within that text
    keys: np.ndarray  # [B] uint64: what is drawn for a sample, such as its mask, is a function of its key

    def select(self, chosen: np.ndarray | slice) -> Samples:
        return Samples(self.text_indices[chosen], self.rows[chosen], self.keys[chosen])

    @classmethod
    def join(cls, parts: Sequence[Samples]) -> Samples:
        """The samples of several parts, one part after another."""
        return cls(
            np.concatenate([part.text_indices for part in parts]),
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.keys for part in parts]),
        )


@dataclass(frozen=True)
class ReplayPool:
    """Texts that a stage draws a `share` of its samples from.

    Each turn draws a row of every text in a random order, epoch by epoch from a shuffle of what is stored of
    it. A buffer of m samples for t texts stores the first m div t samples of a fixed shuffle of each text."""

    texts: Mapping[str, Packed]
    _: KW_ONLY
    share: Fraction
    is_appended: bool  # to the new samples of a batch; else it displaces some of them
    buffer_size: int | None  # samples of all texts together; None: all rows
    seed: int
    # What its random numbers are named by: the stage, or `replay.sources` of a source, and `label`.
    stream_name: tuple[str, str]

    loss_weight: ClassVar[float] = 1.0  # factor of the loss on its tokens

    @property
    def label(self) -> str:
        """The kind of replay: past, general, recovery or the name of a source."""
        return self.stream_name[1]

    def count_draws(self, samples: int) -> int:
        """Draws in the steps of a number of samples; exact, since a float would drift."""
        return samples * self.share.numerator // self.share.denominator

    @cached_property
    def num_rows(self) -> np.ndarray:
        """Rows of each text, [t]."""
        return np.array([len(text) for text in self.texts.values()])

    @cached_property
    def buffer_streams(self) -> np.ndarray:
        """Keys of shuffles that decide which rows of each text are stored, [t]; the same for all stages."""
        return np.array([key(self.seed, "memory", name) for name in self.texts], np.uint64)

    @cached_property
    def order_streams(self) -> np.ndarray:
        """Keys of the orders in which the stored rows of each text are drawn, [t]."""
        return np.array([key(self.seed, *self.stream_name, "rows", name) for name in self.texts], np.uint64)

    def locate(self, draws: np.ndarray) -> Samples:
        """The samples of the draws with these numbers [B], from 0: a function of the numbers and the seed, so
        that any batch is found without the batches before it."""
        num_texts = len(self.texts)
        turns, positions_in_turn = np.divmod(draws, num_texts)
        turn_streams = sample_keys(key(self.seed, *self.stream_name, "turns"), turns)
        text_indices = permute(positions_in_turn, num_texts, stream=turn_streams)

        num_rows = self.num_rows[text_indices]
        num_stored = num_rows
        if self.buffer_size is not None:
            num_stored = np.minimum(num_rows, int(self.buffer_size) // num_texts)

        # A text gives one row in a turn, so that its epochs are counted in turns. An epoch shuffles the
        # positions of what is stored; the shuffle of the buffer says which row is stored at a position.
        epochs, positions = np.divmod(turns, num_stored)
        epoch_streams = sample_keys(self.order_streams[text_indices], epochs)
        stored_positions = permute(positions, num_stored, stream=epoch_streams)
        rows = permute(stored_positions, num_rows, stream=self.buffer_streams[text_indices])
        keys = sample_keys(key(self.seed, *self.stream_name, "masks"), draws)
        return Samples(text_indices, rows, keys)


@dataclass(frozen=True, kw_only=True)
class SourcePool(ReplayPool):
    """A source of `replay.sources` in one stage. Its draws continue where the earlier stages ended, so that
    its epochs and their limit are of the whole run."""

    source_share: SourceShare
    stage_samples: int  # of the stage, with those that replay displaces
    wanted_before: int  # draws in the stages before, without the limit
    max_draws: int | None  # in the whole run; None: no limit
    loss_weight: float = 1.0  # type: ignore[misc]  # an option here, of other replay a constant

    def limit(self, draws: int) -> int:
        """Draws since the beginning of the run, at most as many as are allowed."""
        return draws if self.max_draws is None else min(draws, self.max_draws)

    def count_draws(self, samples: int) -> int:
        draws = self.source_share.count_draws(samples, stage_samples=self.stage_samples)
        return self.limit(self.wanted_before + draws) - self.limit(self.wanted_before)

    def locate(self, draws: np.ndarray) -> Samples:
        return super().locate(draws + self.limit(self.wanted_before))


def to_fraction(share: float) -> Fraction:
    """The share as it is written: 0.1 is a tenth."""
    return Fraction(str(share))


NO_REPLAY = Replay(past_ratio=0.0, general_ratio=0.0, buffer_size=None, mode="replace")
