"""A small task of the lm-evaluation-harness, without network: which word continues a sentence of a domain."""

import json
import random
from pathlib import Path
from typing import Any

from cpt.evaluation.options import LMEvalOptions
from tests.conftest import VOCABULARIES, sentences

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/{name}.jsonl, train: {folder}/{name}_shots.jsonl}}
  cache_dir: {folder}/cache
test_split: test
fewshot_split: train
output_type: {kind}
doc_to_text: "{{{{text}}}}"
{answer}
metadata: {{version: 3.0}}
"""
CHOICES = """\
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
GENERATION = """\
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["."], max_gen_toks: 3, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def make_options(*tasks: str, **overrides: Any) -> LMEvalOptions:
    defaults = {
        "include": None,
        "when": "last",
        "metrics": {},
        "shots": None,
        "max_documents": None,
        "batch_size": 8,
        "max_length": None,
        "tasks": tasks or ["a"],
    }
    return LMEvalOptions(**(defaults | overrides))


def write_choice_task(folder: Path, *, count: int) -> Path:
    """A multiple choice of four words, as YAML and jsonl; returns the folder."""
    return write_task(folder, "next_word", count=count, kind="multiple_choice", answer=CHOICES)


def write_task(folder: Path, name: str, *, count: int, kind: str, answer: str) -> Path:
    write_rows(folder / f"{name}.jsonl", make_rows(count=count, seed=0))
    write_rows(folder / f"{name}_shots.jsonl", make_rows(count=8, seed=1))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder, kind=kind, answer=answer))
    return folder


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_rows(*, count: int, seed: int) -> list[dict]:
    generator = random.Random(seed)
    law_words = VOCABULARIES["law"].split()
    space_words = VOCABULARIES["space"].split()
    rows = []
    for text in sentences(VOCABULARIES["law"], count=count, seed=seed + 50):
        right_choice = generator.choice(law_words)
        choices = [right_choice, *generator.sample(space_words, 3)]
        generator.shuffle(choices)
        beginning = " ".join(text.split()[:5])
        rows.append({"text": beginning, "choices": choices, "label": choices.index(right_choice)})
    return rows


FACTS = {"shots": 0, "limit": None, "examples": 9, "version": "1.0", "chance": 0.25, "truncated": 0}


def make_benchmarks(values_by_task: dict[str, list]) -> dict:
    """The `benchmarks` of scores, with the values of each task by row."""
    tasks = {}
    for name, values in values_by_task.items():
        errors = [None if value is None else 0.01 for value in values]
        tasks[name] = FACTS | {"metric": "acc", "higher": True, "values": values, "errors": errors}
    return {"harness": "0.4.13", "when": "each", "hash": "p", "seconds": 2.0, "tasks": tasks}


class FakeHarness:
    """Stands for Harness: a value of a task is a sum over the model's weights."""

    version = "0.4.13"

    def __init__(self, options: LMEvalOptions) -> None:
        self.options = options
        self.columns = dict.fromkeys(options.tasks)

    def digest(self, name: str) -> str:
        return f"{name} {self.options.max_documents}"

    def measure(self, name: str, model: Any, tokenizer: Any, *, step: Any) -> dict:
        step()
        step()
        cells = {"acc": {"value": sum_weights(model), "error": 0.1, "higher": True}}
        metadata = {"digest": self.digest(name), "harness": self.version, "seconds": 1.0}
        return FACTS | metadata | {"metrics": cells}


def sum_weights(model: Any) -> float:
    return sum(p.double().sum().item() for p in model.parameters())
