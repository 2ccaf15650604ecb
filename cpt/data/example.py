"""An example of a supervised task: a question with its answer, or a chat."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

USER, ASSISTANT = "user", "assistant"


@dataclass(frozen=True)
class Example:
    """A `source` with its `target`. `text` is the span (begin, end) of the source that truncation may cut.
    `choices` are all answers of a closed task. A chat has `turns`, (role, content), instead of a source."""

    id: str
    source: str
    target: str
    task: str
    choices: tuple[str, ...] = ()
    text: tuple[int, int] = (0, 0)
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def question(self) -> str:
        """What decides whether two examples ask the same."""
        return json.dumps(self.turns[:-1]) if self.turns else self.source

    @property
    def bytes(self) -> int:
        return len("".join((self.source, self.target, *(text for _, text in self.turns[:-1]))).encode())


def write_example(example: Example) -> str:
    """An example as a document of a corpus: one line of JSON."""
    return json.dumps(asdict(example), ensure_ascii=False)


def read_example(document: str) -> Example:
    values = json.loads(document)
    values |= {name: tuple(values[name]) for name in ("choices", "text")}
    return Example(**values | {"turns": tuple((role, content) for role, content in values["turns"])})


@dataclass(frozen=True)
class RawExample:
    """A row of a data set, before a template asks it: the template's fields and the answer, or a chat."""

    fields: Mapping[str, str]
    target: str
    id: str = ""
    turns: tuple[tuple[str, str], ...] = ()
