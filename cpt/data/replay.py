"""Replay: text of earlier domains, and general text, in each batch of a domain.

Which row is drawn when is a function of the seed, the stage and the number of the draw, so nothing is stored.
Replayed samples displace new ones (Ibrahim et al., TMLR 2024, arXiv 2403.08763) or are added to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from cpt.core.exceptions import InvalidOptionError
from cpt.core.randomness import key, permute, sample_keys
from cpt.core.schema import BelowOne, Options, Steps, config, option
from cpt.data.options import Domain

if TYPE_CHECKING:  # a config is checked without torch
    from pathlib import Path

    import torch

    from cpt.data.packing import Packed


@config
class ReplayConfig(Options):
    """How much is replayed, and from where; a class of your own is chosen by `replay._target_`."""

    past_ratio: BelowOne = option("share of the batch that is text of past domains, in turn")
    general_ratio: BelowOne = option("share of the batch that is general text")
    mode: Literal["replace", "append"] = option("whether replayed samples replace new ones or are added")

    buffer_size: ClassVar[int | None] = None  # samples that are kept of all past domains together
    is_generated: ClassVar[bool] = False  # whether what is replayed depends on the model before the stage

    def __post_init__(self) -> None:
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

    def check(self, *, domains: int, general: bool, batch_size: int) -> None:
        """Raises ValueError for a memory below one sample of each past domain, for missing general
        text, and for shares that leave no new sample in some batch."""
        if self.buffer_size is not None and self.buffer_size < domains:
            raise InvalidOptionError(
                "replay.buffer_size",
                self.buffer_size,
                context=f"for {domains} past domains",
                allowed="a sample or more for each, or null",
            )
        if self.general_ratio and not general:
            raise InvalidOptionError(
                "replay.general_ratio",
                self.general_ratio,
                reason="there is no general text to train on",
                allowed="0",
            )

        # Counts of two kinds may round up in the same step.
        num_new = batch_size * (1 - to_fraction(self.past_ratio) - to_fraction(self.general_ratio))
        if self.past_ratio and self.general_ratio and not self.is_appended and num_new < 1:
            raise ValueError(
                f"replay.past_ratio={self.past_ratio} with replay.general_ratio={self.general_ratio} is "
                f"invalid: {float(num_new):g} new samples remain in a batch of "
                f"trainer.batch_size={batch_size}. Allowed: 1 or more, or mode=append"
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
    it: of t texts in a buffer of m samples the first m div t of a fixed shuffle."""

    texts: Mapping[str, Packed]
    _: KW_ONLY
    share: Fraction
    is_appended: bool  # to the new samples of a batch; else it displaces some of them
    buffer_size: int | None  # samples of all texts together; None: all rows
    seed: int
    stream_name: tuple[str, str]  # stage and kind of replay: what its random numbers are named by

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
        """The samples of the draws with these numbers [B]."""
        num_texts = len(self.texts)
        turns, positions_in_turn = np.divmod(draws, num_texts)
        turn_streams = sample_keys(key(self.seed, *self.stream_name, "turns"), turns)
        text_indices = permute(positions_in_turn, num_texts, stream=turn_streams)

        num_rows = self.num_rows[text_indices]
        num_stored = num_rows
        if self.buffer_size is not None:
            num_stored = np.minimum(num_rows, int(self.buffer_size) // num_texts)

        # A text gives one row in a turn, so that its epochs are counted in turns.
        epochs, positions = np.divmod(turns, num_stored)
        epoch_streams = sample_keys(self.order_streams[text_indices], epochs)
        stored_positions = permute(positions, num_stored, stream=epoch_streams)
        rows = permute(stored_positions, num_rows, stream=self.buffer_streams[text_indices])
        keys = sample_keys(key(self.seed, *self.stream_name, "masks"), draws)
        return Samples(text_indices, rows, keys)


def to_fraction(share: float) -> Fraction:
    """The share as it is written: 0.1 is a tenth."""
    return Fraction(str(share))


NO_REPLAY = Replay(past_ratio=0.0, general_ratio=0.0, buffer_size=None, mode="replace")
