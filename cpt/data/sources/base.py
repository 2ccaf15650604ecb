"""Where the text of the domains comes from: a source lists its domains and reads one by documents, of which
an example of a supervised task is one.

M2D2 (Reid et al., EMNLP 2022) lists 239 names: 22 coarse domains, 214 fine ones, and three that are not
domains. Some are misspelt there (`General_referece`, `Human_activites`); these are the real ones."""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import translate
from functools import cached_property
from typing import Annotated, Any, Literal

from annotated_types import Gt, Lt, MinLen, Predicate

from cpt.core.config import digest
from cpt.core.exceptions import format_value
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

log = logging.getLogger(__name__)
GENERAL = "general"
USER, ASSISTANT = "user", "assistant"  # roles of a chat
TEXT, EXAMPLES = "text", "examples"  # what the documents of a source may be
NONE, CONCAT, DOCUMENT_MASK = "none", "concat", "document_mask"  # see Source.packing
AUTO, SPLIT, PARSE = "auto", "split", "parse"  # see Source.separator, special_tokens and bos_in_rows
PACKINGS = {TEXT: (CONCAT, DOCUMENT_MASK, NONE), EXAMPLES: (NONE, DOCUMENT_MASK)}  # the default first
FORMAT = 7  # part of every stamp: raise it when the files that cpt.data.corpus makes of a text change
LONGEST_NAME = 200  # bytes: names are part of file names
NOT_DOMAINS = ("eval_sets", "only_text", "only_txt2")
COARSE_OF_WIKIPEDIA = {
    *("Culture_and_the_arts", "General_referece", "Health_and_fitness", "History_and_events"),
    *("Human_activites", "Mathematics_and_logic", "Natural_and_physical_sciences"),
    *("Philosophy_and_thinking", "Religion_and_belief_systems", "Society_and_social_sciences"),
    "Technology_and_applied_sciences",
}


class BadExampleError(ValueError):
    """One example that cannot be used, which `domains.on_bad_example=skip` leaves out. `kind` says what is
    wrong with it in the words that all such examples share."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind or message


@dataclass
class BadExamples:
    """Collects the bad examples of a text, by kind: their number and the message of the first. Unless they
    are skipped, the first one is raised."""

    is_skipping: bool
    counts: Counter[str] = field(default_factory=Counter)
    first_messages: dict[str, str] = field(default_factory=dict)

    def add(self, error: BadExampleError) -> None:
        """Counts an example. Raises BadExampleError where bad examples stop the run."""
        if not self.is_skipping:
            raise BadExampleError(
                f"{error} (domains.on_bad_example=skip leaves it out)", error.kind
            ) from error
        self.counts[error.kind] += 1
        self.first_messages.setdefault(error.kind, str(error))

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """By kind, as JSON: {"count": number of examples, "first": message}."""
        return {
            kind: {"count": count, "first": self.first_messages[kind]}
            for kind, count in sorted(self.counts.items())
        }


OnBadExample = Literal["stop", "skip"]


def reject_record(bad: BadExamples, error: ValueError) -> None:
    """Adds a record of a file that cannot be read to the bad examples. Raises BadExampleError where these
    stop the run."""
    bad.add(BadExampleError(str(error), "a row that cannot be read"))


def log_skipped(text: str, skipped: Mapping[str, Mapping[str, Any]]) -> None:
    """Logs one line for each kind of `BadExamples.facts`."""
    for kind, facts in skipped.items():
        message = "Skipping %d examples of %s (domains.on_bad_example=skip): %s; the first: %s"
        log.warning(message, facts["count"], text, kind, facts["first"])


@dataclass(frozen=True)
class Turn:
    """A message of a chat. `details` are its other keys that chat templates may use, like `tool_calls`."""

    role: str
    content: str
    details: Mapping[str, Any] = field(default_factory=dict)
    is_scored: bool = True  # of an assistant's turn: whether its tokens contribute to the loss

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a chat template takes it."""
        return {"role": self.role, "content": self.content, **self.details}

    @property
    def is_answer(self) -> bool:
        return self.role == ASSISTANT and self.is_scored

    def to_json(self) -> list[str] | dict[str, Any]:
        """[role, content] of a plain turn, else all fields."""
        if not self.details and self.is_scored:
            return [self.role, self.content]
        return {name: getattr(self, name) for name in ("role", "content", "details", "is_scored")}

    @classmethod
    def from_json(cls, value: list[str] | dict[str, Any]) -> "Turn":
        if isinstance(value, dict):
            return cls(**value)
        role, content = value
        return cls(role, content)


@dataclass(frozen=True)
class Example:
    """A `source` with its `target`. `text` is the span (begin, end) of the source that truncation may cut.
    `choices` are all answers of a closed task. A chat has `turns` instead of a source, and maybe `tools`."""

    id: str
    source: str
    target: str
    task: str
    choices: tuple[str, ...] = ()
    text: tuple[int, int] = (0, 0)
    turns: tuple[Turn, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of the functions that the assistant may call
    # Further variables of the chat template.
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def question(self) -> str:
        """What decides whether two examples ask the same."""
        if not self.turns:
            return self.source
        asked: list[Any] = [turn.to_json() for turn in self.turns[:-1]]
        if self.tools:
            asked.append({"tools": self.tools})
        if self.template_options:
            asked.append({"template_options": self.template_options})
        return json.dumps(asked)


def write_example(example: Example) -> str:
    """An example as a document of a corpus: one line of JSON."""
    values = {each.name: getattr(example, each.name) for each in fields(example)}
    values["turns"] = [turn.to_json() for turn in example.turns]
    if not example.tools:
        del values["tools"]
    if not example.template_options:
        del values["template_options"]
    return json.dumps(values, ensure_ascii=False)


def read_example(document: str) -> Example:
    values = json.loads(document)
    for name in ("choices", "text", "tools"):
        if name in values:
            values[name] = tuple(values[name])
    values["turns"] = tuple(map(Turn.from_json, values["turns"]))
    return Example(**values)


@dataclass(frozen=True)
class RawExample:
    """A row of a data set, before a template asks it: the template's fields and the answer, or a chat."""

    fields: Mapping[str, str]
    target: str
    id: str = ""
    turns: tuple[Turn, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)


def as_expression(pattern: str) -> str | None:
    """The regular expression between slashes; None for a pattern of file names."""
    return pattern[1:-1] if len(pattern) > 2 and pattern[0] == pattern[-1] == "/" else None


def is_domain_lists(value: Any) -> bool:
    """Whether it is a list of orders, or orders by their numbers."""
    if isinstance(value, Mapping):
        return all(fits(each, Number) for each in value) and is_domain_lists(list(value.values()))
    return isinstance(value, list | tuple) and all(fits(each, TextList) for each in value)


NamePattern = Annotated[Text, Predicate(lambda text: is_pattern(as_expression(text) or ""))]
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
    separator: Text = option(
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

    def __post_init__(self) -> None:
        read_options(HeldOut, self.held_out, section="held_out")
        kind = self.form("")
        if self.packing not in (None, *PACKINGS[kind]):
            allowed = f"{', '.join(PACKINGS[kind])} of domains of {kind}"
            raise ValueError(f"packing={self.packing} is invalid. Allowed: {allowed}")
        if self.by == "coarse" and kind == EXAMPLES:
            raise ValueError("by=coarse is invalid: these domains are examples. Allowed: null, fine")

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
            kinds = "; ".join(f"{count} × {kind}" for kind, count in bad.counts.most_common())
            first_message = next(iter(bad.first_messages.values()))
            reason = f"all examples of {name} are bad ({kinds}); the first: {first_message}"
            raise ValueError(f"domains.on_bad_example=skip is invalid: {reason}. Allowed: usable examples")

    @property
    def isolated(self) -> bool:
        """Whether samples, or documents, share rows and do not meet."""
        return self.packing == DOCUMENT_MASK

    @property
    def text_packing(self) -> str:
        """How rows of text are filled: CONCAT (also general text of examples), DOCUMENT_MASK or NONE."""
        return CONCAT if self.packing is None or self.form("") == EXAMPLES else self.packing

    @property
    def text_options(self) -> TextOptions:
        """How raw text becomes ids."""
        return TextOptions(self.separator, self.special_tokens, self.bos_in_rows)

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The names of the existing texts."""

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """The domains, each with the names whose text it has: the names as they are; M2D2's fine domains; or
        the coarse ones, joined of their fine ones, or the coarse name where there are none. Raises ValueError
        where `only` leaves none."""
        groups: dict[str, list[str]] = {}
        parsed = [(name, *parse_name(name)) for name in (self.names if self.by else ())]
        if self.by == "coarse":
            for name, coarse, fine in sorted(parsed, key=lambda each: each[2] is None):
                if fine is not None or coarse not in groups:
                    groups.setdefault(coarse, []).append(name)
            groups = dict(sorted(groups.items()))
        else:
            left_out = {name for name, _, fine in parsed if fine is None}
            groups = {name: [name] for name in self.names if name not in left_out}
        if self.only is None:
            return groups
        listed = [self.only] if isinstance(self.only, str) else self.only
        wanted = [re.compile(as_expression(each) or translate(each)) for each in listed]
        chosen = {name: each for name, each in groups.items() if any(one.fullmatch(name) for one in wanted)}
        if not chosen:
            given, allowed = f"domains.only={format_value(self.only)}", ", ".join([*sorted(groups)[:8], "…"])
            raise ValueError(f"{given} is invalid: it leaves no domain. Allowed: {allowed}")
        return chosen

    @property
    def domains(self) -> list[str]:
        return list(self.groups)

    @property
    def named_orders(self) -> Any:
        """The orders by name, of the domains that `only` leaves; as they are where it leaves none of one."""
        if self.only is None or not self.orders:
            return self.orders
        numbered = self.orders.items() if isinstance(self.orders, Mapping) else enumerate(self.orders)
        left = {at: [name for name in each if name in self.groups] or list(each) for at, each in numbered}
        return left if isinstance(self.orders, Mapping) else list(left.values())

    def members(self, name: str) -> list[str]:
        """The names whose text a domain has: several where it is joined of them."""
        return [name] if name == GENERAL else self.groups[name]

    def check_domains(self, order: Sequence[str]) -> None:
        """Checks the names and, as `check`, the text of these domains; logs what `by` and `only` leave out.
        Raises ValueError for a name that cannot be a file's."""
        for name in order:
            if not name.isprintable() or "/" in name or len(name.encode(errors="replace")) > LONGEST_NAME:
                allowed = f"printable Unicode without /, at most {LONGEST_NAME} bytes"
                raise ValueError(f"the domain name {name!r:.90} is invalid. Allowed: {allowed}")
        used = {member for name in self.domains for member in self.members(name)}
        if unused := [name for name in self.names if name not in used]:
            told = "Leaving out %d of %d domains, like %s (domains.by=%s, domains.only=%s)"
            log.info(told, len(unused), len(self.names), unused[0], self.by, format_value(self.only))
        self.check([member for name in order for member in self.members(name)])

    def check(self, order: Sequence[str]) -> None:  # noqa: B027  (most sources have nothing to check)
        """Raises ValueError for text of these domains, or general text, that cannot be read."""

    @abstractmethod
    def read(self, name: str) -> Iterator[tuple[str, str]]:
        """(split, document) of a domain or of `general`; split is train, valid or test."""

    @abstractmethod
    def fingerprint(self, name: str) -> Any:
        """What decides the result of `read`, cheaply: names, sizes, times."""


def stamp_of(source: Source, name: str) -> str:
    """What a domain's text is known by without reading it: sizes, times, and how it is split."""
    joined = [[member, source.fingerprint(member)] for member in source.members(name)]
    known_by = joined[0][1] if source.members(name) == [name] else joined
    return f"{name}-{digest([FORMAT, known_by, dict(source.held_out)])}"


def parse_name(name: str) -> tuple[str, str | None]:
    """The coarse and the fine domain of a name of M2D2: `A__b` of Wikipedia, `cs.AI` of S2ORC; None for fine
    of a coarse name. An archive without classes, like `hep-th`, is a coarse domain's only fine one."""
    if name in NOT_DOMAINS:
        raise ValueError(f"{name} is in M2D2's list and is no domain. Allowed: domains.ignore=[{name}]")
    if name in COARSE_OF_WIKIPEDIA or name.endswith("_l1"):
        return name.removesuffix("_l1"), None
    coarse, _, fine = name.partition("__" if "__" in name else ".")
    return coarse, fine or coarse
