"""Signs of life: what a run says of itself in `progress.json` of its folder, and whether who wrote that is
still there.

The file is a note for people and programs that look on; a run never reads it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from cpt.core.schema import check_types

FILE = "progress.json"
VERSION = 1
GOING, ENDED = ("running", "waiting"), ("finished", "preempted", "failed")
FRESH_S = 180.0  # seconds for which the sign of life of another machine is believed
LONGEST = 400  # characters of a message that are kept


def now() -> str:
    """The time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def age(written: str) -> float:
    """Seconds since a time; 0 where another machine's clock is ahead. Raises ValueError for what is none."""
    then = datetime.fromisoformat(written)
    if then.tzinfo is None:
        raise ValueError(f"{written} has no time zone")
    return max(0.0, (datetime.now(UTC) - then).total_seconds())


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that holds a folder: where it runs and which one it is."""

    host: str
    pid: int
    born: int  # clock ticks from the machine's start to the process's: numbers are given again; 0: not known
    machine: str  # tells this start of this machine, or container, from all others

    @classmethod
    def own(cls) -> Holder:
        """This process."""
        pid = os.getpid()
        born = (stat_of(pid) or ("", 0))[1]
        return cls(host=socket.gethostname(), pid=pid, born=born, machine=machine_here())

    def lives(self) -> bool | None:
        """Whether the process is there; None where that cannot be looked up: on another machine."""
        if self.machine != machine_here():
            return None
        found = stat_of(self.pid)
        if found is not None:
            state, born = found
            return state not in "ZX" and self.born in (0, born)
        return not Path("/proc/self/stat").exists() and answers_signals(self.pid)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


def stat_of(pid: int) -> tuple[str, int] | None:
    """The state of a process as Linux says it, and when it was born; None where there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return words[0], int(words[19])
    except (OSError, IndexError, ValueError):
        return None


def answers_signals(pid: int) -> bool:
    """Whether there is a process of this number, where the system has no /proc."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


@cache
def machine_here() -> str:
    """What tells the start of this machine and, in a container, its numbers of processes from others."""
    found = [socket.gethostname()]
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a run says of itself. Times are in UTC; None is what is not known."""

    state: str  # one of GOING or ENDED
    phase: str = ""  # what it is at, for people
    stage: int | None = None  # the domain that is learned or was learned last, from 1; 0: the base
    stages: int | None = None
    step: float | None = None  # of the phase
    steps: float | None = None
    unit: str = ""  # of step
    learned: float | None = None  # share of all optimizer steps of the run's domains
    phase_eta_s: float | None = None
    run_eta_s: float | None = None
    untimed: list[str] = field(default_factory=list)  # what will come and is not in run_eta_s
    why: str = ""  # what is waited for, or how it ended
    began: str  # when this start of the run was
    moved: str  # when something last changed, the time apart
    written: str
    holder: Holder

    @property
    def going(self) -> bool:
        return self.state in GOING

    @property
    def age_s(self) -> float:
        """Seconds since the last sign of life."""
        return age(self.written)

    @property
    def alive(self) -> bool:
        """Whether its process is at work, as far as one can tell from here."""
        lives = self.holder.lives()
        return self.going and (self.age_s < FRESH_S if lives is None else lives)

    def write(self, folder: Path) -> None:
        """Puts it in the place of the one before; who reads it sees the one or the other. The disk is not
        waited for: after a crash of the machine it is worth nothing."""
        path = folder / FILE
        partial = folder / f"{FILE}.{os.getpid()}.partial"
        partial.write_text(json.dumps({"version": VERSION} | asdict(self)) + "\n", encoding="utf-8")
        os.replace(partial, path)

    @classmethod
    def load(cls, folder: Path) -> Sign | None:
        """That of a folder; None where there is none. Raises ValueError where it cannot be read."""
        path = folder / FILE
        try:
            return cls.read(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{FILE} cannot be read: {' '.join(str(error).split())}") from None

    @classmethod
    def read(cls, told: Any) -> Sign:
        """From JSON. Raises ValueError for what is no sign of this version."""
        if not isinstance(told, dict) or told.get("version") != VERSION:
            raise ValueError(f"needed is version {VERSION} of cpt's form")
        given: dict[str, Any] = {"holder": {}} | told
        check_types(given, OF_SIGN)
        check_types(given["holder"], OF_HOLDER, of="holder")
        holder = Holder(**only(given["holder"], OF_HOLDER))
        found = cls(**only(given, OF_SIGN) | {"holder": holder})
        if found.state not in (*GOING, *ENDED):
            raise ValueError(f"state is {found.state}; allowed: {', '.join((*GOING, *ENDED))}")
        for time in (found.began, found.moved, found.written):
            age(time)
        return found


def types_of(kind: type) -> dict[str, Any]:
    """The types of a class's fields as JSON has them."""
    hints = get_type_hints(kind)
    return {name: dict[str, Any] if hint is Holder else hint for name, hint in hints.items()}


OF_HOLDER, OF_SIGN = types_of(Holder), types_of(Sign)


def only(given: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What a later version may have added is left out."""
    return {name: given[name] for name in names}


def note_end(folder: Path, state: str, why: str, *, began: str) -> None:
    """Says how a start ended that could not say so itself: it began at a time, and what a folder holds is
    older, or of a process that is gone."""
    with suppress(OSError):
        try:
            before = Sign.load(folder)
        except ValueError:
            before = None
        if before is not None and (before.alive or (not before.going and before.written >= began)):
            return
        if before is None or before.written < began:  # nothing that it has said itself
            before = Sign(state=state, began=began, moved=began, written=began, holder=Holder.own())
        why = shorten(why)
        replace(before, state=state, why=why, written=now(), phase_eta_s=None, run_eta_s=None).write(folder)


def shorten(text: str) -> str:
    """A message on one line, and no longer than a file should keep it."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
