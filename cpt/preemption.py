"""Signals that ask a run to leave: what was learned is saved first, and the same command goes on from there.

The first signal is noted. Where nothing would be lost it ends the run at once, by an exception; within
`deferred()`, and where several processes work together, the run goes on to the next place at which it can
leave, and all processes leave there. A second signal ends the process as it stands."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import Popen
from types import FrameType

GO_ON = 75  # EX_TEMPFAIL of BSD's <sysexits.h>: not failed, to be started again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
TOGETHER_S = 0.5  # what reaches a process by its group and once more by its launcher is one signal
CHILDREN_S = 60.0  # that the other processes of a run have to leave
STORE_KEY = "cpt/preempted"


class Preempted(BaseException):
    """The run leaves on a signal; `where` says how far it came."""

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(number, where)
        self.number, self.where = number, where

    def __str__(self) -> str:
        place = f" {self.where}" if self.where else ""
        return f"stopped by {signal.Signals(self.number).name}{place}; the same command goes on from here"


@dataclass
class Notice:
    """The signal of this process, 0 before one has come."""

    number: int = 0
    at: float = 0.0
    deferrals: int = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGNALS."""
        if self.number:
            if time.monotonic() - self.at > TOGETHER_S:
                end_now(number)
            return
        self.number, self.at = number, time.monotonic()
        if not self.deferrals and not in_company():
            raise Preempted(number)


notice = Notice()


def end_now(number: int) -> None:
    for child in children():
        child.kill()
    os._exit(128 + number)


@contextmanager
def heeded() -> Iterator[None]:
    """While it lasts, SIGNALS end the program by one line and the exit code GO_ON; those that are ignored
    (nohup) stay ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, notice.receive)
    try:
        yield
    except Preempted as leaving:
        leave(leaving)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(leaving: Preempted) -> None:
    """Says so, waits for the other processes of the run and ends."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("RANK", "0") == "0":
        print(f"cpt: {leaving}", file=sys.stderr, flush=True)
    deadline = time.monotonic() + CHILDREN_S
    for child in children():
        child.wait(max(0.0, deadline - time.monotonic()))
    # Not sys.exit in a distributed run: a process that has left cannot answer what others ask at their exit.
    os._exit(GO_ON) if "LOCAL_RANK" in os.environ else sys.exit(GO_ON)


@contextmanager
def deferred() -> Iterator[None]:
    """While it lasts, a signal is noted only: whoever opens it calls `check` or `leave_together`."""
    notice.deferrals += 1
    try:
        yield
    finally:
        notice.deferrals -= 1


def check(where: str = "") -> None:
    """Leaves if a signal has come to this process; for where no other one waits for it."""
    if notice.number:
        raise Preempted(notice.number, where)


def leave_together(where: str = "") -> None:
    """Leaves if a signal has come to any process; called by all of them."""
    if number := agreed(notice.number):
        leave_all(number, where)


def leave_all(number: int, where: str = "") -> None:
    """Leaves with all other processes, which know of the signal as well."""
    release_children()
    raise Preempted(number, where)


def agreed(number: int) -> int:
    """The largest of the processes' numbers; a collective where there are several."""
    if not in_company():
        return number
    import torch
    from torch import distributed

    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    largest = torch.tensor(number, device=device)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return int(largest)


def in_company() -> bool:
    """Whether this process works together with others."""
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


class Herald:
    """Tells the other processes of a signal, and hears of theirs, while each works on its own: by the store
    that the process group was made with, asked every `PERIOD_S`."""

    PERIOD_S = 0.5

    def __init__(self) -> None:
        self.asked = 0.0

    def check(self) -> None:
        """Leaves its own work if a signal has come to any process."""
        if in_company():
            self.exchange()
        check()

    def exchange(self) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        if notice.number:
            _get_default_store().set(STORE_KEY, str(notice.number))
        elif time.monotonic() - self.asked > self.PERIOD_S:
            self.asked = time.monotonic()
            if _get_default_store().check([STORE_KEY]):
                notice.number, notice.at = int(_get_default_store().get(STORE_KEY)), time.monotonic()


def ignore_signals(worker: int = 0) -> None:
    """For processes that prepare data: what is sent to all of a run is their parent's to heed, which ends
    them; of SIGTERM, which it may have to use, they ignore the first."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))


def observers() -> list[threading.Thread]:
    """Lightning's threads that kill this process as soon as one that it has started ends with a code."""
    return [thread for thread in threading.enumerate() if thread.name == "child-process-observer"]


_released: list[Popen] = []


def children() -> list[Popen]:
    """The other processes of the run that this one has started."""
    return _released + [child for thread in observers() for child in thread._child_processes]


def release_children() -> None:
    """They may end with GO_ON from now on."""
    for thread in observers():
        _released.extend(thread._child_processes)
        thread._child_processes = []
