"""Signals at random moments of runs: does every process leave, is a step lost, are the bits the same?

    python benchmarks/preemption.py --trials 60

Small runs (two domains, 60 steps each, a checkpoint every 1000) of six methods, by one process and by two;
each trial sends one of four signals to one of the processes at a random moment, and gives the same command
again."""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402

from cpt.core.preemption import GO_ON, SIGNALS  # noqa: E402
from tests.conftest import SMALL, VOCABULARIES, sentences  # noqa: E402
from tests.support.processes import ended, sent, started  # noqa: E402

METHODS = ("ncl", "das", "migu", "ewc", "derpp", "demix")
DDP = ("strategy=ddp", "trainer.accelerator=cpu")
SAID = re.compile(r"cpt: stopped by SIG\w+(?: after step (\d+) of \d+ of (\w+))?")
HANGS_S = 90


def texts(root: Path) -> None:
    for seed, (name, words) in enumerate(VOCABULARIES.items()):
        (root / name).mkdir(parents=True)
        (root / name / "all.txt").write_text("\n".join(sentences(words, count=120, seed=seed)) + "\n")


def command(place: Path, method: str, processes: int, run: Path) -> list[str]:
    places = [f"domains.root={place / 'texts'}", f"cache_dir={place / 'cache'}", f"hydra.run.dir={run}"]
    options = ["trainer.steps=60", "trainer.checkpoint_every=1000", "order=[law,food]"]
    company = DDP if processes > 1 else ()
    return ["domains=texts", *places, *SMALL, *options, f"method={method}", *company]


def begin(arguments: list[str], run: Path, *, processes: int) -> Any:
    run.mkdir(parents=True, exist_ok=True)
    return started(ROOT / "run.py", *arguments, cwd=run.parent, log=run / "log", twin=processes > 1)


def bits(run: Path) -> str:
    """A hash of all that a finished run knows."""
    scores = json.loads((run / "scores.json").read_text())
    found = hashlib.sha256(json.dumps([scores["nll"], scores["metrics"]]).encode())
    (*_, last) = sorted((run / "stages").glob("*.pt"))
    for name, value in sorted(torch.load(last, weights_only=True).items()):
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def lost(run: Path) -> int | None:
    """Optimizer steps that were made and are in no checkpoint; None where no step was under way."""
    found = [match for match in SAID.finditer((run / "log").read_text()) if match[1]]
    if not found:
        return None
    (path,) = run.glob(f"checkpoints/*-{found[-1][2]}.ckpt")
    return int(found[-1][1]) - torch.load(path, weights_only=True)["global_step"]


def trial(place: Path, arguments: list[str], run: Path, *, processes: int, whole: dict, draw: Any) -> dict:
    """One signal and the same command again; None where the run was over before."""
    number, rank = draw.choice(SIGNALS), draw.randrange(processes)
    moment = draw.uniform(0.3, whole["seconds"])
    process = begin(arguments, run, processes=processes)
    time.sleep(moment)
    while process.is_alive() and rank and not children(process.pid):
        time.sleep(0.01)
    if not process.is_alive():
        return {}
    sent(process, number, rank=rank)
    asked = time.monotonic()
    code = ended(process, seconds=HANGS_S)
    told = {"signal": signal.Signals(number).name, "rank": rank, "moment": round(moment, 2), "code": code}
    if code == 0:
        return {}
    told |= {"left_after_s": round(time.monotonic() - asked, 2), "lost": lost(run)}
    told["said"] = len(SAID.findall((run / "log").read_text())) == 1
    code = ended(begin(arguments, run, processes=processes), seconds=HANGS_S)
    return told | {"then": code, "same": code == 0 and bits(run) == whole["bits"]}


def children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def trials(place: Path, count: int, *, seed: int) -> Iterator[dict]:
    draw, wholes = random.Random(seed), {}
    for number, setup in enumerate(islice(cycle(product(METHODS, (1, 2))), count)):
        method, processes = setup
        if setup not in wholes:
            run = place / f"whole-{method}-{processes}"
            arguments = command(place, method, processes, run)
            ended(begin(arguments, run, processes=processes))
            began = time.monotonic()
            shutil.rmtree(run)
            assert ended(begin(arguments, run, processes=processes)) == 0, (run / "log").read_text()
            wholes[setup] = {"seconds": time.monotonic() - began, "bits": bits(run)}
        found: dict = {}
        while not found:
            run = place / f"run-{number}-{draw.random()}"
            arguments = command(place, method, processes, run)
            found = trial(place, arguments, run, processes=processes, whole=wholes[setup], draw=draw)
        yield {"method": method, "processes": processes, **found}


def fine(each: dict) -> bool:
    return each["code"] == GO_ON and each["said"] and each["same"] and each["lost"] in (0, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/preemption.json")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        texts(place / "texts")
        for each in trials(place, given.trials, seed=given.seed):
            found.append(each)
            print(f"{sum(map(fine, found))}/{len(found)}", json.dumps(each), flush=True)
    given.out.write_text(json.dumps({"trials": found, "fine": sum(map(fine, found))}, indent=1) + "\n")


if __name__ == "__main__":
    main()
