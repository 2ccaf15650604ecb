"""Signals to runs of all methods and features: does every process leave, is a step lost, are the bits the same?

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
# What the log says before each loop. Bars of less than ten seconds leave no line in it: scoring follows the last
# step of a stage, end tasks follow the scores of the last stage.
LOOPS = {
    "training": re.compile(r"\((1/1|1/2|2/2)\)"),
    "scoring": re.compile(r"step (\d+)/\1 "),
    "end tasks": re.compile(r"\((?:1/1|2/2)\) · step (\d+)/\1 .*Evaluated after", re.DOTALL),
    "base": re.compile(r"[Pp]re-training the base"),
    "anywhere": re.compile(r""),
}
STEPS = ("trainer.steps=30", "trainer.checkpoint_every_n_steps=1000")
SAID = re.compile(r"cpt: stopped by SIG\w+(?: after step (\d+) of \d+ of (\w+))?")
SLURM = {"JOB_ID": 7, "NODEID": 0, "NODELIST": "localhost", "STEP_NODELIST": "localhost"}
FIRST_PORT = 20000  # of those that trials listen at


def slurm(rank: int, processes: int, *, port: int, restarts: int) -> Any:
    """The environment of a task of a SLURM job, which was queued again so many times."""
    values = SLURM | {
        "PROCID": rank,
        "LOCALID": rank,
        "NTASKS": processes,
        "NTASKS_PER_NODE": processes,
        "NPROCS": processes,
        "RESTART_COUNT": restarts,
    }
    variables = {f"SLURM_{name}": str(value) for name, value in values.items()}
    if processes > 1:
        variables["MASTER_ADDR"] = "127.0.0.1"
        variables["MASTER_PORT"] = str(port)
    return mock.patch.dict(os.environ, variables)


def begin(arguments: list[str], run: Path, setup: str, *, port: int, restarts: int = 0) -> list[Any]:
    """The processes of a start: those that have no parent among them."""
    if "slurm" not in setup:
        return [runs.begin(arguments, run, twin=setup == "two")]
    num_tasks = 2 if "two" in setup else 1
    tasks = []
    for rank in range(num_tasks):
        with slurm(rank, num_tasks, port=port, restarts=restarts):
            tasks.append(runs.begin(arguments, run))
    return tasks


def leave(
    processes: list[Any], run: Path, setup: str, draw: random.Random, *, loop: str, latest: float
) -> dict:
    """Sends a signal in a loop; how the run ended, and nothing where it was over before."""
    first = processes[0]
    is_reached = LOOPS[loop].search
    for process in processes:
        runs.wait_for(lambda task=process: has_sigterm_handler(task.pid) or not task.is_alive())
    runs.wait_for(lambda: is_reached(runs.read_log(run)) or not first.is_alive())
    moment = draw.uniform(0, latest)
    time.sleep(moment)

    number = draw.choice(SIGNALS)
    rank = draw.randrange(2) if setup == "two" else 0
    if rank:
        runs.wait_for(lambda: not first.is_alive() or has_sigterm_handler(find_last_child(first.pid)))
    if not first.is_alive():
        return {}
    for process in processes:  # SLURM sends it to all tasks; else one process has it
        if process.is_alive():
            send_signal(process, number, rank=rank)

    signal_time = time.monotonic()
    codes = [wait_for_exit(process, seconds=runs.HANGS_S) for process in processes]
    if set(codes) == {0}:
        return {}
    return {
        "signal": signal.Signals(number).name,
        "rank": rank,
        "moment": round(moment, 2),
        "codes": codes,
        "left_after_s": round(time.monotonic() - signal_time, 2),
    }


def count_lost_steps(run: Path, cache: Path, log: str) -> int | None:
    """Optimizer steps that were made and are in no checkpoint; None where no step was under way."""
    matches = [match for match in SAID.finditer(log) if match[1]]
    if not matches:
        return None
    _, step, domain = matches[-1].group(0, 1, 2)
    checkpoints = [*run.glob(f"checkpoints/*-{domain}.ckpt"), *cache.glob("base/*.partial/base.ckpt")]
    return int(step) - torch.load(checkpoints[0], weights_only=True)["global_step"]


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    setup = SETUPS[number % len(SETUPS)]
    loop = list(LOOPS)[number // len(SETUPS) % len(LOOPS)]
    cases = [case for case in runs.CASES if case != "none"]
    if loop == "base":
        cases = [case for case in cases if case not in runs.OF_A_CHECKPOINT]
    case = runs.shuffled(cases, number)
    is_distributed = "two" in setup
    home = folder / f"signal-{number}"
    port = FIRST_PORT + number
    conditions = {"case": case, "setup": setup, "loop": loop}

    options = [*runs.options_of(folder, case), *STEPS]
    if is_distributed:
        options += runs.DDP
    if loop == "end tasks":
        options += runs.endtasks_of(folder)
    expected = runs.run_undisturbed(folder, options, twin=is_distributed)
    device_options = ["trainer.devices=2"] if is_distributed else []

    # A signal that comes after the end of the run says nothing: the next attempt sends it sooner.
    for attempt in range(6):
        run = home / str(attempt) / "run"
        cache = home / f"cache-{attempt}" if loop == "base" else folder / "cache"
        arguments = runs.command(folder, run, *options, *device_options, cache=cache)
        processes = begin(arguments, run, setup, port=port)
        latest = (expected["seconds"] if loop == "anywhere" else 0.25) / (1 + attempt)
        departure = leave(processes, run, setup, draw, loop=loop, latest=latest)
        if not departure:
            continue

        log = runs.read_log(run)
        num_lines = len(SAID.findall(log))
        num_lost = count_lost_steps(run, cache, log)
        restarted = begin(arguments, run, setup, port=port + 1000, restarts=1)
        codes = [wait_for_exit(process, seconds=runs.HANGS_S) for process in restarted]
        is_same = not any(codes) and runs.bits(run) == expected["bits"]
        is_orderly = set(departure["codes"]) == {GO_ON} and num_lines == 1 and num_lost in (0, None)
        is_fine = is_orderly and is_same

        outcome = conditions | departure | {"lost": num_lost, "lines": num_lines, "then": codes}
        outcome["same"] = is_same
        outcome["fine"] = is_fine
        outcome["last"] = "" if is_fine else runs.read_log(run)[-1500:]
        shutil.rmtree(home)
        return outcome
    return conditions | {"fine": False, "error": "the run was over before each of six signals"}
