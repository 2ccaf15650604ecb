"""Seeded trials one after another, a bar, JSON, an exit code.

A trial draws from a generator that is made of the campaign's seed and its own number alone, so that
`--only 17` repeats it. What it gives says under `fine` whether the promise was kept; an error counts as
one that was not."""

import argparse
import json
import os
import random
import re
import signal
import socket
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
    "fuzz": 40,
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


def without_paths(text: str, work_folder: Path) -> str:
    """A text without the name of this machine and without its paths: those below the folder of the trials and
    below the checkout, which tracebacks name, become relative to it."""
    text = text.replace(f"{work_folder}/", "").replace(f"{ROOT}/", "")
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)


class Report:
    """The JSON file of a campaign, written after each trial: one that is stopped leaves what it has made."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        self.head = head
        self.outcomes: list[dict[str, Any]] = []

    @property
    def numbers(self) -> set[int]:
        return {outcome["number"] for outcome in self.outcomes}

    @property
    def num_fine(self) -> int:
        return sum(outcome["fine"] for outcome in self.outcomes)

    @property
    def seconds(self) -> int:
        return round(sum(outcome["seconds"] for outcome in self.outcomes))

    def resume(self) -> None:
        """Takes the trials of an earlier start. Raises ValueError for one with other trials or other code."""
        if not self.path.exists():
            return
        stored = json.loads(self.path.read_text())
        for name in ("campaign", "commit", "seed"):
            if stored.get(name) != self.head[name]:
                raise ValueError(f"{self.path} has {name}={stored.get(name)}, not {self.head[name]}")
        self.outcomes = stored["trials"]

    def add(self, outcome: dict[str, Any], *, work_folder: Path) -> None:
        self.outcomes.append(outcome)
        counts = {"made": len(self.outcomes), "fine": self.num_fine, "seconds": self.seconds}
        text = json.dumps(self.head | counts | {"trials": self.outcomes}, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(without_paths(text, work_folder) + "\n")
        os.replace(partial, self.path)

    def describe(self) -> str:
        counts = f"{self.num_fine} of {len(self.outcomes)} fine, {self.head['asked']} asked"
        return f"{self.head['campaign']}: {counts}, {self.seconds} s"


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
    parser.add_argument("--resume", action="store_true", help="only the trials that are not in OUT yet")
    parser.add_argument("--keep", type=Path, help="a folder to work in that stays; default: a temporary one")
    arguments = parser.parse_args()
    # A shell ignores both for what runs in the background, and so would the runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    module = import_module(f"tests.campaigns.{arguments.name}")
    if hasattr(module, "find_missing_programs") and module.find_missing_programs():
        print(f"{arguments.name}: skipped, {module.find_missing_programs()}")
        return 0
    numbers = arguments.only
    trials = arguments.trials or TRIALS[arguments.name]
    if numbers is None:
        numbers = range(arguments.first, arguments.first + trials)
    report = Report(
        path=arguments.out or RESULTS / f"{arguments.name}.json",
        head={"campaign": arguments.name, **describe_version(), "asked": trials, "seed": arguments.seed},
    )
    if arguments.resume:
        report.resume()
        numbers = [number for number in numbers if number not in report.numbers]

    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work_folder = arguments.keep or Path(folder)
        work_folder.mkdir(parents=True, exist_ok=True)
        try:
            bar = tqdm(
                run_trials(module.trial, work_folder, numbers, seed=arguments.seed),
                total=len(numbers),
                desc=arguments.name,
            )
            for outcome in bar:
                report.add(outcome, work_folder=work_folder)
                bar.set_postfix(fine=report.num_fine)
                if not outcome["fine"]:
                    bar.write(json.dumps(outcome), file=sys.stdout)
                if time.monotonic() - start > arguments.seconds:
                    break
            bar.close()
        finally:  # while the folder is there: daemons are ended by their pid files
            if hasattr(module, "close"):
                module.close(work_folder)
    print(report.describe())
    return 0 if report.outcomes and report.num_fine == len(report.outcomes) else 1
