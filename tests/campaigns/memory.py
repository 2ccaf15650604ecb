"""Too little memory: runs whose allocations fail, and processes that the kernel ends for their size.

    python tests/campaigns/memory.py --trials 40 --seed 0

In turn: a run under a hard limit of its data or of its address space (setrlimit) that is reached at any
moment; and, as the kernel's OOM killer does, kill -9 of the largest process of a run whose text is tokenised
by several, of a run of two processes, of a sweep. Each has to end with one line about memory (what is killed
itself says nothing), an exit code that is not 0, and no process left; the same command without the limit ends
with the bits of a run that nobody disturbed. A library in Rust or C++ ends the process in words of its own,
or hangs at that: it is noted, what hangs is killed, and the same command has to go on."""

import os
import random
import re
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

from tests.campaigns import runs  # noqa: E402
from tests.campaigns.frame import ROOT, conduct  # noqa: E402
from tests.campaigns.kills import LEAVES_S, family, in_folder, sweep_of  # noqa: E402
from tests.conftest import VOCABULARIES, sentences  # noqa: E402
from tests.support.processes import ended, is_there, started  # noqa: E402

GIVEN = ("trainer.steps=12",)
KINDS = ("data", "address space", "data", "tokenising", "two processes", "sweep")
MIB = 1 << 20
ROOM_MIB = {"data": 60, "address space": 250}  # what a run takes beyond its start, about
ABOUT = re.compile(r"memory|SIGKILL|Killed|killed")
OWN_WORDS = re.compile(r"memory allocation of \d+ bytes failed|bad_alloc")  # of Rust, of C++
OWN_S = 5.0  # that such a library has to end its process
LIMITED = """
import resource, sys, time
sys.path[:0] = [{root!r}]
given = {room} << 20
kind = resource.{limit}
import torch, lightning.pytorch, cpt.train, cpt.trainer.loop
field = {{"RLIMIT_DATA": "VmData:", "RLIMIT_AS": "VmSize:"}}["{limit}"]
line = next(each for each in open("/proc/self/status") if each.startswith(field))
most = int(line.split()[1]) * 1024 + given
resource.setrlimit(kind, (most, most))
from cpt.__main__ import main
main()
"""
SEVERAL = """
import sys
sys.path[:0] = [{root!r}]
from cpt.data import tokenising
tokenising.WORTH = 1 << 20
from cpt.__main__ import main
if __name__ == "__main__":
    main()
"""


def resident(pid: int) -> int:
    """Bytes that a process holds in memory; 0 where it is gone."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def kill_largest(pids: list[int]) -> int:
    """What the kernel's OOM killer does; the number of the process."""
    victim = max(pids, key=resident)
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    return victim


def last_words(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


def is_told(log: Path) -> bool:
    """Whether there is one line of cpt's, about memory, and no traceback."""
    line = runs.one_line(log.read_text(errors="replace"))
    return line is not None and ABOUT.search(line) is not None


def limited(place: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    """A run in which an allocation fails."""
    given = [f"method={runs.shuffled(runs.METHODS, number)}", *GIVEN]
    expected, home = runs.whole(place, given), place / f"limited-{number}"
    home.mkdir()
    cache = home / "cache" if number % 4 == 0 else place / "cache"
    arguments, script, log = (
        runs.command(place, home / "run", *given, cache=cache),
        home / "limited.py",
        home / "log",
    )
    room = draw.randint(0, ROOM_MIB[kind])
    limit = {"data": "RLIMIT_DATA", "address space": "RLIMIT_AS"}[kind]
    script.write_text(LIMITED.format(root=str(ROOT), room=room, limit=limit))
    log.touch()
    process = started(script, *arguments, cwd=home, log=log)

    def is_abandoned() -> bool:
        return OWN_WORDS.search(log.read_text(errors="replace")) is not None

    runs.wait_for(lambda: not process.is_alive() or is_abandoned(), seconds=runs.HANGS_S)
    code = ended(process, seconds=OWN_S)
    told: dict[str, Any] = {"kind": kind, "method": given[0], "room_mib": room, "code": code}
    told["own words"] = is_abandoned()
    told["line"] = runs.one_line(log.read_text(errors="replace"))
    words = last_words(log)
    told["left"] = code == 0 or (code == 1 and is_told(log)) or (code < 0 and told["own words"])
    told["then"] = ended(started(ROOT / "run.py", *arguments, cwd=home, log=log), seconds=runs.HANGS_S)
    told["same"] = told["then"] == 0 and runs.bits(home / "run") == expected["bits"]
    told["fine"] = told["left"] and told["same"]
    told["last"] = "" if told["fine"] else words
    shutil.rmtree(home)
    return told


def write_long_texts(place: Path) -> Path:
    """Texts of which each domain is worth several processes."""
    for seed, (name, words) in enumerate(VOCABULARIES.items()):
        path = place / "long" / name / "all.txt"
        if name in ("general", "law", "food") and not path.exists():
            path.parent.mkdir(parents=True)
            lines = sentences(words, count=30000 if name == "law" else 120, seed=seed)
            path.write_text("\n".join(lines) + "\n")
    return place / "long"


def tokenising(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    """The largest of the processes that tokenise is killed."""
    home = place / f"tokenising-{number}"
    home.mkdir()
    given = [*GIVEN, "data.workers=2", f"domains.root={write_long_texts(place)}"]
    expected = runs.whole(place, given)
    script, log = home / "several.py", home / "log"
    script.write_text(SEVERAL.format(root=str(ROOT)))
    arguments = runs.command(place, home / "run", *given, cache=home / "cache")
    process = started(script, *arguments, cwd=home, log=log)

    def workers() -> list[int]:
        return [pid for pid in family(process.pid)[1:] if b"spawn_main" in command_line(pid)]

    runs.wait_for(lambda: workers() or not process.is_alive(), seconds=runs.HANGS_S)
    process.join(draw.uniform(0, 1.0))
    members = family(process.pid)
    told: dict[str, Any] = {"kind": "tokenising", "workers": len(found := workers())}
    if found:
        kill_largest(found)
    code = ended(process, seconds=runs.HANGS_S)
    told |= {"code": code, "line": runs.one_line(log.read_text())}
    told["gone"] = runs.wait_for(lambda: not any(map(is_there, members)), seconds=LEAVES_S)
    words = last_words(log)
    told["left"] = code == 0 or (code == 1 and is_told(log))
    told["then"] = ended(started(script, *arguments, cwd=home, log=log), seconds=runs.HANGS_S)
    told["same"] = told["then"] == 0 and runs.bits(home / "run") == expected["bits"]
    told["fine"] = bool(told["left"] and told["gone"] and told["same"] and found)
    told["last"] = "" if told["fine"] else words
    shutil.rmtree(home)
    return told


def command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def of_two(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    """The larger process of a run of two is killed."""
    given = [f"method={runs.shuffled(runs.METHODS, number)}", *GIVEN, *runs.DDP]
    expected, run = runs.whole(place, given, twin=True), place / f"two-{number}"
    arguments = runs.command(place, run, *given)
    process = runs.begin(arguments, run, twin=True)
    process.join(draw.uniform(0.2, expected["seconds"]))
    members = family(process.pid) if process.is_alive() else []
    told: dict[str, Any] = {"kind": "two processes", "method": given[0], "of": len(members)}
    if members:
        told["first"] = kill_largest(members) == process.pid
    told["gone"] = runs.wait_for(lambda: not any(map(is_there, members)), seconds=LEAVES_S)
    told["code"] = ended(process, seconds=LEAVES_S)
    told["then"] = runs.complete(arguments, run, twin=True)
    told["same"] = told["then"] == 0 and runs.bits(run) == expected["bits"]
    told["fine"] = told["same"] and told["gone"] and (told["code"] != 0 or not members)
    told["last"] = "" if told["fine"] else runs.said(run)[-1500:]
    shutil.rmtree(run)
    return told


def of_a_sweep(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    """The largest process of a sweep, a job of it, is killed: the sweep says so, and fails."""
    methods = sorted({runs.shuffled(runs.METHODS, number + turn) for turn in (0, 5)})
    expected = {name: runs.whole(place, [f"method={name}", *GIVEN]) for name in methods}
    home = place / f"sweep-{number}"
    home.mkdir()
    arguments, log = sweep_of(place, home, methods), home / "log"
    process = started(ROOT / "run.py", *arguments, cwd=home, log=log)
    runs.wait_for(lambda: len(family(process.pid)) > 1 or not process.is_alive(), seconds=runs.HANGS_S)
    process.join(draw.uniform(0.5, 8))
    jobs = family(process.pid)[1:]
    told: dict[str, Any] = {"kind": "sweep", "methods": methods, "jobs": len(jobs)}
    if jobs:
        kill_largest(jobs)
    told["code"] = ended(process, seconds=2 * runs.HANGS_S)
    told["gone"] = runs.wait_for(lambda: not any(map(is_there, jobs)), seconds=LEAVES_S)
    words = log.read_text(errors="replace")
    told["said"] = "memory" in words
    told["then"] = ended(started(ROOT / "run.py", *arguments, cwd=home, log=log), seconds=2 * runs.HANGS_S)
    found = {
        name: next(home.glob(f"outputs/sweep/{in_folder(name)}_*/scores.json"), None) for name in methods
    }
    told["same"] = all(
        each and runs.bits(each.parent) == expected[name]["bits"] for name, each in found.items()
    )
    failed = told["code"] == 1 and told["said"]
    told["fine"] = told["same"] and told["then"] == 0 and told["gone"] and (failed or not jobs)
    told["last"] = "" if told["fine"] else words[-1500:]
    shutil.rmtree(home)
    return told


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    kind = KINDS[number % len(KINDS)]
    if kind in ROOM_MIB:
        return limited(place, number, draw, kind)
    return {"tokenising": tokenising, "two processes": of_two, "sweep": of_a_sweep}[kind](place, number, draw)


if __name__ == "__main__":
    sys.exit(conduct(trial, name="memory", about=__doc__, trials=40))
