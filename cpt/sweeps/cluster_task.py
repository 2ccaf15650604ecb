"""What runs on a cluster for a job of a sweep: the process of its run, and what becomes of the job when the
scheduler stops it."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpt.core.preemption import GO_ON
from cpt.sweeps.jobs import start_process
from cpt.sweeps.signals import forward_signals

ANSWER_TIMEOUT_S = 60.0  # of a command that asks SLURM
TOO_MANY_TIMEOUTS = "it reached its time limit more often than hydra.launcher.max_num_timeout"


@dataclass(frozen=True)
class JobEnd:
    """How the process of a job ended."""

    code: int  # its exit code
    offset: int  # in console.log, where its output begins
    stopped: str = ""  # if the scheduler stopped it and does not queue it again: why


@dataclass(frozen=True)
class ClusterTask:
    """The task of a job, which submitit pickles and calls on the cluster.

    command: of the run. folder: of the sweep's start. console: the run's console.log, relative to the folder.
    saving_s: seconds that a run has to save on a signal."""

    command: tuple[str, ...]
    folder: Path
    console: Path
    saving_s: float

    def __call__(self) -> JobEnd:
        """Runs the process to its end, and returns how it ended. Raises SystemExit for a job that was
        preempted and is queued again: it has no result yet, and the sweep waits for its next start."""
        from submitit.core.utils import UncompletedJobError

        os.chdir(self.folder)
        process, offset = start_process(self.command, self.console, env=os.environ)
        try:
            with forward_signals(process, saving_s=self.saving_s) as received:
                code = process.wait()
        except UncompletedJobError:  # raised by submitit's handler of the warning before a time limit
            # The exception has interrupted the wait above. The run may still be saving its checkpoint, and
            # would be killed with this task.
            process.wait()
            return JobEnd(code=GO_ON, offset=offset, stopped=TOO_MANY_TIMEOUTS)

        end = JobEnd(code=code, offset=offset)
        was_signaled = bool(received)
        if was_signaled and was_interrupted(code) and "SLURM_JOB_ID" in os.environ:
            return self.leave_to_scheduler(end)
        return end

    def checkpoint(self) -> Any:
        """What submitit queues again after a time limit: this task, since its run resumes itself."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def leave_to_scheduler(self, end: JobEnd) -> JobEnd:
        """Requeues a preempted job, or lets SLURM do it, and raises SystemExit; returns `end` if it is not
        requeued: it was cancelled, or may not be requeued.

        The state is asked first: to requeue a cancelled job would bring it back to life."""
        job = os.environ["SLURM_JOB_ID"]
        state = read_job_state(job)
        if state == "CANCELLED":
            return replace(end, stopped="cancelled")
        # Only the first process requeues the job. Another one that still finds it running returns its end.
        if state == "RUNNING" and os.environ.get("SLURM_PROCID", "0") == "0":
            command = ["scontrol", "requeue", job]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=ANSWER_TIMEOUT_S)
            except (OSError, subprocess.SubprocessError):  # JobRequeue=0 or --no-requeue
                return end
            raise SystemExit(GO_ON)
        if state in ("PENDING", "PREEMPTED", "REQUEUED", "COMPLETING"):
            raise SystemExit(GO_ON)
        return end


def was_interrupted(code: int) -> bool:
    """Whether an exit code is that of a run that stopped to be continued (GO_ON), or that a signal ended: it
    is below 0 from Python, above 128 from a shell."""
    return code == GO_ON or code < 0 or code > 128


def read_job_state(job: str) -> str:
    """The state of a job by `scontrol show job`, like RUNNING; empty if SLURM does not know it or is
    silent."""
    return parse_job(show_job(job)).get("JobState", "")


def show_job(job: str) -> str:
    """What `scontrol show job` prints of a job; "" where it fails or does not answer in time."""
    command = ["scontrol", "--oneliner", "show", "job", job]
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_job(text: str) -> Mapping[str, str]:
    """Names and values of the first line of `scontrol --oneliner show job`."""
    return dict(re.findall(r"(\w+)=(\S*)", text.partition("\n")[0]))
