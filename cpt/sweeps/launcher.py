"""Launchers of sweeps (`-m`): each job is a process of its own, on this machine or on a cluster.

No generator, thread pool or W&B run leaks from job to job, and a killed job takes no other with it. The ranks
of a distributed job repeat its command line: with `-m` in it they would run the whole sweep themselves."""

import copy
import importlib
import logging
import math
import os
import shutil
import signal
import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

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
from cpt.core.errors import describe_unknown_choice, readable_errors
from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun, format_duration
from cpt.core.preemption import GO_ON, SIGNALS, TOGETHER_S
from cpt.core.processes import die_with_parent, is_one_of_several
from cpt.core.resolved import JOB_NUMBER, RUN_FOLDER
from cpt.core.run_command import format_install_command
from cpt.core.schema import Count, Natural, NonNegative, check_value
from cpt.core.secrets import redact_file
from cpt.core.slurm import remove_task_variables
from cpt.sweeps.cluster import (
    ClusterJob,
    Collector,
    LocalQueue,
    Queue,
    SlurmQueue,
    Submission,
    SubmissionLog,
    find_last_line,
    find_queued,
    format_jobs,
    outside_allocation,
)
from cpt.sweeps.cluster_task import ClusterTask
from cpt.sweeps.jobs import (
    BASIC_SWEEPER,
    CONTINUES,
    Job,
    compose_jobs,
    divide_machine,
    format_sweep_command,
    is_finished_already,
    start_process,
    summarize_jobs,
)
from cpt.sweeps.optuna import OptunaSweeper
from cpt.sweeps.progress import JobProgress
from cpt.sweeps.signals import forward_signals, signal_handlers
from cpt.sweeps.tune import TuneSweeper

log = logging.getLogger(__name__)
POLL_S = 0.1
JOB_OVERRIDES = (f"{RUN_FOLDER}=", f"{JOB_NUMBER}=")  # overrides of Hydra's keys that differ from job to job
SAVED_BEFORE_LIMIT_S = 20.0  # that a job which was warned of its time limit has to be queued again
MAX_ARRAY_JOBS = 1000  # as SLURM's default MaxArraySize allows
NO_CONTROLLER = ("configuration source", "contact slurm controller")  # in the words of sbatch
RESOURCES = ("partition", "gpus_per_node", "mem_gb", "cpus_per_task", "tasks_per_node", "timeout_min")


class JobLauncher(Launcher):
    """Composes the jobs, runs those that are not finished, and returns the results. Subclasses say how."""

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError for a wrong option. Hydra would wrap an error of the constructor in more
        lines, so options are checked here instead."""

    @abstractmethod
    def run(self, waiting: Sequence[Job], jobs: Sequence[Job], first: int) -> None:
        """Runs the `waiting` jobs, those of all `jobs` that are not finished, to their end, and records in
        each how it ended. `first` is the number of the first of all jobs."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        with readable_errors():
            self.check()
            batch_size = config.hydra.sweeper.get("max_batch_size")
            if batch_size is not None:
                raise InvalidOptionError(
                    "hydra.sweeper.max_batch_size",
                    batch_size,
                    reason="a failed batch would stop the others",
                    allowed=f"hydra.launcher.jobs={batch_size}, as many in parallel",
                )
            # An unknown choice of a swept group is reported before the sweep has a folder.
            params = config.hydra.sweeper.get("params") or {}
            lines = [f"{key}={value}" for key, value in params.items()]
            check_choices([*lines, *config.hydra.overrides.task], hydra_context)
        self.context = hydra_context
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The results in the order of `job_overrides`; equal ones are run once, finished ones not at all."""
        with readable_errors():
            redact_file(Path(self.config.hydra.sweep.dir) / "multirun.yaml")
            jobs = compose_jobs(job_overrides, initial_job_idx, context=self.context, config=self.config)
            waiting = [job for job in jobs if not job.was_finished]
            if waiting:
                self.run(waiting, jobs, initial_job_idx)

            # A search decides itself what a failed job means.
            if self.config.hydra.sweeper._target_ == BASIC_SWEEPER:
                log.info("%s", "\n".join(summarize_jobs(jobs)))
                end_if_incomplete(jobs)
            results = {job.overrides: job.result() for job in jobs}
            return [results[tuple(overrides)] for overrides in job_overrides]


def check_choices(lines: Sequence[str], hydra_context: HydraContext) -> None:
    """Raises ValueError for a choice of a swept config group that does not exist."""
    for override in OverridesParser.create().parse_overrides(list(lines)):
        group = override.key_or_group
        options = hydra_context.config_loader.get_group_options(group)
        sweep = override.value() if options else None
        if not isinstance(sweep, ChoiceSweep):
            continue
        for value in sweep.list:
            choices = value if isinstance(value, list) else [value]  # mask=[migu,mofo],none
            for choice in choices:
                name = str(getattr(choice, "text", choice))
                if name not in options:
                    raise ValueError(describe_unknown_choice(group, name, options))


def end_if_incomplete(jobs: Sequence[Job]) -> None:
    """Ends the program with exit code 1 if a job failed, else with GO_ON if one was preempted."""
    job_count = count_noun(len(jobs), "job")
    failed = [str(job) for job in jobs if job.state == "failed"]
    if failed:
        print(f"cpt: {len(failed)} of {job_count} failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)
    preempted = [str(job) for job in jobs if job.state == "preempted"]
    if preempted:
        names = ", ".join(preempted)
        print(f"cpt: {len(preempted)} of {job_count} were preempted: {names}; {CONTINUES}", file=sys.stderr)
        raise SystemExit(GO_ON)


class ProcessLauncher(JobLauncher):
    """Up to `jobs` processes at once with `threads` threads each; None: a fair share of the machine. When the
    sweep is stopped, they have `grace` seconds to save a checkpoint."""

    def __init__(self, *, jobs: int | None, threads: int | None, grace: float = 60) -> None:
        self.jobs = jobs
        self.threads = threads
        self.grace = grace

    def check(self) -> None:
        check_value("hydra.launcher.jobs", self.jobs, Count | None)
        check_value("hydra.launcher.threads", self.threads, Count | None)
        check_value("hydra.launcher.grace", self.grace, NonNegative)
        if is_one_of_several():
            raise ValueError(
                "--multirun is invalid with srun or torchrun: each of their processes would run all jobs. "
                "Allowed: python run.py -m …, or hydra/launcher=slurm"
            )

    def run(self, waiting: Sequence[Job], jobs: Sequence[Job], first: int) -> None:
        configs = [job.config for job in jobs]
        environments = divide_machine(configs, jobs=self.jobs, threads=self.threads, waiting=len(waiting))
        command = format_sweep_command(self.config)
        run_all(waiting, command=command, environments=environments, grace=self.grace)


class SubmititLauncher(JobLauncher):
    """Submits the jobs by submitit as an array of SLURM, or starts them on this machine (`cluster=local`),
    and waits for each. What runs there is the process that a job would be alone, in the same folder.

    A job that is preempted or reaches its time limit is queued again and resumes its run. A sweep that is
    started again waits for jobs that an earlier start has in the queue.

    cluster: slurm or local. submitit_folder: folder of submitit's own files. requeue: whether SLURM may queue
    a job again; None: as the cluster is configured. signal_delay_s: seconds before the time limit at which a
    job is signaled. max_num_timeout: how often a job that reached its time limit is queued again. parameters:
    those of submitit, like partition and timeout_min."""

    def __init__(
        self,
        *,
        cluster: str,
        submitit_folder: str,
        requeue: bool | None = None,
        signal_delay_s: int = 120,
        max_num_timeout: int | None = None,
        **parameters: Any,
    ) -> None:
        self.cluster = cluster
        self.submitit_folder = submitit_folder
        self.requeue = requeue
        self.signal_delay_s = signal_delay_s
        self.max_num_timeout = max_num_timeout
        self.parameters = parameters

    def check(self) -> None:
        check_value("hydra.launcher.cluster", self.cluster, Literal["slurm", "local"])
        check_value("hydra.launcher.requeue", self.requeue, bool | None)
        check_value("hydra.launcher.signal_delay_s", self.signal_delay_s, Count)
        check_value("hydra.launcher.max_num_timeout", self.max_num_timeout, Natural | None)
        try:
            import submitit  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"hydra/launcher is invalid: {error}. Allowed: after {format_install_command('slurm')}"
            ) from error
        if self.cluster == "slurm":
            if shutil.which("sbatch") is None or shutil.which("srun") is None:
                raise InvalidOptionError(
                    "hydra/launcher",
                    "slurm",
                    reason="this machine has no sbatch and srun",
                    allowed="on a machine that has, or hydra/launcher=processes",
                )
            self.make_executor()  # refuses `parameters` that submitit does not know

    def run(self, waiting: Sequence[Job], jobs: Sequence[Job], first: int) -> None:
        submissions = SubmissionLog(Path(self.config.hydra.sweep.dir) / ".jobs" / "submitted.jsonl")
        queue: Queue = SlurmQueue() if self.cluster == "slurm" else LocalQueue()
        queued, queued_with_other_options = find_queued(waiting, submissions.latest(), queue)
        progress = JobProgress(num_jobs=len(waiting))
        for job, submission in queued_with_other_options.items():
            job.code = GO_ON
            job.loss_reason = f"job {submission.job} of an earlier start, with other options, uses its folder"
            progress.note_end(job)
            job.log_end("finished", progress.describe())

        # A signal while jobs are submitted is acted on when their numbers are known.
        received: list[int] = []
        with signal_handlers(SIGNALS, lambda number, frame: received.append(number)):
            cluster_jobs = [self.find(job, submission) for job, submission in queued.items()]
            new_jobs = [job for job in waiting if job not in queued and job not in queued_with_other_options]
            while new_jobs and not received:
                array = new_jobs[:MAX_ARRAY_JOBS]
                submitted = self.submit(array, submissions, is_first=not cluster_jobs)
                progress.num_ended += len(array) - len(submitted)  # those that were refused
                cluster_jobs += submitted
                new_jobs = new_jobs[MAX_ARRAY_JOBS:]
            Collector(cluster_jobs, queue, received, progress, unsubmitted=len(new_jobs)).wait()

    def find(self, job: Job, submission: Submission) -> ClusterJob:
        """The job of the cluster that an earlier start of the sweep submitted for `job`."""
        import submitit

        log.info("Job %s: submitted before (%s)", job, submission.job)
        kind = submitit.SlurmJob if self.cluster == "slurm" else submitit.LocalJob
        return ClusterJob(job, kind(folder=self.submitit_folder, job_id=submission.job))

    def submit(self, jobs: Sequence[Job], submissions: SubmissionLog, *, is_first: bool) -> list[ClusterJob]:
        """Submits jobs as one array, and gives them as jobs of the cluster. If the scheduler refuses the
        array: raises ValueError if it `is_first`, the sweep's first, which shows that the options are wrong;
        else marks the jobs as refused and returns none."""
        folder = Path.cwd()
        command = format_sweep_command(self.config)
        saving_s = max(1.0, self.signal_delay_s - SAVED_BEFORE_LIMIT_S)
        tasks = [ClusterTask((*command, *job.arguments), folder, job.console, saving_s) for job in jobs]
        try:
            with outside_allocation():
                handles = self.make_executor().submit_array(tasks)
        except (RuntimeError, OSError) as error:  # of submitit: sbatch's own words
            reason = find_last_line(str(error))
            if is_first:
                if any(words in reason for words in NO_CONTROLLER):
                    raise InvalidOptionError(
                        "hydra/launcher",
                        self.cluster,
                        reason=reason,
                        allowed="on a machine whose cluster answers `sinfo`, or hydra/launcher=processes",
                    ) from error
                raise ValueError(
                    f"hydra.launcher is invalid: {reason}. Allowed: {self.describe_resources()}"
                ) from error
            for job in jobs:
                job.ending = "refused"
                job.loss_reason = reason
            log.error("%s not submitted: %s", count_noun(len(jobs), "job"), reason)
            return []

        # Recorded at once, so that the next start of the sweep finds the jobs in the queue.
        submissions.extend(
            Submission(str(job.folder), job.shown_overrides, self.cluster, handle.job_id, str(folder))
            for job, handle in zip(jobs, handles, strict=True)
        )
        numbers = [handle.job_id for handle in handles]
        log.info("Submitted %s: %s", count_noun(len(jobs), "job"), format_jobs(numbers))
        return [ClusterJob(job, handle) for job, handle in zip(jobs, handles, strict=True)]

    def describe_resources(self) -> str:
        """The options that ask for resources, with their values, for a scheduler's refusal."""
        values = {name: self.parameters.get(name) for name in RESOURCES}
        listed = ", ".join(f"{name} (is {value})" for name, value in values.items() if value is not None)
        hint = "; without GPUs hydra.launcher.gpus_per_node=0" if values["gpus_per_node"] else ""
        return f"hydra.launcher.NAME=VALUE that the cluster offers: {listed}{hint}"

    def make_executor(self) -> Any:
        """submitit's executor with the options. Raises ValueError for unknown ones and wrong types."""
        import submitit

        parameters: Any = OmegaConf.to_container(OmegaConf.create(self.parameters), resolve=True)
        if self.cluster == "slurm":
            parameters["signal_delay_s"] = self.signal_delay_s
            sbatch_options = parameters.pop("additional_parameters", None) or {}
            parameters["additional_parameters"] = self.requeue_option() | sbatch_options

        # Parameters that only one scheduler has are called by its name as well.
        shared = submitit.AutoExecutor._typed_parameters()
        prefixed = {}
        for name, value in parameters.items():
            prefixed[name if name in shared else f"{self.cluster}_{name}"] = value
        limits: dict[str, int] = {}
        if self.max_num_timeout is not None:
            limits[f"{self.cluster}_max_num_timeout"] = self.max_num_timeout
        try:
            executor = submitit.AutoExecutor(self.submitit_folder, cluster=self.cluster, **limits)
            executor.update_parameters(**prefixed)
        except (NameError, TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise ValueError(f"hydra.launcher is invalid: {str(error).splitlines()[0]}") from error
        return executor

    def requeue_option(self) -> dict[str, Any]:
        """The option of sbatch that allows or forbids to queue a job again; submitit has no name for it."""
        if self.requeue is None:
            return {}
        return {"requeue": True} if self.requeue else {"no-requeue": True}


class ClusterLauncher(JobLauncher):
    """Hands the jobs to a Hydra launcher that others keep: Ray's.

    That launcher says where and when a job runs. What runs there is the process that the job would be alone,
    in the same folder; a job that is queued again resumes its run.

    through: its class. extra: the extra of cpt that installs it. options: of its constructor."""

    def __init__(self, *, through: str, extra: str, options: Mapping[str, Any]) -> None:
        self.through = through
        self.extra = extra
        self.options = options

    def check(self) -> None:
        module, _, name = self.through.rpartition(".")
        resolved = OmegaConf.to_container(OmegaConf.create(dict(self.options)), resolve=True)
        options: Any = OmegaConf.create(resolved)
        try:
            self.inner = getattr(importlib.import_module(module), name)(**options)
        except ImportError as error:
            raise ValueError(
                f"hydra/launcher is invalid: {error}. Allowed: after {format_install_command(self.extra)}"
            ) from error
        except TypeError as error:
            raise ValueError(f"hydra.launcher.options={options} is invalid: {error}") from error

    def run(self, waiting: Sequence[Job], jobs: Sequence[Job], first: int) -> None:
        log.info("Submitting %s; python -m cpt.status shows them", count_noun(len(waiting), "job"))
        progress = JobProgress(num_jobs=len(waiting))
        results = self.launch_jobs(waiting, first)
        for job, result in zip(waiting, results, strict=True):
            note_result(job, result)
            progress.note_end(job)
            job.log_end("finished", progress.describe())

    def launch_jobs(self, jobs: Sequence[Job], first: int) -> Sequence[JobReturn]:
        """Has the other launcher run the jobs. Gives for each what `run_job` returned, or an exception; where
        that launcher itself fails, the same for all."""
        config = copy.deepcopy(self.config)
        # What the launcher itself writes goes to .jobs. Hydra has set its own part of a sweep's config to
        # read-only, whatever the rest is.
        with read_write(config.hydra), open_dict(config):
            config.hydra.sweep.dir = f"{self.config.hydra.sweep.dir}/.jobs"
            config.hydra.output_subdir = None
        task = partial(run_job, format_sweep_command(self.config), Path.cwd())
        self.inner.setup(hydra_context=self.context, task_function=task, config=config)

        try:
            return self.inner.launch([job.arguments for job in jobs], first)
        except Exception as error:  # of any class: each launcher has its own for a job that was cancelled
            # The launcher gave up on all its jobs at once; the cluster may still be at work on some.
            log.error("Stopping: the cluster's launcher failed: %s", error)
            failed = JobReturn(status=JobStatus.FAILED)
            failed.return_value = error
            return [failed] * len(jobs)


def note_result(job: Job, result: JobReturn) -> None:
    """Notes in a job how it ended: the exit code of its process, or the reason that it is missing."""
    if result.status is JobStatus.COMPLETED:
        job.code, job.offset = result._return_value  # of run_job
    elif is_finished_already(job.config, job.folder):
        job.was_finished = True
    else:  # the last line with text: the message of a traceback
        lines = [line.strip() for line in str(result._return_value).splitlines() if line.strip()]
        job.loss_reason = lines[-1] if lines else "(no message)"


def run_job(command: Sequence[str], start: Path, cfg: DictConfig) -> tuple[int, int]:
    """The task of a job on a cluster: the run's own process, in the folder that the sweep was started in. The
    exit code, and the offset in its console.log where the job's output begins."""
    hydra = HydraConfig.get()
    os.chdir(start)
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    hydra_overrides: Any = OmegaConf.to_container(hydra.overrides.hydra, resolve=False)
    # The folder that the sweep has resolved, and the number of the job.
    overrides += [override for override in hydra_overrides if override.startswith(JOB_OVERRIDES)]
    console = Path(hydra.run.dir) / "console.log"
    process, offset = start_process([*command, *overrides], console, env=os.environ)
    with forward_signals(process):
        return process.wait(), offset


def run_all(
    jobs: Sequence[Job], *, command: Sequence[str], environments: Sequence[dict[str, str]], grace: float
) -> None:
    """Runs the jobs, as many at once as there are environments. A signal is handed to all of them and ends
    the program; what still runs after `grace` seconds to save, or at a second signal, is killed."""
    waiting = deque(jobs)
    running: dict[Job, dict[str, str]] = {}
    free = list(environments)
    received: list[int] = []
    last_received = -math.inf
    progress = JobProgress(num_jobs=len(jobs), num_places=len(environments))
    log.info(
        "Running %s, %d in parallel; python -m cpt.status shows them",
        count_noun(len(jobs), "job"),
        len(environments),
    )

    def receive(number: int, frame: FrameType | None) -> None:
        """Notes a signal: an exception could come between a process and the note that it exists."""
        nonlocal last_received
        if time.monotonic() - last_received > TOGETHER_S:  # a terminal that closes sends two
            received.append(number)
            last_received = time.monotonic()

    bar = tqdm(total=len(jobs), unit="job", disable=None, dynamic_ncols=True)
    with signal_handlers(SIGNALS, receive), logging_redirect_tqdm(), bar:
        try:
            while (waiting or running) and not received:
                ended_jobs = [job for job in running if job.process.poll() is not None]
                for job in ended_jobs:
                    free.append(running.pop(job))
                    job.end()
                    progress.note_end(job)
                    duration = format_duration(time.monotonic() - job.start_time)
                    job.log_end(f"finished in {duration}", progress.describe(running))
                    bar.update()

                while waiting and free:
                    job = waiting.popleft()
                    environment = free.pop(0)
                    ordinal = f"{len(jobs) - len(waiting)} of {len(jobs)}"
                    job.start(
                        command, env={**remove_task_variables(os.environ), **environment}, ordinal=ordinal
                    )
                    running[job] = environment
                    progress.note_line()

                if bar.disable and progress.is_line_due():  # no terminal
                    log.info("Running %s: %s", count_noun(len(running), "job"), progress.describe(running))
                bar.refresh()
                time.sleep(POLL_S)
        finally:
            deadline = time.monotonic() + grace
            num_received = max(1, len(received))
            for job in running:
                job.kill(received[0] if received else signal.SIGTERM)
            while any(job.process.poll() is None for job in running) and time.monotonic() < deadline:
                if len(received) > num_received:
                    break
                time.sleep(POLL_S)
            for job in running:
                job.kill(signal.SIGKILL)
                job.process.wait()
    if received:
        log.warning("Stopping on %s; %s", signal.Signals(received[0]).name, CONTINUES)
        raise SystemExit(GO_ON)


die_with_parent()  # also in other Hydra programs that use these launchers
for kind in (ProcessLauncher, SubmititLauncher, ClusterLauncher, OptunaSweeper, TuneSweeper):
    # Hydra takes plugins named `hydra_plugins.` only; a file there would be imported by every Hydra program.
    Plugins.instance().register(kind)
    Plugins.instance().class_name_to_class[f"hydra_plugins.cpt.{kind.__name__}"] = kind
