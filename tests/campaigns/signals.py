"""SLURM's side of a run, and what a run that left says of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from os import environ
from pathlib import Path

import torch

SAID = re.compile(r"cpt: stopped by SIG\w+(?: after step (\d+) of \d+ of (\w+))?")
SLURM = {
    "JOB_ID": 7,
    "PROCID": 0,
    "LOCALID": 0,
    "NODEID": 0,
    "NODELIST": "localhost",
    "STEP_NODELIST": "localhost",
}
FIRST_PORT = 20000  # of those that trials listen at


@contextmanager
def slurm(rank: int, processes: int, *, port: int, restarts: int = 0) -> Iterator[None]:
    """The environment of a task of a SLURM job, which was queued again so many times."""
    told = SLURM | {"PROCID": rank, "LOCALID": rank, "NTASKS": processes, "NTASKS_PER_NODE": processes}
    told |= {"NPROCS": processes, "RESTART_COUNT": restarts}
    variables = {f"SLURM_{name}": str(value) for name, value in told.items()}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if processes > 1 else {}
    before = dict(environ)
    environ.update(variables)
    try:
        yield
    finally:
        environ.clear()
        environ.update(before)


def count_lines(log: str) -> int:
    """How many lines say that the run was stopped."""
    return len(SAID.findall(log))


def lost(run: Path, cache: Path, log: str) -> int | None:
    """Optimizer steps that were made and are in no checkpoint; None where no step was under way."""
    found = [match for match in SAID.finditer(log) if match[1]]
    if not found:
        return None
    places = [*run.glob(f"checkpoints/*-{found[-1][2]}.ckpt"), *cache.glob("base/*.partial/base.ckpt")]
    return int(found[-1][1]) - torch.load(places[0], weights_only=True)["global_step"]
