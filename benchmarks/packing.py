"""Training tokens/s of examples, or documents, that share rows (domains.packing=document_mask) over padded.

Both learn step by step in turns in one process: a padded batch is as wide as its longest example or document.
A step is all of it: batch, layout, forward, backward, clipping, AdamW. Tokens are those of text, without
padding. Examples are the same in the same order, and losses, which agree, show that the work is; of documents
(`--documents`) a batch has as many rows, which hold several of them, so times are taken per token. Of these
some are drawn evenly from the files, in which they have the lengths that all have."""

import argparse
import gzip
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common.ground import Workload, build_workload, make_parser
from common.measuring import compare_times, read_busy_seconds, rotate, save, summarize_times, wait_until_quiet
from common.stage import prepare
from torch.nn.utils import clip_grad_norm_

PACKINGS = ("none", "document_mask")
ALL_SIX = ["restaurant+acl+ai+phone+pubmed+camera"]
MIXTURES = {"examples": [], "with a quarter of text": ["replay=general", "replay.general_ratio=0.25"]}


@dataclass
class Subject:
    """What learns the batches of its tasks in order."""

    workload: Workload

    def __post_init__(self) -> None:
        self.stream = self.workload.stream()
        self.model = self.workload.module.model
        self.optimizer, _ = self.workload.optimizer(self.model)
        self.number = 0

    def step(self) -> dict[str, float]:
        """Makes the next step; gives its seconds, its loss, and the positions that the model was run on."""
        wall_start = time.perf_counter()
        cpu_start = time.process_time()
        busy_before = read_busy_seconds()
        batch = self.stream[self.number % len(self.stream)]
        loss = self.workload.module.losses(batch)["lm"]
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        wall = time.perf_counter() - wall_start
        cpu = time.process_time() - cpu_start

        self.number += 1
        attention_mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        return {
            "wall": wall,
            "foreign_cores": (read_busy_seconds() - busy_before - cpu) / wall,
            "loss": loss.item(),
            "tokens": int(attention_mask.sum()),
            "places": batch.get("layout", batch["input_ids"]).numel(),
        }


def take_turns(subjects: dict[str, Subject], steps: int) -> dict[str, list[dict[str, float]]]:
    """The steps of each, in turns; the first two are not counted."""
    records: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    for turn in range(steps + 2):
        for name in rotate(list(subjects), turn):
            records[name].append(subjects[name].step())
    return {name: subject_records[2:] for name, subject_records in records.items()}


def summarize(steps: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """What came of the steps of padded samples, which come first, and of those that share rows."""
    first, _ = steps
    per_token = {}
    tokens_per_s = {}
    step_s = {}
    filled = {}
    last_loss = {}
    foreign_cores: list[float] = []
    for packing, records in steps.items():
        num_tokens = sum(read_column(records, "tokens"))
        per_token[packing] = [record["wall"] / record["tokens"] for record in records]
        tokens_per_s[packing] = num_tokens / sum(read_column(records, "wall"))
        step_s[packing] = statistics.median(read_column(records, "wall"))
        filled[packing] = num_tokens / sum(read_column(records, "places"))
        last_loss[packing] = records[-1]["loss"]
        foreign_cores += read_column(records, "foreign_cores")

    summary: dict[str, Any] = {}
    summary[f"isolated_over_{first}"] = compare_times(per_token["document_mask"], per_token[first])
    summary["tokens_per_s"] = tokens_per_s
    summary["step_s"] = step_s
    summary["filled"] = filled
    # Losses are comparable where the steps have the same text.
    shared = steps["document_mask"]
    if read_column(shared, "tokens") == read_column(steps[first], "tokens"):
        losses = zip(read_column(steps[first], "loss"), read_column(shared, "loss"), strict=True)
        summary["losses_apart"] = max(abs(padded - packed) for padded, packed in losses)
    summary["last_loss"] = last_loss
    summary["foreign_cores"] = summarize_times(foreign_cores)
    return summary


def read_column(records: list[dict[str, float]], name: str) -> list[float]:
    return [record[name] for record in records]


def make_subjects(options: argparse.Namespace, extra: Sequence[str]) -> dict[str, Subject]:
    """What learns tasks: a GPT-2, padded and with shared rows."""
    root = [] if options.root is None else [f"domains.root={options.root}", "domains.format=jsonl"]
    overrides = [
        "domains=tasks",
        *root,
        f"domains/template={options.template}",
        f"order=[{','.join(options.tasks)}]",
        "method=joint",
        f"model.max_seq_length={options.length}",
        f"trainer.batch_size={options.batch}",
        *extra,
    ]
    return {
        packing: Subject(
            build_workload(options.cache, *overrides, f"domains.packing={packing}", shape="gpt2")
        )
        for packing in PACKINGS
    }


def draw_documents(root: Path, folder: Path, names: Sequence[str], max_documents: int) -> None:
    """Writes the documents of some domains, and of the general text, into a folder as domains=das6 has it: of
    each file so many at most, evenly."""
    for name in (*(f"corpora/{domain}" for domain in names), "general"):
        for file in sorted((root / name).glob("*.jsonl.gz")):
            with gzip.open(file, "rt") as lines:
                documents = list(lines)
            target = folder / name / file.name.removesuffix(".gz")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("".join(documents[:: -(-len(documents) // max_documents)]))


def make_readers(options: argparse.Namespace, names: Sequence[str], folder: Path) -> dict[str, Subject]:
    """What learns documents: a RoBERTa, of the domains with these names together."""
    draw_documents(Path(options.documents), folder, names, options.most)
    overrides = [
        "domains=das6",
        f"domains.root={folder}",
        f"order=[{','.join(names)}]",
        "method=joint",
        f"model.max_seq_length={options.length}",
        f"trainer.batch_size={options.batch}",
    ]
    return {
        packing: Subject(build_workload(options.cache, *overrides, f"domains.packing={packing}"))
        for packing in PACKINGS
    }


def parse_options() -> argparse.Namespace:
    parser = make_parser("Training tokens/s of examples that share rows over padded ones.")
    parser.add_argument("--documents", help="folder of text as domains=das6 has it, instead of tasks")
    parser.add_argument("--domains", nargs="+", default=ALL_SIX, help="those of it, joined by +, in turn")
    parser.add_argument("--most", type=int, default=500, help="documents of a file, at most")
    parser.add_argument("--root", help="folder of tasks as jsonl; default: those of installed packages")
    parser.add_argument("--tasks", nargs="+", default=["sympy"], help="those of them that make the batches")
    parser.add_argument("--template", default="o_lora", help="of the questions: one of conf/domains/template")
    parser.add_argument("--steps", type=int, default=20, help="steps of each that are timed")
    parser.add_argument("--length", type=int, default=256, help="tokens of an example, at most")
    parser.add_argument("--batch", type=int, default=32, help="examples per step")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    prepare(options.threads)
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    mixtures = options.domains if options.documents else list(MIXTURES)
    for name in mixtures:
        if options.documents:
            with TemporaryDirectory() as folder:
                subjects = make_readers(options, name.split("+"), Path(folder))
        else:
            subjects = make_subjects(options, MIXTURES[name])
        wait_until_quiet(options.patience)
        steps = take_turns(subjects, options.steps)
        summary = summarize(steps)
        print(name, summary)
        results[name] = summary | {"steps": steps}

    unrecorded = ("cache", "out", "root", "documents")
    settings = {name: value for name, value in vars(options).items() if name not in unrecorded}
    file = "packing_documents" if options.documents else "packing"
    save(file, {"options": settings, "mixtures": results}, out=options.out)


if __name__ == "__main__":
    main()
