"""A file system as of a slow server, for the process that installs it: calls that take their time, changes of
other machines that are seen late, and now and then a file that cannot be read.

What it does to a call is drawn from a seed. It reaches what Python opens and asks; what libraries in C++ and
Rust do by themselves stays as it is. As on NFS, a process sees its own changes at once, a file that it opens
is the newest, and locks are the server's."""

import builtins
import errno
import io
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "CPT_REMOTE_FILES"  # JSON: root, seed, late (seconds), unreadable (share of files that are read)
SLOW, VERY_SLOW = 0.04, 0.0015  # shares of calls
LONGEST_S, VERY_LONG_S = 0.3, 3.0
CHANGES = ("rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir", "truncate")
FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Client:
    def __init__(self, root: str, *, seed: str, late: float, unreadable: float = 0.0) -> None:
        self.root, self.draw = root, random.Random(seed)
        self.late, self.unreadable = late, unreadable
        self.seen: dict[tuple[str, str], tuple[float, Any]] = {}
        self.own: set[str] = set()  # folders in which this process has written
        self.made: set[str] = set()  # folders that it has made: all in them is its own
        self.guard = threading.Lock()

    def place(self, path: Any) -> str | None:
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.path.abspath(os.fsdecode(path))
        return text if text.startswith(self.root) else None

    def wait(self) -> None:
        with self.guard:
            luck, part = self.draw.random(), self.draw.random()
        if luck < VERY_SLOW:
            time.sleep(1 + part * (VERY_LONG_S - 1))
        elif luck < SLOW:
            time.sleep(part * LONGEST_S)

    def change(self, path: str) -> None:
        if not path.endswith(".lock"):
            self.own.add(os.path.dirname(path))
        for key in (("stat", path), ("lstat", path), ("list", os.path.dirname(path))):
            self.seen.pop(key, None)

    def is_own(self, path: str) -> bool:
        """Whether this process has written beside it, or made a folder in which it is."""
        folder = os.path.dirname(path)
        if folder in self.own:
            return True
        while len(folder) > len(self.root) and folder not in self.made:
            folder = os.path.dirname(folder)
        return folder in self.made

    def look(self, kind: str, path: str, ask: Callable[[], Any]) -> Any:
        """What is there, or was a moment ago."""
        self.wait()
        known = self.seen.get((kind, path))
        if known is None or time.monotonic() - known[0] > self.late or self.is_own(path):
            try:
                found = ask()
            except FileNotFoundError as error:
                found = error
            known = self.seen[kind, path] = time.monotonic(), found
        if isinstance(known[1], FileNotFoundError):
            raise FileNotFoundError(*known[1].args, path)
        return known[1]

    def opens(self, path: str, *, writes: bool) -> None:
        """A file is opened: the server is asked for it. Raises OSError where it cannot be read."""
        self.wait()
        if writes:
            self.change(path)
            return
        for kind in ("stat", "lstat"):
            self.seen.pop((kind, path), None)
        with self.guard:
            broken = self.draw.random() < self.unreadable
        if broken and os.path.isfile(path):
            number = self.draw.choice((errno.ESTALE, errno.EIO))
            raise OSError(number, os.strerror(number), path)


def install() -> None:
    """Has this process, and those that it forks, see such files, where the variable says so."""
    if not (told := os.environ.get(VARIABLE)):
        return
    client = Client(**json.loads(told))
    for name in CHANGES:
        setattr(os, name, changing(client, name, getattr(os, name)))
    for name in ("stat", "lstat"):
        setattr(os, name, looking(client, name, getattr(os, name)))
    open_, fsync, listdir, scandir, read = os.open, os.fsync, os.listdir, os.scandir, io.open

    def opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None and (place := client.place(path)):
            client.wait()
            if flags & FLAGS:
                client.change(place)
        return open_(path, flags, mode, dir_fd=dir_fd)

    def delayed(descriptor: int) -> None:
        client.wait()
        fsync(descriptor)

    def listing(path: Any = ".") -> list[str]:
        place = client.place(path)
        return listdir(path) if place is None else [*client.look("list", f"{place}/", lambda: listdir(path))]

    def scanning(path: Any = ".") -> Any:
        if client.place(path):
            client.wait()
        return scandir(path)

    def reading(file: Any, mode: str = "r", *others: Any, **options: Any) -> Any:
        if place := client.place(file):
            client.opens(place, writes=any(sign in mode for sign in "wax+"))
        return read(file, mode, *others, **options)

    os.open, os.fsync, os.listdir, os.scandir = opening, delayed, listing, scanning
    builtins.open = io.open = reading


def changing(client: Client, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*paths: Any, **options: Any) -> Any:
        relative = any(value is not None for key, value in options.items() if key.endswith("dir_fd"))
        places = [] if relative else [place for each in paths if (place := client.place(each)) is not None]
        if places:
            client.wait()
        found = real(*paths, **options)
        for place in places:
            client.change(place)
        if places and (name == "mkdir" or places[0] in client.made):
            client.made.add(places[-1])
        return found

    return call


def looking(client: Client, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> Any:
        options = {"dir_fd": dir_fd} | ({} if name == "lstat" else {"follow_symlinks": follow_symlinks})
        place = client.place(path) if dir_fd is None else None
        if place is None:
            return real(path, **options)
        return client.look(name if follow_symlinks else "lstat", place, lambda: real(path, **options))

    return call


@contextmanager
def remote(root: Path, *, seed: str, late: float = 1.0, unreadable: float = 0.0) -> Iterator[None]:
    """Processes that are started meanwhile see the files below a folder so, if they call `install`."""
    given = {"root": str(root), "seed": seed, "late": late, "unreadable": unreadable}
    os.environ[VARIABLE] = json.dumps(given)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
