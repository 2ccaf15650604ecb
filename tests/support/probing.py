"""A task of the lm-evaluation-harness of our own, offline: which word goes on with a sentence of a domain."""

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
ANSWER = """\
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["."], max_gen_toks: 3, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def options(*tasks: str, **given: Any) -> LMEvalOptions:
    plain = {"include": None, "when": "last", "metrics": {}, "shots": None, "max_documents": None}
    return LMEvalOptions(**{**plain, "batch_size": 8, "max_length": None, "tasks": tasks or ["a"], **given})


def write_probe(folder: Path, name: str = "next_word", *, domain: str = "law", count: int = 12) -> Path:
    """A multiple choice of four words, as YAML and jsonl; gives the folder."""
    return write_files(folder, name, domain=domain, count=count, kind="multiple_choice", answer=CHOICES)


def write_generation(folder: Path, name: str = "say_word", *, domain: str = "law", count: int = 6) -> Path:
    return write_files(folder, name, domain=domain, count=count, kind="generate_until", answer=ANSWER)


def write_files(folder: Path, name: str, *, domain: str, count: int, kind: str, answer: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (end, number) in enumerate({"": count, "_shots": 8}.items()):
        rows = make_rows(domain, count=number, seed=seed)
        (folder / f"{name}{end}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder, kind=kind, answer=answer))
    return folder


def make_rows(domain: str, *, count: int, seed: int) -> list[dict]:
    draw, words = random.Random(seed), VOCABULARIES[domain].split()
    others = VOCABULARIES["space"].split()
    rows = []
    for text in sentences(VOCABULARIES[domain], count=count, seed=seed + 50):
        choices = [draw.choice(words), *draw.sample(others, 3)]
        right = choices[0]
        draw.shuffle(choices)
        rows.append({"text": " ".join(text.split()[:5]), "choices": choices, "label": choices.index(right)})
    return rows


def results(metrics: dict[str, float], *, digest: str, higher: bool = True) -> dict:
    cells = {name: {"value": value, "error": 0.1, "higher": higher} for name, value in metrics.items()}
    return {
        **{"digest": digest, "harness": "0.4.13", "version": "1.0", "shots": 0, "limit": None},
        **{"examples": 9, "chance": 0.25, "truncated": 0, "metrics": cells, "seconds": 1.0},
    }


def benchmarks(values: dict[str, list], **given: Any) -> dict:
    facts = {"metric": "acc", "higher": True, "shots": 0, "limit": None, "examples": 9, "version": "1.0"}
    facts |= {"chance": 0.25, "truncated": 0} | given
    tasks = {
        name: {**facts, "values": each, "errors": [None if value is None else 0.01 for value in each]}
        for name, each in values.items()
    }
    return {"harness": "0.4.13", "when": "each", "hash": "p", "seconds": 2.0, "tasks": tasks}


class FakeHarness:
    """Stands for Harness: a value of a task is a sum over the model's weights, and it draws from all
    generators."""

    version = "0.4.13"

    def __init__(self, options: LMEvalOptions) -> None:
        self.options, self.columns = options, dict.fromkeys(options.tasks)

    def digest(self, name: str) -> str:
        return f"{name} {self.options.max_documents}"

    def measure(self, name: str, model: Any, tokenizer: Any, *, step: Any) -> dict:
        step()
        step()
        return results({"acc": weigh(model), "f1": 0.0}, digest=self.digest(name))


def weigh(model: Any) -> float:
    return sum(p.double().sum().item() for p in model.parameters())
