"""Seconds that a sweep takes beyond its runs, and what a finished run costs when its command is given again.

    python benchmarks/costs/sweep.py --jobs 4

A job's seconds are those that its run says it took (`scores.json`, the sum of its phases); what the start of
Python, the imports, the report and the launcher take is overhead. One job at a time: nothing overlaps."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import ROOT, measure_foreign_cores, save, summarize_times, wait_until_quiet


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        waited = wait_until_quiet(options.patience)
        time_sweep(Path(folder), seeds=1)  # the texts and the base model are made, the files are in memory
        rounds = [measure_sweep(Path(folder), f"round{n}", jobs=options.jobs) for n in range(options.rounds)]
        foreign = (
            measure_foreign_cores()
        )  # what others use of the machine: figures are of a quiet one where it is 0
    overhead = [figures["overhead"] for figures in rounds]
    skipped = [figures["skipped"] for figures in rounds]
    results = {
        "command": f"python benchmarks/costs/sweep.py --jobs {options.jobs} --rounds {options.rounds}",
        "jobs": options.jobs,
        "waited": waited,
        "foreign_cores": foreign,
        "overhead_per_job": summarize_times(overhead),
        "run": summarize_times([figures["run"] for figures in rounds]),
        "finished_before_per_job": summarize_times(skipped),
        "sweep_of_finished": summarize_times([figures["again"] for figures in rounds]),
    }
    print(json.dumps(results, indent=1))
    save("sweep", results, out=options.out)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--out", help="the results' file; default: benchmarks/results/sweep.json")
    return parser.parse_args()


def measure_sweep(folder: Path, name: str, *, jobs: int) -> dict[str, float]:
    """Of one sweep: seconds per job beyond the run, of the run itself, and of a finished one given again."""
    sweep_seconds = time_sweep(folder, name=name, seeds=jobs)
    runs = [json.loads(path.read_text())["seconds"] for path in folder.glob(f"outputs/{name}/*/scores.json")]
    repeated_seconds = time_sweep(folder, name=name, seeds=jobs)
    single_seconds = time_sweep(folder, name=name, seeds=1)
    return {
        "overhead": (sweep_seconds - sum(runs)) / jobs,
        "run": statistics.median(runs),
        "again": repeated_seconds,
        "skipped": (repeated_seconds - single_seconds) / max(1, jobs - 1),
    }


def time_sweep(folder: Path, *, seeds: int, name: str = "first") -> float:
    """Seconds of a sweep of small runs over so many seeds, from its command to its end."""
    command = [sys.executable, str(ROOT / "run.py"), "-m", "experiment=smoke", f"name={name}", "logger=none"]
    command += ["trainer.steps=3", "domains.held_out.max_documents=4"]
    command += [
        f"cache_dir={folder}/cache",
        "hydra.launcher.jobs=1",
        f"seed={','.join(map(str, range(seeds)))}",
    ]
    start_time = time.perf_counter()
    subprocess.run(command, cwd=folder, env=dict(os.environ), stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start_time


if __name__ == "__main__":
    main()
