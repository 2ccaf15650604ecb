"""Supervised tasks as tasks of the lm-evaluation-harness: a YAML and a file of examples for each. Nothing
here needs the harness."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from cpt.core.files import replace
from cpt.data.tokenized_tasks import Encoder, Prompt

PREFIX = "cpt_"  # the harness has tasks of its own, called rte, copa, …
VERSION = 1.0
TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "question",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "num_fewshot": 0,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": VERSION},
}
GROUP = {
    "group": f"{PREFIX}tasks",
    "group_alias": "AP",
    "aggregate_metric_list": [{"metric": "acc", "aggregation": "mean", "weight_by_size": False}],
    "metadata": {"version": VERSION},
}


@dataclass(frozen=True)
class Exported:
    """What was written of a task: its name in the harness, its examples, and the ids of those of which the
    harness makes other tokens."""

    name: str
    examples: int
    differing: Sequence[str]


@dataclass(frozen=True)
class HarnessTexts:
    """Questions and choices as texts of which the harness (0.4.13, `HFLM`) makes the ids that an encoder
    made.

    For a causal model context and choice are tokenised together, with the tokenizer's own tokens around them
    unless these end a text; for one with two stacks apart. A choice ends in the text of the end token, so
    that its log-likelihood is sum_t log p(choice_t, end | question)."""

    encoder: Encoder

    @property
    def delimiter(self) -> str:
        """What stands between question and choice."""
        return "" if self.encoder.seq2seq else " "

    @cached_property
    def ending(self) -> str:
        """What a choice ends in."""
        return self.encoder.tokenizer.decode(self.encoder.ending)

    @cached_property
    def beginning(self) -> str:
        """What the tokenizer puts before a text. The harness leaves it out of a question to a causal model
        whose tokenizer ends texts, and of every choice for a model with two stacks. Some tokenizers need a
        blank behind it."""
        (before, _), tokenizer = self.encoder.frame, self.encoder.tokenizer
        begin, wanted = tokenizer.decode(before), before + tokenizer.encode("a", add_special_tokens=False)
        begins = (begin, f"{begin} ")
        fitting = (
            each for each in begins if tokenizer.encode(f"{each}a", add_special_tokens=False) == wanted
        )
        return next(fitting, begin)

    def question(self, prompt: Prompt) -> str:
        """The text of a question, as much of it as was not cut."""
        source, begins = prompt.example.source, self.encoder.frame[1] and not self.encoder.seq2seq
        if self.encoder.ids_of([source])[0] != prompt.ids:
            source = self.encoder.tokenizer.decode(prompt.ids, skip_special_tokens=True)
        return self.beginning + source if begins else source

    def choice(self, text: str) -> str:
        """The text of a choice."""
        return (self.beginning if self.encoder.seq2seq else "") + text + self.ending

    def row(self, prompt: Prompt) -> dict[str, Any]:
        """A line of the file of examples."""
        example = prompt.example
        return {
            "id": example.id,
            "question": self.question(prompt),
            "choices": [self.choice(text) for text in example.choices],
            "answer": example.choices.index(example.target),
        }

    def agrees(self, prompt: Prompt, row: Mapping[str, Any]) -> bool:
        """Whether the harness makes a prompt's ids of a line, and those of every choice."""
        pairs = [self.encode_pair(row["question"], self.delimiter + choice) for choice in row["choices"]]
        return pairs == [(prompt.ids, choice) for choice in prompt.choices]

    def encode_pair(self, question: str, choice: str) -> tuple[list[int], list[int]]:
        """The ids that the harness makes of a question and a choice: blanks at the question's end belong to
        the choice."""
        stripped = question.rstrip()
        question, choice = stripped, question[len(stripped) :] + choice
        encode = self.encoder.tokenizer.encode
        if self.encoder.seq2seq:
            return encode(question), encode(choice, add_special_tokens=False)
        special = not self.encoder.frame[1] and not question.startswith(self.prefix)
        alone = encode(question, add_special_tokens=special)
        return alone, encode(question + choice, add_special_tokens=special)[len(alone) :]

    @cached_property
    def prefix(self) -> str:
        """The text that tells the harness that a question has the tokenizer's first token already."""
        tokenizer = self.encoder.tokenizer
        token = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        return tokenizer.decode(token)


def export_task(folder: Path, task: str, prompts: Iterable[Prompt], texts: HarnessTexts) -> Exported | None:
    """Writes a task's YAML and examples; None, and nothing, of a task without choices."""
    rows, differing = [], []
    for prompt in prompts:
        if not prompt.example.choices:
            return None
        rows.append(texts.row(prompt))
        if not texts.agrees(prompt, rows[-1]):
            differing.append(prompt.example.id)
    if not rows:
        return None
    name, stem = name_of(task), quote(task, safe="")
    examples = (folder / f"{stem}.jsonl").resolve()
    replace(examples, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    told = {"task": name, **TASK, "dataset_kwargs": {"data_files": {"test": str(examples)}}}
    write_yaml(folder / f"{stem}.yaml", told | {"target_delimiter": texts.delimiter})
    return Exported(name, len(rows), differing)


def export_group(folder: Path, exported: Sequence[Exported]) -> str:
    """Writes the group of all tasks, whose accuracy is their mean; gives its name."""
    write_yaml(folder / "_all.yaml", {**GROUP, "task": [each.name for each in exported]})
    return str(GROUP["group"])


def name_of(task: str) -> str:
    """What a task is called in the harness."""
    return PREFIX + quote(task, safe="")


def write_yaml(path: Path, told: Mapping[str, Any]) -> None:
    replace(path, yaml.safe_dump(dict(told), sort_keys=False, allow_unicode=True))
