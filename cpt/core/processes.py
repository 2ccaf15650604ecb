"""Which of a run's processes this is, as far as the environment tells before any process group exists."""

import os
import sys
from typing import Any


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def is_first_process() -> bool:
    """Whether this is the process that writes."""
    return all(
        os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID", "NODE_RANK")
    )


def is_one_of_several() -> bool:
    """Whether other processes may work on the same run."""
    return "LOCAL_RANK" in os.environ or int(os.environ.get("SLURM_NTASKS") or 1) > 1


def is_started_by_lightning() -> bool:
    """Whether the first process of the run has started this one, and would be killed if it left alone."""
    others = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")
    return "LOCAL_RANK" in os.environ and not any(name in os.environ for name in others)


def in_company() -> bool:
    """Whether this process works in a group with others now."""
    # Not imported, perhaps only in part: then there is no group.
    distributed: Any = sys.modules.get("torch.distributed")
    initialised = getattr(distributed, "is_initialized", None)
    return initialised is not None and initialised() and distributed.get_world_size() > 1


def rank_and_world() -> tuple[int, int]:
    """The rank of this process in its group, and how many there are."""
    if not in_company():
        return 0, 1
    distributed = sys.modules["torch.distributed"]
    return distributed.get_rank(), distributed.get_world_size()
