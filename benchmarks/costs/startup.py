"""Seconds until `run.py` has answered: its help, and a config with an error in it."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.ground import make_parser
from common.measuring import ROOT, rotate, save, summarize_times, wait_until_quiet

COMMANDS = {
    "python": (["-c", "pass"], 0),
    "help": ([str(ROOT / "run.py"), "--help"], 0),
    "error": ([str(ROOT / "run.py"), "order=9"], 1),
}
TARGET_S = 3.0


def time_command(command: list[str], *, code: int, folder: str) -> dict[str, float]:
    """Wall and CPU seconds of one start; raises RuntimeError for another exit code."""
    before = os.times()
    start_time = time.perf_counter()
    process = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    wall = time.perf_counter() - start_time
    after = os.times()
    if process.returncode != code:
        raise RuntimeError(f"exit code {process.returncode}, not {code}: {process.stderr[-2000:]}")
    cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": wall, "cpu": cpu_seconds}


def run_rounds(repeats: int, patience: float) -> dict[str, list[dict[str, float]]]:
    """All commands in turns, in an empty folder; the first round is not counted."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats + 1):
            patience -= wait_until_quiet(patience)
            for name in rotate(list(COMMANDS), number):
                command, code = COMMANDS[name]
                times[name].append(time_command(command, code=code, folder=folder))
    return {name: starts[1:] for name, starts in times.items()}


def summarize(times: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Median, least and most of the wall and CPU seconds of each command."""
    summary = {}
    for name, starts in times.items():
        summary[name] = {
            "wall": summarize_times([start["wall"] for start in starts]),
            "cpu": summarize_times([start["cpu"] for start in starts]),
        }
    return summary


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    times = run_rounds(options.repeats, options.patience)
    seconds = summarize(times)
    for name, figures in seconds.items():
        print("{:8}{median:.2f} s [{least:.2f}, {most:.2f}]".format(name, **figures["wall"]))
    slowest = max(figures["wall"]["median"] for figures in seconds.values())
    print(f"target: {TARGET_S} s, {'met' if slowest <= TARGET_S else 'missed'}")
    results = {
        "options": {"repeats": options.repeats},
        "target_s": TARGET_S,
        "seconds": seconds,
        "all": times,
    }
    save("startup", results, out=options.out)


if __name__ == "__main__":
    main()
