"""Supervised tasks as tasks of the lm-evaluation-harness: a YAML and a file of examples for each. Nothing
here needs the harness."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from cpt.core import naming
from cpt.core.files import replace
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
        self.encoder, tokenizer = encoder, encoder.tokenizer
        self.delimiter = "" if encoder.seq2seq else " "  # between question and choice
        self.ending = tokenizer.decode(encoder.ending)
        before = encoder.frame[0]
        begin, encode = tokenizer.decode(before), partial(tokenizer.encode, add_special_tokens=False)
        wanted = before + encode("a")
        self.beginning = next((each for each in (begin, f"{begin} ") if encode(f"{each}a") == wanted), begin)
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.prefix = tokenizer.decode(first)  # tells the harness that a question has its first token

    def choice(self, text: str) -> str:
        return self.beginning * self.encoder.seq2seq + text + self.ending

    def row(self, prompt: TaskPrompt) -> dict[str, Any]:
        """A line of the file of examples, with as much of the question as was not cut."""
        example, encoder = prompt.example, self.encoder
        question = example.source
        if encoder.ids_of([question])[0] != prompt.ids:
            question = encoder.tokenizer.decode(prompt.ids, skip_special_tokens=True)
        return {
            "id": example.id,
            "question": self.beginning * bool(encoder.frame[1] and not encoder.seq2seq) + question,
            "choices": [self.choice(text) for text in example.choices],
            "answer": example.choices.index(example.target),
        }


def export_task(
    folder: Path, task: str, prompts: Iterable[TaskPrompt], texts: HarnessTexts
) -> Exported | None:
    """Writes a task's YAML and examples; None, and nothing, of a task without choices."""
    rows, differing = [], []
    for prompt in prompts:
        if not prompt.example.choices:
            return None
        rows.append(row := texts.row(prompt))
        # The ids that the harness makes: blanks at the question's end belong to the choice.
        question, encode = row["question"].rstrip(), texts.encoder.tokenizer.encode
        after = [row["question"][len(question) :] + texts.delimiter + choice for choice in row["choices"]]
        if texts.encoder.seq2seq:
            pairs = [(encode(question), encode(each, add_special_tokens=False)) for each in after]
        else:
            special = not texts.encoder.frame[1] and not question.startswith(texts.prefix)
            alone = encode(question, add_special_tokens=special)
            whole = [encode(question + each, add_special_tokens=special) for each in after]
            pairs = [(alone, each[len(alone) :]) for each in whole]
        if pairs != [(prompt.ids, choice) for choice in prompt.choices]:
            differing.append(prompt.example.id)
    if not rows:
        return None
    stem = quote(task, safe="")
    examples = (folder / f"{stem}.jsonl").resolve()
    replace(examples, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    own = {"dataset_kwargs": {"data_files": {"test": str(examples)}}, "target_delimiter": texts.delimiter}
    content = {"task": PREFIX + stem, **TASK, **own}
    replace(folder / f"{stem}.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return Exported(PREFIX + stem, len(rows), differing)


def export_group(folder: Path, exported: Sequence[Exported]) -> str:
    """Writes the group of all tasks, whose accuracy is their mean; gives its name."""
    content = {**GROUP, "task": [each.name for each in exported]}
    replace(folder / "_all.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return str(GROUP["group"])


def export(plan: Plan, folder: Path) -> list[str]:
    """Writes the tasks of a plan into a folder; gives what is to be said of it."""
    assert plan.source.encoding is not None
    plan.source.check_domains(plan.order)
    corpora = Corpora.read(
        plan.source, plan.order, cache=Path(plan.run.cache_dir), workers=plan.data.preprocessing_num_workers
    )
    base, done = describe_base(plan.model, corpora), {}
    texts = HarnessTexts(Encoder(base.tokenizer, base.length, plan.source.encoding, base.seq2seq))
    for task in plan.order:
        most = plan.answers.max_documents if plan.answers else None
        examples = read_examples(corpora.by_name[task], plan.source.score_on, most=most)
        done[task] = export_task(folder, task, texts.encoder.prompts(examples), texts)
    written = [each for each in done.values() if each is not None]
    if not written:
        why = "has choices, which the harness is to rank; needed: one"
        raise ValueError(f"no task of {', '.join(done)} {why}")
    group, other = export_group(folder, written), "the harness makes other tokens of"
    asked = [f"benchmark.include={naming.quote(str(folder))}", f"benchmark.tasks=[{group}]"]
    differing = {each.name: each.differing for each in written if each.differing}
    return [
        *(f"{each.name}: {each.examples:,} examples" for each in written),
        *(f"{name}: {other} {len(ids):,}, like {ids[0]}" for name, ids in differing.items()),
        *(f"{task} has no choices and is left out" for task, each in done.items() if each is None),
        shlex.join(["benchmark=lm_eval", *asked]),
    ]
