"""Supervised tasks as tasks of the lm-evaluation-harness: a YAML and a file of examples for each. Nothing
here needs the harness."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from cpt.core import naming
from cpt.core.files import write_atomically
from cpt.core.messages import count_noun
from cpt.data.corpora import Corpora
from cpt.data.tokenized_tasks import Encoder, TaskPrompt, read_examples
from cpt.trainer.base_model import describe_base
from cpt.trainer.plan import Plan

PREFIX = "cpt_"  # the harness has tasks of its own, called rte, copa, …
ACCURACY = {"metric": "acc", "aggregation": "mean"}
METADATA = {"metadata": {"version": 1.0}}
TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "question",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "num_fewshot": 0,
    "metric_list": [{**ACCURACY, "higher_is_better": True}],
    **METADATA,
}
GROUP = {
    "group": f"{PREFIX}tasks",
    "group_alias": "AP",
    "aggregate_metric_list": [{**ACCURACY, "weight_by_size": False}],
    **METADATA,
}


@dataclass(frozen=True)
class Exported:
    """What was written of a task: its name in the harness, its examples, and the ids of those that the
    harness tokenises otherwise."""

    name: str
    examples: int
    differing: Sequence[str]


class HarnessTexts:
    """Questions and choices as texts of which the harness (0.4.13, `HFLM`) makes the ids that an encoder
    made.

    For a causal model context and choice are tokenised together; for an encoder-decoder apart. A choice ends
    in the text of the end token. `beginning` is what the tokenizer puts before a text: the harness leaves it
    out of a question to a causal model whose tokenizer ends texts, and of every choice for an
    encoder-decoder. Some tokenizers need a blank after it."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        tokenizer = encoder.tokenizer
        self.delimiter = "" if encoder.seq2seq else " "  # between question and choice
        self.ending = tokenizer.decode(encoder.ending)
        self.beginning = self.find_beginning()
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.prefix = tokenizer.decode(first)  # tells the harness that a question has its first token

    def find_beginning(self) -> str:
        """The text of the special tokens before a text, with a blank if the tokenizer encodes it to these
        tokens only then."""
        tokenizer = self.encoder.tokenizer
        begin_ids = self.encoder.frame.begin
        begin = tokenizer.decode(begin_ids)
        expected = begin_ids + tokenizer.encode("a", add_special_tokens=False)
        for candidate in (begin, f"{begin} "):
            if tokenizer.encode(f"{candidate}a", add_special_tokens=False) == expected:
                return candidate
        return begin

    def choice(self, text: str) -> str:
        beginning = self.beginning if self.encoder.seq2seq else ""
        return beginning + text + self.ending

    def row(self, prompt: TaskPrompt) -> dict[str, Any]:
        """A line of the file of examples, with as much of the question as was not cut."""
        example = prompt.example
        encoder = self.encoder
        question = example.source
        # The ids of a long question are a part of it. Decoded ids may become other ids again, so that a
        # question that was not cut stays as it is.
        if encoder.ids_of([question])[0] != prompt.ids:
            question = encoder.tokenizer.decode(prompt.ids, skip_special_tokens=True)
        if encoder.frame.end and not encoder.seq2seq:
            question = self.beginning + question
        return {
            "id": example.id,
            "question": question,
            "choices": [self.choice(text) for text in example.choices],
            "answer": example.choices.index(example.target),
        }

    def harness_ids(self, row: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
        """The ids of the question and of a choice, for each choice, as the harness makes them of a row:
        blanks at the question's end belong to the choice."""
        encode = self.encoder.tokenizer.encode
        question = row["question"].rstrip()
        blanks = row["question"][len(question) :]
        choices = [blanks + self.delimiter + choice for choice in row["choices"]]
        if self.encoder.seq2seq:
            return [(encode(question), encode(choice, add_special_tokens=False)) for choice in choices]

        # The harness has a causal model add its special tokens, unless the text has its first one already.
        adds_special = not self.encoder.frame.end and not question.startswith(self.prefix)
        question_ids = encode(question, add_special_tokens=adds_special)
        pairs = []
        for choice in choices:
            joined = encode(question + choice, add_special_tokens=adds_special)
            pairs.append((question_ids, joined[len(question_ids) :]))
        return pairs


def export_task(
    folder: Path, task: str, prompts: Iterable[TaskPrompt], texts: HarnessTexts
) -> Exported | None:
    """Writes a task's YAML and examples; None, and nothing, of a task without choices."""
    rows = []
    differing = []
    for prompt in prompts:
        if not prompt.example.choices:
            return None
        row = texts.row(prompt)
        rows.append(row)
        # What the harness makes of the text is compared with what this project's own evaluation scores.
        if texts.harness_ids(row) != [(prompt.ids, choice) for choice in prompt.choices]:
            differing.append(prompt.example.id)
    if not rows:
        return None

    stem = quote(task, safe="")
    examples = (folder / f"{stem}.jsonl").resolve()
    write_atomically(examples, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    content = {
        "task": PREFIX + stem,
        **TASK,
        "dataset_kwargs": {"data_files": {"test": str(examples)}},
        "target_delimiter": texts.delimiter,
    }
    write_atomically(folder / f"{stem}.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return Exported(PREFIX + stem, len(rows), differing)


def export_group(folder: Path, exported: Sequence[Exported]) -> str:
    """Writes the group of all tasks, whose accuracy is their mean; gives its name."""
    content = {**GROUP, "task": [task.name for task in exported]}
    write_atomically(folder / "_all.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return str(GROUP["group"])


def export(plan: Plan, folder: Path) -> list[str]:
    """Writes the tasks of a plan that have choices into a folder, and a group of them. Returns lines for the
    user: the number of examples of each task, those that the harness tokenizes in another way, tasks that are
    left out, and the options that use the group. Raises ValueError where no task has choices."""
    assert plan.source.encoding is not None
    plan.source.check_domains(plan.order)
    corpora = Corpora.read(
        plan.source,
        plan.order,
        cache=Path(plan.run.cache_dir),
        workers=plan.source.preprocessing_num_workers,
    )
    base = describe_base(plan.model, corpora)
    texts = HarnessTexts(Encoder(base.tokenizer, base.length, plan.source.encoding, base.seq2seq))
    max_documents = plan.answers.max_documents if plan.answers else None

    exported_tasks = []
    left_out = []
    for task in plan.order:
        examples = read_examples(corpora.by_name[task], plan.source.score_on, max_examples=max_documents)
        exported = export_task(folder, task, texts.encoder.prompts(examples), texts)
        if exported is None:
            left_out.append(task)
        else:
            exported_tasks.append(exported)
    if not exported_tasks:
        raise ValueError(
            f"no task of {', '.join(plan.order)} has choices, which the harness is to rank; needed: one"
        )

    group = export_group(folder, exported_tasks)
    lines = [f"{exported.name}: {count_noun(exported.examples, 'example')}" for exported in exported_tasks]
    for exported in exported_tasks:
        if exported.differing:
            count = f"{len(exported.differing):,}, like {exported.differing[0]}"
            lines.append(f"{exported.name}: the harness makes other tokens of {count}")
    lines += [f"{task} has no choices and is left out" for task in left_out]
    include = f"benchmark.include={naming.quote(str(folder))}"
    lines.append(shlex.join(["benchmark=lm_eval", include, f"benchmark.tasks=[{group}]"]))
    return lines
