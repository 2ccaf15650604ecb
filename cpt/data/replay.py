"""Replay: text of earlier domains, and general text, in each batch of a domain.

Which row is drawn when is a function of the seed, the stage and the number of the draw, so nothing is stored.
Replayed samples displace new ones (Ibrahim et al., TMLR 2024, arXiv 2403.08763) or are added to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from cpt.core.randomness import key, sample_keys, shuffle
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
    generates: ClassVar[bool] = False  # whether what is replayed depends on the model before the stage

    def __post_init__(self) -> None:
        if exact(self.past_ratio) + exact(self.general_ratio) >= 1:
            given = f"past_ratio={self.past_ratio} with general_ratio={self.general_ratio}"
            raise ValueError(f"{given} is invalid. Allowed: shares whose sum is below 1")
        if self.buffer_size is not None and not self.past_ratio:
            given = f"buffer_size={self.buffer_size} is invalid: past_ratio={self.past_ratio} replays nothing"
            raise ValueError(f"{given}. Allowed: past_ratio above 0, or null")

    @property
    def adds(self) -> bool:
        return self.mode == "append"

    def check(self, *, domains: int, general: bool, batch_size: int) -> None:
        """Raises ValueError for a memory below one sample of each past domain, for missing general
        text, and for shares that leave no new sample in some batch."""
        if self.buffer_size is not None and self.buffer_size < domains:
            given = f"replay.buffer_size={self.buffer_size} is invalid for {domains} past domains"
            raise ValueError(f"{given}. Allowed: a sample or more for each, or null")
        if self.general_ratio and not general:
            why = "there is no general text to train on"
            raise ValueError(f"replay.general_ratio={self.general_ratio} is invalid: {why}. Allowed: 0")
        # Counts of two kinds may round up in the same step.
        new = batch_size * (1 - exact(self.past_ratio) - exact(self.general_ratio))
        if self.past_ratio and self.general_ratio and not self.adds and new < 1:
            given = f"replay.past_ratio={self.past_ratio} with replay.general_ratio={self.general_ratio}"
            why = f"{float(new):g} new samples remain in a batch of trainer.batch_size={batch_size}"
            raise ValueError(f"{given} is invalid: {why}. Allowed: 1 or more, or mode=append")

    def conflicts(
        self, *, examples: bool, chats: bool, length: int, batch_size: int, sharded: bool
    ) -> Iterator[str]:
        """What of a plan does not go with this replay, as messages, before torch is imported."""
        return iter(())

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
        kinds: list[Any] = [("past", self.past_ratio, past, self.buffer_size)]
        kinds.append(("general", self.general_ratio, general, None))
        how: dict[str, Any] = {"adds": self.adds, "seed": seed}
        return [
            ReplayPool(texts, share=exact(share), memory=memory, place=(stage, kind), **how)
            for kind, share, texts, memory in kinds
            if texts and share
        ]


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


@dataclass(frozen=True)
class ReplayPool:
    """Texts that a stage draws a `share` of its samples from; `place` names the stage and the kind. Each
    turn draws a row of every text in a random order, epoch by epoch from a shuffle of what is kept of it: of
    t texts in a memory of m samples the first m div t of a fixed shuffle."""

    texts: Mapping[str, Packed]
    _: KW_ONLY
    share: Fraction
    adds: bool
    memory: int | None
    seed: int
    place: tuple[str, str]

    def count(self, samples: int) -> int:
        """Draws in the steps of a number of samples; exact, since a float would drift."""
        return samples * self.share.numerator // self.share.denominator

    @cached_property
    def sizes(self) -> np.ndarray:
        """Rows of each text, [t]."""
        return np.array([len(text) for text in self.texts.values()])

    @cached_property
    def shuffles(self) -> np.ndarray:
        """Keys of what is kept of each text, the same in all stages, and of the order it comes in, [2, t]."""
        kept = [key(self.seed, "memory", name) for name in self.texts]
        return np.array([kept, [key(self.seed, *self.place, "rows", name) for name in self.texts]], np.uint64)

    def locate(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Index of the text, row and key of the draws with these numbers, each [B]."""
        turns, seats = np.divmod(draws, len(self.texts))
        order = sample_keys(key(self.seed, *self.place, "turns"), turns)
        parts = shuffle(seats, len(self.texts), stream=order)
        (memory, rows), kept = self.shuffles[:, parts], self.sizes[parts]
        if self.memory is not None:
            kept = np.minimum(kept, int(self.memory) // len(self.texts))
        epochs, places = np.divmod(turns, kept)
        items = shuffle(places, kept, stream=sample_keys(rows, epochs))
        rows = shuffle(items, self.sizes[parts], stream=memory)
        return parts, rows, sample_keys(key(self.seed, *self.place, "masks"), draws)


def exact(share: float) -> Fraction:
    """The share as it is written: 0.1 is a tenth."""
    return Fraction(str(share))


NO_REPLAY = Replay(past_ratio=0.0, general_ratio=0.0, buffer_size=None, mode="replace")
