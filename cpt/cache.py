"""Things that are made once and shared by all runs, also by runs that start together."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)


def made_once(folder: Path, *, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make(partial folder)` unless it is there, and renamed when it is complete.

    One process makes it and the others wait: the lock is the system's and ends with its holder. What a killed
    holder left stands in the partial folder, so that `make` may go on with it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial")
    if not folder.exists():
        with waited_for(FileLock(folder.with_name(f"{folder.name}.lock"))):
            if not folder.exists():
                partial.mkdir(exist_ok=True)
                make(partial)
                os.replace(partial, folder)
    return folder


def waited_for(lock: FileLock) -> FileLock:
    """The lock, acquired; says so if another process holds it."""
    try:
        return lock.acquire(timeout=0.5)
    except Timeout:
        log.info("waiting for another run that is making %s", Path(lock.lock_file).stem)
        return lock.acquire()
