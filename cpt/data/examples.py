"""An example of a supervised task: text to text, or turns of a chat."""

import json
from dataclasses import asdict, dataclass

USER, ASSISTANT = "user", "assistant"


@dataclass(frozen=True)
class Example:
    """What a model is asked, and what it is to answer.

    `text` is the place (begin, end) in `source` of the text that the question is about: the only part that
    may be cut. `choices` are all answers of a task with a closed set of them. A chat has `turns`, (role,
    content) one after another, instead of a source; its target is the last turn."""

    id: str
    source: str
    target: str
    task: str
    choices: tuple[str, ...] = ()
    text: tuple[int, int] = (0, 0)
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def question(self) -> str:
        """What two examples that are the same question share, whatever their answers are."""
        if self.turns:
            return json.dumps(self.turns[:-1])
        return self.source

    @property
    def asked_about(self) -> str:
        """The text that the question is about; the whole question where there is none, of a chat its last."""
        if self.turns:
            return next((text for role, text in reversed(self.turns[:-1]) if role == USER), "")
        begin, end = self.text
        return self.source[begin:end] or self.source

    @property
    def bytes(self) -> int:
        """Of everything that is read, UTF-8."""
        return len("".join((self.source, self.target, *(text for _, text in self.turns[:-1]))).encode())


def write_example(example: Example) -> str:
    """An example as a document of a corpus: one line of JSON."""
    return json.dumps(asdict(example), ensure_ascii=False)


def read_example(document: str) -> Example:
    """The example of a document."""
    values = json.loads(document)
    pairs = {"turns": tuple((role, content) for role, content in values["turns"])}
    places = {name: tuple(values[name]) for name in ("choices", "text")}
    return Example(**{**values, **places, **pairs})
