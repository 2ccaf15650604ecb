"""The jobs of a sweep: their configs and run folders, their processes, their shares of the machine, how each
ended, and the summary of all."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from cpt.core.heartbeat import State, record_exit, utc_now
from cpt.core.naming import RunIdentity, as_written, distinguish_runs, quote
from cpt.core.preemption import GO_ON
from cpt.core.processes import JOB, PARENT, cores
from cpt.core.resolved import resolve_job
from cpt.core.secrets import redact_override
from cpt.evaluation.task_metrics import run_objective
from cpt.train import is_done

log = logging.getLogger(__name__)
TAIL_BYTES = 65536
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
ERROR = re.compile(r"(cpt:|[\w.]*(Error|Exception|Interrupt)(:|\(|$))")
CONTINUES = "the same command continues"
HINT = "Set the environment variable HYDRA_FULL_ERROR"
STATES = ("finished", "finished before", "preempted", "failed")


class PreemptedJob(HydraException):  # noqa: N818
    """The result of a job that continues when the sweep is started again."""


@dataclass(eq=False)
class Job:
    """A job of a sweep: its overrides, its run folder and, once it has ended, its exit code."""

    number: int
    overrides: tuple[str, ...]
    label: str  # the overrides that other jobs do not share
    config: DictConfig
    folder: Path
    resolved: tuple[str, ...] = ()  # overrides that hand on what the sweep has resolved: cpt.core.resolved
    before: bool = False  # finished before this sweep began
    code: int | None = None  # as subprocess gives it: negative is a signal
    offset: int = 0  # where this start's output begins in console.log
    lost: str = ""  # on a cluster: why the exit code is unknown, or why the job is not queued again
    ending: str = "lost"  # on a cluster, without an exit code: cancelled, refused, out of memory
    process: subprocess.Popen[bytes] = field(init=False)
    started: float = field(init=False)
    began: str = field(init=False)  # the same in UTC

    def __post_init__(self) -> None:
        self.console = self.folder / "console.log"

    def __str__(self) -> str:
        return f"#{self.number} {self.label}".strip()

    def rename_folder(self, name: str) -> None:
        """Gives the job another run folder next to its own."""
        self.folder = self.folder.with_name(name)
        self.console = self.folder / "console.log"

    @property
    def arguments(self) -> list[str]:
        """The overrides of its process, with its folder."""
        return [*self.overrides, *self.resolved, f"hydra.run.dir={quote(str(self.folder))}"]

    @property
    def state(self) -> str:
        """One of STATES. scores.json decides whether a run is finished: a signal may come after its last
        write, and a process may exit with 0 without one. A lost job has no exit code."""
        about = {} if self.before or self.code is None else read_scores(self.folder).get("run")
        done = isinstance(about, dict) and about.get("finished") is True
        if done and (self.code == 0 or is_finished_already(self.config, self.folder)):
            return "finished"
        return "finished before" if self.before else "preempted" if self.code == GO_ON else "failed"

    @property
    def shown_overrides(self) -> tuple[str, ...]:
        """The overrides without secrets, for files."""
        return tuple(map(redact_override, self.overrides))

    @property
    def whole(self) -> bool:
        return self.state.startswith("finished")

    def start(self, command: Sequence[str], *, env: Mapping[str, str]) -> None:
        self.started, self.began = time.monotonic(), utc_now()
        self.process, self.offset = start_process([*command, *self.arguments], self.console, env=env)
        log.info("Job %s: started, %s", self, self.console)

    def kill(self, number: int) -> None:
        """Sends a signal to every process of the job, its data workers and ranks included."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Logs how the process ended, kills its remaining processes and notes a failure in progress.json."""
        self.kill(signal.SIGKILL)
        self.code = self.process.returncode
        self.log_end(f"finished in {time.monotonic() - self.started:.0f} s")
        if not self.whole:
            state: State = "preempted" if self.state == "preempted" else "failed"
            record_exit(self.folder, state, self.failure().removeprefix(f"{state} "), began=self.began)

    def log_end(self, finished: str) -> None:
        if self.whole:
            log.info("Job %s: %s", self, finished)
        else:
            log.error("Job %s: %s", self, self.failure())

    def failure(self) -> str:
        """How it ended and its last error or line of output: `failed (exit 1): ValueError: …`."""
        if self.code is None:
            return f"failed ({self.ending}): {self.lost}"
        if self.code == GO_ON and self.lost:
            return f"preempted: {self.lost}"
        text = ""
        with suppress(OSError), self.console.open("rb") as output:  # it may have been removed
            end = output.seek(0, os.SEEK_END)
            output.seek(max(self.offset, end - TAIL_BYTES))
            text = output.read().decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(HINT)]
        # W&B and the interpreter write on after a traceback; a killed process writes no error, but Lightning
        # kills one for the error of another.
        own = re.compile(r"cpt: ") if self.code == -signal.SIGKILL else ERROR
        errors = [line for line in lines if own.match(line)] if self.code > 0 or own is not ERROR else []
        ending = f"exit {self.code}"
        if self.code < 0:  # the kernel sends SIGKILL when memory is exhausted
            memory = "; perhaps for want of memory" * (self.code == -signal.SIGKILL and not errors)
            ending = f"signal {-self.code}, {signal.strsignal(-self.code) or -self.code}{memory}"
        said = (errors or lines or ["(no output)"])[-1].strip()
        if self.code == 0:
            said = f"scores.json in its folder is not that of a finished run; its last words: {said}"
        return f"{self.state} ({ending}): {said}"

    def result(self) -> JobReturn:
        """What the sweeper gets: the objective of this sweep (an earlier one may have had another), None
        without one, or the failure as an exception."""
        done = JobReturn(overrides=self.overrides, cfg=self.config, working_dir=str(self.folder))
        done.status = JobStatus.COMPLETED if self.whole else JobStatus.FAILED
        if self.whole:
            scores, wanted = read_scores(self.folder), self.config.get("optimized_metric")
            value = run_objective(scores, wanted) if "metrics" in scores else None
            done.return_value = scores.get("optimized_metric") if value is None else value
        else:
            kind = PreemptedJob if self.state == "preempted" else HydraException
            done.return_value = kind(f"{self}: {self.failure()}")
        return done


def start_process(
    command: Sequence[str], console: Path, *, env: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """A job's process, in a session of its own, so that Ctrl-C reaches the sweep only; and the offset in its
    console.log where its output begins."""
    console.parent.mkdir(parents=True, exist_ok=True)
    arguments, secrets = take_out_secrets([*command, "hydra.mode=RUN"])
    with console.open("ab") as output:
        offset = output.tell()
        process = subprocess.Popen(
            arguments,
            # Unbuffered: a killed job keeps its output.
            env={**env, **secrets, PARENT: str(os.getpid()), JOB: "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, offset


def take_out_secrets(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments of a job without secrets, which any user of the machine could see in its list of
    processes; and the environment variables that have them."""
    shown, variables = [], dict[str, str]()
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if redact_override(argument) != argument and "${" not in text and not argument.startswith("-"):
            name = f"CPT_SECRET_{len(variables)}"
            (override,) = OverridesParser.create().parse_overrides([argument])
            variables[name] = str(override.value())
            argument = f"{key}{equals}${{oc.env:{name}}}"
        shown.append(argument)
    return shown, variables


def read_scores(folder: Path) -> dict[str, Any]:
    """A run's scores.json; empty if missing or unreadable, which the run's own process will report."""
    try:
        return json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def is_finished_already(cfg: DictConfig, folder: Path) -> bool:
    """Whether a process would only report that the run is finished: starting one takes seconds."""
    if not (folder / "scores.json").exists():
        return False
    HydraConfig.instance().set_config(cfg)  # for ${variant:}
    own = cfg.copy()
    with open_dict(own):
        own.pop("hydra")
    try:
        return is_done(own, folder)
    except (ValueError, OSError, YAMLError, OmegaConfBaseException):
        return False  # its own process reports what is wrong


def compose_jobs(
    job_overrides: Sequence[Sequence[str]], first: int, *, context: HydraContext, config: DictConfig
) -> list[Job]:
    """The jobs with the config and run folder that each one's process will have, numbered from `first`; equal
    ones are one. Raises ValueError if two have one folder."""
    distinct = dict.fromkeys(map(tuple, job_overrides))
    common = set.intersection(*map(set, distinct)) if len(distinct) > 1 else set()
    jobs = []
    for number, overrides in enumerate(distinct, first):
        cfg = context.config_loader.load_sweep_config(config, [*overrides, "hydra.mode=RUN"])
        resolved = resolve_job(cfg, number, sweep=config)
        own = [redact_override(override) for override in overrides if override not in common]
        label = " ".join(filter_overrides(own))
        jobs.append(Job(number, overrides, label, cfg, Path(cfg.hydra.run.dir), resolved=tuple(resolved)))

    separate_folders(jobs)
    for job in jobs:
        job.before = is_finished_already(job.config, job.folder)
    return jobs


def separate_folders(jobs: Sequence[Job]) -> None:
    """Gives jobs that share a run folder, as of paths that end alike, folders of their own. Raises ValueError
    where the folder is not named after what was chosen."""
    by_folder: dict[Path, list[Job]] = defaultdict(list)
    for job in jobs:
        by_folder[job.folder].append(job)
    for folder, sharing in by_folder.items():
        if len(sharing) == 1:
            continue
        identities = []
        for job in sharing:
            hydra = job.config.hydra
            overrides = as_written(hydra.overrides.task)
            order, seed = job.config.order, job.config.seed
            identities.append(RunIdentity(overrides, str(hydra.runtime.choices.method), order, seed))
        if any(identity.name() != folder.name for identity in identities):
            reason = f"'{sharing[0]}' and '{sharing[1]}' share it"
            allowed = "a folder for each, as with ${choices:…} of conf/config.yaml or ${hydra.job.num}"
            raise ValueError(f"hydra.run.dir={folder} is invalid: {reason}. Allowed: {allowed}")
        for job, name in zip(sharing, distinguish_runs(identities), strict=True):
            job.rename_folder(name)


def job_command(config: DictConfig) -> list[str]:
    """The command line of this sweep without the sweep: program, flags, overrides of Hydra's own keys."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec else [os.path.abspath(sys.argv[0])]
    given = vars(get_args_parser().parse_args())
    places = {name: given[name.replace("-", "_")] for name in ("config-path", "config-name", "config-dir")}
    flags = [f"--{name}={place}" for name, place in places.items() if place is not None]
    # Not resolved: ${seed} in an override is each job's own.
    written: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    own = re.compile(r"hydra\.mode=|hydra/sweeper=|[+~]*hydra\.sweeper\.")
    return [sys.executable, *program, *flags, *(line for line in written if not own.match(line))]


def summarize_jobs(jobs: Sequence[Job]) -> list[str]:
    """Lines: how many jobs ended how, why each failed, and the command that compares the runs."""
    counts = Counter(job.state for job in jobs)
    ended = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    lines = [f"{len(jobs)} job{'s' * (len(jobs) != 1)}: {ended}"]
    for job in (each for each in jobs if not each.whole):
        console = f" ({job.console})" if job.console.exists() else ""  # a job that never began has none
        lines.append(f"{job}: {job.failure()}{console}")
    if parents := dict.fromkeys(str(job.folder.parent) for job in jobs if job.whole):
        lines.append(f"compare: python -m cpt.report {' '.join(parents)}")
    return lines


def visible_gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them; importing torch would take seconds."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.replace(" ", "").split(",") if name not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [str(index) for index in range(len(re.findall(r"^GPU ", listed, re.MULTILINE)))]


def divide_machine(
    configs: Sequence[DictConfig], *, jobs: int | None, threads: int | None, waiting: int | None = None
) -> list[dict[str, str]]:
    """The environment of each job that runs at once: its share of the cores and of the GPUs.

    jobs, threads: at once and per process; None: by the machine, and threads as the user's environment says.
    waiting: how many of the configs are still to run (default: all). The number of threads does not depend
    on it: with another the last bits differ."""
    on_cpu = all(OmegaConf.select(cfg, "trainer.accelerator") == "cpu" for cfg in configs)
    gpus = [] if on_cpu else visible_gpus()
    asked = [OmegaConf.select(cfg, "trainer.devices") for cfg in configs]
    # "auto" is a job's share of the devices; -1 and a list stand for all
    shares = [len(gpus) // (len(configs) if n == "auto" else 1) for n in asked]
    wanted = zip(asked, shares, strict=True)
    each = max(n if isinstance(n, int) and n > 0 else max(1, own) for n, own in wanted)
    fitting = max(1, (len(gpus) or cores()) // each)
    number = min(jobs or fitting, len(configs))
    processes = number * each
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    shared = {}
    if threads is not None or not any(name in os.environ for name in names):
        shared = dict.fromkeys(names, str(threads or max(1, cores() // processes)))
    if processes > 1:  # threads that wait by spinning halve the speed of the other processes
        shared["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    number = number if waiting is None else min(number, waiting)
    if not gpus:
        return [shared] * number
    firsts = [place % fitting * each for place in range(number)]
    return [shared | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + each])} for first in firsts]
