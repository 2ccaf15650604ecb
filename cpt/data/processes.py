"""Work that is shared out among processes of this machine, its results in the order of what was asked."""

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import current_process, get_context, parent_process
from pathlib import Path
from typing import Any, TypeVar

from cpt.core.preemption import ignore_signals

AHEAD = 2  # pieces per process that are made before they are asked for
OWN = ("run.py", "__main__.py", "cpt")  # scripts that may be read a second time
Asked = TypeVar("Asked")
Made = TypeVar("Made")


def may_start() -> bool:
    """Whether this process may start others for a little work: a daemon may not, and a script of one's own
    would be run again by them."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    return Path(script).name in OWN and not current_process().daemon


def in_order(
    work: Callable[[Asked], Made], found: Iterator[Asked], number: int, *, told: str
) -> Generator[tuple[Asked, Made]]:
    """What processes make of pieces, in the order of the pieces; no more of it is held than a few per
    process. Raises ValueError where one is ended, with what it is `told` to do, and what helps."""
    pool = ProcessPoolExecutor(number, get_context("spawn"), initializer=begin, initargs=(work,))
    waiting: deque[tuple[Asked, Future[Made]]] = deque()
    try:
        for piece in found:
            waiting.append((piece, pool.submit(make, piece)))
            if len(waiting) > AHEAD * number:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        end_all(pool)
        raise ValueError(told) from error
    finally:
        pool.shutdown(cancel_futures=True)


def end_all(pool: ProcessPoolExecutor) -> None:
    """Kills what is left of a broken pool, which waits for processes that ignore its SIGTERM."""
    for pid in list(pool._processes or ()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


_work: list[Callable[[Any], Any]] = []  # of a process that was started here


def begin(work: Callable[[Any], Any]) -> None:
    """Makes a process ready to work; it ends with the one that has started it."""
    ignore_signals()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _work[:] = [work]
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def make(piece: Any) -> Any:
    return _work[0](piece)
