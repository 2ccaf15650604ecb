"""Runs each job of a sweep (`-m`) in a process of its own, several at once.

No generator, thread pool or W&B run leaks from job to job, and a killed job takes no other with it. The ranks
of a distributed job repeat its command line: with `-m` in it they would run the whole sweep themselves.
"""

import ctypes
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from cpt.config import readable
from cpt.machine import shares

log = logging.getLogger(__name__)

PARENT = "CPT_LAUNCHER"  # environment variable: the process that a job must not outlive
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
POLL_S = 0.1
GRACE_S = 10.0  # between SIGTERM and SIGKILL
TAIL_BYTES = 65536
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
ERROR = re.compile(r"(cpt:|[\w.]*(Error|Exception|Interrupt)(:|\(|$))")
HINT = "Set the environment variable HYDRA_FULL_ERROR"


@dataclass(eq=False)
class Job:
    """A job of the sweep: what was asked for, where it writes and, once started, its process."""

    number: int
    overrides: tuple[str, ...]
    label: str  # what sets it apart from the other jobs
    config: DictConfig
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)
    started: float = field(init=False)
    offset: int = field(init=False)  # where this start's output begins: console.log is appended to

    def __str__(self) -> str:
        return f"#{self.number} {self.label}".strip()

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    def start(self, command: Sequence[str], *, env: Mapping[str, str]) -> None:
        """A session of its own: Ctrl-C reaches the sweep only, which then ends the whole group."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        with self.console.open("ab") as console:
            self.offset = console.tell()
            self.process = subprocess.Popen(
                [*command, *self.overrides, "hydra.mode=RUN"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        log.info("%s: started, %s", self, self.console)

    def kill(self, number: int) -> None:
        """Reaches every process of the job: data workers and the other ranks too."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @property
    def failed(self) -> bool:
        return self.process.returncode != 0

    def end(self) -> None:
        """Reports how the job ended and kills what it left behind."""
        self.kill(signal.SIGKILL)
        if self.failed:
            log.error("%s: %s", self, self.failure())
        else:
            log.info("%s: finished in %.0f s", self, time.monotonic() - self.started)

    def failure(self) -> str:
        """How it ended and what it said: `failed (exit 1): ValueError: …`."""
        code = self.process.returncode
        ending = f"exit {code}" if code > 0 else f"signal {-code}, {signal.strsignal(-code)}"
        return f"failed ({ending}): {self.last_words()}"

    def last_words(self) -> str:
        """The last error of an exit, else the last line of the output."""
        with self.console.open("rb") as console:
            end = console.seek(0, os.SEEK_END)
            console.seek(max(self.offset, end - TAIL_BYTES))
            text = console.read().decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(HINT)]
        # W&B and the interpreter still talk after a traceback; a killed job says nothing about its end.
        errors = [line for line in lines if ERROR.match(line)] if self.process.returncode > 0 else []
        return (errors or lines or ["(no output)"])[-1].strip()

    def result(self) -> JobReturn:
        """What the sweeper gets: the objective, None if the job names none, or its failure."""
        done = JobReturn(overrides=self.overrides, cfg=self.config, working_dir=str(self.folder))
        done.status = JobStatus.FAILED if self.failed else JobStatus.COMPLETED
        done.return_value = HydraException(f"{self}: {self.failure()}") if self.failed else self.objective()
        return done

    def objective(self) -> float | None:
        scores = self.folder / "scores.json"
        return json.loads(scores.read_text()).get("objective") if scores.exists() else None


class ProcessLauncher(Launcher):
    """Up to `jobs` processes at once with `threads` threads each; None: a fair share of the machine."""

    def __init__(self, *, jobs: int | None, threads: int | None) -> None:
        for name, given in (("jobs", jobs), ("threads", threads)):
            if given is not None and (not isinstance(given, int) or given < 1):
                raise ValueError(f"hydra.launcher.{name} is {given!r}; allowed: null, 1, 2, …")
        self.jobs, self.threads = jobs, threads

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The results in the order of `job_overrides`; equal ones are run once."""
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            distinct = dict.fromkeys(map(tuple, job_overrides))
            common = set.intersection(*map(set, distinct)) if len(distinct) > 1 else set()
            jobs = [
                self._compose(given, i, common=common) for i, given in enumerate(distinct, initial_job_idx)
            ]
            check_folders(jobs)
            places = shares([job.config for job in jobs], jobs=self.jobs, threads=self.threads)
            run_all(jobs, command=job_command(self.config), places=places)
        self._report([job for job in jobs if job.failed], total=len(jobs))
        results = {job.overrides: job.result() for job in jobs}
        return [results[tuple(given)] for given in job_overrides]

    def _compose(self, overrides: tuple[str, ...], number: int, *, common: set[str]) -> Job:
        """The job with its run folder, composed exactly as its own process will."""
        cfg = self.context.config_loader.load_sweep_config(self.config, [*overrides, "hydra.mode=RUN"])
        HydraConfig.instance().set_config(cfg)  # for ${hydra:...} in hydra.run.dir
        label = " ".join(filter_overrides([each for each in overrides if each not in common]))
        return Job(number, overrides, label, cfg, folder=Path(cfg.hydra.run.dir))

    def _report(self, failed: Sequence[Job], *, total: int) -> None:
        """All failures once more, at the end; Hydra's own sweeper would turn the first into a traceback."""
        for job in failed:
            log.error("%s: %s (%s)", job, job.failure(), job.console)
        # A sweeper that searches decides itself what a failed job means.
        if failed and self.config.hydra.sweeper._target_ == BASIC_SWEEPER:
            names = ", ".join(map(str, failed))
            raise SystemExit(f"cpt: {len(failed)} of {total} jobs failed: {names}")


def check_folders(jobs: Sequence[Job]) -> None:
    """Two jobs in one folder would overwrite each other."""
    owners: dict[Path, Job] = {}
    for job in jobs:
        other = owners.setdefault(job.folder, job)
        if other is not job:
            raise ValueError(f"'{other}' and '{job}' have one hydra.run.dir, {job.folder}; allowed: one each")


def job_command(config: DictConfig) -> list[str]:
    """What started this sweep, without the sweep: program, flags, overrides of Hydra's own keys."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec else [os.path.abspath(sys.argv[0])]
    given = vars(get_args_parser().parse_args())
    places = {name: given[name.replace("-", "_")] for name in ("config-path", "config-name", "config-dir")}
    flags = [f"--{name}={place}" for name, place in places.items() if place is not None]
    # Not resolved: ${seed} in an override is each job's own.
    written: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    overrides = [line for line in written if not line.startswith("hydra.mode=")]
    return [sys.executable, *program, *flags, *overrides]


def run_all(jobs: Sequence[Job], *, command: Sequence[str], places: Sequence[dict[str, str]]) -> None:
    """Runs the jobs, each in a place that is free; a signal ends them all and the program."""
    waiting, running, free = deque(jobs), dict[Job, dict[str, str]](), list(places)
    env = os.environ | {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}  # a killed job keeps its output
    log.info("%d jobs, %d at once", len(jobs), len(places))
    bar = tqdm(total=len(jobs), unit="job", disable=None)
    with heeded_signals() as received, logging_redirect_tqdm(), bar:
        try:
            while (waiting or running) and not received:
                for job in [job for job in running if job.process.poll() is not None]:
                    free.append(running.pop(job))
                    job.end()
                    bar.update()
                while waiting and free:
                    job, place = waiting.popleft(), free.pop(0)
                    job.start(command, env=env | place)
                    running[job] = place
                bar.refresh()  # the clock goes on between two ends
                time.sleep(POLL_S)
        finally:
            stop(list(running))
    if received:
        log.warning("stopped by %s; the same command continues", signal.Signals(received[0]).name)
        raise SystemExit(128 + received[0])


@contextmanager
def heeded_signals() -> Iterator[list[int]]:
    """Collects signals in a list: an exception could come between a process and the note that it exists."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]  # nohup ignores
    for number in heeded:
        signal.signal(number, lambda given, _: received.append(given))
    try:
        yield received
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def stop(jobs: Sequence[Job]) -> None:
    """Ends jobs with all their processes: asks first, kills what is left after GRACE_S seconds."""
    deadline = time.monotonic() + GRACE_S
    for job in jobs:
        job.kill(signal.SIGTERM)
    while any(job.process.poll() is None for job in jobs) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for job in jobs:
        job.kill(signal.SIGKILL)
        job.process.wait()


def end_with_parent() -> None:
    """In a job and its ranks: Linux kills it when the process that started it is gone, even by SIGKILL."""
    if sys.platform == "linux" and os.environ.get(PARENT) == str(os.getppid()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ[PARENT] = str(os.getpid())


end_with_parent()
Plugins.instance().register(ProcessLauncher)
# Hydra takes plugins named `hydra_plugins.` only; a file there would be imported by every Hydra program.
Plugins.instance().class_name_to_class["hydra_plugins.cpt.ProcessLauncher"] = ProcessLauncher
