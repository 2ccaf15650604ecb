"""The terminal's line of a sweep: how many jobs are done, and how far each of those is that run."""

import os
import sys
import time
from collections.abc import Iterable, Sequence

from tqdm import tqdm

from cpt.core.signs import Sign
from cpt.status import clock, cut, doing
from cpt.sweeps.jobs import Job

EVERY_S = 2.0  # how often the jobs' folders are looked at
LEAST = 16  # characters that tell something of a job
BETWEEN = " | "
FORM = "{n_fmt}/{total_fmt} jobs [{elapsed}<{remaining}]{postfix}"


class SweepLine:
    """A bar of `total` jobs; where there is no terminal it says nothing."""

    def __init__(self, total: int) -> None:
        self.bar = tqdm(total=total, unit="job", disable=None, dynamic_ncols=True, bar_format=FORM)
        self.looked, self.seen = 0.0, list[Job]()

    def refresh(self, running: Iterable[Job]) -> None:
        """Moves the clock on and, from time to time, says anew what the jobs are at."""
        if self.bar.disable:
            return
        jobs = list(running)
        if jobs != self.seen or time.monotonic() - self.looked >= EVERY_S:
            self.looked, self.seen = time.monotonic(), jobs
            self.bar.set_postfix_str("", refresh=False)
            room = columns() - len(str(self.bar)) - len(", ")
            self.bar.set_postfix_str(fit([tell_job(job) for job in jobs], room), refresh=False)
        self.bar.refresh()


def columns() -> int:
    """The width of the terminal that bars go to."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def tell_job(job: Job) -> tuple[str, str]:
    """What a running job is at, and the time left: of the run where that is known, else of its phase."""
    try:
        sign = Sign.load(job.folder)
    except ValueError:
        sign = None
    if sign is None or not sign.alive:
        is_own = sign is not None and sign.written >= job.began  # else of an earlier start
        return f"#{job.number} {'ending' if is_own else 'starting'}", ""
    left = sign.phase_eta_s if sign.run_eta_s is None else sign.run_eta_s
    more = "+" if sign.run_eta_s is None or sign.untimed else ""
    what = "waiting" if sign.state == "waiting" else doing(sign, timed=False)
    return f"#{job.number} {what}", "" if left is None else f" {clock(left)}{more}"


def fit(told: Sequence[tuple[str, str]], room: int) -> str:
    """All jobs, each as short as it has to be, the time whole; with less than LEAST for each the first of
    them, and how many more there are."""
    if not told:
        return ""
    for count in range(len(told), 0, -1):
        more = f"{BETWEEN}+{len(told) - count}" if count < len(told) else ""
        left = room - len(more) - len(BETWEEN) * (count - 1)
        if left // count >= LEAST:
            break
    texts = [""] * count
    order = sorted(range(count), key=lambda place: sum(map(len, told[place])))
    for done, place in enumerate(order):  # what a short one does not need is for the longer ones
        what, when = told[place]
        texts[place] = cut(what, max(1, left // (count - done) - len(when))) + when
        left -= len(texts[place])
    return cut(BETWEEN.join(texts) + more, max(0, room))
