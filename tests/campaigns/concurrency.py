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
GIVEN = ("trainer.steps=20",)
METHODS = ("ncl", "derpp")
REFUSED = re.compile(r"another process is using \S+( \(host \S+, process \d+\))?;")


def start(home: Path, arguments: list[str], name: str) -> Any:
    return start_script(ROOT / "run.py", *arguments, cwd=home, log=home / name)


def start_twice(
    home: Path, arguments: list[str], moment: float, *, killed: bool, seconds: float
) -> list[int]:
    """Two starts, the second a moment after the first, which is then killed or not; how they ended."""
    first = start(home, arguments, "log-1")
    first.join(moment)
    if killed:
        first.kill()
        first.join()
    return [wait_for_exit(process, seconds=seconds) for process in (first, start(home, arguments, "log-2"))]


def try_run(folder: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    options = [f"method={runs.shuffled(runs.METHODS, number)}", *GIVEN]
    killed = kind == "stale lock"
    expected = runs.run_undisturbed(folder, options)
    home = folder / f"twice-{number}"
    cache = home / "cache" if number // len(KINDS) % 4 == 0 else folder / "cache"
    home.mkdir()
    arguments = runs.command(folder, home / "run", *options, cache=cache)

    moment = draw.uniform(0, expected["seconds"])
    first, second = codes = start_twice(home, arguments, moment, killed=killed, seconds=runs.HANGS_S)
    logs = [home / "log-1", home / "log-2"]  # a first that was killed at once has none
    words = [log.read_text() if log.exists() else "" for log in logs]
    line = runs.one_line(words[1])

    outcome: dict[str, Any] = {"kind": kind, "method": options[0], "codes": codes, "line": line}
    outcome["same"] = (home / "run" / "scores.json").exists() and runs.bits(home / "run") == expected["bits"]
    refused = not killed and second == GO_ON and bool(line and REFUSED.search(line))
    outcome["fine"] = outcome["same"] and (first == 0 or killed) and (second == 0 or refused)
    outcome["last"] = "" if outcome["fine"] else "".join(words_of_start[-1500:] for words_of_start in words)

    shutil.rmtree(home)
    return outcome


def try_sweep(folder: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    home = folder / f"sweeps-{number}"
    home.mkdir()
    arguments = runs.sweep_of(folder, home, METHODS)
    latest = 4 + 2 * sum(
        runs.run_undisturbed(folder, [f"method={name}", *runs.GIVEN])["seconds"] for name in METHODS
    )
    moment = draw.uniform(0.5, latest)
    killed = kind == "sweep again"
    codes = start_twice(home, arguments, moment, killed=killed, seconds=2 * runs.HANGS_S)
    # A job that another sweep is at is left to it; the same command again does what is missing.
    final_code = wait_for_exit(start(home, arguments, "log-2"), seconds=2 * runs.HANGS_S)
    outcome = {
        "kind": kind,
        "codes": codes,
        "then": final_code,
        "unlike": runs.find_unlike(folder, home, METHODS),
    }
    outcome["fine"] = final_code == 0 and not outcome["unlike"]
    outcome["last"] = "" if outcome["fine"] else (home / "log-2").read_text()[-1500:]
    shutil.rmtree(home)
    return outcome


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    kind = KINDS[number % len(KINDS)]
    return (try_sweep if "sweep" in kind else try_run)(folder, number, draw, kind)
