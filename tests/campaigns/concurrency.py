"""The same command twice, killed holders, sweeps that are started again: does each end, and with the same
bits?

In turn: a second start of a run, at any moment of the first, waits or is refused in one line with the
host and the number of the process that is at work; a start beside a killed one's lock; a second start of
a sweep while it is running; a sweep whose process was killed, started again at once while its jobs may
still be there. The shared cache is empty in every fourth trial."""

import random
import re
import shutil
from pathlib import Path
from typing import Any

from cpt.core.preemption import GO_ON
from tests.campaigns import runs
from tests.campaigns.frame import ROOT
from tests.support.forked_scripts import start_script, wait_for_exit

KINDS = ("twice", "stale lock", "sweep twice", "sweep again")
GIVEN, METHODS = ("trainer.steps=20",), ("ncl", "derpp")
REFUSED = re.compile(r"another process is using \S+( \(host \S+, process \d+\))?;")


def start(home: Path, arguments: list[str], name: str) -> Any:
    return start_script(ROOT / "run.py", *arguments, cwd=home, log=home / name)


def twice(home: Path, arguments: list[str], moment: float, *, killed: bool, seconds: float) -> list[int]:
    """Two starts, the second a moment after the first, which is then killed or not; how they ended."""
    first = start(home, arguments, "log-1")
    first.join(moment)
    if killed:
        first.kill()
        first.join()
    return [wait_for_exit(each, seconds=seconds) for each in (first, start(home, arguments, "log-2"))]


def of_a_run(place: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    given, killed = [f"method={runs.shuffled(runs.METHODS, number)}", *GIVEN], kind == "stale lock"
    expected, home = runs.whole(place, given), place / f"twice-{number}"
    cache = home / "cache" if number // len(KINDS) % 4 == 0 else place / "cache"
    home.mkdir()
    arguments = runs.command(place, home / "run", *given, cache=cache)
    moment = draw.uniform(0, expected["seconds"])
    first, second = codes = twice(home, arguments, moment, killed=killed, seconds=runs.HANGS_S)
    logs = [home / "log-1", home / "log-2"]  # a first that was killed at once has none
    words = [log.read_text() if log.exists() else "" for log in logs]
    line = runs.one_line(words[1])
    told: dict[str, Any] = {"kind": kind, "method": given[0], "codes": codes, "line": line}
    told["same"] = (home / "run" / "scores.json").exists() and runs.bits(home / "run") == expected["bits"]
    refused = not killed and second == GO_ON and bool(line and REFUSED.search(line))
    told["fine"] = told["same"] and (first == 0 or killed) and (second == 0 or refused)
    told["last"] = "" if told["fine"] else "".join(each[-1500:] for each in words)
    shutil.rmtree(home)
    return told


def of_a_sweep(place: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    home = place / f"sweeps-{number}"
    home.mkdir()
    arguments = runs.sweep_of(place, home, METHODS)
    latest = 4 + 2 * sum(runs.whole(place, [f"method={name}", *runs.GIVEN])["seconds"] for name in METHODS)
    moment, killed = draw.uniform(0.5, latest), kind == "sweep again"
    codes = twice(home, arguments, moment, killed=killed, seconds=2 * runs.HANGS_S)
    # A job that another sweep is at is left to it; the same command again does what is missing.
    then = wait_for_exit(start(home, arguments, "log-2"), seconds=2 * runs.HANGS_S)
    told = {"kind": kind, "codes": codes, "then": then, "unlike": runs.unlike(place, home, METHODS)}
    told["fine"] = then == 0 and not told["unlike"]
    told["last"] = "" if told["fine"] else (home / "log-2").read_text()[-1500:]
    shutil.rmtree(home)
    return told


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    kind = KINDS[number % len(KINDS)]
    return (of_a_sweep if "sweep" in kind else of_a_run)(place, number, draw, kind)
