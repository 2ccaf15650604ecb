"""Examples of supervised tasks and chats, as documents of a corpus, and those that cannot be used."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun

log = logging.getLogger(__name__)
USER, ASSISTANT = "user", "assistant"  # roles of a chat
SKIP_OPTION = "domains.on_bad_example"  # whether bad examples are left out
OnBadExample = Literal["stop", "skip"]  # its values


class BadExampleError(ValueError):
    """One example that cannot be used, which `domains.on_bad_example=skip` leaves out. `kind` says what is
    wrong with it in the words that all such examples share; `num_tokens` are those that one takes which is
    too long for the model, else None."""

    def __init__(self, message: str, kind: str = "", num_tokens: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind or message
        self.num_tokens = num_tokens

    def with_message(self, message: str) -> "BadExampleError":
        return BadExampleError(message, self.kind, self.num_tokens)


@dataclass
class BadExamples:
    """Collects the bad examples of a text, by kind: their number and the message of the first. Unless they
    are skipped, the first one is raised. `option` decides which. For examples that are too long for the
    model, the error of the longest is kept."""

    is_skipping: bool
    option: str = SKIP_OPTION
    counts: Counter[str] = field(default_factory=Counter)
    first_messages: dict[str, str] = field(default_factory=dict)
    longest: BadExampleError | None = None

    def add(self, error: BadExampleError) -> None:
        """Counts an example. Raises BadExampleError where bad examples stop the run."""
        if not self.is_skipping:
            raise error.with_message(f"{error} ({self.option}=skip leaves it out)") from error
        self.counts[error.kind] += 1
        self.first_messages.setdefault(error.kind, str(error))
        if error.num_tokens is None:
            return
        if self.longest is None or error.num_tokens > (self.longest.num_tokens or 0):
            self.longest = error

    def describe_longest(self) -> str:
        """The message of the longest example, and how many others are too long, so that one change of the
        length makes room for all. Empty where all fit."""
        if self.longest is None:
            return ""
        num_others = self.counts[self.longest.kind] - 1
        if num_others == 0:
            return str(self.longest)
        verb = "is" if num_others == 1 else "are"
        return (
            f"{self.longest}. {count_noun(num_others, 'other example')} {verb} too long as well, not longer"
        )

    def all_skipped(self, text: str) -> InvalidOptionError:
        """The error of a text whose examples are all bad."""
        kinds = "; ".join(f"{count} × {kind}" for kind, count in self.counts.most_common())
        first_message = next(iter(self.first_messages.values()), "")
        return InvalidOptionError(
            self.option,
            "skip",
            reason=f"all examples of {text} are bad ({kinds}); the first: {first_message}",
            allowed="usable examples",
        )

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """By kind, as JSON: {"count": number of examples, "first": message}."""
        facts = {}
        for kind, count in sorted(self.counts.items()):
            facts[kind] = {"count": count, "first": self.first_messages[kind]}
        return facts


def reject_record(bad: BadExamples, error: ValueError) -> None:
    """Adds a record of a file that cannot be read to the bad examples. Raises BadExampleError where these
    stop the run."""
    bad.add(BadExampleError(str(error), "a row that cannot be read"))


def log_skipped(text: str, skipped: Mapping[str, Mapping[str, Any]]) -> None:
    """Logs one line for each kind of `BadExamples.facts`."""
    for kind, facts in skipped.items():
        log.warning(
            "Skipping %s of %s (on_bad_example=skip): %s; the first: %s",
            count_noun(facts["count"], "example"),
            text,
            kind,
            facts["first"],
        )


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
    """A `source` with its `target`. `choices` are all answers of a closed task. A chat has `turns` instead of
    a source, and maybe `tools`."""

    id: str
    source: str
    target: str
    task: str
    choices: tuple[str, ...] = ()
    text_span: tuple[int, int] = (0, 0)  # (begin, end) of the characters of `source` that may be cut
    turns: tuple[Turn, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of the functions that the assistant may call
    # Further variables of the chat template.
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def question(self) -> str:
        """What decides whether two examples ask the same."""
        if not self.turns:
            return self.source
        values: list[Any] = [turn.to_json() for turn in self.turns[:-1]]
        if self.tools:
            values.append({"tools": self.tools})
        if self.template_options:
            values.append({"template_options": self.template_options})
        return json.dumps(values)


def write_example(example: Example) -> str:
    """An example as a document of a corpus: one line of JSON."""
    values: dict[str, Sequence[Any] | Mapping[str, Any]] = {
        "id": example.id,
        "source": example.source,
        "target": example.target,
        "task": example.task,
        "choices": example.choices,
        "text": example.text_span,
        "turns": [turn.to_json() for turn in example.turns],
    }
    if example.tools:
        values["tools"] = example.tools
    if example.template_options:
        values["template_options"] = example.template_options
    return json.dumps(values, ensure_ascii=False)


def read_example(document: str) -> Example:
    """The example of a document that `write_example` has made."""
    values = json.loads(document)
    text_begin, text_end = values["text"]
    return Example(
        id=values["id"],
        source=values["source"],
        target=values["target"],
        task=values["task"],
        choices=tuple(values["choices"]),
        text_span=(text_begin, text_end),
        turns=tuple(map(Turn.from_json, values["turns"])),
        tools=tuple(values.get("tools", ())),
        template_options=values.get("template_options", {}),
    )


@dataclass(frozen=True)
class RawExample:
    """A row of a data set, before a template asks it: the template's fields and the answer, or a chat."""

    fields: Mapping[str, str]
    target: str
    id: str = ""
    turns: tuple[Turn, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
