"""Training tokens/s of cpt (NCL, masked language model) against the Hugging Face Trainer and bare PyTorch.

Every subject is a process of its own that waits between chunks of steps, so that the subjects take turns on
the same cores: A B C D, B C D A, ... All subjects are started anew several times (`--casts`; one start is a
session of stage.py), because ratios drift by a percent or two within and between sessions. All have the same
weights, rows, optimizer, schedule and clipping; a first, untimed pass without dropout on identical batches
shows that they do the same work."""

import argparse
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.ground import SHAPES, make_parser
from common.measuring import compare_times, save, summarize_times
from common.stage import Chunks, collect_times, join_sessions, measure_rounds, prepare, select_quiet_rounds
from common.subjects import DEFAULT_SUBJECTS, SUBJECTS, TrainingSetup


def measure_subjects(setup: TrainingSetup, names: list[str], *, patience: float) -> dict[str, Any]:
    """One session of subjects."""
    return measure_rounds({name: partial(SUBJECTS[name], setup) for name in names}, setup, patience=patience)


def compare_losses(steps: dict[str, Any]) -> dict[str, Any]:
    """Of each subject the absolute difference of its losses from cpt's, at the first step and the largest of
    all, and its scored tokens; of cpt the first and the last loss. `steps`: the reports of the subjects."""
    ours = steps["cpt"]["losses"]
    distances = {}
    for name, report in steps.items():
        differences = [abs(a - b) for a, b in zip(ours, report["losses"], strict=True)]
        distances[name] = {
            "first": differences[0],
            "most": max(differences),
            "scored": sum(report["scored"]),
            "same_scored": report["scored"] == steps["cpt"]["scored"],
        }
    return {"loss": [ours[0], ours[-1]], "distance": distances}


def compute_speeds(chunks: Chunks, rounds: list[int], *, tokens: int, ours: str) -> dict[str, Any]:
    """Tokens/s of each subject, how many times faster `ours` is than each other one, by wall and by CPU time,
    and how many cores other processes used, over some of the rounds. `tokens`: of a chunk."""
    wall = collect_times(chunks, rounds, "wall")
    cpu = collect_times(chunks, rounds, "cpu")
    foreign_cores = collect_times(chunks, rounds, "foreign_cores")
    references = [name for name in chunks if name != ours]
    return {
        "rounds": rounds,
        "tokens_per_s": {name: tokens / statistics.median(durations) for name, durations in wall.items()},
        "cpt_over": {name: compare_times(wall[ours], wall[name]) for name in references},
        "cpt_over_by_cpu_time": {name: compare_times(cpu[ours], cpu[name]) for name in references},
        "foreign_cores": summarize_times(sum(foreign_cores.values(), [])),
    }


def compute_medians(chunks: Chunks, rounds: list[int], *, ours: str) -> dict[str, float]:
    """Over the rounds of one session: the median of how many times faster `ours` is than each other one."""
    wall = collect_times(chunks, rounds, "wall")
    return {
        name: compare_times(wall[ours], durations)["median"]
        for name, durations in wall.items()
        if name != ours
    }


def summarize(run: dict[str, Any], setup: TrainingSetup, *, ours: str = "cpt") -> dict[str, Any]:
    """The figures of the undisturbed rounds and of all, losses and scored tokens; ratios to `ours`."""
    chunks = run["chunks"]
    num_rounds = len(run["load"])
    tokens = setup.chunk * setup.batch * setup.length
    return {
        **compute_speeds(chunks, select_quiet_rounds(chunks), tokens=tokens, ours=ours),
        "of_all_rounds": compute_speeds(chunks, list(range(num_rounds)), tokens=tokens, ours=ours),
        "by_cast": [
            compute_medians(chunks, list(range(start, start + setup.rounds)), ours=ours)
            for start in range(0, num_rounds, setup.rounds)
        ],
        "scored_tokens": {name: sum(steps["scored"]) for name, steps in run["reports"].items()},
        "mean_loss": {name: statistics.mean(steps["losses"]) for name, steps in run["reports"].items()},
        "load": run["load"],
    }


def format_results(results: dict[str, Any]) -> str:
    """The table of the subjects; the check that all do equal work: each subject's differences from cpt's
    losses (`distance`); then how undisturbed the measurement was, and the ratios of each session (`cast`)."""
    lines = [f"{'subject':22}{'tokens/s':>10}{'scored':>9}{'mean loss':>11}   cpt is faster by"]
    for name, speed in results["tokens_per_s"].items():
        ratio = ""
        if results["cpt_over"].get(name):
            ratio = "{median:.3f} [{low:.3f}, {high:.3f}]".format(**results["cpt_over"][name])
        losses = f"{results['scored_tokens'][name]:9}{results['mean_loss'][name]:11.4f}"
        lines.append(f"{name:22}{speed:10.0f}{losses}   {ratio}")
    for name, difference in results["equal_work"]["distance"].items():
        lines.append(f"equal work, {name}: {difference}")

    # The table is over the rounds in which other processes left the machine alone.
    num_quiet_rounds = len(results["rounds"])
    num_rounds = len(results["load"])
    load = summarize_times(results["load"])
    lines.append(f"of {num_quiet_rounds} of {num_rounds} rounds; load average {load}")
    for number, ratios in enumerate(results["by_cast"], start=1):
        lines.append(f"cast {number}: {ratios}")
    lines.append(f"cores that others used meanwhile {results['foreign_cores']}")
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = make_parser("Training tokens/s of cpt, the Hugging Face Trainer and bare PyTorch loops.")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per chunk")
    parser.add_argument("--repeats", type=int, default=8, help="chunks per subject and cast")
    parser.add_argument("--casts", type=int, default=3, help="times that all subjects are started anew")
    parser.add_argument("--length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--check-steps", type=int, default=25, help="steps of the equal-work check")
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="roberta", help="masked, spans of T5, causal"
    )
    parser.add_argument("--model", help="a checkpoint instead of --shape; a missing head is random")
    parser.add_argument("--config", nargs="+", default=[], help="changes to the config of all subjects")
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=DEFAULT_SUBJECTS)
    parser.add_argument("--fused", action="store_true", help="fused AdamW on all sides")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    prepare(options.threads)
    names = ["cpt", *(name for name in options.subjects if name != "cpt")]
    shape = options.shape
    config = tuple(options.config)
    if options.model is not None:
        shape = "given"
        config = (
            "model=hf",
            f"model.name_or_path={options.model}",
            "model.pretraining.head_steps=0",
            *options.config,
        )
        options.model = Path(options.model).name
    setup = TrainingSetup(
        threads=options.threads,
        rounds=options.repeats,
        chunk=options.steps,
        cache=options.cache,
        batch=options.batch,
        length=options.length,
        fused=options.fused,
        equal=False,
        shape=shape,
        config=config,
    )
    check = replace(setup, rounds=1, chunk=options.check_steps, equal=True)
    setup.build_workload()  # fills the cache
    check.build_workload()

    usual_names = [name for name in names if name in DEFAULT_SUBJECTS]
    equal = compare_losses(measure_subjects(check, usual_names, patience=0.0)["reports"])
    sessions = [measure_subjects(setup, names, patience=options.patience) for _ in range(options.casts)]
    run = join_sessions(sessions)
    settings = {name: value for name, value in vars(options).items() if name not in ("cache", "out")}
    results = {
        "options": settings,
        "equal_work": equal,
        **summarize(run, setup),
        "chunks": run["chunks"],
    }
    print(format_results(results))
    name = "throughput" if options.shape == "roberta" else f"throughput_{options.shape}"
    save(name, results, out=options.out)


if __name__ == "__main__":
    main()
