"""The jobs of a sweep on a cluster, by submitit: which are in the queue, and how each one ended.

submitit submits a job and stores what its task returns. Whether a job is still to end is asked of the
scheduler here, since submitit waits for ever for a job that was cancelled on a cluster without
accounting."""

import json
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from cpt.core.messages import count_noun
from cpt.core.preemption import GO_ON
from cpt.sweeps.cluster_task import ANSWER_TIMEOUT_S, JobEnd, read_job_state
from cpt.sweeps.jobs import CONTINUES, Job, is_finished_already
from cpt.sweeps.progress import JobProgress

log = logging.getLogger(__name__)
POLL_S = 1.0  # between looks for results, which are files
QUEUE_S = 15.0  # between questions to the scheduler, which many users ask
GONE_S = 30.0  # that a job without a result is out of the queue before it has ended: a file system is slow
UNREADABLE_S = 10.0  # that a result stays unreadable before it counts as such
UNENDED = ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "RESIZING", "SUSPENDED")
ENDINGS = {  # by the state of a job that left no result: how it ended, as a job and in words
    "CANCELLED": ("cancelled", "was cancelled"),
    "OUT_OF_MEMORY": ("out of memory", "used more memory than it was given (hydra.launcher.mem_gb)"),
    "TIMEOUT": ("preempted", "reached its time limit (hydra.launcher.timeout_min)"),
    "PREEMPTED": ("preempted", "was preempted and not queued again"),
    "NODE_FAIL": ("preempted", "lost its node and was not queued again"),
    "": ("lost", "left no result, and the scheduler no longer knows it"),
}


@dataclass(frozen=True)
class Submission:
    """A job that was submitted: the run's folder and overrides, the scheduler's number, and the folder that
    the sweep was started in, which tells it from a job with the same number on another cluster."""

    run: str
    overrides: tuple[str, ...]
    cluster: str
    job: str
    folder: str


class SubmissionLog:
    """The submissions of all starts of a sweep, a line of JSON each: a sweep that is started again waits
    for those that are still in the queue."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def extend(self, submissions: Iterable[Submission]) -> None:
        """Adds submissions to the end of the file, each as a line of JSON."""
        lines = [json.dumps(asdict(submission)) + "\n" for submission in submissions]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def latest(self) -> dict[str, Submission]:
        """The last submission of each run. A line that a killed process left incomplete is skipped."""
        submissions: dict[str, Submission] = {}
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return submissions
        for line in lines:
            try:
                submission = Submission(**json.loads(line))
            except (ValueError, TypeError):
                continue
            submissions[submission.run] = submission
        return submissions


class Queue(Protocol):
    """What a scheduler says of jobs."""

    cluster: str

    def active(self) -> dict[str, tuple[str, str]] | None:
        """State and working folder of the user's jobs that are still to end, by their numbers; None if the
        scheduler does not answer."""

    def final_state(self, job: str) -> str:
        """How a job that is no longer active ended, like CANCELLED; empty if the scheduler does not know."""

    def cancel_command(self, jobs: Sequence[str]) -> str:
        """The command that ends jobs."""


class SlurmQueue:
    """SLURM's queue, by `squeue`. Ended jobs are known to `sacct` or, without accounting, to `scontrol` for
    some minutes."""

    cluster = "slurm"

    def active(self) -> dict[str, tuple[str, str]] | None:
        command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%T|%Z"]
        output = run_command(command)
        if output is None:
            return None
        rows = [line.strip().split("|", 2) for line in output.splitlines() if line.count("|") >= 2]
        return {job: (state, folder) for job, state, folder in rows}

    def final_state(self, job: str) -> str:
        command = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=State", f"--jobs={job}"]
        states = (run_command(command) or "").split()  # "CANCELLED by 0"
        is_final = bool(states) and states[0] not in UNENDED  # accounting may lag
        return states[0] if is_final else read_job_state(job)

    def cancel_command(self, jobs: Sequence[str]) -> str:
        arrays = dict.fromkeys(job.partition("_")[0] for job in jobs)
        return f"scancel {' '.join(arrays)}"


class LocalQueue:
    """The jobs of submitit's local executor: a job's number is the id of its controlling process."""

    cluster = "local"

    def active(self) -> dict[str, tuple[str, str]] | None:
        jobs: dict[str, tuple[str, str]] = {}
        for process in psutil.process_iter(["pid", "cmdline", "cwd", "status"]):
            is_controller = "submitit.local._local" in (process.info["cmdline"] or ())
            if is_controller and process.info["status"] != psutil.STATUS_ZOMBIE:
                jobs[str(process.info["pid"])] = ("RUNNING", process.info["cwd"] or "")
        return jobs

    def final_state(self, job: str) -> str:
        return ""

    def cancel_command(self, jobs: Sequence[str]) -> str:
        return f"kill {' '.join(jobs)}"


def run_command(command: Sequence[str]) -> str | None:
    """The output of a command; None if it fails or does not answer."""
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass
class ClusterJob:
    """A job of a sweep and the scheduler's job of it, of this start or of an earlier one."""

    job: Job
    handle: Any  # submitit.Job
    state: str = "PENDING"
    gone_since: float | None = None  # time.monotonic() at which it was out of the queue first
    unreadable_since: float | None = None

    @property
    def number(self) -> str:
        return self.handle.job_id

    def note_state(self, state: str) -> None:
        """Logs a change of state: a line for each."""
        if state == self.state:
            return
        if state == "PENDING":
            log.info("Job %s: queued again (%s)", self.job, self.number)
        elif state == "RUNNING":
            log.info("Job %s: running (%s), %s", self.job, self.number, self.job.console)
        self.state = state

    def read_result(self) -> bool:
        """Notes how the job ended if its task has left a result. Returns whether the job has ended."""
        from submitit.core.utils import UncompletedJobError

        task = self.handle.task(0)  # all tasks of a job have the same end
        refresh(task.paths.folder)
        path = task.paths.result_pickle
        if not path.exists():
            return False
        try:
            end = task.result()
        except UncompletedJobError as error:  # the task raised
            self.note_end_without_code("lost", find_last_line(find_traceback(str(error))))
            return True
        except Exception as error:  # pickle raises many classes for a file that is damaged or incomplete
            return self.note_unreadable(path, error)

        if not isinstance(end, JobEnd):
            return self.note_unreadable(path, TypeError(f"{type(end).__name__} in it"))
        self.note_end(end)
        return True

    def note_unreadable(self, path: Path, error: Exception) -> bool:
        """Waits some seconds for a result that may be written at this moment; then the run's folder decides
        how the job ended. Returns whether it has."""
        current_time = time.monotonic()
        if self.unreadable_since is None:
            self.unreadable_since = current_time
        if current_time - self.unreadable_since < UNREADABLE_S:
            return False
        reason = str(error) or type(error).__name__
        self.note_end_without_code("lost", f"the result {path} is unreadable: {reason}")
        return True

    def note_end(self, end: JobEnd) -> None:
        """Records in the job how its process ended, and if the scheduler stopped it, why."""
        self.job.code = end.code
        self.job.offset = end.offset
        if end.stopped == "cancelled":
            self.note_end_without_code("cancelled", f"job {self.number} was cancelled")
        elif end.stopped:
            self.job.loss_reason = f"job {self.number}: {end.stopped}"

    def note_final_state(self, state: str) -> None:
        """Notes the end of a job that left no result, by its last state."""
        ending, words = ENDINGS.get(state, ("lost", f"ended as {state} without a result"))
        log_file = self.handle.task(0).paths.stderr
        if ending == "lost" and log_file.exists():
            words = f"{words}: {find_last_line(log_file.read_text(errors='replace'))} ({log_file})"
        self.note_end_without_code(ending, f"job {self.number} {words}")

    def note_end_without_code(self, ending: str, reason: str) -> None:
        """Notes an end whose exit code says nothing or is unknown. A run that is finished is so, however
        its job ended."""
        self.job.code = GO_ON if ending == "preempted" else None
        self.job.ending = ending
        self.job.loss_reason = reason
        if is_finished_already(self.job.config, self.job.folder):
            self.job.code = 0
            self.job.loss_reason = ""


@contextmanager
def outside_allocation() -> Iterator[None]:
    """Inside the context the environment is that of a shell outside of any job: a sweep may be started inside
    one, whose number of tasks and memory would be those of the jobs that it submits."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("SLURM_", "SRUN_")) and name != "SLURM_CONF"
    }
    if "SLURM_JOB_ID" not in inherited:
        yield
        return
    for name in inherited:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(inherited)


def refresh(folder: Path) -> None:
    """Has a network file system read a folder again."""
    try:
        folder.chmod(folder.stat().st_mode)
    except OSError:
        return


def find_traceback(message: str) -> str:
    """The traceback in submitit's message of a task that raised, which stands between lines of dashes; the
    whole message if it has none."""
    sections = re.split(r"^-{5,}$", message, flags=re.MULTILINE)
    return sections[1] if len(sections) > 1 else message


def find_last_line(text: str) -> str:
    """The last line with text: the message of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
    return lines[-1] if lines else "(no message)"


@dataclass
class Collector:
    """Waits for jobs on a cluster, one by one, until a signal is received."""

    jobs: Sequence[ClusterJob]
    queue: Queue
    received: list[int]
    progress: JobProgress
    unsubmitted: int = 0  # jobs that a signal came before
    is_silent: bool = field(default=False, init=False)  # whether the scheduler did not answer last

    def wait(self) -> None:
        """Waits until each job has ended. On a signal the jobs stay on the cluster: raises SystemExit after
        a line that names them."""
        open_jobs = list(self.jobs)
        next_question = 0.0
        while open_jobs and not self.received:
            if time.monotonic() >= next_question:
                self.ask_queue(open_jobs)
                next_question = time.monotonic() + QUEUE_S
            for cluster_job in list(open_jobs):
                if self.has_ended(cluster_job):
                    open_jobs.remove(cluster_job)
                    self.progress.note_end(cluster_job.job)
                    cluster_job.job.log_end("finished", self.progress.describe())
            if open_jobs and self.progress.is_line_due():
                log.info("Waiting for %s: %s", count_noun(len(open_jobs), "job"), self.progress.describe())
            if open_jobs and not self.received:
                time.sleep(POLL_S)

        if self.received and (open_jobs or self.unsubmitted):
            self.leave(open_jobs, self.received[0])

    def ask_queue(self, open_jobs: Sequence[ClusterJob]) -> None:
        """Records the state of each job, or since when it has been missing from the queue."""
        active = self.queue.active()
        is_silent = active is None
        if is_silent != self.is_silent:
            log.warning("The scheduler %s", "does not answer; waiting" if is_silent else "answers again")
        self.is_silent = is_silent
        if active is None:
            return

        for cluster_job in open_jobs:
            if cluster_job.number in active:
                state, _folder = active[cluster_job.number]
                cluster_job.gone_since = None
                cluster_job.note_state(state)
            elif cluster_job.gone_since is None:
                cluster_job.gone_since = time.monotonic()

    def has_ended(self, job: ClusterJob) -> bool:
        """Whether a job has ended; notes how. Its result decides or, GONE_S after it left the queue, the
        scheduler's last state of it."""
        if job.read_result():
            return True
        if job.unreadable_since is not None:
            return False
        if job.gone_since is None or time.monotonic() - job.gone_since < GONE_S:
            return False
        job.note_final_state(self.queue.final_state(job.number))
        return True

    def leave(self, open_jobs: Sequence[ClusterJob], number: int) -> None:
        """Logs which jobs are still in the queue, and raises SystemExit."""
        numbers = [job.number for job in open_jobs]
        parts = [f"Stopping on {signal.Signals(number).name}"]
        if numbers:
            parts.append(f"{count_noun(len(numbers), 'job')} still in the queue: {format_jobs(numbers)}")
            parts.append(f"{self.queue.cancel_command(numbers)} ends them; the same command waits for them")
        if self.unsubmitted:
            parts.append(f"{count_noun(self.unsubmitted, 'job')} not submitted; {CONTINUES}")
        log.warning("%s", "; ".join(parts))
        raise SystemExit(GO_ON)


def format_jobs(jobs: Sequence[str]) -> str:
    """Numbers of jobs, those of an array in ranges: 38_[0-3,7], 41."""
    arrays: dict[str, list[int]] = {}
    for job in jobs:
        array, _, index = job.partition("_")
        indices = arrays.setdefault(array, [])
        if index.isdigit():
            indices.append(int(index))

    names = []
    for array, indices in arrays.items():
        ranges = format_ranges(sorted(indices))
        if not ranges:
            names.append(array)
        elif ranges.isdigit():
            names.append(f"{array}_{ranges}")
        else:
            names.append(f"{array}_[{ranges}]")
    return ", ".join(names)


def format_ranges(numbers: Sequence[int]) -> str:
    """Ascending whole numbers as ranges: 0-3,7."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def find_queued(
    jobs: Sequence[Job], submissions: Mapping[str, Submission], queue: Queue
) -> tuple[dict[Job, Submission], dict[Job, Submission]]:
    """The submissions of an earlier start that are still in the queue, by their jobs: those with the same
    overrides, and those with others, which hold the run's folder. Raises ValueError if the scheduler does not
    answer."""
    with_same_overrides: dict[Job, Submission] = {}
    with_others: dict[Job, Submission] = {}
    recorded = {job: submissions[str(job.folder)] for job in jobs if str(job.folder) in submissions}
    if not recorded:
        return with_same_overrides, with_others
    active = queue.active()
    if active is None:
        raise ValueError(
            "squeue does not answer, and jobs of an earlier start may still be in the queue; "
            "run the same command again when it answers"
        )

    for job, submission in recorded.items():
        if submission.cluster != queue.cluster or submission.job not in active:
            continue
        _, folder = active[submission.job]
        if folder != submission.folder:  # a job of another cluster, or of another sweep, with the same number
            continue
        if sorted(submission.overrides) == sorted(job.shown_overrides):
            with_same_overrides[job] = submission
        else:
            with_others[job] = submission
    return with_same_overrides, with_others
