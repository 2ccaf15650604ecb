"""Seeded trials one after another, a bar, JSON, an exit code.

A trial draws from a generator that is made of the campaign's seed and its own number alone, so that
`--only 17` repeats it. What it gives says under `fine` whether the promise was kept; an error counts as
one that was not."""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).parents[2]
for variable, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}.items():
    os.environ.setdefault(variable, value)
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
RESULTS = ROOT / "benchmarks" / "results" / "campaigns"
TRIALS = {"concurrency": 60, "faults": 200, "kills": 300, "nonfinite": 100, "preemption": 200, "torchrun": 12}
TRIALS |= {"slurm": 10}
Trial = Callable[[Path, int, random.Random], dict[str, Any]]


def run_trials(trial: Trial, place: Path, numbers: Iterable[int], *, seed: int) -> Iterator[dict[str, Any]]:
    """What each trial gives, with its number. `place` is a folder that the trials share."""
    for number in numbers:
        began = time.monotonic()
        try:
            found = trial(place, number, random.Random(f"{seed} {number}"))
        except Exception as error:
            found = {"fine": False, "error": "".join(traceback.format_exception(error))[-2000:]}
        yield {"number": number, **found, "seconds": round(time.monotonic() - began, 2)}


def main() -> int:
    """Runs a campaign as the command line asks; gives the exit code: 0 where every trial was fine."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument("name", choices=TRIALS, help="the campaign: a module of tests/campaigns")
    parser.add_argument("--trials", type=int, help=f"how many; default: {TRIALS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the trials to repeat")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begins no trial after so many")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}/NAME.json")
    parser.add_argument("--keep", type=Path, help="a folder to work in that stays; default: a temporary one")
    given = parser.parse_args()
    # A shell ignores both for what runs in the background, and so would the runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    module = import_module(f"tests.campaigns.{given.name}")
    if hasattr(module, "missing") and module.missing():
        print(f"{given.name}: skipped, {module.missing()}")
        return 0
    trial, trials = module.trial, given.trials or TRIALS[given.name]
    numbers = given.only or range(given.first, given.first + trials)
    out = given.out or RESULTS / f"{given.name}.json"
    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        place = given.keep or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        try:
            bar = tqdm(
                run_trials(trial, place, numbers, seed=given.seed), total=len(numbers), desc=given.name
            )
            for each in bar:
                found.append(each)
                bar.set_postfix(fine=sum(one["fine"] for one in found))
                if not each["fine"]:
                    bar.write(json.dumps(each), file=sys.stdout)
                if time.monotonic() - began > given.seconds:
                    break
            bar.close()
        finally:  # while the folder is there: daemons are ended by their pid files
            if hasattr(module, "close"):
                module.close(place)
    told = {"campaign": given.name, "asked": trials, "seed": given.seed, "made": len(found)}
    told |= {"fine": sum(each["fine"] for each in found), "seconds": round(time.monotonic() - began)}
    out.parent.mkdir(parents=True, exist_ok=True)
    written = json.dumps(told | {"trials": found}, indent=1).replace(f"{place}/", "")  # no machine's paths
    out.write_text(written + "\n")
    print("{campaign}: {fine} of {made} fine, {asked} asked, {seconds} s".format(**told))
    return 0 if found and told["fine"] == told["made"] else 1
