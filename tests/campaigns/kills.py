"""kill -9 at random moments of runs of all methods, and of sweeps: are the bits the same?

    python tests/campaigns/kills.py --trials 300 --seed 0

A trial kills a run once to three times, each at any moment of what is left of it; then the same command
ends it. Every third run is of two processes, of which any one is killed and the other has to leave by
itself; every fifth trial is a sweep of two methods, of which the sweep or one of its jobs is killed.
`python -m cpt.verify` has to find nothing in the end."""

import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

from cpt.verify import damage_in_run  # noqa: E402
from tests.campaigns import runs  # noqa: E402
from tests.campaigns.frame import ROOT, conduct  # noqa: E402
from tests.support.processes import ended, is_there, started  # noqa: E402

LEAVES_S = 60.0  # within which a process has to leave whose companion was killed
GIVEN = ("trainer.steps=12",)


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def family(pid: int) -> list[int]:
    """A process and those below it."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def kill_at(process: Any, moment: float, draw: random.Random) -> dict[str, Any]:
    """Kills one of a run's processes after so many seconds; how long the others took to leave."""
    process.join(moment)
    if not process.is_alive():
        return {}
    members = family(process.pid)
    rank = draw.randrange(len(members))
    with suppress(ProcessLookupError):
        os.kill(members[rank], signal.SIGKILL)
    killed = time.monotonic()
    left = runs.wait_for(lambda: not any(map(is_there, members)), seconds=LEAVES_S)
    for each in members:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    ended(process)
    return {
        "rank": rank,
        "of": len(members),
        "left": left,
        "left_after_s": round(time.monotonic() - killed, 2),
    }


def of_a_run(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    method, two = runs.shuffled(runs.METHODS, number), number % 3 == 2
    given = [f"method={method}", *GIVEN, *(runs.DDP if two else ())]
    given += runs.endtasks_of(place) if draw.random() < 0.2 else []
    expected, run = runs.whole(place, given, twin=two), place / f"run-{number}"
    own = draw.random() < 0.3
    cache = place / f"cache-{number}" if own else place / "cache"
    arguments, kills = runs.command(place, run, *given, cache=cache), []
    for _ in range(draw.randint(1, 3)):
        latest = expected["seconds"] * (1.5 if own else 1)
        kills.append(kill_at(runs.begin(arguments, run, twin=two), draw.uniform(0, latest), draw))
    told = {"method": method, "processes": 1 + two, "own cache": own, "kills": kills}
    told["code"] = runs.complete(arguments, run, twin=two)
    told["same"] = told["code"] == 0 and runs.bits(run) == expected["bits"]
    told["damage"] = list(damage_in_run(run))
    told["fine"] = told["same"] and not told["damage"] and all(each.get("left", True) for each in kills)
    told["last"] = "" if told["fine"] else runs.said(run)[-1500:]
    shutil.rmtree(run)
    shutil.rmtree(cache) if own else None
    return told


def sweep_of(place: Path, home: Path, methods: list[str]) -> list[str]:
    """The arguments of a sweep below a folder."""
    arguments = runs.command(place, home / "unused", *GIVEN, f"method={','.join(methods)}")
    kept = [each for each in arguments if not each.startswith("hydra.run.dir=")]
    return ["-m", *kept, "name=sweep", "hydra.launcher.jobs=2"]


def in_folder(name: str) -> str:
    """A method's name as a folder of a sweep has it."""
    return name.replace("_", ".")


def of_a_sweep(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    methods = sorted({runs.shuffled(runs.METHODS, number + turn) for turn in (0, 5)})
    expected = {name: runs.whole(place, [f"method={name}", *GIVEN]) for name in methods}
    home, kills = place / f"sweep-{number}", []
    home.mkdir()
    arguments, log = sweep_of(place, home, methods), home / "log"
    longest = 2 * sum(each["seconds"] for each in expected.values()) + 4
    for _ in range(draw.randint(1, 2)):
        process = started(ROOT / "run.py", *arguments, cwd=home, log=log)
        process.join(draw.uniform(0.5, longest))
        if not process.is_alive():
            break
        members = family(process.pid)
        victim = draw.choice(members)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        of_sweep = victim == process.pid
        kills.append({"killed": "sweep" if of_sweep else "job", "of": len(members), "left": True})
        if of_sweep:  # which no job outlives; that of a job goes on with the others
            left = runs.wait_for(lambda own=members: not any(map(is_there, own)), seconds=LEAVES_S)
            kills[-1]["left"] = left
        ended(process)
    told = {
        "sweep": methods,
        "kills": kills,
        "code": ended(started(ROOT / "run.py", *arguments, cwd=home, log=log)),
    }
    found = {
        name: next(home.glob(f"outputs/sweep/{in_folder(name)}_*/scores.json"), None) for name in methods
    }
    same = {
        name: bool(path) and runs.bits(path.parent) == expected[name]["bits"] for name, path in found.items()
    }
    told["same"] = all(same.values())
    told["unlike"] = [name for name, each in same.items() if not each]
    told["fine"] = told["same"] and told["code"] == 0 and all(each["left"] for each in kills)
    told["last"] = "" if told["fine"] else log.read_text()[-1500:]
    shutil.rmtree(home) if told["fine"] else home.rename(place / f"unlike-{number}")
    return told


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    return (of_a_sweep if number % 5 == 4 else of_a_run)(place, number, draw)


if __name__ == "__main__":
    sys.exit(conduct(trial, name="kills", about=__doc__, trials=300))
