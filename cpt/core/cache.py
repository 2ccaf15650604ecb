"""Artifacts that all runs share: texts, their tokens, rows of these, tokenizers, base models.

An artifact is a folder with `checksums.json`. It is built in `NAME.partial` under a file lock and renamed
when it is complete: processes that start together build it once, and a killed build is never loaded."""

import errno
import logging
import os
import re
import shutil
import stat as stat_module
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from filelock import FileLock, Timeout

from cpt.core.cache_use import record_use
from cpt.core.files import (
    CHECKSUMS,
    PARTIAL,
    find_damage,
    read_checksums,
    sync,
    write_checksums,
    writing,
)
from cpt.core.heartbeat import waiting_for
from cpt.core.processes import is_first_process

log = logging.getLogger(__name__)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
SMALL = 1 << 24  # bytes: artifacts up to this size are hashed whenever they are opened
HEAD_START = 0.5  # seconds that a run's first process has to begin a build before the others
LOCK_TIMEOUT = 0.5  # seconds after which the wait for another process is logged
CACHED = re.compile(r"(corpora|tokens|packed|base|tokenizers|endtasks|similarity)/(.*-)?[0-9a-f]{16}")
OUTDATED_FILES = {"packed": "rows.arrow"}  # by kind, a file that only artifacts of older formats have
check_all = ContextVar("check_all", default=False)  # whether artifacts of any size are hashed when opened


def make_once(folder: Path, *, make: Callable[[Path], None]) -> Path:
    """`folder`, CACHE/KIND/NAME, filled by `make(partial folder)` unless it exists and is intact.

    Files and folders get the permissions of the umask, so that users may share a cache. What a killed build
    left in the partial folder is there for `make` to continue. From here on the process counts as a user of
    the folder. Raises ValueError where this user may not read or write the cache."""
    with naming_cache(folder.parent.parent):
        record_use(folder)  # before it is looked for: see cpt.core.cache_use
        if not find_artifact_damage(folder):
            with suppress(OSError):  # another user's
                os.utime(folder)  # when it was last used: cpt/clean.py
            return folder

        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if folder.exists():
                damage = find_artifact_damage(folder)
                if not damage:  # another process has built it meanwhile
                    return folder
                log.warning("Rebuilding %s, which is damaged (%s)", folder, damage)
                discard(folder)
            build_artifact(folder, make=make)
    return folder


def build_artifact(folder: Path, *, make: Callable[[Path], None]) -> None:
    """Fills an artifact that is not there. The caller holds its lock."""
    partial = folder.with_name(folder.name + PARTIAL)
    partial.mkdir(exist_ok=True)
    for pattern in ("*.tmp", f"*{PARTIAL}"):  # atomic writes of a killed build
        for incomplete in partial.rglob(pattern):
            incomplete.unlink()
    with writing(partial):
        make(partial)
        finish_artifact(partial, folder)


@contextmanager
def naming_cache(cache: Path) -> Iterator[None]:
    """Raises ValueError, with `cache_dir`, where something in a cache may not be read or written."""
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename or "")).absolute()
        if error.errno not in FORBIDDEN or not path.is_relative_to(cache.absolute()):
            raise
        raise ValueError(
            f"cache_dir={cache} is invalid: {path}: {error.strerror}{describe_owner(path)}. Allowed: a "
            "folder that this user may read and write (shared: one group, umask 002), or another cache_dir"
        ) from error


def describe_owner(path: Path) -> str:
    """` (owner 1000, mode 0700)` of a path, or of the nearest readable folder above it."""
    for ancestor in (path, *path.parents):
        try:
            stat = ancestor.stat()
        except OSError:
            continue
        name = "" if ancestor == path else f"{ancestor} "
        return f" ({name}owner {stat.st_uid}, mode {stat.st_mode & 0o7777:04o})"
    return ""


def finish_artifact(partial: Path, folder: Path) -> None:
    """Writes the checksums of a complete artifact and gives it its name."""
    files = [path for path in partial.rglob("*") if path.is_file() and path.name != CHECKSUMS]
    apply_umask(partial)
    write_checksums(partial, files)
    os.replace(partial, folder)
    sync(folder.parent)


def apply_umask(folder: Path) -> None:
    """Gives what libraries made for its owner alone (safetensors, tempfile) the permissions that the umask
    gave the folder itself."""
    granted = folder.stat().st_mode & 0o777
    for path in folder.rglob("*"):
        permissions = granted if path.is_dir() else granted & 0o666
        mode = path.stat().st_mode
        if permissions & ~mode:
            path.chmod(stat_module.S_IMODE(mode) | permissions)


def find_artifact_damage(folder: Path) -> str:
    """What is wrong with an artifact, if anything; by hash if it is small or a full check is wanted. Raises
    PermissionError where it may not be read."""
    try:
        table = read_checksums(folder)
    except ValueError as error:
        return str(error)
    full = check_all.get() or sum(size for size, _ in table.values()) <= SMALL
    return "; ".join(find_damage(folder, table, full=full))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of an artifact inside the context. A wait for another process that holds it is logged,
    and shown in the run's status."""
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    if not is_first_process():  # the first one is to build it, as it alone logs and shows bars
        give_head_start(folder, lock)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT)
    except Timeout:
        log.info("Waiting for another process that is making %s", folder.name)
        with waiting_for(f"another process that is making {folder.name}"):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def give_head_start(folder: Path, lock: FileLock) -> None:
    """Waits until another process builds an artifact (it has the lock) or has built it (the folder exists).

    At most for HEAD_START: the first process of the run may be on a machine with another cache."""
    deadline = time.monotonic() + HEAD_START
    while time.monotonic() < deadline and not folder.exists():
        try:
            with lock.acquire(timeout=0):
                pass  # no process builds it yet
        except Timeout:
            return
        time.sleep(0.02)


def is_outdated(folder: Path) -> bool:
    """Whether an artifact is of an older format, which is not read any more."""
    file = OUTDATED_FILES.get(folder.parent.name)
    return file is not None and (folder / file).exists()


def discard(path: Path) -> None:
    """Removes a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
