"""Signals to runs of all methods: does every process leave, is a step lost, are the bits the same?

    python tests/campaigns/preemption.py --trials 200 --seed 0

A trial sends one of four signals to a run in one of its loops, in turn: while the base is pre-trained,
while a domain is learned, while texts are scored, while end tasks are fine-tuned, or anywhere. It runs by
one process, by two (one of which has the signal), or as one or two tasks of a SLURM job (an environment
without SLURM), all of which have the signal and are queued again after exit code 75, or as a job of
submitit's executor on this machine (tests/campaigns/submitit_jobs.py, where submitit is installed), which has
SIGUSR2 and queues it again, or SIGTERM. Then the same command is given again."""

import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

from cpt.core.preemption import GO_ON, SIGNALS  # noqa: E402
from tests.campaigns import runs, submitit_jobs  # noqa: E402
from tests.campaigns.frame import conduct  # noqa: E402
from tests.campaigns.signals import FIRST_PORT, count_lines, lost, slurm  # noqa: E402
from tests.support.processes import ended, heeds_signals, last_child, sent  # noqa: E402

SETUPS = ("alone", "two", "slurm", "alone", "two slurm", "submitit")
LOOPS = {  # what the log says first, and how long they take at most
    "training": re.compile(r"\((1/1|1/2|2/2)\)"),
    "scoring": re.compile(r"scoring after"),
    "end tasks": re.compile(r"end task|fine-tuning"),
    "base": re.compile(r"pre-training the base"),
    "anywhere": re.compile(r""),
}
STEPS = ("trainer.steps=30", "trainer.checkpoint_every=1000")


def options_of(place: Path, method: str, loop: str, *, two: bool) -> list[str]:
    given = [f"method={method}", *STEPS, *(runs.DDP if two else ())]
    given += ["trainer.devices=2"] * two
    return given + (runs.endtasks_of(place) if loop == "end tasks" else [])


def begin(arguments: list[str], run: Path, setup: str, *, port: int, restarts: int = 0) -> list[Any]:
    """The processes of a start: those that have no parent among them."""
    if "slurm" not in setup:
        return [runs.begin(arguments, run, twin=setup == "two")]
    processes, found = 2 if "two" in setup else 1, []
    for rank in range(processes):
        with slurm(rank, processes, port=port, restarts=restarts):
            found.append(runs.begin(arguments, run))
    return found


def signalled(processes: list[Any], number: int, rank: int) -> None:
    """SLURM sends a signal to all tasks; else one process has it."""
    for process in processes:
        if process.is_alive():
            sent(process, number, rank=rank)


def leave(
    run: Path, arguments: list[str], setup: str, draw: random.Random, plan: dict[str, Any]
) -> dict[str, Any]:
    """A start that has a signal in a loop, and how it ended; nothing where the run was over before."""
    processes = begin(arguments, run, setup, port=plan["port"])
    first, seen = processes[0], LOOPS[plan["loop"]].search
    for each in processes:
        runs.wait_for(lambda each=each: heeds_signals(each.pid) or not each.is_alive(), seconds=runs.HANGS_S)
    runs.wait_for(lambda: seen(runs.said(run)) or not first.is_alive(), seconds=runs.HANGS_S)
    latest = plan["seconds"] if plan["loop"] == "anywhere" else 0.25
    time.sleep(moment := draw.uniform(0, latest))
    number, rank = draw.choice(SIGNALS), draw.randrange(2) if setup == "two" else 0
    if rank:
        runs.wait_for(
            lambda: not first.is_alive() or heeds_signals(last_child(first.pid)), seconds=runs.HANGS_S
        )
    if not first.is_alive():
        return {}
    signalled(processes, number, rank)
    asked = time.monotonic()
    codes = [ended(process, seconds=runs.HANGS_S) for process in processes]
    if set(codes) == {0}:
        return {}
    told = {"signal": signal.Signals(number).name, "rank": rank, "moment": round(moment, 2), "codes": codes}
    return told | {"left_after_s": round(time.monotonic() - asked, 2)}


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    setup, loop = SETUPS[number % len(SETUPS)], list(LOOPS)[number // len(SETUPS) % len(LOOPS)]
    method = runs.shuffled([each for each in runs.METHODS if each != "none"], number)
    if setup == "submitit" and not submitit_jobs.is_there_submitit():
        return {"setup": setup, "fine": True, "skipped": "needs submitit: pip install -e '.[slurm]'"}
    if setup == "submitit":
        loop = "training" if loop == "base" else loop
        given = options_of(place, method, loop, two=False)
        return submitit_jobs.trial(place, number, draw, given, loop, LOOPS[loop])
    two, home = "two" in setup, place / f"run-{number}"
    given, known = options_of(place, method, loop, two=two), {"method": method, "setup": setup, "loop": loop}
    expected = runs.whole(place, [each for each in given if each != "trainer.devices=2"], twin=two)
    plan = {"loop": loop, "seconds": expected["seconds"], "port": FIRST_PORT + number}
    for turn in range(6):
        run = home / str(turn)
        cache = run.with_name(f"cache-{turn}") if loop == "base" else place / "cache"
        arguments = runs.command(place, run, *given, cache=cache)
        if found := leave(run, arguments, setup, draw, plan):
            log = runs.said(run)
            told = known | found | {"lost": lost(run, cache, log), "lines": count_lines(log)}
            again = begin(arguments, run, setup, port=plan["port"] + 1000, restarts=1)
            told["then"] = [ended(process, seconds=runs.HANGS_S) for process in again]
            told["same"] = not any(told["then"]) and runs.bits(run) == expected["bits"]
            left = set(told["codes"]) == {GO_ON} and told["lines"] == 1 and told["lost"] in (0, None)
            told["fine"] = left and told["same"]
            told["last"] = "" if told["fine"] else runs.said(run)[-1500:]
            shutil.rmtree(home)
            return told
    return known | {"fine": False, "error": "the run was over before each of six signals"}


if __name__ == "__main__":
    sys.exit(conduct(trial, name="preemption", about=__doc__, trials=200))
