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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from cpt.core.heartbeat import Heartbeat, list_sweep_runs
from cpt.core.preemption import GO_ON, SIGNALS, TOGETHER_S
from cpt.core.processes import die_with_parent
from cpt.status import cut_line, format_phase, format_time
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

log = logging.getLogger(__name__)
POLL_S = 0.1
REFRESH_S = 2.0  # between two reads of the jobs' progress
MIN_WIDTH = 16  # characters of a job in the progress line
BAR = "{n_fmt}/{total_fmt} jobs [{elapsed}<{remaining}]{postfix}"
SAVING_S = 100.0  # for a job to save after the cluster's warning; less than signal_delay_s in conf


class JobLauncher(Launcher):
    """Composes the jobs, runs those that are not finished, and returns the results. Subclasses say how."""

    def check(self) -> None:
        """Raises ValueError for a wrong option of the launcher. Not in the constructor: Hydra wraps what is
        raised there in lines of its own."""
        raise NotImplementedError

    def run(self, waiting: Sequence[Job], jobs: Sequence[Job], first: int) -> None:
        """Runs the `waiting` ones of the jobs to their end."""
        raise NotImplementedError

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            self.check()
            # An unknown choice of a swept group is reported before the sweep has a folder.
            named = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
            for each in OverridesParser.create().parse_overrides([*named, *config.hydra.overrides.task]):
                options = hydra_context.config_loader.get_group_options(each.key_or_group)
                swept = each.value() if options else None
                for value in swept.list if isinstance(swept, ChoiceSweep) else ():
                    if str(value) not in options:
                        raise ValueError(unknown_name(f"{each.key_or_group}={value}", options))
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The results in the order of `job_overrides`; equal ones are run once, finished ones not at all."""
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            jobs = compose_jobs(job_overrides, initial_job_idx, context=self.context, config=self.config)
            if waiting := [job for job in jobs if not job.before]:
                list_sweep_runs(Path(self.config.hydra.sweep.dir), [job.folder for job in jobs])
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
        for name, given in (("jobs", self.jobs), ("threads", self.threads)):
            if given is not None and (type(given) is not int or given < 1):
                raise ValueError(f"hydra.launcher.{name}={given}; allowed: null, 1, 2, …")
        if isinstance(self.grace, bool) or not isinstance(self.grace, (int, float)) or not self.grace >= 0:
            raise ValueError(f"hydra.launcher.grace={self.grace}; allowed: 0 seconds or more")

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
            raise ValueError(f"{self.through} is needed ({error}): {advice}") from error
        except TypeError as error:
            raise ValueError(f"hydra.launcher.options={options}: {error}") from error

    def run(self, waiting: Sequence[Job], jobs: Sequence[Job], first: int) -> None:
        config = copy.deepcopy(self.config)
        with read_write(config), open_dict(config):  # what the launcher itself writes goes to .jobs
            config.hydra.sweep.dir = f"{self.config.hydra.sweep.dir}/.jobs"
            config.hydra.output_subdir = None
        command = Command(job_command(self.config), Path.cwd())
        self.inner.setup(hydra_context=self.context, task_function=command, config=config)
        try:
            returned = self.inner.launch([list(job.overrides) for job in waiting], first)
        except Exception as error:  # of any class: each launcher has its own for a job that was cancelled
            # The launcher gave up on all its jobs at once; the cluster may still be at work on some.
            log.error("the cluster's launcher gave up: %s", error)
            for job in waiting:
                if is_finished_already(job.config, job.folder):
                    job.before = True
                else:
                    job.lost = last_line(error)
            return
        for job, each in zip(waiting, returned, strict=True):
            if each.status is JobStatus.COMPLETED:
                job.code, job.offset = each._return_value
            else:
                job.lost = last_line(each._return_value)
            job.log_end("finished")


def last_line(error: object) -> str:
    """The last line with text: the message of a traceback."""
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or ["(no message)"])[-1]


@dataclass(frozen=True)
class Command:
    """The task of a job on a cluster: the run's own process, in the folder that the sweep was started in."""

    command: Sequence[str]
    start: Path

    def __call__(self, cfg: DictConfig) -> tuple[int, int]:
        """The exit code, and the offset in its console.log where the job's output begins."""
        hydra = HydraConfig.get()
        os.chdir(self.start)
        overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        console = Path(hydra.run.dir) / "console.log"
        process, offset = start_process([*self.command, *overrides], console, env=os.environ)
        with forward_signals(process):
            return process.wait(), offset


@contextmanager
def forward_signals(process: Popen[bytes]) -> Iterator[None]:
    """Forwards signals to a job's process, and calls the cluster's own handler (submitit's queues the job
    again and exits) after the job has saved its checkpoint."""
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers there only
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGUSR2)}

    def is_running() -> bool:  # without taking the exit code from who waits for it
        try:
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        except ChildProcessError:
            return False

    def forward(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + SAVING_S
        while is_running() and time.monotonic() < deadline:
            time.sleep(0.05)
        if callable(before[number]):
            before[number](number, frame)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_all(
    jobs: Sequence[Job], *, command: Sequence[str], places: Sequence[dict[str, str]], grace: float
) -> None:
    """Runs the jobs, as many at once as there are places (environments); a signal is handed to all of them,
    which have `grace` seconds to save, and ends the program."""
    waiting, running, free = deque(jobs), dict[Job, dict[str, str]](), list(places)
    log.info("%d to run, %d at once", len(jobs), len(places))
    line = SweepLine(len(jobs))
    with collect_signals() as received, logging_redirect_tqdm(), line.bar:
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
                line.refresh(list(running))
                time.sleep(POLL_S)
        finally:
            stop_jobs(list(running), grace=grace, received=received)
    if received:
        log.warning("stopped by %s; %s", signal.Signals(received[0]).name, CONTINUES)
        raise SystemExit(GO_ON)


@contextmanager
def collect_signals() -> Iterator[list[int]]:
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


def stop_jobs(jobs: Sequence[Job], *, grace: float, received: Sequence[int]) -> None:
    """Ends jobs with all their processes: forwards the signal that was received, and kills what is left after
    `grace` seconds or at a second signal."""
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


class SweepLine:
    """A progress bar of `total` jobs with the phase of each running one; silent without a terminal."""

    def __init__(self, total: int) -> None:
        self.bar = tqdm(total=total, unit="job", disable=None, dynamic_ncols=True, bar_format=BAR)
        self.looked, self.seen = 0.0, list[Job]()

    def refresh(self, jobs: list[Job]) -> None:
        """Moves the clock on and, every REFRESH_S, reads the progress of the jobs."""
        if self.bar.disable:
            return
        if jobs != self.seen or time.monotonic() - self.looked >= REFRESH_S:
            self.looked, self.seen = time.monotonic(), jobs
            self.bar.set_postfix_str("", refresh=False)
            room = (self.bar.format_dict["ncols"] or 80) - len(str(self.bar)) - len(", ")
            self.bar.set_postfix_str(fit_jobs([job_progress(job) for job in jobs], room), refresh=False)
        self.bar.refresh()


def job_progress(job: Job) -> tuple[str, str]:
    """A running job's phase, and the time left: of the run if known, else of its phase."""
    try:
        beat = Heartbeat.load(job.folder)
    except ValueError:
        beat = None
    if beat is None or not beat.alive:
        is_own = beat is not None and beat.written >= job.began  # else of an earlier start
        return f"#{job.number} {'ending' if is_own else 'starting'}", ""
    left = beat.phase_eta_s if beat.run_eta_s is None else beat.run_eta_s
    more = "+" if beat.run_eta_s is None or beat.untimed else ""
    what = "waiting" if beat.state == "waiting" else format_phase(beat)
    return f"#{job.number} {what}", "" if left is None else f" {format_time(left)}{more}"


def fit_jobs(jobs: Sequence[tuple[str, str]], room: int) -> str:
    """All jobs, their phases cut to equal shares of the room where needed; the first ones if these are too
    small."""
    text = " | ".join(what + left for what, left in jobs)
    if len(text) > (room := max(0, room)):
        share = max(MIN_WIDTH, (room + 3) // len(jobs) - 3)
        text = " | ".join(cut_line(what, share - len(left)) + left for what, left in jobs)
    return cut_line(text, room)


die_with_parent()  # also in other Hydra programs that use these launchers
for kind in (ProcessLauncher, ClusterLauncher, OptunaSweeper):
    # Hydra takes plugins named `hydra_plugins.` only; a file there would be imported by every Hydra program.
    Plugins.instance().register(kind)
    Plugins.instance().class_name_to_class[f"hydra_plugins.cpt.{kind.__name__}"] = kind
