"""Subjects that take turns on the same cores: each is a process of its own that waits between chunks of
steps, A B C D, B C D A, ...

A subject is a function of a beat, which it calls after every step; what it returns is part of its report."""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from measuring import QUIET_CORES, read_busy_seconds, rotate, wait_until_quiet

from cpt.core.processes import SPINS

WARMUP = 5
UNTIMED = {"cpu": 0, "cuda": 1}  # steps, in which memory is asked for again
FEWEST_ROUNDS = 7

Chunks = Mapping[str, list[dict[str, float]]]  # of every subject, round by round


@dataclass(frozen=True)
class Rhythm:
    """`rounds` chunks of `chunk` steps after the warm-up; on a GPU each behind `UNTIMED` steps of its own."""

    threads: int
    rounds: int
    chunk: int
    device: str = field(default="cpu", kw_only=True)

    @property
    def untimed(self) -> int:
        return UNTIMED[self.device]

    @property
    def steps(self) -> int:
        return WARMUP + self.rounds * (self.untimed + self.chunk)


class Mark:
    """A moment, on a GPU of its own work: what was asked of it before is done then."""

    def __init__(self) -> None:
        self.time = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_initialized() else None
        if self.event is not None:
            self.event.record()

    def reached(self) -> "Mark":
        """Itself, once the moment has come."""
        if self.event is not None:
            self.event.synchronize()
        return self

    def seconds_to(self, end: "Mark") -> float:
        if self.event is None or end.event is None:
            return end.time - self.time
        return self.event.elapsed_time(end.event) / 1000


class Beat:
    """Called after every step of a subject; between chunks it reports the chunk's time and waits for the
    next turn, on a GPU without memory that it does not use."""

    def __init__(self, pipe: Connection, rhythm: Rhythm) -> None:
        self.pipe, self.rhythm = pipe, rhythm
        self.losses: list[Any] = []
        self.scored: list[int] = []
        self.wall = self.cpu = 0.0
        self.marks: list[Mark] = []

    def __call__(self, loss: Any, scored: int) -> None:
        self.losses.append(loss.detach())
        self.scored.append(scored)
        counted_steps = len(self.losses) - WARMUP
        if counted_steps < 0:
            return
        position = counted_steps % (self.rhythm.untimed + self.rhythm.chunk)
        if position == 0:
            self.pause()
        if position == self.rhythm.untimed:
            self.begin()
        else:
            self.marks.append(Mark())

    def enter(self) -> None:
        """Returns when it is the subject's turn to warm up: a GPU has no memory for all at once."""
        if self.rhythm.device != "cpu":
            self.pipe.send({})
            self.pipe.recv()

    def pause(self) -> None:
        """Reports the chunk and waits for the next turn."""
        last = Mark().reached()
        wall = time.perf_counter() - self.wall
        cpu = time.process_time() - self.cpu
        marks = [*self.marks, last]
        steps = [start.seconds_to(end) for start, end in pairwise(marks)]

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self.pipe.send({"wall": wall, "cpu": cpu, "steps": steps})
        self.pipe.recv()

    def begin(self) -> None:
        """Starts the clocks of a chunk."""
        self.marks = [Mark().reached()]
        self.wall = time.perf_counter()
        self.cpu = time.process_time()

    def conclude(self, facts: Mapping[str, Any]) -> None:
        self.pipe.send({**facts, "losses": [loss.item() for loss in self.losses], "scored": self.scored})


Subject = Callable[[Beat], Mapping[str, Any] | None]


def run_subject(subject: Subject, rhythm: Rhythm, pipe: Connection, log: str) -> None:
    """One subject's process; what it prints goes to a file."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(rhythm.threads)
    beat = Beat(pipe, rhythm)
    beat.conclude(subject(beat) or {})


@dataclass(frozen=True)
class Actor:
    """A subject's process as the parent sees it."""

    name: str
    process: BaseProcess
    pipe: Connection
    log: Path

    def report(self) -> dict[str, Any]:
        try:
            return self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} ended early:\n{self.log.read_text()[-3000:]}") from None

    def turn(self) -> dict[str, float]:
        """One chunk: its seconds, and the cores that processes other than the subject used meanwhile."""
        before = read_busy_seconds()
        self.pipe.send("go")
        chunk = self.report()
        return {
            **chunk,
            "foreign_cores": max(0.0, (read_busy_seconds() - before - chunk["cpu"]) / chunk["wall"]),
        }


@contextmanager
def start_actors(subjects: Mapping[str, Subject], rhythm: Rhythm) -> Iterator[dict[str, Actor]]:
    """All subjects, warmed up and waiting for their first turn."""
    with tempfile.TemporaryDirectory() as logs:
        cast = {
            name: start_actor(name, subject, rhythm, Path(logs) / str(number))
            for number, (name, subject) in enumerate(subjects.items())
        }
        try:
            warm_up(cast, together=rhythm.device == "cpu")
            yield cast
        finally:
            for actor in cast.values():
                actor.process.terminate()
                actor.process.join()


def warm_up(cast: Mapping[str, Actor], *, together: bool) -> None:
    """Has all subjects do their first steps, once all have what they need; one after another if not
    together."""
    if not together:
        for actor in cast.values():
            actor.report()
    for actor in cast.values():
        if not together:
            actor.pipe.send("go")
        actor.report()


def start_actor(name: str, subject: Subject, rhythm: Rhythm, log: Path) -> Actor:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    log.touch()
    process = context.Process(target=run_subject, args=(subject, rhythm, theirs, str(log)))
    process.start()
    theirs.close()
    return Actor(name, process, ours, log)


def play_rounds(subjects: Mapping[str, Subject], rhythm: Rhythm, *, patience: float) -> dict[str, Any]:
    """All rounds of one cast: chunks and report of every subject, and the load average. A report has the
    loss and the scored tokens of each step, and what the subject returned."""
    chunks: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    load = []
    with start_actors(subjects, rhythm) as cast:
        for number in range(rhythm.rounds):
            patience -= wait_until_quiet(patience)
            load.append(os.getloadavg()[0])
            for name in rotate(list(cast), number):
                chunks[name].append(cast[name].turn())
            print(f"round {number + 1}/{rhythm.rounds}", file=sys.stderr)
        for actor in cast.values():
            actor.pipe.send("go")
        reports = {name: actor.report() for name, actor in cast.items()}
    return {"chunks": chunks, "reports": reports, "load": load}


def join_casts(casts: list[dict[str, Any]]) -> dict[str, Any]:
    """The rounds of all casts one after another; reports of the first, as all are alike."""
    chunks: dict[str, list[dict[str, float]]] = {name: [] for name in casts[0]["chunks"]}
    load: list[float] = []
    for cast in casts:
        load.extend(cast["load"])
        for name, cast_chunks in chunks.items():
            cast_chunks.extend(cast["chunks"][name])
    return {"chunks": chunks, "reports": casts[0]["reports"], "load": load}


def select_quiet_rounds(chunks: Chunks) -> list[int]:
    """The rounds in which other processes left the machine alone; all rounds if those are too few."""
    rounds = list(range(len(next(iter(chunks.values())))))
    quiet_rounds = []
    for number in rounds:
        foreign_cores = [subject_chunks[number]["foreign_cores"] for subject_chunks in chunks.values()]
        if max(foreign_cores) <= QUIET_CORES:
            quiet_rounds.append(number)
    return quiet_rounds if len(quiet_rounds) >= FEWEST_ROUNDS else rounds


def collect_times(chunks: Chunks, rounds: list[int], kind: str) -> dict[str, list[float]]:
    """One figure of every subject's chunks in some of the rounds: `wall`, `cpu` or `foreign_cores`."""
    times = {}
    for name, subject_chunks in chunks.items():
        times[name] = [subject_chunks[number][kind] for number in rounds]
    return times


def prepare(threads: int) -> None:
    """What the processes of all subjects inherit."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # what run.py sets on a quiet machine
