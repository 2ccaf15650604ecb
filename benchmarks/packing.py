"""Training tokens/s of examples that share rows (domains.packing=isolated) over padded ones.

Both learn the same examples in the same order, step by step in turns in one process: a padded batch is as
wide as its longest example. A step is all of it: batch, layout, forward, backward, clipping, AdamW.
Losses, which agree, show that they do the same work; tokens are those of examples, without padding."""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ground import Ground, arguments, ground
from measuring import busy, paired, rotated, save, spread, wait_until_quiet
from stage import prepare
from torch.nn.utils import clip_grad_norm_

PACKINGS = ("none", "isolated")
MIXTURES = {"examples": [], "with a quarter of text": ["replay=general", "replay.general=0.25"]}


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
        wall, cpu, all_cores = time.perf_counter(), time.process_time(), busy()
        batch = self.stream[self.number % len(self.stream)]
        loss = self.made.module.losses(batch)["lm"]
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.number += 1
        present = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        return {
            "wall": wall,
            "foreign_cores": (busy() - all_cores - cpu) / wall,
            "loss": loss.item(),
            "tokens": int(present.sum()),
            "places": batch.get("layout", batch["input_ids"]).numel(),
        }


def play(subjects: dict[str, Subject], steps: int) -> dict[str, list[dict[str, float]]]:
    """The steps of each, in turns; the first two are not counted."""
    made: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    for turn in range(steps + 2):
        for name in rotated(list(subjects), turn):
            made[name].append(subjects[name].step())
    return {name: each[2:] for name, each in made.items()}


def summary(steps: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    def column(packing: str, name: str) -> list[float]:
        return [each[name] for each in steps[packing]]

    padded, shared = (column(packing, "wall") for packing in PACKINGS)
    losses = zip(*(column(packing, "loss") for packing in PACKINGS), strict=True)
    tokens = sum(column("none", "tokens"))
    return {
        "isolated_over_none": paired(shared, padded),
        "tokens_per_s": {packing: tokens / sum(column(packing, "wall")) for packing in PACKINGS},
        "step_s": {packing: statistics.median(column(packing, "wall")) for packing in PACKINGS},
        "filled": {packing: tokens / sum(column(packing, "places")) for packing in PACKINGS},
        "losses_apart": max(abs(one - other) for one, other in losses),
        "last_loss": {packing: column(packing, "loss")[-1] for packing in PACKINGS},
        "foreign_cores": spread(column("none", "foreign_cores") + column("isolated", "foreign_cores")),
    }


def make_subjects(chosen: argparse.Namespace, extra: Sequence[str]) -> dict[str, Subject]:
    root = [] if chosen.root is None else [f"domains.root={chosen.root}", "domains.format=jsonl"]
    options = [
        *("domains=tasks", *root, f"domains/template={chosen.template}", f"order=[{','.join(chosen.tasks)}]"),
        *("method=joint", f"model.length={chosen.length}", f"trainer.batch_size={chosen.batch}"),
        *extra,
    ]
    return {
        packing: Subject(ground(chosen.cache, *options, f"domains.packing={packing}", shape="gpt2"))
        for packing in PACKINGS
    }


def options() -> argparse.Namespace:
    parser = arguments("Training tokens/s of examples that share rows over padded ones.")
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
    for name, extra in MIXTURES.items():
        subjects = make_subjects(chosen, extra)
        wait_until_quiet(chosen.patience)
        steps = play(subjects, chosen.steps)
        results[name] = summary(steps) | {"steps": steps}
        print(name, {key: value for key, value in results[name].items() if key != "steps"})
    settings = {name: value for name, value in vars(chosen).items() if name not in ("cache", "out", "root")}
    save("packing", {"options": settings, "mixtures": results}, out=chosen.out)


if __name__ == "__main__":
    main()
