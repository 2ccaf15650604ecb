"""The frame of the campaigns: seeded trials one after another, a bar, a figure, JSON, an exit code.

A trial draws from a generator that is made of the campaign's seed and its own number alone, so that
`--only 17` repeats it. What it gives says under `fine` whether the promise was kept; an error counts as
one that was not."""

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]
for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from tqdm import tqdm  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "campaigns"
LONGEST = 2000  # characters of an error that are kept
Trial = Callable[[Path, int, random.Random], dict[str, Any]]


def run_trials(trial: Trial, place: Path, numbers: Iterable[int], *, seed: int) -> Iterator[dict[str, Any]]:
    """What each trial gives, with its number. `place` is a folder that the trials share."""
    for number in numbers:
        began = time.monotonic()
        try:
            found = trial(place, number, random.Random(f"{seed} {number}"))
        except Exception as error:
            found = {"fine": False, "error": "".join(traceback.format_exception(error))[-LONGEST:]}
        yield {"number": number, **found, "seconds": round(time.monotonic() - began, 2)}


def sum_up(name: str, given: argparse.Namespace, found: list[dict[str, Any]], took: float) -> dict[str, Any]:
    """What is written of a campaign: how many trials were asked for, were made, were fine, and each."""
    fine = sum(each["fine"] for each in found)
    asked = {"asked": given.trials, "seed": given.seed}
    made = {"made": len(found), "fine": fine, "seconds": round(took)}
    return {"campaign": name, **asked, **made, "trials": found}


def read_options(description: str, name: str, trials: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the trials to repeat")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begins no trial after so many")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument("--keep", type=Path, help="a folder to work in that stays; default: a temporary one")
    return parser.parse_args()


def conduct(trial: Trial, *, name: str, about: str, trials: int) -> int:
    """Runs a campaign as the command line asks; gives the exit code: 0 where every trial was fine."""
    given = read_options(about, name, trials)
    numbers = given.only or range(given.first, given.first + given.trials)
    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        place = given.keep or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        bar = tqdm(run_trials(trial, place, numbers, seed=given.seed), total=len(numbers), desc=name)
        for each in bar:
            found.append(each)
            bar.set_postfix(fine=sum(one["fine"] for one in found))
            if not each["fine"]:
                bar.write(json.dumps(each), file=sys.stdout)
            if time.monotonic() - began > given.seconds:
                break
        bar.close()
    told = sum_up(name, given, found, time.monotonic() - began)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{name}: {told['fine']} of {told['made']} fine, {told['asked']} asked, {told['seconds']} s")
    return 0 if found and told["fine"] == told["made"] else 1
