"""The jobs of a sweep: their configs and run folders, their processes, their shares of the machine, how each
ended, and the summary of all."""

import json
import logging
import os
import re
import shlex
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

from cpt.core.exceptions import InvalidOptionError
from cpt.core.heartbeat import State, record_exit, utc_now
from cpt.core.messages import count_noun
from cpt.core.naming import RunIdentity, distinguish_runs, list_typed_overrides, quote
from cpt.core.preemption import GO_ON
from cpt.core.processes import JOB, PARENT, count_cores
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
    was_finished: bool = False  # before this sweep began
    code: int | None = None  # as subprocess gives it: negative is a signal
    offset: int = 0  # where this start's output begins in console.log
    loss_reason: str = ""  # on a cluster: why the exit code is unknown, or why the job is not queued again
    ending: str = "lost"  # on a cluster, if the exit code is unknown: lost, cancelled, refused, out of memory
    process: subprocess.Popen[bytes] = field(init=False)
    start_time: float = field(init=False)  # time.monotonic()
    start_date: str = field(init=False)  # the same in UTC

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
        if self.was_finished:
            return "finished before"
        if self.code is None:
            return "failed"

        run = read_scores(self.folder).get("run")
        has_finished_scores = isinstance(run, dict) and run.get("finished") is True
        if has_finished_scores and (self.code == 0 or is_finished_already(self.config, self.folder)):
            return "finished"
        return "preempted" if self.code == GO_ON else "failed"

    @property
    def shown_overrides(self) -> tuple[str, ...]:
        """The overrides without secrets, for files."""
        return tuple(map(redact_override, self.overrides))

    @property
    def is_complete(self) -> bool:
        """Whether its run is finished, now or before this sweep began."""
        return self.state.startswith("finished")

    def start(self, command: Sequence[str], *, env: Mapping[str, str], ordinal: str) -> None:
        """Starts the process of the job, which is the `ordinal` of its sweep: `2 of 4`."""
        self.start_time = time.monotonic()
        self.start_date = utc_now()
        self.process, self.offset = start_process([*command, *self.arguments], self.console, env=env)
        log.info("Job %s: started (%s), %s", self, ordinal, self.console)

    def kill(self, number: int) -> None:
        """Sends a signal to every process of the job, its data workers and ranks included."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Kills the remaining processes of one that has ended, and notes a failure in progress.json."""
        self.kill(signal.SIGKILL)
        self.code = self.process.returncode
        if not self.is_complete:
            state: State = "preempted" if self.state == "preempted" else "failed"
            record_exit(
                self.folder, state, self.failure().removeprefix(f"{state} "), run_start=self.start_date
            )

    def log_end(self, finished: str, progress: str) -> None:
        """Logs how the job ended, `finished` if it is complete, and how far the sweep is."""
        if self.is_complete:
            log.info("Job %s: %s (%s)", self, finished, progress)
        else:
            log.error("Job %s: %s (%s)", self, self.failure(), progress)

    def failure(self) -> str:
        """How it ended and its last error or line of output: `failed (exit 1): ValueError: …`."""
        if self.code is None:
            return f"failed ({self.ending}): {self.loss_reason}"
        if self.code == GO_ON and self.loss_reason:
            return f"preempted: {self.loss_reason}"

        # W&B and the interpreter write on after a traceback; a killed process writes no error, but Lightning
        # kills one for the error of another.
        lines = self.read_output()
        errors: list[str] = []
        if self.code == -signal.SIGKILL:
            errors = [line for line in lines if line.startswith("cpt: ")]
        elif self.code > 0:
            errors = [line for line in lines if ERROR.match(line)]

        ending = f"exit {self.code}"
        if self.code < 0:
            ending = f"signal {-self.code}, {signal.strsignal(-self.code) or -self.code}"
        if self.code == -signal.SIGKILL and not errors:  # the kernel sends it when memory is exhausted
            ending += "; perhaps for want of memory"

        last_words = (errors or lines or ["(no output)"])[-1].strip()
        if self.code == 0:
            last_words = (
                f"scores.json in its folder is not that of a finished run; its last words: {last_words}"
            )
        return f"{self.state} ({ending}): {last_words}"

    def read_output(self) -> list[str]:
        """The last lines with text that this start has written."""
        text = ""
        with suppress(OSError), self.console.open("rb") as output:  # it may have been removed
            end = output.seek(0, os.SEEK_END)
            output.seek(max(self.offset, end - TAIL_BYTES))
            text = output.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip() and not line.startswith(HINT)]

    def result(self) -> JobReturn:
        """What the sweeper gets for the job: the value of `optimized_metric`, None without one, or for a job
        that is not complete the failure as an exception."""
        result = JobReturn(overrides=self.overrides, cfg=self.config, working_dir=str(self.folder))
        if self.is_complete:
            # Computed from the metrics: the stored value is of the sweep that ran the job, which may have
            # optimized another metric.
            scores = read_scores(self.folder)
            metric = self.config.get("optimized_metric")
            value = run_objective(scores, metric) if "metrics" in scores else None
            result.status = JobStatus.COMPLETED
            result.return_value = scores.get("optimized_metric") if value is None else value
        else:
            error_class = PreemptedJob if self.state == "preempted" else HydraException
            result.status = JobStatus.FAILED
            result.return_value = error_class(f"{self}: {self.failure()}")
        return result


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
    """The arguments of a job without secrets, and the environment variables that hold them: every user of the
    machine can see the arguments of a process."""
    public_arguments = []
    variables: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        is_secret = redact_override(argument) != argument
        if is_secret and "${" not in value and not argument.startswith("-"):
            name = f"CPT_SECRET_{len(variables)}"
            (override,) = OverridesParser.create().parse_overrides([argument])
            variables[name] = str(override.value())
            argument = f"{key}{equals}${{oc.env:{name}}}"
        public_arguments.append(argument)
    return public_arguments, variables


def read_scores(folder: Path) -> dict[str, Any]:
    """A run's scores.json; empty if missing or unreadable, which the run's own process will report."""
    try:
        scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return scores if isinstance(scores, dict) else {}


def is_finished_already(cfg: DictConfig, folder: Path) -> bool:
    """Whether a process would only report that the run is finished: starting one takes seconds."""
    if not (folder / "scores.json").exists():
        return False
    HydraConfig.instance().set_config(cfg)  # for ${variant:}
    run_config = cfg.copy()
    with open_dict(run_config):
        run_config.pop("hydra")
    try:
        return is_done(run_config, folder)
    except (ValueError, OSError, YAMLError, OmegaConfBaseException):
        return False  # its own process reports what is wrong


def compose_jobs(
    job_overrides: Sequence[Sequence[str]], first: int, *, context: HydraContext, config: DictConfig
) -> list[Job]:
    """The jobs with the config and run folder that each one's process will have, numbered from `first`; equal
    ones are one. Raises ValueError if two have one folder."""
    distinct = dict.fromkeys(map(tuple, job_overrides))
    common: set[str] = set()
    if len(distinct) > 1:
        common = set.intersection(*map(set, distinct))

    jobs = []
    for number, overrides in enumerate(distinct, first):
        cfg = context.config_loader.load_sweep_config(config, [*overrides, "hydra.mode=RUN"])
        resolved = resolve_job(cfg, number, sweep=config)
        differing = [redact_override(override) for override in overrides if override not in common]
        label = " ".join(filter_overrides(differing))
        jobs.append(Job(number, overrides, label, cfg, Path(cfg.hydra.run.dir), resolved=tuple(resolved)))

    separate_folders(jobs)
    for job in jobs:
        job.was_finished = is_finished_already(job.config, job.folder)
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
            overrides = list_typed_overrides(hydra.overrides.task)
            method = str(hydra.runtime.choices.method)
            identities.append(RunIdentity(overrides, method, job.config.order, job.config.seed))
        if any(identity.name() != folder.name for identity in identities):
            raise InvalidOptionError(
                "hydra.run.dir",
                folder,
                reason=f"'{sharing[0]}' and '{sharing[1]}' share it",
                allowed="a folder for each, as with ${choices:…} of conf/config.yaml or ${hydra.job.num}",
            )
        for job, name in zip(sharing, distinguish_runs(identities), strict=True):
            job.rename_folder(name)


def format_sweep_command(config: DictConfig) -> list[str]:
    """The command line of this sweep without the sweep: program, flags, overrides of Hydra's own keys."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec else [os.path.abspath(sys.argv[0])]

    arguments = get_args_parser().parse_args()
    values = {
        "config-path": arguments.config_path,
        "config-name": arguments.config_name,
        "config-dir": arguments.config_dir,
    }
    flags = [f"--{name}={value}" for name, value in values.items() if value is not None]

    # Not resolved: ${seed} in an override is each job's own.
    hydra_overrides: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    of_sweep = re.compile(r"hydra\.mode=|hydra/sweeper=|[+~]*hydra\.sweeper\.")
    job_overrides = [override for override in hydra_overrides if not of_sweep.match(override)]
    return [sys.executable, *program, *flags, *job_overrides]


def summarize_jobs(jobs: Sequence[Job]) -> list[str]:
    """Lines: how many jobs ended how, why each failed, and the command that compares the runs."""
    counts = Counter(job.state for job in jobs)
    endings = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    lines = [f"{count_noun(len(jobs), 'job')}: {endings}"]

    for job in jobs:
        if not job.is_complete:
            console = f" ({job.console})" if job.console.exists() else ""  # a job that never began has none
            lines.append(f"{job}: {job.failure()}{console}")

    folders = list(dict.fromkeys(str(job.folder.parent) for job in jobs if job.is_complete))
    if folders:
        lines.append(f"compare: python -m cpt.report {shlex.join(folders)}")
    return lines


def list_visible_gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them; importing torch would take seconds."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        return [name for name in variable.replace(" ", "").split(",") if name not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    output = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    num_gpus = len(re.findall(r"^GPU ", output, re.MULTILINE))
    return [str(index) for index in range(num_gpus)]


def divide_machine(
    configs: Sequence[DictConfig], *, jobs: int | None, threads: int | None, waiting: int | None = None
) -> list[dict[str, str]]:
    """The environment of each job that runs at once: its share of the cores and of the GPUs.

    jobs, threads: at once and per process; None: by the machine, and threads as the user's environment says.
    waiting: how many of the configs are still to run (default: all). The number of threads does not depend
    on it: with another the last bits differ."""
    on_cpu = all(OmegaConf.select(cfg, "trainer.accelerator") == "cpu" for cfg in configs)
    gpus = [] if on_cpu else list_visible_gpus()

    # A job is given as many devices, which are processes, as the largest needs.
    devices_per_job = 1
    for cfg in configs:
        devices = OmegaConf.select(cfg, "trainer.devices")
        if isinstance(devices, int) and devices > 0:
            devices_per_job = max(devices_per_job, devices)
        elif devices == "auto":  # a job's share of the machine
            devices_per_job = max(devices_per_job, len(gpus) // len(configs))
        else:  # -1 and a list stand for all
            devices_per_job = max(devices_per_job, len(gpus))

    max_at_once = max(1, (len(gpus) or count_cores()) // devices_per_job)
    num_at_once = min(jobs or max_at_once, len(configs))
    num_processes = num_at_once * devices_per_job

    variables = {}
    thread_variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    if threads is not None or not any(name in os.environ for name in thread_variables):
        num_threads = threads or max(1, count_cores() // num_processes)
        variables = dict.fromkeys(thread_variables, str(num_threads))
    if num_processes > 1:  # threads that wait by spinning halve the speed of the other processes
        variables["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")

    if waiting is not None:
        num_at_once = min(num_at_once, waiting)
    if not gpus:
        return [variables] * num_at_once
    environments = []
    for index in range(num_at_once):
        first = index % max_at_once * devices_per_job
        job_gpus = gpus[first : first + devices_per_job]
        environments.append(variables | {"CUDA_VISIBLE_DEVICES": ",".join(job_gpus)})
    return environments
