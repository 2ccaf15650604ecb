"""How far the jobs of a sweep are, and when the last of them is likely to end."""

import heapq
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean

from cpt.core.heartbeat import Heartbeat
from cpt.core.messages import count_noun, format_duration
from cpt.sweeps.jobs import Job

PERIOD_S = 600.0  # after which a log tells again how far jobs are


@dataclass
class JobProgress:
    """Counts the jobs that have ended, out of `num_jobs`; `num_places` run at once. On a cluster only the
    scheduler knows how many do (None), and no time is estimated."""

    num_jobs: int
    num_places: int | None = None
    num_ended: int = 0
    durations: list[float] = field(default_factory=list)  # of complete jobs, in seconds
    last_line_time: float = field(default_factory=time.monotonic)

    def note_end(self, job: Job) -> None:
        """Counts a job that has ended. One that failed says nothing of how long others take."""
        self.num_ended += 1
        self.note_line()
        if self.num_places is not None and job.is_complete:
            self.durations.append(time.monotonic() - job.start_time)

    def note_line(self) -> None:
        """Notes that the log has a new line on the jobs."""
        self.last_line_time = time.monotonic()

    def is_line_due(self) -> bool:
        """Whether the log has been silent for PERIOD_S; if so, notes that it gets a line now."""
        if time.monotonic() - self.last_line_time < PERIOD_S:
            return False
        self.note_line()
        return True

    def describe(self, running: Collection[Job] = ()) -> str:
        """`1 of 4 jobs ended, about 0:36 left`, without the time where it is unknown."""
        text = f"{self.num_ended} of {count_noun(self.num_jobs, 'job')} ended"
        remaining_s = self.estimate_s(running)
        return text if remaining_s is None else f"{text}, about {format_duration(remaining_s)} left"

    def estimate_s(self, running: Collection[Job]) -> float | None:
        """The seconds until all jobs have ended, if each still takes what its run says, or else as long as
        others did; None if nothing is known, or nothing is left."""
        num_waiting = self.num_jobs - self.num_ended - len(running)
        if self.num_places is None or not (running or num_waiting):
            return None
        elapsed = {job: time.monotonic() - job.start_time for job in running}
        estimates = {job: read_remaining_s(job) for job in running}

        durations = list(self.durations)
        if not durations:
            for job, estimate in estimates.items():
                if estimate is not None:
                    durations.append(elapsed[job] + estimate)
        if not durations:
            return None
        duration = fmean(durations)

        # Each waiting job takes the place that is free first.
        free_times = [0.0] * (self.num_places - len(running))
        for job, estimate in estimates.items():
            free_times.append(max(0.0, duration - elapsed[job]) if estimate is None else estimate)
        heapq.heapify(free_times)
        for _ in range(num_waiting):
            heapq.heapreplace(free_times, free_times[0] + duration)
        return max(free_times)


def read_remaining_s(job: Job) -> float | None:
    """The seconds that a job's run expects to take, as its progress.json of this start says; None if it does
    not."""
    beat = None
    with suppress(ValueError):
        beat = Heartbeat.load(job.folder)
    if beat is None or beat.began < job.start_date:
        return None
    return beat.run_eta_s
