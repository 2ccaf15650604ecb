"""Subjects that take turns on the same cores: each is a worker process of its own that waits between chunks
of steps, A B C D, B C D A, ...

A subject is a function of a step timer, which it calls after every step; what it returns is part of its
report. A round is one chunk of every subject. A session starts all subjects and measures all rounds; it may
be repeated, as ratios drift by a percent or two from session to session."""

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
from common.measuring import QUIET_CORES, read_busy_seconds, rotate, wait_until_quiet

from cpt.core.processes import SPINS

WARMUP = 5
UNTIMED = {"cpu": 0, "cuda": 1}  # steps, in which memory is asked for again
MIN_QUIET_ROUNDS = 7

Chunks = Mapping[str, list[dict[str, float]]]  # of every subject, round by round


@dataclass(frozen=True)
class TimingOptions:
    """How long a subject trains: a warm-up, then `rounds` chunks of `chunk` timed steps each; on a GPU each
    chunk begins with `untimed` further steps."""

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
    """A moment: now on the CPU, and on a GPU the moment at which it has done all work queued so far."""

    def __init__(self) -> None:
        self.time = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_initialized() else None
        if self.event is not None:
            self.event.record()

    def wait(self) -> "Mark":
        """Waits until the moment has come; returns the mark itself."""
        if self.event is not None:
            self.event.synchronize()
        return self

    def seconds_to(self, end: "Mark") -> float:
        if self.event is None or end.event is None:
            return end.time - self.time
        return self.event.elapsed_time(end.event) / 1000


class StepTimer:
    """Times the steps of a subject, in its process. The subject calls it after every step. Between chunks it
    sends the chunk's time to the parent and waits until the parent lets the next chunk begin; a GPU's unused
    memory is freed before, for the other subjects."""

    def __init__(self, pipe: Connection, timing: TimingOptions) -> None:
        self.pipe, self.timing = pipe, timing
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
        position = counted_steps % (self.timing.untimed + self.timing.chunk)
        if position == 0:
            self.pause()
        if position == self.timing.untimed:
            self.begin()
        else:
            self.marks.append(Mark())

    def wait_for_warm_up(self) -> None:
        """On a GPU, returns when it is the subject's turn to warm up: it has no memory for all at once."""
        if self.timing.device != "cpu":
            self.pipe.send({})
            self.pipe.recv()

    def pause(self) -> None:
        """Sends the chunk's times to the parent and waits for its message to go on."""
        last = Mark().wait()
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
        self.marks = [Mark().wait()]
        self.wall = time.perf_counter()
        self.cpu = time.process_time()

    def send_report(self, facts: Mapping[str, Any]) -> None:
        """Sends the last message: the loss and scored tokens of each step, and what the subject returned."""
        self.pipe.send({**facts, "losses": [loss.item() for loss in self.losses], "scored": self.scored})


Subject = Callable[[StepTimer], Mapping[str, Any] | None]


def run_subject(subject: Subject, timing: TimingOptions, pipe: Connection, log: str) -> None:
    """Runs in the process of a subject: trains it. What it prints goes to the file `log`."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(timing.threads)
    timer = StepTimer(pipe, timing)
    timer.send_report(subject(timer) or {})


@dataclass(frozen=True)
class Worker:
    """A subject's process, as the parent sees it."""

    name: str
    process: BaseProcess
    pipe: Connection
    log: Path

    def receive(self) -> dict[str, Any]:
        """Waits for the next message of the process. Raises RuntimeError if the process has ended."""
        try:
            return self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} ended early:\n{self.log.read_text()[-3000:]}") from None

    def run_chunk(self) -> dict[str, float]:
        """Has the process run its next chunk of steps, while all other subjects wait. Returns the chunk's
        seconds, and how many cores were used meanwhile by other processes than the subject's."""
        busy_before = read_busy_seconds()
        self.pipe.send("go")
        chunk = self.receive()
        foreign_seconds = read_busy_seconds() - busy_before - chunk["cpu"]
        return {**chunk, "foreign_cores": max(0.0, foreign_seconds / chunk["wall"])}


@contextmanager
def start_workers(subjects: Mapping[str, Subject], timing: TimingOptions) -> Iterator[dict[str, Worker]]:
    """Starts a worker process for each subject; yields them by name when all have done their warm-up steps
    and wait for their first chunk. At the end of the context all are terminated."""
    with tempfile.TemporaryDirectory() as log_folder:
        workers = {}
        for number, (name, subject) in enumerate(subjects.items()):
            workers[name] = start_worker(name, subject, timing, Path(log_folder) / str(number))
        try:
            warm_up(workers, together=timing.device == "cpu")
            yield workers
        finally:
            for worker in workers.values():
                worker.process.terminate()
                worker.process.join()


def warm_up(workers: Mapping[str, Worker], *, together: bool) -> None:
    """Returns when all workers have done their warm-up steps, all at once or (not `together`) one after
    another, when all have loaded what they need."""
    if not together:
        for worker in workers.values():
            worker.receive()  # the message of `wait_for_warm_up`
    for worker in workers.values():
        if not together:
            worker.pipe.send("go")
        worker.receive()  # the message of the first `pause`, whose times are of no chunk


def start_worker(name: str, subject: Subject, timing: TimingOptions, log: Path) -> Worker:
    """Starts the process of a subject; what it prints goes to the file `log`."""
    context = multiprocessing.get_context("spawn")
    parent_end, worker_end = context.Pipe()
    log.touch()
    process = context.Process(target=run_subject, args=(subject, timing, worker_end, str(log)))
    process.start()
    # A process that ends must be the last that holds this end: only then does reading raise EOFError.
    worker_end.close()
    return Worker(name=name, process=process, pipe=parent_end, log=log)


def measure_rounds(
    subjects: Mapping[str, Subject], timing: TimingOptions, *, patience: float
) -> dict[str, Any]:
    """One session: the chunks of every subject, round by round, the report of every subject, and the load
    average before each round. A report has the loss and the scored tokens of each step, and what the subject
    returned. `patience`: the seconds that all rounds together may wait for a quiet machine."""
    chunks: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    load = []
    with start_workers(subjects, timing) as workers:
        for number in range(timing.rounds):
            patience -= wait_until_quiet(patience)
            load.append(os.getloadavg()[0])
            for name in rotate(list(workers), number):
                chunks[name].append(workers[name].run_chunk())
            print(f"round {number + 1}/{timing.rounds}", file=sys.stderr)
        for worker in workers.values():
            worker.pipe.send("go")  # the answer to the `pause` after the last chunk
        reports = {name: worker.receive() for name, worker in workers.items()}
    return {"chunks": chunks, "reports": reports, "load": load}


def join_sessions(sessions: list[dict[str, Any]]) -> dict[str, Any]:
    """The rounds of several sessions one after another, as if of one; the reports are those of the first
    session, as all are alike."""
    chunks: dict[str, list[dict[str, float]]] = {name: [] for name in sessions[0]["chunks"]}
    load: list[float] = []
    for session in sessions:
        load.extend(session["load"])
        for name, subject_chunks in chunks.items():
            subject_chunks.extend(session["chunks"][name])
    return {"chunks": chunks, "reports": sessions[0]["reports"], "load": load}


def select_quiet_rounds(chunks: Chunks) -> list[int]:
    """The rounds in which other processes left the machine alone; all rounds if those are too few."""
    rounds = list(range(len(next(iter(chunks.values())))))
    quiet_rounds = []
    for number in rounds:
        foreign_cores = [subject_chunks[number]["foreign_cores"] for subject_chunks in chunks.values()]
        if max(foreign_cores) <= QUIET_CORES:
            quiet_rounds.append(number)
    return quiet_rounds if len(quiet_rounds) >= MIN_QUIET_ROUNDS else rounds


def collect_times(chunks: Chunks, rounds: list[int], kind: str) -> dict[str, list[float]]:
    """One figure of every subject's chunks in some of the rounds: `wall`, `cpu` or `foreign_cores`."""
    times = {}
    for name, subject_chunks in chunks.items():
        times[name] = [subject_chunks[number][kind] for number in rounds]
    return times


def prepare(threads: int) -> None:
    """Sets the environment variables that the processes of all subjects inherit."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # what run.py sets on a quiet machine
