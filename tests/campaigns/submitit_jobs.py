"""A run as a job of submitit's executor on this machine, which is told to leave and queued again.

submitit has a task of its own start the run (cpt/sweeps/launcher.py). SIGUSR2 to that task is what it is sent
before the time limit and when it is preempted: it has the job queued again; SIGTERM is a cancelled job."""

import importlib.util
import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.campaigns import runs
from tests.campaigns.frame import ROOT
from tests.campaigns.kills import LEAVES_S, family, in_folder
from tests.campaigns.signals import count_lines
from tests.support.processes import ended, heeds_signals, is_there, started

TASK, CONSOLE = b"submitit.core._submit", "outputs/sweep/*/console.log"
QUEUED_AGAIN = signal.SIGUSR2
SENT = (QUEUED_AGAIN, QUEUED_AGAIN, signal.SIGTERM)


def is_there_submitit() -> bool:
    return importlib.util.find_spec("submitit") is not None


def arguments_of(place: Path, home: Path, given: list[str]) -> list[str]:
    kept = [each for each in runs.command(place, home / "unused", *given) if "hydra.run.dir=" not in each]
    return ["-m", *kept, "name=sweep", "hydra/launcher=slurm_local"]


def task_of(pid: int) -> int | None:
    """submitit's task below a process, once it has started a run that heeds signals."""
    for member in family(pid):
        with suppress(OSError):
            if TASK in Path(f"/proc/{member}/cmdline").read_bytes():
                return member if any(map(heeds_signals, family(member)[1:])) else None
    return None


def said_in(home: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in home.glob(CONSOLE)).replace("\r", "\n")


def tell_to_leave(process: Any, home: Path, seen: re.Pattern[str], draw: random.Random) -> dict[str, Any]:
    """Sends the task a signal within a loop of the run; nothing where the run was over before."""
    runs.wait_for(lambda: task_of(process.pid) or not process.is_alive(), seconds=runs.HANGS_S)
    runs.wait_for(lambda: seen.search(said_in(home)) or not process.is_alive(), seconds=runs.HANGS_S)
    time.sleep(moment := draw.uniform(0, 0.25))
    task, number = task_of(process.pid), draw.choice(SENT)
    if task is None:
        return {}
    os.kill(task, number)
    return {"signal": signal.Signals(number).name, "moment": round(moment, 2)}


def trial(
    place: Path, number: int, draw: random.Random, given: list[str], loop: str, seen: Any
) -> dict[str, Any]:
    """A job that is queued again by submitit, or is cancelled and started by the same command."""
    method = given[0].removeprefix("method=")
    expected, home = runs.whole(place, given), place / f"submitit-{number}"
    home.mkdir()
    arguments, log = arguments_of(place, home, given), home / "log"
    process = started(ROOT / "run.py", *arguments, cwd=home, log=log)
    told = {"method": method, "setup": "submitit", "loop": loop} | tell_to_leave(process, home, seen, draw)
    members = family(process.pid)
    told["code"] = ended(process, seconds=2 * runs.HANGS_S)
    console = said_in(home)
    told["lines"] = count_lines(console)
    again = told.get("signal") == QUEUED_AGAIN.name
    told["then"] = told["code"]
    if "signal" in told and not again:
        told["then"] = ended(
            started(ROOT / "run.py", *arguments, cwd=home, log=log), seconds=2 * runs.HANGS_S
        )
    found = next(home.glob(f"outputs/sweep/{in_folder(method)}_*/scores.json"), None)
    told["gone"] = runs.wait_for(lambda: not any(map(is_there, members)), seconds=LEAVES_S)
    told["same"] = told["then"] == 0 and found is not None and runs.bits(found.parent) == expected["bits"]
    told["fine"] = bool(told["same"] and told["gone"] and told["lines"] == ("signal" in told))
    told["last"] = "" if told["fine"] else (log.read_text() + console)[-1500:]
    shutil.rmtree(home)
    return told
