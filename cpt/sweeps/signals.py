"""Signals to a sweep: to the process that the user started, and to what runs a job on a cluster."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from subprocess import Popen
from types import FrameType
from typing import Any

from cpt.core.preemption import SIGNALS

POLL_S = 0.05
SAVING_S = 100.0  # for a job to save after the cluster's warning; less than signal_delay_s in conf


@contextmanager
def signal_handlers(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[Mapping[int, Any]]:
    """Inside the context a function handles the signals that are not ignored (nohup). Yields the previous
    handlers."""
    previous_handlers = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, previous in previous_handlers.items() if previous != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield previous_handlers
    finally:
        for number in handled:
            signal.signal(number, previous_handlers[number])


@contextmanager
def forward_signals(process: Popen[bytes], *, saving_s: float = SAVING_S) -> Iterator[list[int]]:
    """Forwards the first signal to a job's process as SIGTERM, waits up to `saving_s` seconds for it to save
    and end, and calls the cluster's own handler (submitit's queues the job again and exits). Returns the
    numbers of the signals that came.

    Further signals are not forwarded: a scheduler sends several, and a second one would end a run that
    saves."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers there only
        yield received
        return

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        wait_for_end(process, saving_s)
        previous = previous_handlers[number]
        if callable(previous):
            previous(number, frame)

    with signal_handlers(SIGNALS, forward) as previous_handlers:
        yield received


def wait_for_end(process: Popen[bytes], seconds: float) -> None:
    """Waits for the end of a process without taking its exit code, which an interrupted `wait` will ask
    for."""
    deadline = time.monotonic() + seconds
    with suppress(ChildProcessError):  # its exit code has been taken
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_S)
