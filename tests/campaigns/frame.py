"""Seeded trials one after another, a bar, JSON, an exit code.

A trial draws from a generator that is made of the campaign's seed and its own number alone, so that
`--only 17` repeats it. What it gives says under `fine` whether the promise was kept; an error counts as
one that was not."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).parents[2]
for variable, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}.items():
    os.environ.setdefault(variable, value)
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
RESULTS = ROOT / "benchmarks" / "results" / "campaigns"
TRIALS = {
    "concurrency": 60,
    "derived": 40,
    "faults": 200,
    "kills": 300,
    "nonfinite": 100,
    "preemption": 200,
    "tracking": 40,
    "torchrun": 12,
    "slurm": 10,
}
Trial = Callable[[Path, int, random.Random], dict[str, Any]]


def run_trials(trial: Trial, folder: Path, numbers: Iterable[int], *, seed: int) -> Iterator[dict[str, Any]]:
    """What each trial gives, with its number. `folder` is one that the trials share."""
    for number in numbers:
        start = time.monotonic()
        try:
            outcome = trial(folder, number, random.Random(f"{seed} {number}"))
        except Exception as error:
            outcome = {"fine": False, "error": "".join(traceback.format_exception(error))[-2000:]}
        yield {"number": number, **outcome, "seconds": round(time.monotonic() - start, 2)}


def describe_version() -> dict[str, str]:
    """The day and the commit that a campaign is about to try; with a plus sign if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+", "--abbrev=8"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {"day": datetime.now(UTC).date().isoformat(), "commit": commit}


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
    arguments = parser.parse_args()
    # A shell ignores both for what runs in the background, and so would the runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    module = import_module(f"tests.campaigns.{arguments.name}")
    if hasattr(module, "missing") and module.missing():
        print(f"{arguments.name}: skipped, {module.missing()}")
        return 0
    trial = module.trial
    trials = arguments.trials or TRIALS[arguments.name]
    numbers = arguments.only or range(arguments.first, arguments.first + trials)
    out = arguments.out or RESULTS / f"{arguments.name}.json"
    version = describe_version()
    start = time.monotonic()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        work_folder = arguments.keep or Path(folder)
        work_folder.mkdir(parents=True, exist_ok=True)
        try:
            bar = tqdm(
                run_trials(trial, work_folder, numbers, seed=arguments.seed),
                total=len(numbers),
                desc=arguments.name,
            )
            for outcome in bar:
                outcomes.append(outcome)
                bar.set_postfix(fine=sum(trial_outcome["fine"] for trial_outcome in outcomes))
                if not outcome["fine"]:
                    bar.write(json.dumps(outcome), file=sys.stdout)
                if time.monotonic() - start > arguments.seconds:
                    break
            bar.close()
        finally:  # while the folder is there: daemons are ended by their pid files
            if hasattr(module, "close"):
                module.close(work_folder)
    summary = {
        "campaign": arguments.name,
        "day": version["day"],
        "commit": version["commit"],
        "asked": trials,
        "seed": arguments.seed,
        "made": len(outcomes),
        "fine": sum(outcome["fine"] for outcome in outcomes),
        "seconds": round(time.monotonic() - start),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    report = json.dumps(summary | {"trials": outcomes}, indent=1)
    report = report.replace(f"{work_folder}/", "")  # no machine's paths
    out.write_text(report + "\n")
    print("{campaign}: {fine} of {made} fine, {asked} asked, {seconds} s".format(**summary))
    return 0 if outcomes and summary["fine"] == summary["made"] else 1
