"""The threads that a run keeps."""

import logging
import os
from pathlib import Path

from cpt.core.processes import is_first_process

log = logging.getLogger(__name__)


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
