"""Where the text of the domains comes from. A source lists its domains and reads one by documents."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpt.core.config import digest
from cpt.core.options import Options, option, prefix_errors, read_options
from cpt.core.rules import MAPPING, Rule, is_list, is_number, is_text, is_whole, one_of, or_null, whole

GENERAL = "general"
TEXT, EXAMPLES = "text", "examples"  # what the documents of a source may be
NONE, ISOLATED = "none", "isolated"  # how the samples of a batch may share rows
FORMAT = 2  # part of every stamp: raise it when the files that cpt.data.corpus makes of a text change


SHARE = Rule(lambda value: is_number(value) and 0 < value < 0.5, "shares above 0 and below 0.5")


def is_domain_lists(value: Any) -> bool:
    """Whether it is a list of orders, or orders by their numbers."""
    if isinstance(value, Mapping):
        return all(map(is_number, value)) and is_domain_lists(list(value.values()))
    return is_list(value, lambda each: is_list(each, is_text))


@dataclass(frozen=True, kw_only=True)
class Encoding(Options):
    """How examples become rows of tokens."""

    truncate: str = option(
        "what is cut of an example that is too long: the end or the middle of its text, or, as released code "
        "does, the end of the whole question",
        one_of("tail", "middle", "released"),
    )
    scored_turns: str = option("of a chat: which turns of the assistant are scored", one_of("all", "last"))


@dataclass(frozen=True, kw_only=True)
class HeldOut(Options):
    """What is held out where files are not split: shares of a domain's documents."""

    valid: float = option("share of the documents", SHARE)
    test: float = option("share of the documents", SHARE)
    seed: int = option("of the split", whole(0))
    most: int | None = option(
        "documents of either, at most; null: no bound",
        Rule(lambda value: value is None or is_whole(value, 1), "null, or 1 document or more"),
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class Source(Options, ABC):
    """Domains by name, each a stream of (split, document)."""

    orders: Any = option(
        "named orders of the domains; null: one, by name",
        or_null(Rule(is_domain_lists, "a list of orders like [[a,b],[b,a]], or {1: [a,b], 2: [b,a]}")),
    )
    held_out: Mapping[str, Any] = option("what is split off where files are not split", MAPPING)
    score_on: str = option("the split that the matrix is made of", one_of("valid", "test"))
    packing: str = option(
        "of examples: a row for each, or rows that several share, isolated from each other",
        one_of(NONE, ISOLATED),
        default=NONE,
    )

    def check_together(self) -> None:
        with prefix_errors("held_out"):
            read_options(HeldOut, self.held_out, place="")
        if self.isolated and self.form("") == TEXT:
            raise ValueError(
                "packing=isolated is for domains of examples, and rows of raw text are full; allowed: none"
            )

    @property
    def encoding(self) -> Encoding | None:
        """How the documents of the domains become rows, where they are examples; None where they are text."""
        return None

    @property
    def chats(self) -> bool:
        """Whether the documents of the domains are chats."""
        return False

    @property
    def class_limit(self) -> int | None:
        """Training examples of each answer, at most; None for all."""
        return None

    def form(self, name: str) -> str:
        """What the documents of a name are: TEXT or EXAMPLES. General text is text."""
        return TEXT if self.encoding is None or name == GENERAL else EXAMPLES

    @property
    def isolated(self) -> bool:
        """Whether samples share rows."""
        return self.packing == ISOLATED

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The domains that can be learned."""

    def check(self, order: Sequence[str]) -> None:  # noqa: B027  (most sources have nothing to check)
        """Raises ValueError for text of these domains, or general text, that cannot be read as it is meant,
        as far as that is known at once."""

    @abstractmethod
    def read(self, name: str) -> Iterator[tuple[str, str]]:
        """(split, document) of a domain or of `general`; split is train, valid or test."""

    @abstractmethod
    def fingerprint(self, name: str) -> Any:
        """What decides the result of `read`, cheaply: names, sizes, times."""


def stamp_of(source: Source, name: str) -> str:
    """What a domain's text is known by without reading it: sizes, times, and how it is split."""
    return f"{name}-{digest([FORMAT, source.fingerprint(name), dict(source.held_out)])}"
