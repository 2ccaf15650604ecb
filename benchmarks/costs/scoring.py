"""Seconds that scoring held-out examples takes: rows in their order, rows of much the same length together,
and these in bf16-mixed, in turns in one process; and how far the losses are apart.

    python benchmarks/costs/scoring.py --root FOLDER --tasks agnews amazon dbpedia yahoo

The rows in their order in 32-true are what cpt did before `DomainSequence.by_length`."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cpt.core.memory import keep_freed_blocks
from cpt.trainer.lightning import make_trainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.ground import Workload, build_workload, make_parser
from common.measuring import compare_times, rotate, save, wait_until_quiet
from common.stage import Mark, prepare

REFERENCE = "rows in their order"
HOW: dict[str, tuple[bool, str]] = {
    REFERENCE: (False, "32-true"),
    "by length": (True, "32-true"),
    "by length, bf16-mixed": (True, "bf16-mixed"),
}


@dataclass
class Scoring:
    """Scores all held-out texts again and again."""

    workload: Workload
    by_length: bool
    precision: str
    seconds: list[float] = field(default_factory=list)
    losses: Mapping[str, float] = field(default_factory=dict)

    def __call__(self) -> None:
        module, data = self.workload.module, self.workload.data
        data.by_length = self.by_length
        data.requested_texts = [domain.name for domain in data.domains]
        arguments = self.workload.machine.lightning_arguments(self.workload.plan.trainer)
        fitting = make_trainer(arguments | {"precision": self.precision}, label="")
        start_mark = Mark()
        fitting.validate(module, datamodule=data, verbose=False)
        self.seconds.append(start_mark.seconds_to(Mark()))
        self.losses = {
            text: float(nll.sum() / count.sum()) for text, (nll, count) in module.document_losses().items()
        }


def measure(subjects: Mapping[str, Scoring], *, rounds: int, patience: float) -> dict[str, Any]:
    """All rounds but the first, which warms up."""
    for number in range(rounds + 1):
        wait_until_quiet(patience)
        for name in rotate(list(subjects), number):
            subjects[name]()

    first = subjects[REFERENCE]
    medians = {}
    ratios = {}
    distances = {}
    for name, subject in subjects.items():
        medians[name] = float(np.median(subject.seconds[1:]))
        if name != REFERENCE:
            ratios[name] = compare_times(subject.seconds[1:], first.seconds[1:])
        distances[name] = max(abs(loss - first.losses[text]) for text, loss in subject.losses.items())
    return {"seconds": medians, "over_rows_in_their_order": ratios, "losses_apart": distances}


def parse_options() -> argparse.Namespace:
    parser = make_parser(str(__doc__).split(":")[0])
    parser.add_argument("--root", required=True, help="folder of the tasks, as domains=tasks has it")
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--template", default="bare")
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=20_000, help="of each task, in rows drawn by key")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    prepare(options.threads)
    keep_freed_blocks()
    workload = build_workload(
        options.cache,
        "domains=tasks",
        f"domains.root={options.root}",
        "domains.format=jsonl",
        f"domains/template={options.template}",
        f"order=[{','.join(options.tasks)}]",
        f"model.max_seq_length={options.length}",
        f"eval.max_tokens={options.tokens}",
        shape="gpt2",
    )
    subjects = {}
    for name, (by_length, precision) in HOW.items():
        subjects[name] = Scoring(workload, by_length, precision)
    results = measure(subjects, rounds=options.rounds, patience=options.patience)
    print(*(f"{name}: {figures}" for name, figures in results.items()), sep="\n")
    settings = {name: value for name, value in vars(options).items() if name not in ("cache", "out", "root")}
    save("scoring", {"options": settings, **results}, out=options.out)


if __name__ == "__main__":
    main()
