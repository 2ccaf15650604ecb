"""Runs each job of a sweep (`-m`) in a process of its own, several at once.

No generator, thread pool or W&B run leaks from job to job, and a killed job takes no other with it. The ranks
of a distributed job repeat its command line: with `-m` in it they would run the whole sweep themselves.
"""

import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.plugin import Plugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from tqdm.contrib.logging import logging_redirect_tqdm

import cpt.core.naming  # noqa: F401  (registers the resolvers that a run folder's name is made with)
from cpt.core.errors import readable
from cpt.core.heartbeat import die_with_parent, list_sweep_runs
from cpt.core.preemption import GO_ON, SIGNALS, TOGETHER_S
from cpt.sweeps.cluster import ClusterLauncher
from cpt.sweeps.jobs import (
    CONTINUES,
    Job,
    check_swept_choices,
    compose_jobs,
    conclude_sweep,
    job_command,
)
from cpt.sweeps.line import SweepLine
from cpt.sweeps.optuna_sweeper import OptunaSweeper
from cpt.sweeps.resources import share_out_machine

log = logging.getLogger(__name__)
POLL_S = 0.1


class ProcessLauncher(Launcher):
    """Up to `jobs` processes at once with `threads` threads each; None: a fair share of the machine. When the
    sweep is stopped, they have `grace` seconds to save what they have learned."""

    def __init__(self, *, jobs: int | None, threads: int | None, grace: float = 60) -> None:
        self.jobs, self.threads, self.grace = jobs, threads, grace

    def check(self) -> None:
        """Raises ValueError for a number of jobs or threads that there cannot be."""
        for name, given in (("jobs", self.jobs), ("threads", self.threads)):
            if given is not None and (type(given) is not int or given < 1):
                raise ValueError(f"hydra.launcher.{name}={given}; allowed: null, 1, 2, …")
        if isinstance(self.grace, bool) or not isinstance(self.grace, (int, float)) or not self.grace >= 0:
            raise ValueError(f"hydra.launcher.grace={self.grace}; allowed: 0 seconds or more")

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Not the constructor checks: Hydra wraps what is raised there in lines of its own."""
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            self.check()
            check_swept_choices(hydra_context, config)
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The results in the order of `job_overrides`; equal ones are run once, finished ones not at all."""
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            jobs = compose_jobs(job_overrides, initial_job_idx, context=self.context, config=self.config)
            if waiting := [job for job in jobs if not job.before]:
                list_sweep_runs(Path(self.config.hydra.sweep.dir), [job.folder for job in jobs])
                configs = [job.config for job in jobs]
                places = share_out_machine(
                    configs, jobs=self.jobs, threads=self.threads, waiting=len(waiting)
                )
                run_all(waiting, command=job_command(self.config), places=places, grace=self.grace)
            return conclude_sweep(jobs, job_overrides, sweeper=self.config.hydra.sweeper._target_)


def run_all(
    jobs: Sequence[Job], *, command: Sequence[str], places: Sequence[dict[str, str]], grace: float
) -> None:
    """Runs the jobs, each in a place that is free; a signal has them all leave, and then the program."""
    waiting, running, free = deque(jobs), dict[Job, dict[str, str]](), list(places)
    log.info("%d to run, %d at once", len(jobs), len(places))
    line = SweepLine(len(jobs))
    with heeded_signals() as received, logging_redirect_tqdm(), line.bar:
        try:
            while (waiting or running) and not received:
                for job in [job for job in running if job.process.poll() is not None]:
                    free.append(running.pop(job))
                    job.end()
                    line.bar.update()
                while waiting and free:
                    job, place = waiting.popleft(), free.pop(0)
                    job.start(command, env={**os.environ, **place})
                    running[job] = place
                line.refresh(running)  # the clock goes on between two ends
                time.sleep(POLL_S)
        finally:
            stop(list(running), grace=grace, received=received)
    if received:
        log.warning("stopped by %s; %s", signal.Signals(received[0]).name, CONTINUES)
        raise SystemExit(GO_ON)


@contextmanager
def heeded_signals() -> Iterator[list[int]]:
    """Collects signals in a list: an exception could come between a process and the note that it exists."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]  # nohup ignores
    last = -math.inf

    def receive(given: int, _: object) -> None:
        nonlocal last
        if time.monotonic() - last > TOGETHER_S:  # a terminal that closes sends two
            received.append(given)
            last = time.monotonic()

    for number in heeded:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def stop(jobs: Sequence[Job], *, grace: float, received: Sequence[int]) -> None:
    """Ends jobs with all their processes: hands on the signal that was received, and kills what is left after
    so many seconds, or when a second signal is received."""
    deadline, first = time.monotonic() + grace, max(1, len(received))
    for job in jobs:
        job.kill(received[0] if received else signal.SIGTERM)
    while any(job.process.poll() is None for job in jobs) and time.monotonic() < deadline:
        if len(received) > first:
            break
        time.sleep(POLL_S)
    for job in jobs:
        job.kill(signal.SIGKILL)
        job.process.wait()


def plugin(made: type[Plugin]) -> None:
    """Hydra takes plugins named `hydra_plugins.` only; a file there would be imported by every Hydra
    program."""
    Plugins.instance().register(made)
    Plugins.instance().class_name_to_class[f"hydra_plugins.cpt.{made.__name__}"] = made


die_with_parent()  # also in programs of others that have their sweeps run so
for each in (ProcessLauncher, ClusterLauncher, OptunaSweeper):
    plugin(each)
