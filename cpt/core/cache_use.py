"""Which processes use which artifacts of a cache, so that `cpt.clean` leaves these.

A process records its uses in `CACHE/.uses/HOST-PID-START.jsonl`: itself in the first line, then one artifact
a line. It records a use before it looks whether the artifact is there, and `cpt.clean` moves an artifact away
before it looks who uses it: one of the two sees the other. A record counts as long as its process lives; on
another machine, whose processes cannot be asked, for a day after its process has touched it last."""

import atexit
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from cpt.core.heartbeat import ProcessId

USES = ".uses"
TOUCHING = "cache use"  # the thread that touches the records of this process
TOUCH_S = 3600.0  # seconds between two touches
REMOTE_S = 24 * 3600.0  # seconds: age at which a record of another machine counts no longer


class UseRecord:
    """The record of this process in a cache."""

    def __init__(self, cache: Path) -> None:
        process = ProcessId.current()
        self.pid = process.pid
        name = f"{process.host}-{process.pid}-{round(process.start_time)}.jsonl"
        self.path = cache.absolute() / USES / name
        self.artifacts = set[str]()
        self.append(asdict(process))

    def append(self, line: object) -> None:
        """A cache that this process may not write to stays without a record."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def add(self, artifact: Path) -> None:
        name = format_artifact_name(artifact)
        if name not in self.artifacts:
            self.artifacts.add(name)
            self.append(name)

    def touch(self) -> None:
        with suppress(OSError):
            os.utime(self.path)

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


records: dict[Path, UseRecord] = {}  # by cache; a forked process has the records of its parent


def format_artifact_name(artifact: Path) -> str:
    """`packed/law-train-0123456789abcdef`."""
    return f"{artifact.parent.name}/{artifact.name}"


def record_use(artifact: Path) -> None:
    """Records that this process uses an artifact until it ends. `artifact` is CACHE/KIND/NAME."""
    cache = artifact.parent.parent
    record = records.get(cache)
    if record is None or record.pid != os.getpid():
        remove_dead_records(cache)
        if TOUCHING not in [thread.name for thread in threading.enumerate()]:
            threading.Thread(target=touch_records, daemon=True, name=TOUCHING).start()
        record = UseRecord(cache)
        records[cache] = record
    record.add(artifact)


def touch_records() -> None:
    while True:
        time.sleep(TOUCH_S)
        for record in list(records.values()):
            record.touch()


@atexit.register
def end_uses() -> None:
    """Removes the records of this process: its run has ended."""
    for record in records.values():
        if record.pid == os.getpid():
            record.remove()
    records.clear()


def find_users(artifact: Path) -> list[ProcessId]:
    """The living processes that have recorded a use of an artifact. `artifact` is CACHE/KIND/NAME."""
    cache = artifact.parent.parent
    name = format_artifact_name(artifact)
    processes = []
    for record_file, process, artifact_names in read_uses(cache):
        if name in artifact_names and is_alive(process, record_file):
            processes.append(process)
    return processes


def is_alive(process: ProcessId, record_file: Path) -> bool:
    """Whether the process of a record lives. A process of another machine cannot be asked: it counts as alive
    if its record was touched in the last REMOTE_S seconds."""
    is_alive_here = process.is_alive()  # None: on another machine
    if is_alive_here is not None:
        return is_alive_here
    try:
        return time.time() - record_file.stat().st_mtime < REMOTE_S
    except OSError:
        return False


def remove_dead_records(cache: Path) -> None:
    """Removes the records of processes that ended without doing so."""
    for record_file, process, _ in list(read_uses(cache)):
        if not is_alive(process, record_file):
            with suppress(OSError):
                record_file.unlink(missing_ok=True)


def read_uses(cache: Path) -> Iterator[tuple[Path, ProcessId, set[str]]]:
    """The records of a cache: file, process, names of artifacts.

    Other processes may be writing: a record without a complete first line is skipped, and a last line that is
    not complete as well."""
    try:
        paths = sorted((cache / USES).glob("*.jsonl"))
    except OSError:
        return
    for path in paths:
        try:
            complete_lines = path.read_text(encoding="utf-8").split("\n")[:-1]
            process = ProcessId(**json.loads(complete_lines[0]))
            yield path, process, {str(json.loads(line)) for line in complete_lines[1:]}
        except (OSError, ValueError, TypeError, IndexError):
            continue
