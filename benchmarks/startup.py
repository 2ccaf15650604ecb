"""Seconds until `run.py` has answered: its help, and a config with an error in it."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from ground import arguments
from measuring import ROOT, rotated, save, spread, wait_until_quiet

COMMANDS = {
    "python": (["-c", "pass"], 0),
    "help": ([str(ROOT / "run.py"), "--help"], 0),
    "error": ([str(ROOT / "run.py"), "order=9"], 1),
}
TARGET_S = 3.0


def answered(command: list[str], *, code: int, folder: str) -> dict[str, float]:
    """Wall and processor seconds of one start; raises RuntimeError for another exit code."""
    before, start_time = os.times(), time.perf_counter()
    process = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    wall, after = time.perf_counter() - start_time, os.times()
    if process.returncode != code:
        raise RuntimeError(f"exit code {process.returncode}, not {code}: {process.stderr[-2000:]}")
    cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": wall, "cpu": cpu_seconds}


def rounds(repeats: int, patience: float) -> dict[str, list[dict[str, float]]]:
    """All commands in turns, in an empty folder; the first round is not counted."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats + 1):
            patience -= wait_until_quiet(patience)
            for name in rotated(list(COMMANDS), number):
                command, code = COMMANDS[name]
                times[name].append(answered(command, code=code, folder=folder))
    return {name: starts[1:] for name, starts in times.items()}


def summary(times: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    return {
        name: {kind: spread([start[kind] for start in starts]) for kind in ("wall", "cpu")}
        for name, starts in times.items()
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    chosen = parser.parse_args()
    times = rounds(chosen.repeats, chosen.patience)
    seconds = summary(times)
    for name, figures in seconds.items():
        print("{:8}{median:.2f} s [{least:.2f}, {most:.2f}]".format(name, **figures["wall"]))
    slowest = max(statistics.median(start["wall"] for start in starts) for starts in times.values())
    print(f"target: {TARGET_S} s, {'met' if slowest <= TARGET_S else 'missed'}")
    results = {"options": {"repeats": chosen.repeats}, "target_s": TARGET_S, "seconds": seconds, "all": times}
    save("startup", results, out=chosen.out)


if __name__ == "__main__":
    main()
