"""Small runs of every method in processes of their own, and what tells one finished run from another."""

import hashlib
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.campaigns.frame import ROOT
from tests.conftest import SMALL, VOCABULARIES, sentences
from tests.support.endtask_fixtures import QUICK, write_task
from tests.support.processes import ended, started

METHODS = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
DDP = ("strategy=ddp", "trainer.accelerator=cpu")
HANGS_S = 120
LINE = re.compile(r"^cpt: .*$", re.MULTILINE)


def write_texts(place: Path) -> Path:
    """The small texts of the tests, once, in a folder that the trials share."""
    for seed, (name, words) in enumerate(VOCABULARIES.items()):
        folder = place / "texts" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            lines = sentences(words, count=120, seed=seed)
            (folder / "all.txt").write_text("\n".join(lines) + "\n")
    return place / "texts"


def endtasks_of(place: Path) -> list[str]:
    """Overrides for end tasks on the two domains."""
    for domain in ("law", "food"):
        if not (place / "tasks" / "endtasks" / domain).exists():
            write_task(place / "tasks", domain)
    quick = QUICK | {"root": place / "tasks", "when": "each", "seeds": "[1,2]", "epochs": 2}
    return ["endtask=texts", *(f"endtask.{name}={value}" for name, value in quick.items())]


def command(place: Path, run: Path, *given: str, cache: Path | None = None) -> list[str]:
    """The arguments of a run of two domains in a folder."""
    texts = write_texts(place)
    places = [f"domains.root={texts}", f"cache_dir={cache or place / 'cache'}", f"hydra.run.dir={run}"]
    return ["domains=texts", *places, *SMALL, "order=[law,food]", *given]


def begin(
    arguments: Sequence[str], run: Path, *, twin: bool = False, script: Path | None = None
) -> BaseProcess:
    """Starts it; what it says is appended to `log` in the run's folder."""
    run.mkdir(parents=True, exist_ok=True)
    return started(script or ROOT / "run.py", *arguments, cwd=run.parent, log=log_of(run), twin=twin)


def log_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def said(run: Path, since: int = 0) -> str:
    """What a run's starts have said, from a place in the log on."""
    path = log_of(run)
    text = path.read_bytes()[since:].decode(errors="replace") if path.exists() else ""
    return text.replace("\r", "\n")


def complete(arguments: Sequence[str], run: Path, *, twin: bool = False, script: Path | None = None) -> int:
    """Runs it to its end; the exit code."""
    return ended(begin(arguments, run, twin=twin, script=script), seconds=HANGS_S)


def bits(run: Path) -> str:
    """A hash of all that a finished run knows: the matrix, the metrics, end tasks, the last stage's state."""
    scores = json.loads((run / "scores.json").read_text())
    assert scores["run"]["finished"], f"{run} is not finished"
    told = [scores["nll"], scores["metrics"], scores["endtasks"].get("scores")]
    found = hashlib.sha256(json.dumps(told).encode())
    if stages := sorted((run / "stages").glob("*.pt")):
        state = torch.load(stages[-1], weights_only=True)
        for name, value in sorted(state.items()):
            found.update(name.encode())
            raw = value.contiguous().view(torch.uint8) if value.ndim else value.reshape(1).view(torch.uint8)
            found.update(raw.numpy().tobytes())
    return found.hexdigest()


WHOLES: dict[tuple, dict[str, Any]] = {}


def whole(place: Path, given: Sequence[str], *, twin: bool = False) -> dict[str, Any]:
    """The bits of a run that nobody disturbed, and its seconds; made once."""
    known = (str(place), *given, twin)
    if known not in WHOLES:
        run = place / "wholes" / str(len(WHOLES))
        arguments = command(place, run, *given)
        began = time.monotonic()
        if complete(arguments, run, twin=twin) != 0:
            raise RuntimeError(f"a whole run of {given} failed: {said(run)[-600:]}")
        WHOLES[known] = {"bits": bits(run), "seconds": time.monotonic() - began, "folder": run}
    return WHOLES[known]


def shuffled(names: Sequence[str], number: int) -> str:
    """The name for a trial: all of them, in another order in each round."""
    turn, at = divmod(number, len(names))
    return random.Random(turn).sample(list(names), len(names))[at]


def wait_for(seen: Callable[[], Any], *, seconds: float) -> bool:
    """Whether it was seen in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if seen():
            return True
        time.sleep(0.005)
    return False


def one_line(text: str) -> str | None:
    """The only line of an error that a user is to see; None where there is a traceback, none or several."""
    found = LINE.findall(text.replace("\r", "\n"))
    return found[0] if len(found) == 1 and "Traceback" not in text else None
