"""Which of a run's processes this is, by the environment, before any process group exists; its
cores and threads, and its parent."""

import ctypes
import os
import signal
import sys
from typing import Any

import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from cpt.core.slurm import count_started_tasks

# Environment variables: the process that must not be outlived; whether this is its child, a job of a sweep
PARENT, JOB = "CPT_LAUNCHER", "CPT_JOB"
TOGETHER = "CPT_SIGNALS_TOGETHER_S"  # of a job and of its ranks: seconds in which signals are one
JOB_TOGETHER_S = 10.0  # a scheduler signals every process, and the launcher once more, later on a busy node
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
SPINS = "10000"  # times that a thread of OpenMP looks for work before it sleeps: many slow other runs


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def is_first_process() -> bool:
    """Whether this is the process that writes."""
    return not find_stray_ranks()


def find_stray_ranks() -> str:
    """The environment variables that make this another process than the first, as NAME=VALUE."""
    variables = []
    for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID", "NODE_RANK"):
        value = os.environ.get(name, "0")
        if value != "0":
            variables.append(f"{name}={value}")
    return " ".join(variables)


def is_one_of_several() -> bool:
    """Whether other processes may work on the same run."""
    return "LOCAL_RANK" in os.environ or count_started_tasks() > 1


def is_distributed() -> bool:
    """Whether this process works in a group with others now."""
    # Not imported, perhaps only in part: then there is no group.
    distributed: Any = sys.modules.get("torch.distributed")
    initialised = getattr(distributed, "is_initialized", None)
    return initialised is not None and initialised() and distributed.get_world_size() > 1


def rank_and_world() -> tuple[int, int]:
    """The rank of this process in its group, and how many there are."""
    if not is_distributed():
        return 0, 1
    distributed = sys.modules["torch.distributed"]
    return distributed.get_rank(), distributed.get_world_size()


def is_job_within_a_sweep() -> bool:
    """Whether a launcher of Hydra's plugins runs this job as a call in its own process, whose command line,
    if any, is the sweep's. cpt's launchers start the command of a single run."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def is_submitit_job() -> bool:
    """Whether submitit runs this job as a call, for one of Hydra's plugins."""
    return is_job_within_a_sweep() and "SUBMITIT_EXECUTOR" in os.environ


def die_with_parent() -> None:
    """Linux kills this process when the process of cpt that started it ends, even by SIGKILL: a rank left
    alone would wait for the others for minutes. Processes that this one starts get the same."""
    parent = os.environ.get(PARENT, "")
    if sys.platform == "linux" and parent == str(os.getppid()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    is_job = os.environ.pop(JOB, "") != ""
    if is_job:
        os.environ.setdefault(TOGETHER, str(JOB_TOGETHER_S))

    # The parent may have ended before the call above: then no signal comes any more.
    is_child = is_job or "LOCAL_RANK" in os.environ  # a rank that Lightning started
    if is_child and parent.isdigit():
        try:
            is_gone = psutil.Process(int(parent)).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            is_gone = True
        if is_gone:
            os._exit(128 + signal.SIGKILL)

    os.environ[PARENT] = str(os.getpid())
