"""Signals to runs of all methods: does every process leave, is a step lost, are the bits the same?

A trial sends one of four signals to a run in one of its loops, in turn: while the base is pre-trained,
while a domain is learned, while texts are scored, while end tasks are fine-tuned, or anywhere. It runs by
one process, by two (one of which has the signal), or as one or two tasks of a SLURM job (an environment
without SLURM), all of which have the signal and are queued again after exit code 75. Then the same command
is given again."""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cpt.core.preemption import GO_ON, SIGNALS
from tests.campaigns import runs
from tests.support.forked_scripts import find_last_child, has_sigterm_handler, send_signal, wait_for_exit

SETUPS = ("alone", "two", "slurm", "alone", "two slurm")
LOOPS = {  # what the log says first
    "training": re.compile(r"\((1/1|1/2|2/2)\)"),
    "scoring": re.compile(r"scoring after"),
    "end tasks": re.compile(r"end task|fine-tuning"),
    "base": re.compile(r"[Pp]re-training the base"),
    "anywhere": re.compile(r""),
}
STEPS = ("trainer.steps=30", "trainer.checkpoint_every=1000")
SAID = re.compile(r"cpt: stopped by SIG\w+(?: after step (\d+) of \d+ of (\w+))?")
SLURM = {"JOB_ID": 7, "NODEID": 0, "NODELIST": "localhost", "STEP_NODELIST": "localhost"}
FIRST_PORT = 20000  # of those that trials listen at


def slurm(rank: int, processes: int, *, port: int, restarts: int) -> Any:
    """The environment of a task of a SLURM job, which was queued again so many times."""
    told = SLURM | {"PROCID": rank, "LOCALID": rank, "NTASKS": processes, "NTASKS_PER_NODE": processes}
    told |= {"NPROCS": processes, "RESTART_COUNT": restarts}
    variables = {f"SLURM_{name}": str(value) for name, value in told.items()}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if processes > 1 else {}
    return mock.patch.dict(os.environ, variables)


def begin(arguments: list[str], run: Path, setup: str, *, port: int, restarts: int = 0) -> list[Any]:
    """The processes of a start: those that have no parent among them."""
    if "slurm" not in setup:
        return [runs.begin(arguments, run, twin=setup == "two")]
    processes, found = 2 if "two" in setup else 1, []
    for rank in range(processes):
        with slurm(rank, processes, port=port, restarts=restarts):
            found.append(runs.begin(arguments, run))
    return found


def leave(
    processes: list[Any], run: Path, setup: str, draw: random.Random, *, loop: str, latest: float
) -> dict:
    """Sends a signal in a loop; how the run ended, and nothing where it was over before."""
    first, seen = processes[0], LOOPS[loop].search
    for each in processes:
        runs.wait_for(lambda each=each: has_sigterm_handler(each.pid) or not each.is_alive())
    runs.wait_for(lambda: seen(runs.said(run)) or not first.is_alive())
    time.sleep(moment := draw.uniform(0, latest))
    number, rank = draw.choice(SIGNALS), draw.randrange(2) if setup == "two" else 0
    if rank:
        runs.wait_for(lambda: not first.is_alive() or has_sigterm_handler(find_last_child(first.pid)))
    if not first.is_alive():
        return {}
    for process in processes:  # SLURM sends it to all tasks; else one process has it
        if process.is_alive():
            send_signal(process, number, rank=rank)
    asked = time.monotonic()
    codes = [wait_for_exit(process, seconds=runs.HANGS_S) for process in processes]
    told = {"signal": signal.Signals(number).name, "rank": rank, "moment": round(moment, 2), "codes": codes}
    return {} if set(codes) == {0} else told | {"left_after_s": round(time.monotonic() - asked, 2)}


def lost(run: Path, cache: Path, log: str) -> int | None:
    """Optimizer steps that were made and are in no checkpoint; None where no step was under way."""
    found = [match for match in SAID.finditer(log) if match[1]]
    if not found:
        return None
    places = [*run.glob(f"checkpoints/*-{found[-1][2]}.ckpt"), *cache.glob("base/*.partial/base.ckpt")]
    return int(found[-1][1]) - torch.load(places[0], weights_only=True)["global_step"]


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    setup, loop = SETUPS[number % len(SETUPS)], list(LOOPS)[number // len(SETUPS) % len(LOOPS)]
    method = runs.shuffled([each for each in runs.METHODS if each != "none"], number)
    two, home, port = "two" in setup, place / f"signal-{number}", FIRST_PORT + number
    given = [f"method={method}", *STEPS, *(runs.DDP if two else ())]
    given += runs.endtasks_of(place) if loop == "end tasks" else []
    expected, known = runs.whole(place, given, twin=two), {"method": method, "setup": setup, "loop": loop}
    for turn in range(6):
        run = home / str(turn) / "run"
        cache = home / f"cache-{turn}" if loop == "base" else place / "cache"
        arguments = runs.command(place, run, *given, *["trainer.devices=2"] * two, cache=cache)
        processes = begin(arguments, run, setup, port=port)
        latest = (expected["seconds"] if loop == "anywhere" else 0.25) / (1 + turn)
        if found := leave(processes, run, setup, draw, loop=loop, latest=latest):
            log = runs.said(run)
            told = known | found | {"lost": lost(run, cache, log), "lines": len(SAID.findall(log))}
            again = begin(arguments, run, setup, port=port + 1000, restarts=1)
            told["then"] = [wait_for_exit(process, seconds=runs.HANGS_S) for process in again]
            told["same"] = not any(told["then"]) and runs.bits(run) == expected["bits"]
            left = set(told["codes"]) == {GO_ON} and told["lines"] == 1 and told["lost"] in (0, None)
            told["fine"] = left and told["same"]
            told["last"] = "" if told["fine"] else runs.said(run)[-1500:]
            shutil.rmtree(home)
            return told
    return known | {"fine": False, "error": "the run was over before each of six signals"}
