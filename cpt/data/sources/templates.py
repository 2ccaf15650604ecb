"""How a task's fields become a question: templates are data, with named fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

import numpy as np

from cpt.core.options import Options, option
from cpt.core.randomness import key, shuffle
from cpt.core.rules import MAPPED_TEXTS, Rule, is_list, is_text, one_of

NAMES = ("none", "task", "dataset")
MADE = ("prefix", "question", "instruction", "options", "text", "task", "dataset")  # fields every format has
TEXT_FIELD = "{text}"

FIELDS = Rule(lambda value: isinstance(value, str), "a text with {fields}")


@dataclass(frozen=True, kw_only=True)
class Template(Options):
    """A question of named fields. `prefix` names the task, `question` asks; both may be empty. {text} is what
    it is about, the only part that truncation may cut."""

    name: str = option("what the template is called", Rule(is_text, "a text"))
    source: str = option("the whole question", FIELDS)
    without_text: str | None = option(
        "the whole question where the text is empty; null: the same",
        Rule(lambda value: value is None or isinstance(value, str), "null or a text with {fields}"),
    )
    question: str = option("what is asked: {instruction}, {options}", FIELDS)
    names: str = option(
        "what of the names stands there: nothing, the task's, and the data set's", one_of(*NAMES)
    )
    prefixes: Mapping[str, str] = option("the prefix for each of `names`", MAPPED_TEXTS)
    options: str = option("the order of the options: as they are listed, or for each example its own",
                          one_of("file", "shuffled"))  # fmt: skip
    separator: str = option("between options", Rule(lambda value: isinstance(value, str), "a text"))
    instructions: Mapping[str, str] = option("what is asked, by task", MAPPED_TEXTS)
    tasks: Mapping[str, str] = option(
        "the task of each data set, where its place does not say it", MAPPED_TEXTS
    )
    unasked: Sequence[str] = option(
        "tasks whose text asks already: no question",
        Rule(lambda value: is_list(value, is_text), "a list of tasks"),
    )

    def check_fields(self, own: Sequence[str]) -> None:
        """Raises ValueError for a field that neither the template nor the format has."""
        known = [*MADE, *(name for name in own if name not in MADE)]
        for place in ("source", "without_text", "question", *(f"prefixes.{name}" for name in self.prefixes)):
            for name in fields_of(self.written(place) or ""):
                if name not in known:
                    raise ValueError(
                        f"template.{place} has the field {{{name}}}, which does not exist; allowed: "
                        + ", ".join(f"{{{each}}}" for each in known)
                    )
        if self.source.count(TEXT_FIELD) > 1:
            raise ValueError(f"template.source={self.source!r} has {{text}} more than once; allowed: once")

    def written(self, place: str) -> Any:
        head, _, name = place.partition(".")
        return getattr(self, head)[name] if name else getattr(self, head)

    def task_of(self, dataset: str, said: str | None) -> str:
        """The task of a data set: what its place says, what the template says, else its own name."""
        return said or self.tasks.get(dataset.lower(), dataset)

    def ask(
        self, values: Mapping[str, str], *, task: str, dataset: str, choices: Sequence[str], seed: int
    ) -> tuple[str, tuple[int, int]]:
        """The question of some fields, and the place of the text in it."""
        values = {"instruction": self.instructions.get(task, ""), **values, "task": task, "dataset": dataset}
        values["options"] = self.separator.join(self.ordered(choices, values, seed=seed))
        values["prefix"] = self.prefixes.get(self.names, "").format_map(values)
        asked = self.question and task not in self.unasked
        values["question"] = self.question.format_map(values) if asked else ""
        text = values["text"]
        if not text.strip() and self.without_text is not None:
            return self.without_text.format_map(values).rstrip(), (0, 0)
        before, found, after = self.source.partition(TEXT_FIELD)
        before, after = before.format_map(values), after.format_map(values)
        if not found:
            return before.rstrip(), (0, 0)
        source = (before + text + after).rstrip()
        return source, (len(before), min(len(before) + len(text), len(source)))

    def ordered(self, choices: Sequence[str], values: Mapping[str, str], *, seed: int) -> list[str]:
        """The options as they are shown; a shuffle is a function of the seed and the text."""
        if self.options == "file" or not choices:
            return list(choices)
        stream = key("options", seed, values["task"], values["text"])
        order = shuffle(np.arange(len(choices)), len(choices), stream=stream)
        return [choices[at] for at in order]

    def check_task(self, task: str, *, instructed: bool, dataset: str) -> None:
        """Raises ValueError for a task that the template has no instruction for, where it asks with one."""
        uses = "instruction" in fields_of(self.question) and task not in self.unasked
        if uses and not instructed and task not in self.instructions:
            raise ValueError(
                f"template {self.name} has no instruction for the task {task} of {dataset}; allowed: "
                f"{', '.join(self.instructions)} (+domains.template.tasks.{dataset}=…), "
                "or domains/template=plain"
            )


def fields_of(text: str) -> list[str]:
    """The names of the fields in a text; ValueError where its braces do not match, and for a field that is
    more than a name."""
    try:
        found = [(name, style, how) for _, name, style, how in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"template {text!r} cannot be read: {error}; allowed: {{names}} in braces"
        ) from error
    if styled := [name for name, style, how in found if style or how]:
        raise ValueError(
            f"template {text!r} says how {{{styled[0]}}} is written; allowed: {{names}} in braces, no more"
        )
    return [name for name, _, _ in found]
