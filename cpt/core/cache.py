"""Things that are made once and shared by all runs, also by runs that start together.

Each is a folder with checksums. A small one is read through when it is opened, a large one by a thread while
the run works; `damage` gives its verdict, which a run waits for before it keeps a result."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from filelock import FileLock, Timeout

from cpt.core.checksums import FILE, Checksums, seal, sync
from cpt.core.files import writing
from cpt.core.pulse import waiting_for

log = logging.getLogger(__name__)
LARGE = 1 << 24  # bytes of a folder above which its contents are not waited for
FOREVER = threading.TIMEOUT_MAX
FORGOTTEN = 24 * 3600  # seconds after which what a dead process left is not gone on with
PARTIAL, DAMAGED = ".partial", ".damaged"


def make_once(folder: Path, *, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make(partial folder)` unless it is there and whole, and renamed when complete.

    One process makes it and the others wait: the lock is the system's and ends with its holder. What a killed
    holder left stands in the partial folder, so that `make` may go on with it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists() or problem(folder):
        with wait_for(lock_of(folder)):
            if folder.exists() and (found := problem(folder)):
                log.warning("%s is damaged (%s) and is made again", folder, found)
                take_out(folder)
            if not folder.exists():
                fill(folder, make)
                return folder
    WATCH.add(folder)
    return folder


def fill(folder: Path, make: Callable[[Path], None]) -> None:
    """Makes what is not there; the caller holds its lock."""
    sweep(folder.parent)
    partial = folder.with_name(folder.name + PARTIAL)
    partial.mkdir(exist_ok=True)
    for pattern in ("*.tmp", f"*{PARTIAL}"):
        for left in partial.rglob(pattern):
            left.unlink()
    with writing(partial):
        make(partial)
    seal(partial)
    os.replace(partial, folder)
    sync(folder.parent)


def problem(folder: Path) -> str:
    """What is wrong with a folder as far as it is read on opening; empty if nothing is."""
    try:
        checksums = Checksums.load(folder / FILE)
    except ValueError as error:
        return str(error)
    check = checksums.lost if checksums.size > LARGE else checksums.damaged
    return "; ".join(check(folder))


def take_out(folder: Path) -> None:
    """Takes a folder out of the cache. Who has it open keeps what it reads."""
    aside = folder.with_name(folder.name + DAMAGED)
    discard(aside)
    os.replace(folder, aside)
    discard(aside)


def discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Removes what processes that died long ago left half made; what a living one makes is locked."""
    for suffix in (PARTIAL, DAMAGED):
        for left in folder.glob(f"*{suffix}"):
            with suppress(FileNotFoundError):  # another process removes it just now
                if time.time() - touch(left) > FORGOTTEN:
                    remove_unless_locked(left, lock_of(left.with_name(left.name.removesuffix(suffix))))


def remove_unless_locked(path: Path, lock: FileLock) -> None:
    try:
        with lock.acquire(timeout=0):
            discard(path)
    except Timeout:
        pass


def touch(path: Path) -> float:
    """When a file, or anything in a folder, was last written to."""
    return max((each.lstat().st_mtime for each in (path, *path.rglob("*"))), default=0.0)


def lock_of(folder: Path) -> FileLock:
    return FileLock(folder.with_name(f"{folder.name}.lock"))


def wait_for(lock: FileLock) -> AbstractContextManager[object]:
    """The lock, acquired; says so if another process holds it."""
    try:
        return lock.acquire(timeout=0.5)
    except Timeout:
        name = Path(lock.lock_file).stem
        log.info("waiting for another run that is making %s", name)
        with waiting_for(f"another run that is making {name}"):
            return lock.acquire()


@dataclass(frozen=True)
class Opened:
    """A folder that the run has opened, as it was then."""

    folder: Path
    checksums: Checksums
    files: dict[str, tuple[int, int]]

    @classmethod
    def now(cls, folder: Path) -> "Opened":
        checksums = Checksums.load(folder / FILE)
        return cls(folder, checksums, is_present(folder, checksums.files))

    @property
    def is_here(self) -> bool:
        """Whether no other process has made it again meanwhile."""
        return is_present(self.folder, self.checksums.files) == self.files

    def wrong(self) -> str:
        """What is wrong with it, every byte of it read; empty if nothing is."""
        found = "; ".join(self.checksums.damaged(self.folder))
        return found if self.is_here else "another process made it again while this one read it"

    def take_out(self) -> None:
        with wait_for(lock_of(self.folder)):
            if self.is_here:
                take_out(self.folder)


class Watch:
    """Reads the contents of large folders through while they are in use. One process of a machine does it."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[Opened] = SimpleQueue()
        self.idle, self.pending = threading.Condition(), 0
        self.found: list[tuple[Opened, str]] = []

    def add(self, folder: Path) -> None:
        """Has a folder that has just been opened read through, if its contents have not been."""
        opened = Opened.now(folder)
        if opened.checksums.size <= LARGE or not is_first_on_machine():
            return
        with self.idle:
            self.waiting.put(opened)
            self.pending += 1
            if self.pending == 1:
                threading.Thread(target=self.work, name="checksums", daemon=True).start()

    def work(self) -> None:
        """Ends when nothing waits."""
        while True:
            opened = self.waiting.get()
            try:
                wrong = opened.wrong()
            except OSError as error:
                wrong = str(error)
            with self.idle:
                self.found += [(opened, wrong)] * bool(wrong)
                self.pending -= 1
                self.idle.notify_all()
                if not self.pending:
                    return

    def damage(self, *, seconds: float = FOREVER) -> list[str]:
        """What is wrong with what has been opened so far, waited for at most so long; told once, and taken
        out of the cache."""
        with self.idle:
            if seconds and self.pending:
                log.info("waiting until %d large folders of the cache are read through", self.pending)
                self.idle.wait_for(lambda: not self.pending, timeout=seconds)
            found, self.found = self.found, []
        for opened, _ in found:
            opened.take_out()
        return [f"{opened.folder} was damaged ({wrong})" for opened, wrong in found]


WATCH = Watch()


def is_present(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Which files stand under these names, by number and time: those made again have others."""
    stats = {name: (folder / name).stat() for name in names if (folder / name).exists()}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def is_first_on_machine() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "SLURM_LOCALID"))
