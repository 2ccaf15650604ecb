"""A task of the lm-evaluation-harness of our own, offline: which word goes on with a sentence of a domain."""

import json
import random
from pathlib import Path

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
    text = TASK.format(name=name, folder=folder, kind=kind, answer=answer)
    (folder / f"{name}.yaml").write_text(text)
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
