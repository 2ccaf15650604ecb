"""Processes that must not outlive the one that has started them: jobs of a sweep, ranks of a run."""

import ctypes
import os
import signal
import sys

from cpt.core.signs import answers_signals, stat_of

PARENT = "CPT_LAUNCHER"  # environment variable: the process that those it starts must not outlive
RANK = "LOCAL_RANK"  # which Lightning gives the ranks that it starts
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent() -> None:
    """Linux kills this process when the one of cpt's that has started it is gone, even by SIGKILL: a rank on
    its own would wait for the others for minutes. Those that this one starts it does not leave either."""
    parent = os.environ.get(PARENT, "")
    if sys.platform == "linux" and parent == str(os.getppid()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if RANK in os.environ and parent.isdigit() and not is_there(int(parent)):  # it was gone already
        os._exit(128 + signal.SIGKILL)
    os.environ[PARENT] = str(os.getpid())


def is_there(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    if sys.platform != "linux":
        return answers_signals(pid)
    state = stat_of(pid)
    return state is not None and state[0] not in "ZX"
