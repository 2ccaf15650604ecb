"""Training tokens/s of cpt (NCL, masked language model) against the Hugging Face Trainer and bare PyTorch.

Every subject is a process of its own that waits between chunks of steps, so that the subjects take turns on
the same cores: A B C D, B C D A, ... The whole cast is started anew several times, because ratios drift
by a percent or two within and between runs. All have the same weights, rows, optimizer,
schedule and clipping; a first, untimed pass without dropout on identical batches shows that they do the same
work."""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ground import arguments
from measuring import QUIET_CORES, busy, paired, rotated, save, spread, wait_until_quiet
from subjects import SUBJECTS, Beat, Course

FEWEST_ROUNDS = 7


def act(name: str, course: Course, pipe: Connection, log: str) -> None:
    """One subject's process; what it prints goes to a file."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    import torch

    torch.set_num_threads(course.threads)
    beat = Beat(pipe, course)
    SUBJECTS[name](course, beat)
    beat.conclude()


@dataclass(frozen=True)
class Actor:
    """A subject's process as the parent sees it."""

    process: BaseProcess
    pipe: Connection
    log: Path

    def report(self) -> dict[str, Any]:
        try:
            return self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"a subject ended early:\n{self.log.read_text()[-3000:]}") from None

    def turn(self) -> dict[str, float]:
        """One chunk: its seconds, and the cores that processes other than the subject used meanwhile."""
        before = busy()
        self.pipe.send("go")
        chunk = self.report()
        return {**chunk, "foreign_cores": max(0.0, (busy() - before - chunk["cpu"]) / chunk["wall"])}


@contextmanager
def actors(course: Course) -> Iterator[dict[str, Actor]]:
    """All subjects, warmed up and waiting for their first turn."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as logs:
        cast = {name: enter(context, name, course, Path(logs) / name) for name in SUBJECTS}
        try:
            for actor in cast.values():
                actor.report()
            yield cast
        finally:
            for actor in cast.values():
                actor.process.terminate()
                actor.process.join()


def enter(context: Any, name: str, course: Course, log: Path) -> Actor:
    ours, theirs = context.Pipe()
    log.touch()
    process = context.Process(target=act, args=(name, course, theirs, str(log)), daemon=True)
    process.start()
    theirs.close()
    return Actor(process, ours, log)


def played(course: Course, *, patience: float) -> dict[str, Any]:
    """All rounds of one cast: chunks and per-step losses and scored tokens of every subject, and the load
    average."""
    chunks: dict[str, list[dict[str, float]]] = {name: [] for name in SUBJECTS}
    load = []
    with actors(course) as cast:
        for number in range(course.rounds):
            patience -= wait_until_quiet(patience)
            load.append(os.getloadavg()[0])
            for name in rotated(list(cast), number):
                chunks[name].append(cast[name].turn())
            print(f"round {number + 1}/{course.rounds}", file=sys.stderr)
        for actor in cast.values():
            actor.pipe.send("go")
        steps = {name: actor.report() for name, actor in cast.items()}
    return {"chunks": chunks, "steps": steps, "load": load}


def joined(casts: list[dict[str, Any]]) -> dict[str, Any]:
    """The rounds of all casts one after another; losses and scored tokens of the first, as all are alike."""
    chunks = {name: [chunk for cast in casts for chunk in cast["chunks"][name]] for name in SUBJECTS}
    load = [each for cast in casts for each in cast["load"]]
    return {"chunks": chunks, "steps": casts[0]["steps"], "load": load}


def equality(steps: dict[str, Any]) -> dict[str, Any]:
    """How far each subject's losses are from cpt's, at the first step and at most; scored tokens."""
    ours = steps["cpt"]["losses"]

    def distance(name: str) -> dict[str, Any]:
        apart = [abs(a - b) for a, b in zip(ours, steps[name]["losses"], strict=True)]
        same = steps[name]["scored"] == steps["cpt"]["scored"]
        return {
            "first": apart[0],
            "most": max(apart),
            "scored": sum(steps[name]["scored"]),
            "same_scored": same,
        }

    return {"loss": [ours[0], ours[-1]], "distance": {name: distance(name) for name in steps}}


def undisturbed(chunks: dict[str, list[dict[str, float]]]) -> list[int]:
    """The rounds in which other processes left the machine alone; all rounds if those are too few."""
    rounds = list(range(len(chunks["cpt"])))
    quiet = [n for n in rounds if max(each[n]["foreign_cores"] for each in chunks.values()) <= QUIET_CORES]
    return quiet if len(quiet) >= FEWEST_ROUNDS else rounds


def timed(chunks: dict[str, list[dict[str, float]]], rounds: list[int], *, tokens: int) -> dict[str, Any]:
    """Tokens/s, and how much faster cpt is by wall and by processor time, over some of the rounds."""
    wall, cpu = (
        {name: [each[number][kind] for number in rounds] for name, each in chunks.items()}
        for kind in ("wall", "cpu")
    )
    others = [name for name in chunks if name != "cpt"]
    return {
        "rounds": rounds,
        "tokens_per_s": {name: tokens / statistics.median(each) for name, each in wall.items()},
        "cpt_over": {name: paired(wall["cpt"], wall[name]) for name in others},
        "cpt_over_by_cpu_time": {name: paired(cpu["cpt"], cpu[name]) for name in others},
        "foreign_cores": spread(
            [each[number]["foreign_cores"] for each in chunks.values() for number in rounds]
        ),
    }


def medians(chunks: dict[str, list[dict[str, float]]], start: int, rounds: int) -> dict[str, float]:
    """Median ratios of one cast's rounds."""
    wall = {name: [chunk["wall"] for chunk in each[start : start + rounds]] for name, each in chunks.items()}
    return {name: paired(wall["cpt"], each)["median"] for name, each in wall.items() if name != "cpt"}


def summary(run: dict[str, Any], course: Course) -> dict[str, Any]:
    """The figures of the undisturbed rounds and of all, losses and scored tokens."""
    tokens, chunks = course.chunk * course.batch * course.length, run["chunks"]
    return {
        **timed(chunks, undisturbed(chunks), tokens=tokens),
        "of_all_rounds": timed(chunks, list(range(len(run["load"]))), tokens=tokens),
        "by_cast": [
            medians(chunks, start, course.rounds) for start in range(0, len(run["load"]), course.rounds)
        ],
        "scored_tokens": {name: sum(steps["scored"]) for name, steps in run["steps"].items()},
        "mean_loss": {name: statistics.mean(steps["losses"]) for name, steps in run["steps"].items()},
        "load": run["load"],
    }


def shown(results: dict[str, Any]) -> str:
    lines = [f"{'subject':8}{'tokens/s':>10}{'scored':>9}{'mean loss':>11}   cpt is faster by"]
    for name, speed in results["tokens_per_s"].items():
        ratio = results["cpt_over"].get(name)
        times = "{median:.3f} [{low:.3f}, {high:.3f}]".format(**ratio) if ratio else ""
        work = f"{results['scored_tokens'][name]:9}{results['mean_loss'][name]:11.4f}"
        lines.append(f"{name:8}{speed:10.0f}{work}   {times}")
    for name, apart in results["equal_work"]["distance"].items():
        lines.append(f"equal work, {name}: {apart}")
    used, load = len(results["rounds"]), spread(results["load"])
    lines.append(f"of {used} of {len(results['load'])} rounds; load average {load}")
    lines += [f"cast {number}: {each}" for number, each in enumerate(results["by_cast"], start=1)]
    lines.append(f"cores that others used meanwhile {results['foreign_cores']}")
    return "\n".join(lines)


def options() -> argparse.Namespace:
    parser = arguments("Training tokens/s of cpt, the Hugging Face Trainer and bare PyTorch loops.")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per chunk")
    parser.add_argument("--repeats", type=int, default=8, help="chunks per subject and cast")
    parser.add_argument("--casts", type=int, default=3, help="times that all subjects are started anew")
    parser.add_argument("--length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--check-steps", type=int, default=25, help="steps of the equal-work check")
    parser.add_argument("--fused", action="store_true", help="fused AdamW on all sides")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # for all subjects what run.py sets for cpt
    shared = {name: getattr(chosen, name) for name in ("cache", "threads", "batch", "length", "fused")}
    course = Course(**shared, rounds=chosen.repeats, chunk=chosen.steps, equal=False)
    check = Course(**shared, rounds=1, chunk=chosen.check_steps, equal=True)
    for each in (course, check):
        each.ground()  # fills the cache
    equal = equality(played(check, patience=0.0)["steps"])
    run = joined([played(course, patience=chosen.patience) for _ in range(chosen.casts)])
    settings = {name: value for name, value in vars(chosen).items() if name not in ("cache", "out")}
    results = {"options": settings, "equal_work": equal, **summary(run, course), "chunks": run["chunks"]}
    print(shown(results))
    save("throughput", results, out=chosen.out)


if __name__ == "__main__":
    main()
