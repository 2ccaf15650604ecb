"""Where the text of the domains comes from: a source lists its domains and reads one by documents, of which
an example of a supervised task is one."""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

from annotated_types import Gt, Lt, MinLen, Predicate

from cpt.core.config import digest
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import count_noun
from cpt.core.schema import (
    Allowed,
    Count,
    Natural,
    Number,
    Options,
    Text,
    TextList,
    config,
    fits,
    is_pattern,
    option,
    read_options,
)
from cpt.data.sources.examples import BadExamples
from cpt.data.sources.m2d2 import parse_name

log = logging.getLogger(__name__)
GENERAL = "general"
TEXT, EXAMPLES = "text", "examples"  # what the documents of a source may be
NONE, CONCAT, DOCUMENT_MASK = "none", "concat", "document_mask"  # see Source.packing
AUTO, SPLIT, PARSE = "auto", "split", "parse"  # see Source.separator, special_tokens and bos_in_rows
PACKINGS = {TEXT: (CONCAT, DOCUMENT_MASK, NONE), EXAMPLES: (NONE, DOCUMENT_MASK)}  # the default first
FORMAT = 7  # part of every stamp: raise it when the files that cpt.data.corpus makes of a text change
MAX_NAME_BYTES = 200  # names are part of file names


def parse_expression(pattern: str) -> str | None:
    """The regular expression between slashes; None for a pattern of file names."""
    return pattern[1:-1] if len(pattern) > 2 and pattern[0] == pattern[-1] == "/" else None


def is_domain_lists(value: Any) -> bool:
    """Whether it is a list of orders, or orders by their numbers."""
    if isinstance(value, Mapping):
        return all(fits(number, Number) for number in value) and is_domain_lists(list(value.values()))
    return isinstance(value, list | tuple) and all(fits(order, TextList) for order in value)


NamePattern = Annotated[Text, Predicate(lambda text: is_pattern(parse_expression(text) or ""))]
NamePatterns = Annotated[
    NamePattern | Annotated[tuple[NamePattern, ...], MinLen(1)] | None,
    Allowed("null, names or patterns like [cs.*,Art], or a regular expression between slashes"),
]


@config
class Encoding(Options):
    """How examples become rows of tokens."""

    truncate: Literal["tail", "middle", "released"] = option("what is cut from a long example")
    scored_turns: Literal["all", "last"] = option("assistant's turns that contribute to the loss of a chat")
    on_bad_example: Literal["stop", "skip"] = option("what to do with an unusable example", default="stop")
    date: str | None = option("YYYY-MM-DD that chat templates print; null: they print none", default=None)


@dataclass(frozen=True)
class TextOptions:
    """How raw text becomes ids: the options of that name of a Source."""

    separator: str = AUTO
    special_tokens: str = SPLIT
    bos_in_rows: bool | str = AUTO


HeldOutShare = Annotated[Number, Gt(0), Lt(0.5), Allowed("shares above 0 and below 0.5")]
DomainLists = Annotated[
    Any, Predicate(is_domain_lists), Allowed("a list of orders like [[a,b],[b,a]], or {1: [a,b], 2: [b,a]}")
]


@config
class HeldOut(Options):
    """What is held out where files are not split: shares of a domain's documents."""

    valid: HeldOutShare = option("share of the documents")
    test: HeldOutShare = option("share of the documents")
    seed: Natural = option("seed of the split")
    max_documents: Count | None = option("maximum documents of each split; null: no limit", default=None)


SeparatorName = Annotated[Text, Allowed("auto, none, or one token of the vocabulary")]


@config
class Source(Options, ABC):
    """Domains by name, each a stream of (split, document)."""

    orders: DomainLists | None = option("named orders of the domains; null: one order, sorted by name")
    held_out: Mapping[str, Any] = option("held-out documents of files without a split")
    score_on: Literal["valid", "test"] = option("split that is evaluated")
    packing: Literal["none", "concat", "document_mask"] | None = option(
        "documents per sequence: several, several with masking, one; null: concat of text, none of examples",
        default=None,
    )
    separator: SeparatorName = option(
        "token after each document of raw text: auto (the pre-training separator of the checkpoint), none, "
        "or a token of the vocabulary",
        default=AUTO,
    )
    special_tokens: Literal["split", "parse"] = option(
        "special tokens in raw text: split into the tokens of their characters, or parsed as their ids",
        default=SPLIT,
    )
    bos_in_rows: bool | Literal["auto"] = option(
        "begin each sequence of raw text with the BOS token (causal models); auto: for a checkpoint whose "
        "tokenizer begins each text with it",
        default=AUTO,
    )
    only: NamePatterns = option("domains to use, by name or pattern; null: all", default=None)
    by: Literal["fine", "coarse"] | None = option("level of M2D2: fine, or joined, domains", default=None)
    balanced: Annotated[bool | Count, Allowed("true, false, or tokens: a whole number, 1 or more")] = option(
        "cut the training text of every domain to the tokens of the smallest, or to N tokens", default=False
    )
    embedding_samples: Count = option("maximum number of embedded documents per text", default=1000)
    preprocessing_num_workers: Count | None = option(
        "tokenization processes per text, which change no result; null: one per core", default=None
    )

    def __post_init__(self) -> None:
        read_options(HeldOut, self.held_out, section="held_out")
        kind = self.form("")
        packings = PACKINGS[kind]
        if self.packing is not None and self.packing not in packings:
            raise InvalidOptionError(
                "packing", self.packing, allowed=f"{', '.join(packings)}, for domains of {kind}"
            )
        if self.by == "coarse" and kind == EXAMPLES:
            raise InvalidOptionError(
                "by", "coarse", reason="these domains are examples", allowed="null, fine"
            )

    @property
    def chats(self) -> bool:
        return False

    @property
    def class_limit(self) -> int | None:
        """Training examples of each answer, at most; None for all."""
        return None

    @property
    def encoding(self) -> Encoding | None:
        """How the documents of the domains become rows, where they are examples; None where they are text."""
        return None

    def form(self, name: str) -> str:
        """What the documents of a name are: TEXT or EXAMPLES. General text is text."""
        return TEXT if self.encoding is None or name == GENERAL else EXAMPLES

    @cached_property
    def skipped(self) -> dict[str, dict[str, Any]]:
        """`BadExamples.facts` of each text that was read, by its name."""
        return {}

    def record_skipped(self, name: str, bad: BadExamples, *, num_read: int) -> None:
        """Keeps the facts of a text's bad examples. Raises ValueError where no other was read."""
        self.skipped[name] = bad.facts
        if bad.counts and num_read == 0:
            raise bad.all_skipped(name)

    @property
    def isolated(self) -> bool:
        """Whether samples, or documents, share rows and do not meet."""
        return self.packing == DOCUMENT_MASK

    @property
    def text_packing(self) -> str:
        """How rows of text are filled: CONCAT (also general text of examples), DOCUMENT_MASK or NONE."""
        if self.packing is None or self.form("") == EXAMPLES:
            return CONCAT
        return self.packing

    @property
    def text_options(self) -> TextOptions:
        """How raw text becomes ids."""
        return TextOptions(
            separator=self.separator, special_tokens=self.special_tokens, bos_in_rows=self.bos_in_rows
        )

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The names of the existing texts."""

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """The domains that `only` leaves, each with the names whose text it has. Raises ValueError where it
        leaves none."""
        groups = self.group_names()
        if self.only is None:
            return groups

        patterns = [self.only] if isinstance(self.only, str) else self.only
        expressions = [re.compile(parse_expression(pattern) or translate(pattern)) for pattern in patterns]
        chosen = {}
        for name, members in groups.items():
            if any(expression.fullmatch(name) for expression in expressions):
                chosen[name] = members
        if not chosen:
            raise InvalidOptionError(
                "domains.only",
                self.only,
                reason="it leaves no domain",
                allowed=", ".join([*sorted(groups)[:8], "…"]),
            )
        return chosen

    def group_names(self) -> dict[str, list[str]]:
        """All domains, of which `only` then selects some, each with the names whose text it has. Without `by`
        each name is a domain. With it, names are those of M2D2: `fine` keeps the fine domains alone; `coarse`
        joins the fine domains of each coarse one, and takes the text of the coarse one itself only where it
        has no fine ones."""
        if self.by is None:
            return {name: [name] for name in self.names}
        parsed = [(name, *parse_name(name)) for name in self.names]
        if self.by == "fine":
            return {name: [name] for name, _, fine in parsed if fine is not None}

        groups: dict[str, list[str]] = {}
        for name, coarse, fine in parsed:
            if fine is not None:
                groups.setdefault(coarse, []).append(name)
        for name, coarse, fine in parsed:
            if fine is None:
                groups.setdefault(coarse, [name])
        return dict(sorted(groups.items()))

    @property
    def domains(self) -> list[str]:
        return list(self.groups)

    def find_exclusion(self, name: str) -> str:
        """The option, like `domains.only=law`, that leaves out a domain that the text has; empty for a domain
        that is among `domains`, and for an unknown name."""
        if name in self.groups:
            return ""
        if name in self.group_names():
            return f"domains.only={format_value(self.only)}"
        return f"domains.by={self.by}" if name in self.names else ""

    @property
    def named_orders(self) -> Any:
        """The orders by name, of the domains that `only` leaves; as they are where it leaves none of one."""
        if self.only is None or not self.orders:
            return self.orders
        if isinstance(self.orders, Mapping):
            return {number: self.restrict_order(order) for number, order in self.orders.items()}
        return [self.restrict_order(order) for order in self.orders]

    def restrict_order(self, order: Sequence[str]) -> list[str]:
        """The domains of an order that `only` leaves, or all of them where it leaves none."""
        return [name for name in order if name in self.groups] or list(order)

    def members(self, name: str) -> list[str]:
        """The names whose text a domain has: several where it is joined of them."""
        return [name] if name == GENERAL else self.groups[name]

    def entries_of(self, name: str) -> tuple[str, ...]:
        """The options below `domains` that are of one name alone, as entries of mappings by name. A run that
        extends another one may have new ones of its further domains. Here: none."""
        return ()

    def check_domains(self, order: Sequence[str]) -> None:
        """Checks the names and, as `check`, the text of these domains; logs what `by` and `only` leave out.
        Raises ValueError for a name that cannot be a file's."""
        for name in order:
            num_bytes = len(name.encode(errors="replace"))
            if not name.isprintable() or "/" in name or num_bytes > MAX_NAME_BYTES:
                raise ValueError(
                    f"the domain name {name!r:.90} is invalid. Allowed: "
                    f"printable Unicode without /, at most {MAX_NAME_BYTES} bytes"
                )

        used_names: set[str] = set()
        for members in self.groups.values():
            used_names.update(members)
        unused = [name for name in self.names if name not in used_names]
        if unused:
            log.info(
                "Leaving out %d of %s, like %s (domains.by=%s, domains.only=%s)",
                len(unused),
                count_noun(len(self.names), "domain"),
                unused[0],
                self.by,
                format_value(self.only),
            )

        members_of_order: list[str] = []
        for name in order:
            members_of_order += self.members(name)
        self.check(members_of_order)

    def check(self, order: Sequence[str]) -> None:  # noqa: B027  (most sources have nothing to check)
        """Raises ValueError for text of these domains, or general text, that cannot be read."""

    @abstractmethod
    def read(self, name: str) -> Iterator[tuple[str, str]]:
        """(split, document) of a domain or of `general`; split is train, valid or test."""

    @abstractmethod
    def fingerprint(self, name: str) -> Any:
        """What decides the result of `read`, cheaply: names, sizes, times."""


class DocumentSource(Protocol):
    """What a corpus is read from: a Source, or a source of `replay.sources`. With an empty `held_out` all
    documents are for training."""

    @property
    def held_out(self) -> Mapping[str, Any]: ...

    @property
    def class_limit(self) -> int | None: ...

    @property
    def skipped(self) -> Mapping[str, dict[str, Any]]: ...

    def form(self, name: str) -> str: ...

    def members(self, name: str) -> list[str]: ...

    def read(self, name: str) -> Iterator[tuple[str, str]]: ...

    def fingerprint(self, name: str) -> Any: ...


def make_stamp(source: DocumentSource, name: str) -> str:
    """What a domain's text is known by without reading it: sizes, times, and how it is split."""
    members = source.members(name)
    fingerprints: Any = [[member, source.fingerprint(member)] for member in members]
    if members == [name]:
        fingerprints = fingerprints[0][1]
    return f"{name}-{digest([FORMAT, fingerprints, dict(source.held_out)])}"
