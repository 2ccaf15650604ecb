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
from ground import Ground, arguments, ground
from measuring import busy, paired, rotated, save, spread, wait_until_quiet
from stage import prepare
from torch.nn.utils import clip_grad_norm_

PACKINGS = ("none", "document_mask")
ALL_SIX = ["restaurant+acl+ai+phone+pubmed+camera"]
MIXTURES = {"examples": [], "with a quarter of text": ["replay=general", "replay.general_ratio=0.25"]}


@dataclass
class Subject:
    """What learns the batches of its tasks in order."""

    made: Ground

    def __post_init__(self) -> None:
        self.stream, self.model = self.made.stream(), self.made.module.model
        self.optimizer, _ = self.made.optimizer(self.model)
        self.number = 0

    def step(self) -> dict[str, float]:
        """Makes the next step; gives its seconds, its loss, and the places that the model was run on."""
        wall, cpu, busy_before = time.perf_counter(), time.process_time(), busy()
        batch = self.stream[self.number % len(self.stream)]
        loss = self.made.module.losses(batch)["lm"]
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.number += 1
        attention_mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        return {
            "wall": wall,
            "foreign_cores": (busy() - busy_before - cpu) / wall,
            "loss": loss.item(),
            "tokens": int(attention_mask.sum()),
            "places": batch.get("layout", batch["input_ids"]).numel(),
        }


def play(subjects: dict[str, Subject], steps: int) -> dict[str, list[dict[str, float]]]:
    """The steps of each, in turns; the first two are not counted."""
    records: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    for turn in range(steps + 2):
        for name in rotated(list(subjects), turn):
            records[name].append(subjects[name].step())
    return {name: subject_records[2:] for name, subject_records in records.items()}


def summary(steps: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """What came of the steps of padded samples, which come first, and of those that share rows."""

    def column(packing: str, name: str) -> list[float]:
        return [each[name] for each in steps[packing]]

    def rate(packing: str, denominator: str) -> float:
        return sum(column(packing, "tokens")) / sum(column(packing, denominator))

    per_token = [[each["wall"] / each["tokens"] for each in made] for made in steps.values()]
    same = column("document_mask", "tokens") == column(next(iter(steps)), "tokens")
    losses = zip(*(column(packing, "loss") for packing in steps), strict=True)
    return {
        f"isolated_over_{next(iter(steps))}": paired(*reversed(per_token)),
        "tokens_per_s": {packing: rate(packing, "wall") for packing in steps},
        "step_s": {packing: statistics.median(column(packing, "wall")) for packing in steps},
        "filled": {packing: rate(packing, "places") for packing in steps},
        **({"losses_apart": max(abs(one - other) for one, other in losses)} if same else {}),
        "last_loss": {packing: column(packing, "loss")[-1] for packing in steps},
        "foreign_cores": spread([each for packing in steps for each in column(packing, "foreign_cores")]),
    }


def make_subjects(chosen: argparse.Namespace, extra: Sequence[str]) -> dict[str, Subject]:
    root = [] if chosen.root is None else [f"domains.root={chosen.root}", "domains.format=jsonl"]
    options = [
        *("domains=tasks", *root, f"domains/template={chosen.template}", f"order=[{','.join(chosen.tasks)}]"),
        *("method=joint", f"model.max_seq_length={chosen.length}", f"trainer.batch_size={chosen.batch}"),
        *extra,
    ]
    return {
        packing: Subject(ground(chosen.cache, *options, f"domains.packing={packing}", shape="gpt2"))
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


def make_readers(chosen: argparse.Namespace, names: Sequence[str], folder: Path) -> dict[str, Subject]:
    """What learns documents: a RoBERTa, of the domains with these names together."""
    draw_documents(Path(chosen.documents), folder, names, chosen.most)
    options = [
        *("domains=das6", f"domains.root={folder}", f"order=[{','.join(names)}]", "method=joint"),
        *(f"model.max_seq_length={chosen.length}", f"trainer.batch_size={chosen.batch}"),
    ]
    return {
        packing: Subject(ground(chosen.cache, *options, f"domains.packing={packing}")) for packing in PACKINGS
    }


def options() -> argparse.Namespace:
    parser = arguments("Training tokens/s of examples that share rows over padded ones.")
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
    chosen = options()
    prepare(chosen.threads)
    torch.set_num_threads(chosen.threads)
    results: dict[str, Any] = {}
    for name in chosen.domains if chosen.documents else MIXTURES:
        if chosen.documents:
            with TemporaryDirectory() as folder:
                subjects = make_readers(chosen, name.split("+"), Path(folder))
        else:
            subjects = make_subjects(chosen, MIXTURES[name])
        wait_until_quiet(chosen.patience)
        steps = play(subjects, chosen.steps)
        results[name] = summary(steps) | {"steps": steps}
        print(name, {key: value for key, value in results[name].items() if key != "steps"})
    unrecorded = ("cache", "out", "root", "documents")
    settings = {name: value for name, value in vars(chosen).items() if name not in unrecorded}
    save(
        "packing_documents" if chosen.documents else "packing",
        {"options": settings, "mixtures": results},
        out=chosen.out,
    )


if __name__ == "__main__":
    main()
