"""The jobs of a sweep: what each was asked for, where it writes, how it ended, and all of them together."""

import json
import logging
import os
import re
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

from cpt.core.errors import unknown_name
from cpt.core.heartbeat import PARENT, record_exit, utc_now
from cpt.core.preemption import GO_ON
from cpt.evaluation.pairs import LEVEL, least_p, needed_pairs

log = logging.getLogger(__name__)
TAIL_BYTES = 65536
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
ERROR = re.compile(r"(cpt:|[\w.]*(Error|Exception|Interrupt)(:|\(|$))")
CONTINUES = "the same command continues"
HINT = "Set the environment variable HYDRA_FULL_ERROR"
STATES = ("finished", "finished before", "preempted", "failed")


class PreemptedJob(HydraException):  # noqa: N818
    """What a sweeper gets of a job that goes on when the sweep is started again."""


@dataclass(eq=False)
class Job:
    """A job of the sweep: what was asked for, where it writes and, once it has ended, its exit code."""

    number: int
    overrides: tuple[str, ...]
    label: str  # what sets it apart from the other jobs
    config: DictConfig
    folder: Path
    before: bool = False  # whether it was finished before this sweep began
    code: int | None = None  # as subprocess gives it: negative is a signal
    offset: int = 0  # where this start's output begins: console.log is appended to
    lost: str = ""  # of a job on a cluster: why nobody knows how it ended
    process: subprocess.Popen[bytes] = field(init=False)
    started: float = field(init=False)
    began: str = field(init=False)  # the same in UTC

    def __str__(self) -> str:
        return f"#{self.number} {self.label}".strip()

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    def start(self, command: Sequence[str], *, env: Mapping[str, str]) -> None:
        """A session of its own: Ctrl-C reaches the sweep only, which then ends the whole group."""
        self.started, self.began = time.monotonic(), utc_now()
        self.process, self.offset = start_process([*command, *self.overrides], self.console, env=env)
        log.info("%s: started, %s", self, self.console)

    def kill(self, number: int) -> None:
        """Reaches every process of the job: data workers and the other ranks too."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @property
    def state(self) -> str:
        """One of STATES; a run is finished where its scores say so, whatever its process ended with."""
        if self.before:
            return "finished before"
        if self.code == 0 and not self.lost and is_finished(self.folder):
            return "finished"
        if (
            self.code and is_finished(self.folder) and is_finished_already(self.config, self.folder)
        ):  # the signal came after all was written
            return "finished"
        return "preempted" if self.code == GO_ON and not self.lost else "failed"

    @property
    def failed(self) -> bool:
        return self.state == "failed"

    @property
    def whole(self) -> bool:
        return self.state in ("finished", "finished before")

    def end(self) -> None:
        """Reports how the job ended and kills what it left behind."""
        self.kill(signal.SIGKILL)
        self.code = self.process.returncode
        self.tell(f"finished in {time.monotonic() - self.started:.0f} s")
        if not self.whole:
            record_exit(
                self.folder, self.state, self.failure().removeprefix(f"{self.state} "), began=self.began
            )

    def tell(self, finished: str) -> None:
        """Says how the job ended."""
        if self.whole:
            log.info("%s: %s", self, finished)
        else:
            log.error("%s: %s", self, self.failure())

    def failure(self) -> str:
        """How it ended and what it said: `failed (exit 1): ValueError: …`."""
        if self.code is None:
            return f"failed (lost): {self.lost}"
        ending = f"exit {self.code}" if self.code >= 0 else f"signal {-self.code}, {name_signal(-self.code)}"
        said = last_words(self.console, self.offset, exited=self.code > 0)
        if self.code == 0:
            said = f"scores.json in its folder is not that of a finished run; its last words: {said}"
        return f"{self.state} ({ending}): {said}"

    def result(self) -> JobReturn:
        """What the sweeper gets: the objective, None if the job names none, or its failure."""
        done = JobReturn(overrides=self.overrides, cfg=self.config, working_dir=str(self.folder))
        done.status = JobStatus.COMPLETED if self.whole else JobStatus.FAILED
        kind = PreemptedJob if self.state == "preempted" else HydraException
        done.return_value = self.objective() if self.whole else kind(f"{self}: {self.failure()}")
        return done

    def objective(self) -> float | list[float | None] | None:
        """Of this sweep: the run may be of an earlier one that asked for another."""
        from cpt.evaluation.objective import objective_value  # numpy: run.py --help need not wait for it

        scores, asked = read_scores(self.folder), self.config.get("objective")
        return objective_value(scores["metrics"], asked) if "metrics" in scores else scores.get("objective")


def start_process(
    command: Sequence[str], console: Path, *, env: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """A job's process, and where in its console.log its output begins."""
    own = {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}  # a killed job keeps its output
    console.parent.mkdir(parents=True, exist_ok=True)
    with console.open("ab") as output:
        offset = output.tell()
        process = subprocess.Popen(
            [*command, "hydra.mode=RUN"],
            env={**env, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, offset


def name_signal(number: int) -> str:
    """A signal in words; the kernel sends SIGKILL where memory does not suffice."""
    why = "; perhaps for want of memory" if number == signal.SIGKILL else ""
    return (signal.strsignal(number) or str(number)) + why


def last_words(console: Path, offset: int, *, exited: bool) -> str:
    """The last error of an exit, else the last line of the output."""
    with console.open("rb") as output:
        end = output.seek(0, os.SEEK_END)
        output.seek(max(offset, end - TAIL_BYTES))
        text = output.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(HINT)]
    # W&B and the interpreter still talk after a traceback; a killed job says nothing about its end.
    errors = [line for line in lines if ERROR.match(line)] if exited else []
    return (errors or lines or ["(no output)"])[-1].strip()


def read_scores(folder: Path) -> dict[str, Any]:
    """A run's scores.json; empty where there is none that can be read: its own process will say so."""
    try:
        return json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def is_finished(folder: Path) -> bool:
    """Whether a run's scores.json says that it is finished."""
    about = read_scores(folder).get("run")
    return isinstance(about, dict) and about.get("finished") is True


def check_swept_choices(context: HydraContext, config: DictConfig) -> None:
    """Raises ValueError for a choice that a sweep names and that there is not; Hydra would find it when the
    sweep has a folder already."""
    named = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    overrides = OverridesParser.create().parse_overrides([*named, *config.hydra.overrides.task])
    for each in overrides:
        options = context.config_loader.get_group_options(each.key_or_group)
        for value in each.value().list if options and each.is_choice_sweep() else ():
            if str(value) not in options:
                raise ValueError(unknown_name(f"{each.key_or_group}={value}", options))


def compose_jobs(
    job_overrides: Sequence[Sequence[str]], first: int, *, context: HydraContext, config: DictConfig
) -> list[Job]:
    """The jobs, numbered from `first`; equal ones are one. Raises ValueError if two have one folder."""
    distinct = dict.fromkeys(map(tuple, job_overrides))
    common = set.intersection(*map(set, distinct)) if len(distinct) > 1 else set()
    jobs = []
    for number, overrides in enumerate(distinct, first):
        label = " ".join(filter_overrides([each for each in overrides if each not in common]))
        jobs.append(compose(Job(number, overrides, label, config, Path()), context))
    check_folders(jobs)
    if config.hydra.sweeper._target_ == BASIC_SWEEPER and (needs := describe_pairs(list(distinct))):
        log.info(needs)
    return jobs


def describe_pairs(jobs: Sequence[Sequence[str]]) -> str | None:
    """How many pairs (order, seed) a comparison of the sweep's groups needs, from the overrides of its jobs;
    None of one group."""
    pairs: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    for overrides in jobs:
        own = tuple(each for each in overrides if each.startswith(("order=", "seed=")))
        pairs[tuple(each for each in overrides if each not in own)].add(own)
    comparisons, most = len(pairs) - 1, max(map(len, pairs.values()))
    if not comparisons or (needed := needed_pairs(comparisons)) is None:
        return None
    smallest = min(1.0, least_p(most) * comparisons)
    told = f"; the smallest of {most} is {smallest:.2g}" if most < needed else ""
    return (
        f"Comparing {len(pairs)} groups of {most} pair{'s' * (most > 1)} (order, seed): p <= {LEVEL} after "
        f"Holm's correction for {comparisons} comparison{'s' * (comparisons > 1)} needs {needed} pairs{told}"
    )


def compose(job: Job, context: HydraContext) -> Job:
    """Gives a job the config and the run folder that its own process will have."""
    cfg = context.config_loader.load_sweep_config(job.config, [*job.overrides, "hydra.mode=RUN"])
    HydraConfig.instance().set_config(cfg)  # for ${hydra:...} in hydra.run.dir
    job.config, job.folder = cfg, Path(cfg.hydra.run.dir)
    job.before = is_finished_already(cfg, job.folder)
    return job


def is_finished_already(cfg: DictConfig, folder: Path) -> bool:
    """Whether a process would only say that the run is finished: starting one takes seconds."""
    if not (folder / "scores.json").exists():
        return False
    from cpt.train import is_done

    HydraConfig.instance().set_config(cfg)  # for ${variant:}
    own = cfg.copy()
    with open_dict(own):
        own.pop("hydra")
    try:
        return is_done(own, folder)
    except (ValueError, OSError, YAMLError, OmegaConfBaseException):
        return False  # its own process says what is wrong


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
    overrides = [line for line in written if not line.startswith(("hydra.mode=", "hydra/sweeper="))]
    overrides = [line for line in overrides if not line.lstrip("+~").startswith("hydra.sweeper.")]
    return [sys.executable, *program, *flags, *overrides]


def conclude_sweep(jobs: Sequence[Job], given: Sequence[Sequence[str]], *, sweeper: str) -> list[JobReturn]:
    """The results in the order of the overrides given. The last lines of a sweep: how many jobs ended how,
    which failed and why, and the command that compares them; then exit code 1 if one failed, GO_ON if one was
    preempted."""
    failed, left = [job for job in jobs if job.failed], [job for job in jobs if job.state == "preempted"]
    # A sweeper that searches has many batches, and decides itself what a failed job means.
    if sweeper == BASIC_SWEEPER:
        log.info("%s", "\n".join(table(jobs)))
        if failed:
            names = ", ".join(map(str, failed))
            raise SystemExit(f"cpt: {len(failed)} of {len(jobs)} jobs failed: {names}")
        if left:
            names = ", ".join(map(str, left))
            print(
                f"cpt: {len(left)} of {len(jobs)} jobs were preempted: {names}; {CONTINUES}", file=sys.stderr
            )
            raise SystemExit(GO_ON)
    results = {job.overrides: job.result() for job in jobs}
    return [results[tuple(each)] for each in given]


def table(jobs: Sequence[Job]) -> list[str]:
    counts = Counter(job.state for job in jobs)
    told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    lines = [f"{len(jobs)} job{'s' * (len(jobs) != 1)}: {told}"]
    lines += [f"{job}: {job.failure()} ({job.console})" for job in jobs if not job.whole]
    if parents := dict.fromkeys(str(job.folder.parent) for job in jobs if job.whole):
        lines.append(f"compare: python -m cpt.report {' '.join(parents)}")
    return lines
