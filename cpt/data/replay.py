"""Earlier text mixed into a domain's batches: of the domains before it, and the general text.

Which row is drawn when is a function of the seed, the stage and the number of the draw, so nothing is stored:
Ibrahim et al., TMLR 2024 (arXiv 2403.08763), where replayed samples displace new ones, or beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from cpt.core.options import Options, option
from cpt.core.randomness import key, sample_keys, shuffle
from cpt.core.rules import TEXT, YES_NO, Rule, is_steps, number, or_null, whole

if TYPE_CHECKING:  # a config is checked without torch
    from cpt.data.packing import Packed


SHARE = number("0 or more and below 1")
SIGN = "An example of {domain}:"


@dataclass(frozen=True, kw_only=True)
class Mixture(Options):
    """How much is mixed in beside new text: instead of new samples or, with `adds`, on top of them."""

    past: float = option("share of the batch for the past domains together, in turn", SHARE)
    general: float = option("share of the batch for the general text", SHARE)
    adds: bool = option("replayed samples make the batch larger; false: they displace new ones", YES_NO)

    generates: ClassVar[bool] = False  # whether the model writes what is mixed in

    def check_together(self) -> None:
        if sum(map(exact, (self.past, self.general))) >= 1:
            raise ValueError(
                f"past={self.past} and general={self.general}; allowed: shares whose sum is below 1"
            )

    def check(self, *, domains: int, general: bool, batch_size: int) -> None:
        """Raises ValueError if it asks for more than there is: past domains that do not fit into the memory,
        general text, or more of a batch than can be displaced."""
        if self.general and not general:
            raise ValueError(
                f"replay.general={self.general}, but there is no general text to train on; allowed: 0"
            )
        # Counts of two kinds may round up in the same step.
        new = batch_size * (1 - exact(self.past) - exact(self.general))
        if self.past and self.general and not self.adds and new < 1:
            raise ValueError(
                f"replay.past={self.past} and replay.general={self.general}, which leaves {float(new):g} new "
                f"samples in a batch of trainer.batch_size={batch_size}; allowed: 1 or more, or adds=true"
            )

    @property
    def limit(self) -> int | None:
        """Samples that can be drawn of all past domains together; None: all there are."""
        return None

    def on_text(self) -> Replay:
        """The same shares of all text there is."""
        return Replay(past=self.past, general=self.general, adds=self.adds, memory=None)

    def pools(
        self, past: Mapping[str, Packed], general: Mapping[str, Packed], *, stage: str, seed: int
    ) -> list[Pool]:
        """What a stage draws from: the texts before it, by name, and the general text."""
        kinds = [("past", self.past, past, self.limit), ("general", self.general, general, None)]
        return [
            Pool(texts, share=exact(share), adds=self.adds, memory=memory, seed=seed, place=(stage, kind))
            for kind, share, texts, memory in kinds
            if texts
        ]

    def memory_pool(self, past: Mapping[str, Packed], *, stage: str, seed: int) -> Pool:
        """What a stage draws from where it goes over the texts before it alone: the same memory."""
        place = (stage, "recovery")
        return Pool(past, share=Fraction(1), adds=False, memory=self.limit, seed=seed, place=place)


@dataclass(frozen=True, kw_only=True)
class Replay(Mixture):
    """Text that was learned, or general text, as it is."""

    memory: int | None = option(
        "samples that are kept of all past domains together; null: all their training text",
        or_null(Rule(is_steps, "a whole number of samples, 1 or more")),
    )

    def check_together(self) -> None:
        super().check_together()
        if self.memory is not None and not self.past:
            raise ValueError(f"memory={self.memory} with past={self.past}; allowed: past above 0, or null")

    def check(self, *, domains: int, general: bool, batch_size: int) -> None:
        if self.memory is not None and self.memory < domains:
            raise ValueError(
                f"replay.memory={self.memory} for {domains} past domains; "
                "allowed: a sample or more for each, or null"
            )
        super().check(domains=domains, general=general, batch_size=batch_size)

    @property
    def limit(self) -> int | None:
        return self.memory


@dataclass(frozen=True, kw_only=True)
class Generated(Mixture):
    """Text that the model writes before a stage, of each past domain, in place of that domain's own."""

    generates: ClassVar[bool] = True

    tokens: int | None = option(
        "tokens that are written of each past domain before a stage, at most as many as it replays; null: so "
        "many",
        or_null(Rule(is_steps, "a whole number of tokens, 1 or more")),
    )
    drop: float = option(
        "share of the tokens written that is left out again: texts of the highest perplexity to the model "
        "that wrote them",
        SHARE,
    )
    prefix: int = option("tokens of real text that each text goes on from; 0: none is kept", whole(0))
    starts: int = option("such beginnings that are kept of a domain, from its probe", whole(1))
    prompt: str | None = option(
        "text that each is written behind, which is not replayed; {domain} stands for the domain's name",
        or_null(TEXT),
    )
    forms: float = option(
        "of domains of examples: share of the batch in which the domain's own are learned as a whole, with "
        "their questions, so that the model can write some later",
        SHARE,
    )
    temperature: float = option("of sampling: logits are divided by it", number("above 0"))
    top_p: float = option(
        "sampled are the likeliest tokens whose probability comes to it", number("above 0, at most 1")
    )
    batch_size: int = option("texts that a process writes at once", whole(1))

    def check_examples(self, *, batch_size: int) -> None:
        """Raises ValueError for what does not go with domains of examples."""
        if self.prompt is not None and "{domain}" not in self.prompt:
            raise ValueError(
                f"replay.prompt={self.prompt} does not say of which domain an example is to be written; "
                "allowed: null, or a text with {domain}"
            )
        if self.general:
            raise ValueError(
                f"replay.general={self.general} with replay=generated and domains of examples, which are no "
                "text; allowed: 0"
            )
        new = batch_size * (1 - exact(self.past) - exact(self.forms))
        if new < 1 and (not self.adds or new <= 0):
            raise ValueError(
                f"replay.past={self.past} and replay.forms={self.forms}, which leaves {float(new):g} new "
                f"samples in a batch of trainer.batch_size={batch_size}; allowed: 1 or more"
            )

    def sign(self, domain: str) -> str:
        """What examples of a domain are written behind."""
        return (self.prompt or SIGN).replace("{domain}", domain)

    def form_pool(self, texts: Mapping[str, Packed], *, stage: str, seed: int) -> Pool:
        """What a stage learns to write."""
        place = (stage, "forms")
        return Pool(texts, share=exact(self.forms), adds=self.adds, memory=None, seed=seed, place=place)

    def check_length(self, length: int) -> None:
        """Raises ValueError for beginnings that leave nothing to write in rows of `length` tokens."""
        if self.prefix >= length:
            raise ValueError(
                f"replay.prefix={self.prefix}, which leaves nothing to write of model.length={length}; "
                "allowed: fewer"
            )

    def budget(self, replayed: int) -> int:
        """Tokens that are kept of a text of which so many are replayed."""
        return replayed if self.tokens is None else min(int(self.tokens), replayed)

    def wanted(self, budget: int) -> int:
        """Tokens that have to be written so that so many can be kept."""
        return math.ceil(budget / (1 - exact(self.drop)))


@dataclass(frozen=True)
class Pool:
    """Texts that a stage draws from in turn, a `share` of its samples; `place` names the stage and the kind.

    Each turn draws a row of every text, in an order of its own. The rows of a text come in a shuffle of what
    is kept of it, epoch by epoch: of t texts in a memory of m samples the first m div t of a fixed shuffle,
    so that what is kept later was kept before."""

    texts: Mapping[str, Packed]
    _: KW_ONLY
    share: Fraction
    adds: bool
    memory: int | None
    seed: int
    place: tuple[str, str]

    def count(self, samples: int) -> int:
        """How many are drawn in the steps of so many samples; exact, since a float would drift."""
        return samples * self.share.numerator // self.share.denominator

    @cached_property
    def sizes(self) -> np.ndarray:
        """Rows of each text, [t]."""
        return np.array([len(text) for text in self.texts.values()])

    @cached_property
    def kept(self) -> np.ndarray:
        """Rows of each text that can be drawn, [t]."""
        if self.memory is None:
            return self.sizes
        return np.minimum(self.sizes, int(self.memory) // len(self.texts))

    @cached_property
    def shuffles(self) -> np.ndarray:
        """Keys of what is kept of each text, the same in all stages, and of the order it comes in, [2, t]."""
        kept = [key(self.seed, "memory", name) for name in self.texts]
        return np.array([kept, [self.stream("rows", name) for name in self.texts]], np.uint64)

    def locate(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Place of the text, row and key of the samples with these numbers, each [B]."""
        turns, seats = np.divmod(draws, len(self.texts))
        parts = shuffle(seats, len(self.texts), stream=sample_keys(self.stream("turns"), turns))
        (memory, order), kept = self.shuffles[:, parts], self.kept[parts]
        epochs, places = np.divmod(turns, kept)
        items = shuffle(places, kept, stream=sample_keys(order, epochs))
        rows = shuffle(items, self.sizes[parts], stream=memory)
        return parts, rows, sample_keys(self.stream("masks"), draws)

    def stream(self, *purpose: str) -> int:
        return key(self.seed, *self.place, *purpose)


def exact(share: float) -> Fraction:
    """The share as it is written: 0.1 is a tenth."""
    return Fraction(str(share))


NOTHING = Replay(past=0.0, general=0.0, memory=None, adds=False)
