"""Sweeps on a cluster, through the Hydra launchers that others keep: submitit for SLURM, and Ray.

Such a launcher says where and when a job runs. What runs there is the same process as on one machine, with
the command line and the folder that it would have alone: nothing leaks from job to job, and a job that is
queued again goes on with its run.
"""

import copy
import importlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from cpt.core.errors import readable
from cpt.core.heartbeat import list_sweep_runs
from cpt.core.preemption import SIGNALS
from cpt.sweeps.jobs import (
    Job,
    check_swept_choices,
    compose_jobs,
    conclude_sweep,
    is_finished_already,
    job_command,
    start_process,
)

log = logging.getLogger(__name__)
SAVING_S = 100.0  # that a job has when it is told to leave; less than the signal_delay_s of conf
FOLDER = ".jobs"  # below the sweep's: what the launchers themselves write


class ClusterLauncher(Launcher):
    """Hands the jobs that are not finished to the launcher `through`, a class of the package `extra` names.

    options: of that class's constructor.
    """

    def __init__(self, *, through: str, extra: str, options: Mapping[str, Any]) -> None:
        self.through, self.extra, self.options = through, extra, options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            check_swept_choices(hydra_context, config)
            self.inner = self.made()
        self.context, self.config = hydra_context, config

    def made(self) -> Launcher:
        """Raises ValueError where the package is missing or knows no such option."""
        module, _, name = self.through.rpartition(".")
        options: Any = OmegaConf.create(OmegaConf.to_container(OmegaConf.create(self.options), resolve=True))
        try:
            return getattr(importlib.import_module(module), name)(**options)
        except ImportError as error:
            advice = f"pip install -e '.[{self.extra}]' in the checkout of cpt"
            raise ValueError(f"{self.through} is needed ({error}): {advice}") from error
        except TypeError as error:
            raise ValueError(f"hydra.launcher.options={options}: {error}") from error

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The results in the order of `job_overrides`; equal ones are run once, finished ones not at all."""
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            jobs = compose_jobs(job_overrides, initial_job_idx, context=self.context, config=self.config)
            if waiting := [job for job in jobs if not job.before]:
                list_sweep_runs(Path(self.config.hydra.sweep.dir), [job.folder for job in jobs])
                self.run(waiting, first=initial_job_idx)
            return conclude_sweep(jobs, job_overrides, sweeper=self.config.hydra.sweeper._target_)

    def run(self, jobs: Sequence[Job], *, first: int) -> None:
        """Has the jobs run, and notes how each ended."""
        command = Command(job_command(self.config), Path.cwd())
        config = apart(self.config)
        self.inner.setup(hydra_context=self.context, task_function=command, config=config)
        try:
            returned = self.inner.launch([list(job.overrides) for job in jobs], first)
        except Exception as error:  # of any class: each launcher has its own for a job that was cancelled
            lose(jobs, str(error))
            return
        for job, each in zip(jobs, returned, strict=True):
            note(job, each)


@dataclass(frozen=True)
class Command:
    """What a job on the cluster calls: the run's own process, in the folder that the sweep was started in."""

    command: Sequence[str]
    start: Path

    def __call__(self, cfg: DictConfig) -> tuple[int, int]:
        """The exit code, and where the job's output begins in its console.log."""
        hydra = HydraConfig.get()
        os.chdir(self.start)
        overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        console = Path(hydra.run.dir) / "console.log"
        process, offset = start_process([*self.command, *overrides], console, env=os.environ)
        with forward_signals(process):
            return process.wait(), offset


@contextmanager
def forward_signals(process: Popen[bytes]) -> Iterator[None]:
    """Hands signals on to a job's process; what the cluster's own handler does (submitit has the job queued
    again and ends) it does after the job has saved what it learned."""
    if threading.current_thread() is not threading.main_thread():  # where Python knows no handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGUSR2)}

    def hand_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + SAVING_S
        while not has_ended(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        if callable(before[number]):
            before[number](number, frame)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, hand_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def has_ended(pid: int) -> bool:
    """Whether a child has ended; its exit code is left for who waits for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def apart(config: DictConfig) -> DictConfig:
    """The sweep's config, with a folder of its own for what the launchers write about their jobs."""
    own = copy.deepcopy(config)
    with read_write(own), open_dict(own):
        own.hydra.sweep.dir = f"{config.hydra.sweep.dir}/{FOLDER}"
        own.hydra.output_subdir = None
    return own


def note(job: Job, returned: JobReturn) -> None:
    """How a job ended, from what its launcher gave back."""
    if returned.status is JobStatus.COMPLETED:
        job.code, job.offset = returned._return_value
    else:
        job.lost = one_line(str(returned._return_value))
    job.tell("finished")


def lose(jobs: Sequence[Job], why: str) -> None:
    """The launcher has given up on all its jobs at once: what is not finished is lost, though the cluster may
    still be at work on it. The same command goes on with it."""
    log.error("the cluster's launcher gave up: %s", why)
    for job in jobs:
        if is_finished_already(job.config, job.folder):
            job.before = True
        else:
            job.lost = one_line(why)


def one_line(text: str) -> str:
    """The last line with something in it: where a traceback says what it is about."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["(nothing said)"])[-1]
