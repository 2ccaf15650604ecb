"""A file system as of a slow server, for the process that installs it: calls that take their time, and now
and then a file that cannot be read. What it does to a call is drawn from a seed. It reaches what Python opens
and asks; what libraries in C++ and Rust do by themselves stays as it is."""

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

VARIABLE = "CPT_REMOTE_FILES"  # JSON: root, seed, unreadable (share of files that are read)
SLOW, VERY_SLOW = 0.04, 0.0015  # shares of calls
LONGEST_S, VERY_LONG_S = 0.3, 3.0
CALLS = ("rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir", "truncate", "stat", "lstat")
CALLS += ("open", "listdir", "scandir")


def install() -> None:
    """Has this process, and those that it forks, see such files, where the variable says so."""
    if not (told := os.environ.get(VARIABLE)):
        return
    given, guard = json.loads(told), threading.Lock()
    draw = random.Random(given["seed"])

    def slow(real: Callable[..., Any], *, reads: bool = False) -> Callable[..., Any]:
        def call(path: Any = ".", *others: Any, **options: Any) -> Any:
            known = isinstance(path, str | bytes | os.PathLike)
            if known and os.path.abspath(os.fsdecode(path)).startswith(given["root"]):
                with guard:
                    luck, part, broken = draw.random(), draw.random(), draw.random() < given["unreadable"]
                if luck < VERY_SLOW:
                    time.sleep(1 + part * (VERY_LONG_S - 1))
                elif luck < SLOW:
                    time.sleep(part * LONGEST_S)
                mode = str((*others, options.get("mode", "r"))[0])
                if reads and broken and not any(sign in mode for sign in "wax+") and os.path.isfile(path):
                    number = draw.choice((errno.ESTALE, errno.EIO))
                    raise OSError(number, os.strerror(number), path)
            return real(path, *others, **options)

        return call

    for name in CALLS:
        setattr(os, name, slow(getattr(os, name)))
    builtins.open = io.open = slow(io.open, reads=True)


@contextmanager
def remote(root: Path, *, seed: str, unreadable: float = 0.0) -> Iterator[None]:
    """Processes that are started meanwhile see the files below a folder so, if they call `install`."""
    os.environ[VARIABLE] = json.dumps({"root": str(root), "seed": seed, "unreadable": unreadable})
    try:
        yield
    finally:
        del os.environ[VARIABLE]
