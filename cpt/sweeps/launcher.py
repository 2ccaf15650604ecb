"""Launchers of sweeps (`-m`): each job is a process of its own, on this machine or on a cluster.

No generator, thread pool or W&B run leaks from job to job, and a killed job takes no other with it. The ranks
of a distributed job repeat its command line: with `-m` in it they would run the whole sweep themselves."""

import copy
import importlib
import logging
import math
import os
import signal
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import cpt.core.naming  # noqa: F401  (registers the resolvers of a run folder's name)
from cpt.core.errors import readable, unknown_name
from cpt.core.preemption import GO_ON, SIGNALS, TOGETHER_S
from cpt.core.processes import die_with_parent, is_one_of_several
from cpt.core.schema import Count, NonNegative, check_value
from cpt.core.slurm import without_task
from cpt.sweeps.jobs import (
    BASIC_SWEEPER,
    CONTINUES,
    Job,
    compose_jobs,
    divide_machine,
    is_finished_already,
    job_command,
    start_process,
    summarize_jobs,
)
from cpt.sweeps.optuna import OptunaSweeper
from cpt.sweeps.tune import TuneSweeper

log = logging.getLogger(__name__)
POLL_S = 0.1
SAVING_S = 100.0  # for a job to save after the cluster's warning; less than signal_delay_s in conf


class JobLauncher(Launcher):
    """Composes the jobs, runs those that are not finished, and returns the results. Subclasses say how."""

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError for a wrong option; in the constructor Hydra would wrap it in more lines."""

    @abstractmethod
    def run(self, waiting: Sequence[Job], jobs: Sequence[Job], first: int) -> None:
        """Runs the `waiting` ones of the jobs to their end."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        with readable():
            self.check()
            if (most := config.hydra.sweeper.get("max_batch_size")) is not None:
                told = f"hydra.sweeper.max_batch_size={most} is invalid: a failed batch would stop the others"
                raise ValueError(f"{told}. Allowed: hydra.launcher.jobs={most}, as many in parallel")
            # An unknown choice of a swept group is reported before the sweep has a folder.
            named = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
            for each in OverridesParser.create().parse_overrides([*named, *config.hydra.overrides.task]):
                options = hydra_context.config_loader.get_group_options(each.key_or_group)
                swept = each.value() if options else None
                for value in swept.list if isinstance(swept, ChoiceSweep) else ():
                    for one in value if isinstance(value, list) else [value]:  # mask=[migu,mofo],none
                        if (name := str(getattr(one, "text", one))) not in options:
                            raise ValueError(unknown_name(f"{each.key_or_group}={name}", options))
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The results in the order of `job_overrides`; equal ones are run once, finished ones not at all."""
        with readable():
            jobs = compose_jobs(job_overrides, initial_job_idx, context=self.context, config=self.config)
            if waiting := [job for job in jobs if not job.before]:
                self.run(waiting, jobs, initial_job_idx)
            # A sweep without a search ends with a summary, and with exit code 1 if a job failed, GO_ON if one
            # was preempted; a search decides itself what a failed job means.
            if self.config.hydra.sweeper._target_ == BASIC_SWEEPER:
                log.info("%s", "\n".join(summarize_jobs(jobs)))
                for state, code in (("failed", 1), ("preempted", GO_ON)):
                    if names := [str(job) for job in jobs if job.state == state]:
                        were, more = ("failed", "") if code == 1 else ("were preempted", f"; {CONTINUES}")
                        told = f"{len(names)} of {len(jobs)} jobs {were}: {', '.join(names)}{more}"
                        print(f"cpt: {told}", file=sys.stderr)
                        raise SystemExit(code)
            results = {job.overrides: job.result() for job in jobs}
            return [results[tuple(each)] for each in job_overrides]


class ProcessLauncher(JobLauncher):
    """Up to `jobs` processes at once with `threads` threads each; None: a fair share of the machine. When the
    sweep is stopped, they have `grace` seconds to save a checkpoint."""

    def __init__(self, *, jobs: int | None, threads: int | None, grace: float = 60) -> None:
        self.jobs, self.threads, self.grace = jobs, threads, grace

    def check(self) -> None:
        for name, kind in (("jobs", Count | None), ("threads", Count | None), ("grace", NonNegative)):
            check_value(f"hydra.launcher.{name}", getattr(self, name), kind)
        if is_one_of_several():
            problem = (
                "--multirun is invalid with srun or torchrun: each of their processes would run all jobs"
            )
            raise ValueError(f"{problem}. Allowed: python run.py -m …, or hydra/launcher=slurm")

    def run(self, waiting: Sequence[Job], jobs: Sequence[Job], first: int) -> None:
        configs = [job.config for job in jobs]
        places = divide_machine(configs, jobs=self.jobs, threads=self.threads, waiting=len(waiting))
        run_all(waiting, command=job_command(self.config), places=places, grace=self.grace)


class ClusterLauncher(JobLauncher):
    """Hands the jobs to a Hydra launcher that others keep: submitit for SLURM, or Ray.

    That launcher says where and when a job runs. What runs there is the process that the job would be alone,
    in the same folder; a job that is queued again resumes its run.

    through: its class. extra: the extra of cpt that installs it. options: of its constructor."""

    def __init__(self, *, through: str, extra: str, options: Mapping[str, Any]) -> None:
        self.through, self.extra, self.options = through, extra, options

    def check(self) -> None:
        module, _, name = self.through.rpartition(".")
        resolved = OmegaConf.to_container(OmegaConf.create(dict(self.options)), resolve=True)
        options: Any = OmegaConf.create(resolved)
        try:
            self.inner = getattr(importlib.import_module(module), name)(**options)
        except ImportError as error:
            advice = f"pip install -e '.[{self.extra}]' in the checkout of cpt"
            raise ValueError(f"hydra/launcher is invalid: {error}. Allowed: after {advice}") from error
        except TypeError as error:
            raise ValueError(f"hydra.launcher.options={options} is invalid: {error}") from error

    def run(self, waiting: Sequence[Job], jobs: Sequence[Job], first: int) -> None:
        config = copy.deepcopy(self.config)
        with read_write(config), open_dict(config):  # what the launcher itself writes goes to .jobs
            config.hydra.sweep.dir = f"{self.config.hydra.sweep.dir}/.jobs"
            config.hydra.output_subdir = None
        command = partial(run_job, job_command(self.config), Path.cwd())
        self.inner.setup(hydra_context=self.context, task_function=command, config=config)
        try:
            returned = self.inner.launch([list(job.overrides) for job in waiting], first)
        except Exception as error:  # of any class: each launcher has its own for a job that was cancelled
            # The launcher gave up on all its jobs at once; the cluster may still be at work on some.
            log.error("Stopping: the cluster's launcher failed: %s", error)
            failed = JobReturn(status=JobStatus.FAILED)
            failed.return_value = error
            returned = [failed] * len(waiting)
        for job, each in zip(waiting, returned, strict=True):
            if each.status is JobStatus.COMPLETED:
                job.code, job.offset = each._return_value
            elif is_finished_already(job.config, job.folder):
                job.before = True
            else:  # the last line with text: the message of a traceback
                lines = [line.strip() for line in str(each._return_value).splitlines() if line.strip()]
                job.lost = (lines or ["(no message)"])[-1]
            job.log_end("finished")


def run_job(command: Sequence[str], start: Path, cfg: DictConfig) -> tuple[int, int]:
    """The task of a job on a cluster: the run's own process, in the folder that the sweep was started in. The
    exit code, and the offset in its console.log where the job's output begins."""
    hydra = HydraConfig.get()
    os.chdir(start)
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    console = Path(hydra.run.dir) / "console.log"
    process, offset = start_process([*command, *overrides], console, env=os.environ)
    with forward_signals(process):
        return process.wait(), offset


@contextmanager
def forward_signals(process: Popen[bytes]) -> Iterator[None]:
    """Forwards signals to a job's process, and calls the cluster's own handler (submitit's queues the job
    again and exits) after the job has saved its checkpoint."""
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers there only
        yield
        return

    def forward(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        deadline, without_its_code = time.monotonic() + SAVING_S, os.WEXITED | os.WNOWAIT | os.WNOHANG
        with suppress(ChildProcessError):
            while os.waitid(os.P_PID, process.pid, without_its_code) is None and time.monotonic() < deadline:
                time.sleep(0.05)
        if callable(before[number]):
            before[number](number, frame)

    with signal_handlers((*SIGNALS, signal.SIGUSR2), forward) as before:
        yield


def run_all(
    jobs: Sequence[Job], *, command: Sequence[str], places: Sequence[dict[str, str]], grace: float
) -> None:
    """Runs the jobs, as many at once as there are places (environments). A signal is handed to all of them
    and ends the program; what is left after `grace` seconds to save, or at a second signal, is killed."""
    waiting, running, free = deque(jobs), dict[Job, dict[str, str]](), list(places)
    received, last = list[int](), -math.inf
    log.info("Running %d jobs, %d in parallel", len(jobs), len(places))

    def receive(number: int, frame: FrameType | None) -> None:
        """Notes a signal: an exception could come between a process and the note that it exists."""
        nonlocal last
        if time.monotonic() - last > TOGETHER_S:  # a terminal that closes sends two
            received.append(number)
            last = time.monotonic()

    bar = tqdm(total=len(jobs), unit="job", disable=None, dynamic_ncols=True)
    with signal_handlers(SIGNALS, receive), logging_redirect_tqdm(), bar:
        try:
            while (waiting or running) and not received:
                for job in [job for job in running if job.process.poll() is not None]:
                    free.append(running.pop(job))
                    job.end()
                    bar.update()
                while waiting and free:
                    job, place = waiting.popleft(), free.pop(0)
                    job.start(command, env={**without_task(os.environ), **place})
                    running[job] = place
                bar.refresh()
                time.sleep(POLL_S)
        finally:
            deadline, first = time.monotonic() + grace, max(1, len(received))
            for job in running:
                job.kill(received[0] if received else signal.SIGTERM)
            while any(job.process.poll() is None for job in running) and time.monotonic() < deadline:
                if len(received) > first:
                    break
                time.sleep(POLL_S)
            for job in running:
                job.kill(signal.SIGKILL)
                job.process.wait()
    if received:
        log.warning("Stopping on %s; %s", signal.Signals(received[0]).name, CONTINUES)
        raise SystemExit(GO_ON)


@contextmanager
def signal_handlers(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[Mapping[int, Any]]:
    """Within, a function handles the signals that are not ignored (nohup). Gives the handlers before."""
    before = {number: signal.getsignal(number) for number in numbers}
    heeded = [number for number, each in before.items() if each != signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, handler)
    try:
        yield before
    finally:
        for number in heeded:
            signal.signal(number, before[number])


die_with_parent()  # also in other Hydra programs that use these launchers
for kind in (ProcessLauncher, ClusterLauncher, OptunaSweeper, TuneSweeper):
    # Hydra takes plugins named `hydra_plugins.` only; a file there would be imported by every Hydra program.
    Plugins.instance().register(kind)
    Plugins.instance().class_name_to_class[f"hydra_plugins.cpt.{kind.__name__}"] = kind
