"""Worker processes for the preparation of text."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import current_process, get_context, parent_process
from pathlib import Path
from typing import Any

from cpt.core.preemption import ignore_signals

ENTRY_POINTS = ("run.py", "__main__.py", "cpt")  # scripts that a spawned process may import again
_work: list[Callable[[Any], Any]] = []  # of a worker process


def can_spawn() -> bool:
    """Whether worker processes may be started unasked: not by a daemon, nor by a user's own script, which
    each of them would run again."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    return Path(script).name in ENTRY_POINTS and not current_process().daemon


def map_in_processes(
    work: Callable[[Any], Any], items: Iterable[Any], processes: int, *, ended: str, chunk: int = 1
) -> Generator[Any]:
    """`work` of each item, in the order of the items, `chunk` of them at a time. The processes are spawned,
    so that they inherit no file lock; they end with this one. Raises ValueError with the message `ended`
    where one was killed."""
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=start_worker, initargs=(work,))
    try:
        yield from pool.map(run_work, items, chunksize=chunk)
    except BaseException as error:
        for pid in list(pool._processes or ()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if isinstance(error, BrokenProcessPool):
            raise ValueError(ended) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(work: Callable[[Any], Any]) -> None:
    ignore_signals()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _work[:], parent = [work], parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def run_work(item: Any) -> Any:
    return _work[0](item)
