"""Seconds of `python run.py` from an empty cache, by phase: what a newcomer waits for after installing."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.ground import make_parser
from common.measuring import ROOT, save, summarize_times, wait_until_quiet


def time_demo() -> dict[str, float]:
    """The seconds of one run and of its phases. Raises RuntimeError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"CPT_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(ROOT / "run.py"), f"hydra.run.dir={folder}/run"]
        start_time = time.perf_counter()
        process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - start_time
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {process.stderr[-2000:]}")
        phases = json.loads(Path(folder, "run", "scores.json").read_text(encoding="utf-8"))["phases"]
    phase_seconds = {**phases["start"], "train": sum(phases["learn"].values())}
    phase_seconds["evaluate"] = sum(phases["score"].values())
    return {"wall": seconds, **phase_seconds, "imports, files, report": seconds - sum(phase_seconds.values())}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    runs = []
    for _ in range(options.repeats):
        wait_until_quiet(options.patience)
        runs.append(time_demo())

    seconds = {}
    for phase in runs[0]:
        seconds[phase] = summarize_times([run[phase] for run in runs])
        print("{:24}{median:.1f} s [{least:.1f}, {most:.1f}]".format(phase, **seconds[phase]))
    save("demo", {"options": {"repeats": options.repeats}, "seconds": seconds}, out=options.out)


if __name__ == "__main__":
    main()
