"""The threads that a run keeps, and how they wait."""

import logging
import os
import time
from pathlib import Path
from statistics import median

from cpt.core.processes import cores, is_first_process

log = logging.getLogger(__name__)
LOAD = Path("/proc/loadavg")
SPINNING, SLEEPING = 10_000, 1_000  # times that a thread of OpenMP looks for work before it sleeps
LOOKS, BETWEEN = 5, 0.01  # seconds


def choose_spins() -> int:
    """How often OpenMP's threads look for work before they sleep: more where the machine has a core for each.

    A default run on two cores of its own makes 22.5 steps a second SPINNING and 17.8 SLEEPING, in the same
    processor time; two of them at once on these cores take 50 s and 36 s."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    ours = int(threads) if threads.isdigit() else cores()
    others = count_running() - 1
    return SPINNING if ours + others <= (os.cpu_count() or 1) else SLEEPING


def count_running() -> float:
    """Threads of all processes that run or wait for a core, this one among them; infinitely many where the
    system does not tell."""
    if not LOAD.exists():
        return float("inf")
    seen = []
    for _ in range(LOOKS):
        seen.append(int(LOAD.read_text().split()[3].partition("/")[0]))
        time.sleep(BETWEEN)
    return median(seen)


def keep_threads(path: Path, *, processes: int) -> None:
    """Has the processor use as many threads as the run began with, which a file of its folder remembers. With
    others the same sums are added in another order, and the last bits differ. `processes` are at work on the
    run on this machine. Raises ValueError for a file that is damaged."""
    import torch  # seconds that sweeps need not wait for

    given = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        given = max(1, given // processes)
    begun = path.read_text() if path.exists() else str(given)
    if not begun.isdigit() or int(begun) < 1:
        raise ValueError(f"{path} is damaged; write the number of threads into it that the run began with")
    if int(begun) != given:
        log.info("computing with %s threads, as this run began, not with %d", begun, given)
    if is_first_process() and not path.exists():
        path.write_text(begun)
    torch.set_num_threads(int(begun))
    os.environ["OMP_NUM_THREADS"] = begun  # for the processes that Lightning starts
