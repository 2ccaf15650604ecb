"""Too little memory: runs whose allocations fail, and processes that the kernel ends for their size.

    python tests/campaigns/memory.py --trials 40 --seed 0

In turn: a run under a hard limit of its data or of its address space (setrlimit) that is reached at any
moment; and, as the kernel's OOM killer does, kill -9 of the largest process of a run whose text is tokenised
by several, of a run of two processes, of a sweep. Each has to end with one line about memory (what is killed
itself says nothing), an exit code that is not 0, and no process left; the same command without the limit ends
with the bits of a run that nobody disturbed. A library in Rust or C++ ends the process in words of its own,
or hangs at that: it is noted, what hangs is killed, and the same command has to go on."""

import random
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

from tests.campaigns import runs  # noqa: E402
from tests.campaigns.frame import ROOT, conduct  # noqa: E402
from tests.support.processes import ended, started  # noqa: E402

KINDS = ("data", "address space", "data", "tokenising", "two processes", "sweep")
LIMITS = {"data": (60, "RLIMIT_DATA", "VmData:"), "address space": (250, "RLIMIT_AS", "VmSize:")}
# (MiB that a run takes beyond its start, about; the limit; its line of /proc/self/status)
ABOUT = re.compile(r"memory|SIGKILL|Killed|killed")
OWN_WORDS = re.compile(r"memory allocation of \d+ bytes failed|bad_alloc")  # of Rust, of C++
OWN_S = 5.0  # that such a library has to end its process
LIMITED = """
import resource, sys
sys.path[:0] = [{root!r}]
import torch, lightning.pytorch, cpt.train, cpt.trainer.loop
line = next(each for each in open("/proc/self/status") if each.startswith("{field}"))
most = int(line.split()[1]) * 1024 + ({room} << 20)
resource.setrlimit(resource.{limit}, (most, most))
from cpt.__main__ import main
main()
"""
SEVERAL = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
from cpt.data import tokenize
tokenize.SHARD = 1 << 20
from cpt.__main__ import main
if __name__ == "__main__":
    main()
"""


def kill_largest(pids: list[int]) -> None:
    """What the kernel's OOM killer does."""

    def resident(pid: int) -> int:
        with suppress(OSError, IndexError):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return 0

    if pids:
        runs.kill(max(pids, key=resident))


def command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def is_told(words: str) -> bool:
    """Whether there is one line of cpt's, about memory, and no traceback."""
    line = runs.one_line(words)
    return line is not None and ABOUT.search(line) is not None


def close(home: Path, told: dict[str, Any], words: str) -> dict[str, Any]:
    told["last"] = "" if told["fine"] else words[-1500:]
    shutil.rmtree(home)
    return told


def limited(place: Path, home: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    """A run in which an allocation fails."""
    given, run = [f"method={runs.shuffled(runs.METHODS, number)}", *runs.GIVEN], home / "run"
    expected, (most, limit, field) = runs.whole(place, given), LIMITS[kind]
    cache = home / "cache" if number % 4 == 0 else place / "cache"
    arguments, script = runs.command(place, run, *given, cache=cache), home / "limited.py"
    room = draw.randint(0, most)
    script.write_text(LIMITED.format(root=str(ROOT), room=room, limit=limit, field=field))
    process = runs.begin(arguments, run, script=script)
    runs.wait_for(lambda: not process.is_alive() or OWN_WORDS.search(runs.said(run)))
    code, words = ended(process, seconds=OWN_S), runs.said(run)
    own = OWN_WORDS.search(words) is not None
    told = {"kind": kind, "method": given[0], "room_mib": room, "code": code, "own words": own}
    told |= {"line": runs.one_line(words)} | runs.again(arguments, run, expected)
    left = code == 0 or (code == 1 and is_told(words)) or (code < 0 and own)
    return close(home, told | {"fine": left and told["same"]}, words)


def tokenising(place: Path, home: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    """The largest of the processes that tokenise is killed; each domain is worth several."""
    texts, run, script = runs.write_texts(place, "long", many=30000), home / "run", home / "several.py"
    given = [*runs.GIVEN, "data.workers=2", f"domains.root={texts}"]
    expected, arguments = runs.whole(place, given), runs.command(place, run, *given, cache=home / "cache")
    script.write_text(SEVERAL)
    process = runs.begin(arguments, run, script=script)

    def workers() -> list[int]:
        return [pid for pid in runs.family(process.pid)[1:] if b"spawn_main" in command_line(pid)]

    runs.wait_for(lambda: workers() or not process.is_alive())
    process.join(draw.uniform(0, 1.0))
    members, found = runs.family(process.pid), workers()
    kill_largest(found)
    code = ended(process, seconds=runs.HANGS_S)
    words, gone = runs.said(run), runs.have_left(members)
    told = {"kind": kind, "workers": len(found), "code": code, "gone": gone}
    told |= {"line": runs.one_line(words)} | runs.again(arguments, run, expected)
    left = code == 0 or (code == 1 and is_told(words))
    return close(home, told | {"fine": bool(left and gone and told["same"] and found)}, words)


def of_two(place: Path, home: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    """The larger process of a run of two is killed."""
    given, run = [f"method={runs.shuffled(runs.METHODS, number)}", *runs.GIVEN, *runs.DDP], home / "run"
    expected, arguments = runs.whole(place, given, twin=True), runs.command(place, run, *given)
    process = runs.begin(arguments, run, twin=True)
    process.join(draw.uniform(0.2, expected["seconds"]))
    members = runs.family(process.pid) if process.is_alive() else []
    kill_largest(members)
    told = {"kind": kind, "method": given[0], "of": len(members), "gone": runs.have_left(members)}
    told["code"] = ended(process, seconds=runs.LEAVES_S)
    told |= runs.again(arguments, run, expected, twin=True)
    told["fine"] = told["same"] and told["gone"] and (told["code"] != 0 or not members)
    return close(home, told, runs.said(run))


def of_a_sweep(place: Path, home: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    """The largest process of a sweep, a job of it, is killed: the sweep says so, and fails."""
    methods = sorted({runs.shuffled(runs.METHODS, number + turn) for turn in (0, 5)})
    arguments, log = runs.sweep_of(place, home, methods), home / "log"
    process = started(ROOT / "run.py", *arguments, cwd=home, log=log)
    runs.wait_for(lambda: len(runs.family(process.pid)) > 1 or not process.is_alive())
    process.join(draw.uniform(0.5, 8))
    jobs = runs.family(process.pid)[1:]
    kill_largest(jobs)
    code, gone = ended(process, seconds=2 * runs.HANGS_S), runs.have_left(jobs)
    words = log.read_text(errors="replace")
    then = ended(started(ROOT / "run.py", *arguments, cwd=home, log=log), seconds=2 * runs.HANGS_S)
    told = {"kind": kind, "methods": methods, "jobs": len(jobs), "code": code, "gone": gone, "then": then}
    told["unlike"] = runs.unlike(place, home, methods)
    failed = (code == 1 and "memory" in words) or not jobs
    return close(home, told | {"fine": failed and gone and then == 0 and not told["unlike"]}, words)


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    kind, home = KINDS[number % len(KINDS)], place / f"memory-{number}"
    home.mkdir()
    of = {"tokenising": tokenising, "two processes": of_two, "sweep": of_a_sweep}
    return of.get(kind, limited)(place, home, number, draw, kind)


if __name__ == "__main__":
    sys.exit(conduct(trial, name="memory", about=__doc__, trials=40))
