"""Signals that ask a run to leave: what it has learned is saved first, and the same command resumes it.

The first signal is recorded; those that follow within `choose_signal_window()` are the same one. Where
nothing would be lost it ends the run at once, by an exception; within `defer_signals()`, and with several
processes, the run continues to the next point at which it can leave, and all processes leave there. A
second signal ends the process as it is."""

import atexit
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import Popen, TimeoutExpired
from types import FrameType
from typing import Any, NoReturn

from cpt.core.processes import TOGETHER, is_distributed, is_first_process, is_one_of_several
from cpt.core.slurm import is_slurm_task, is_started_by_torchrun

GO_ON = 75  # EX_TEMPFAIL of BSD's <sysexits.h>: not failed, to be started again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
TOGETHER_S = 0.5  # what reaches a process by its group and once more by its launcher is one signal
CHILDREN_S = 60.0  # that the other processes of a run have to leave
AGAIN_S = 0.05  # after which a signal whose exception was lost acts again
# That a process still waits for others after a signal: they join it where they have had none. SLURM kills
# 30 seconds after SIGTERM (KillWait).
JOINING_S = 10.0


class Preempted(BaseException):
    """The run leaves on a signal; `where` is how far it came."""

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(number, where)
        self.number = number
        self.where = where

    def __str__(self) -> str:
        position = f" {self.where}" if self.where else ""
        return (
            f"stopped by {signal.Signals(self.number).name}{position}; run the same command again to continue"
        )


class SignalState:
    """The signal of this process, 0 before one has come."""

    number = 0
    deferrals = 0
    is_joining = False  # within `joining_others`
    num_repeated = 0  # signals that the process sends itself (`repeat_signal`) and that have not come yet
    last_read = 0.0  # when the store of the processes was read
    released: list[Popen] = []

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGNALS; `watch_signals` acts on a second one."""
        if not self.number:
            self.number = number
            self.leave_if_possible()

    def leave_if_possible(self) -> None:
        if self.number and not self.deferrals and not is_waited_for():
            raise Preempted(self.number)


notice = SignalState()


def is_waited_for() -> bool:
    """Whether other processes would hang, or be killed, if this one left alone."""
    has_others = is_distributed() or is_rank_of_lightning() or notice.is_joining
    return has_others or bool(list_child_processes())


def is_rank_of_lightning() -> bool:
    """Whether Lightning has started this process, or others from this one: it kills all once one leaves."""
    return "LOCAL_RANK" in os.environ and not is_started_by_torchrun() and not is_slurm_task()


def choose_signal_window() -> float:
    """The seconds within which several signals to this process count as one: more in the job of a sweep,
    which a scheduler, its process group and the launcher may signal one after another."""
    return float(os.environ.get(TOGETHER, TOGETHER_S))


def watch_signals(received: socket.socket) -> None:
    """Ends the process on its second signal, even while it is blocked in a library."""
    first = None
    while numbers := received.recv(1):
        if notice.num_repeated:
            notice.num_repeated -= 1
            continue
        if numbers[0] in SIGNALS and signal.getsignal(numbers[0]) == notice.receive:
            first = first or time.monotonic()
            if time.monotonic() - first > choose_signal_window():
                for child in list_child_processes():
                    child.kill()
                os._exit(128 + numbers[0])
            timer = threading.Timer(JOINING_S, leave_if_joining, [numbers[0]])
            timer.daemon = True
            timer.start()


def leave_if_joining(number: int) -> None:
    """Ends a process that has had a signal and is still within `joining_others`: it has learned nothing yet,
    and may wait for one that has left on the same signal. Ranks of Lightning do not leave before they have
    joined: it would kill those that are still to come."""
    if notice.is_joining and not is_rank_of_lightning():
        if is_first_process():
            print(f"cpt: {Preempted(number)}", file=sys.stderr, flush=True)
        leave_process(GO_ON)


@contextmanager
def joining_others() -> Iterator[None]:
    """Inside the context the process waits in a library, for up to half an hour, until the others that a
    launcher has started are there. Python's handlers of signals wait as long: `watch_signals` acts on one. A
    signal that has come before, and whose exception a library dropped, acts now."""
    notice.leave_if_possible()
    notice.is_joining = True
    try:
        yield
    finally:
        notice.is_joining = False


@contextmanager
def handle_signals() -> Iterator[None]:
    """Inside the context SIGNALS end the program with one line and the exit code GO_ON; ignored ones (nohup)
    stay ignored."""
    # Python's own part of a signal waits for libraries; what it writes to a socket does not.
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    threading.Thread(target=watch_signals, args=[receiving], daemon=True, name="signals").start()
    previous_descriptor = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    previous_handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in previous_handlers.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, notice.receive)
    previous_hook = sys.unraisablehook

    def receive_lost_signal(lost: "sys.UnraisableHookArgs") -> None:
        """Python drops exceptions of the code that frees an object: a signal that came then acts again."""
        if isinstance(lost.exc_value, Preempted):
            notice.number = 0
            threading.Timer(AGAIN_S, repeat_signal, [lost.exc_value.number]).start()
        else:
            previous_hook(lost)

    sys.unraisablehook = receive_lost_signal
    try:
        yield
    except Preempted as leaving:
        if is_first_process():
            print(f"cpt: {leaving}", file=sys.stderr, flush=True)
        # The others save what they have learned too: they are killed only if that takes too long.
        deadline = time.monotonic() + CHILDREN_S
        for child in list_child_processes():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutExpired:
                child.kill()
        if not is_one_of_several():  # a process that has left cannot answer the others at exit
            atexit._run_exitfuncs()
        leave_process(GO_ON)
    finally:
        notice.deferrals += 1  # the program has ended: a signal is only recorded
        sys.unraisablehook = previous_hook
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_descriptor)
        sending.close()
        notice.deferrals -= 1


def repeat_signal(number: int) -> None:
    """Sends this process a signal that it has had before, unless it no longer handles signals. A call of the
    system in which it waits is interrupted, as by the first."""
    if signal.getsignal(number) == notice.receive:
        notice.num_repeated += 1
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def leave_process(code: int) -> NoReturn:
    """Ends the process without the interpreter's teardown, which takes seconds once torch is imported: a
    scheduler that kills it meanwhile would not see the exit code."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or its reader has left
            stream.flush()
    os._exit(code)


def handle_signals_in_imports() -> None:
    """Until `handle_signals`, while libraries are imported: SIGNALS end the program with the code GO_ON. In
    the interpreter's teardown, which they would end with another code, they are ignored."""

    def leave_at_once(number: int, frame: FrameType | None) -> None:
        if is_waited_for():
            notice.number = number
            return
        if is_first_process():
            print(f"cpt: {Preempted(number)}", file=sys.stderr, flush=True)
        os._exit(GO_ON)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, leave_at_once)
    atexit.register(ignore_signals_in_teardown)


def ignore_signals_in_teardown() -> None:
    """The interpreter gives every signal with a handler its default effect, which is to kill, before its
    teardown: seconds in which another process of the job may still be at work, with torch imported. A
    scheduler would take a process that has done its part for one that failed."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Inside the context a signal is only recorded: `check_signals`, `leave_together` or the end of the
    context acts on it."""
    notice.deferrals += 1
    try:
        yield
    finally:
        notice.deferrals -= 1
    notice.leave_if_possible()


def check_signals(where: str = "") -> None:
    """Leaves if a signal has come to this process; for where no other process waits for it. Raises
    Preempted."""
    if notice.number:
        raise Preempted(notice.number, where)


def leave_all(number: int, where: str = "") -> None:
    """Leaves with all other processes, which know of the signal as well. Raises Preempted."""
    list_child_processes(release=True)
    raise Preempted(number, where)


def ignore_signals(worker: int = 0) -> None:
    """For processes that prepare data. Signals to the whole run are for their parent, which ends them. They
    ignore only the first SIGTERM, as the parent may have to send a second one."""
    signal.set_wakeup_fd(-1)  # the parent's
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))


def list_child_processes(*, release: bool = False) -> list[Popen]:
    """The other processes of the run that this one has started. Lightning's thread kills this process as soon
    as one of them ends with a code: those that it is to `release` may end with GO_ON from now on."""
    threads: list[Any] = []
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            threads.append(thread)
    processes = list(notice.released)
    for thread in threads:
        processes += thread._child_processes
    if release:
        notice.released = processes
        for thread in threads:
            thread._child_processes = []
    return processes
