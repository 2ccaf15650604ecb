"""The terminal line of a sweep: jobs done, and the progress of each running job."""

import time
from collections.abc import Iterable, Sequence

from tqdm import tqdm

from cpt.core.heartbeat import Heartbeat
from cpt.status import format_phase, format_time, truncate
from cpt.sweeps.jobs import Job

EVERY_S = 2.0  # between two looks at the jobs' folders
MIN_WIDTH = 16  # characters of a job
FORM = "{n_fmt}/{total_fmt} jobs [{elapsed}<{remaining}]{postfix}"


class SweepLine:
    """A bar of `total` jobs; silent without a terminal."""

    def __init__(self, total: int) -> None:
        self.bar = tqdm(total=total, unit="job", disable=None, dynamic_ncols=True, bar_format=FORM)
        self.looked, self.seen = 0.0, list[Job]()

    def refresh(self, running: Iterable[Job]) -> None:
        """Moves the clock on and, every EVERY_S, reads the progress of the jobs."""
        if self.bar.disable:
            return
        jobs = list(running)
        if jobs != self.seen or time.monotonic() - self.looked >= EVERY_S:
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
        text = " | ".join(truncate(what, share - len(left)) + left for what, left in jobs)
    return truncate(text, room)
