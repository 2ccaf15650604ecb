"""The runs that the pictures of the guides show, trained in minutes: `python docs/site/guide_runs.py` writes
benchmarks/results/guide_runs.json.

One run is trained without an interruption. A second one with the same options is killed by SIGKILL after step
KILL_STEP of its second domain and started again. Of both the training losses are stored, of the first also
what `python -m cpt.gate` says."""

import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "guide_runs.json"
DOMAINS = ("sympy", "networkx")
CHECKPOINT_EVERY = 15  # steps
KILL_STEP = 40
OVERRIDES = (
    f"order=[{','.join(DOMAINS)}]",
    "trainer.steps=60",
    "trainer.batch_size=8",
    "trainer.log_every_n_steps=1",
    f"trainer.checkpoint_every_n_steps={CHECKPOINT_EVERY}",
    "logger=csv",
)
GATE = ("--min-gain", "0.05", "--max-forgetting", "0.02", "--json")
TIMEOUT_S = 3600.0


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "run.py", *OVERRIDES, f"hydra.run.dir={folder}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def read_losses(folder: Path) -> dict[int, float]:
    """The logged training losses of the last domain, by step of its stage."""
    path = folder / "metrics.csv"
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["value"]]
    name = f"train/lm/{DOMAINS[-1]}"
    return {int(row["step"]): float(row["value"]) for row in rows if row["name"] == name}


def kill_at_step(folder: Path) -> dict[int, float]:
    """Kills a run after KILL_STEP; returns the losses that it has logged."""
    process = start(folder)
    deadline = time.monotonic() + TIMEOUT_S
    while max(read_losses(folder), default=0) < KILL_STEP:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"the run ended before step {KILL_STEP}")
        time.sleep(0.05)
    process.kill()
    process.wait()
    return read_losses(folder)


def train(folder: Path) -> dict[int, float]:
    process = start(folder)
    if process.wait(TIMEOUT_S) != 0:
        raise RuntimeError(f"the run failed: see {folder}/run.log")
    return read_losses(folder)


def check_release(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "cpt.gate", str(folder), *GATE]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {"exit_code": process.returncode, **json.loads(process.stdout)}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        whole_folder, killed_folder = Path(name) / "whole", Path(name) / "killed"
        whole = train(whole_folder)
        print("uninterrupted", len(whole), "steps", flush=True)
        killed = kill_at_step(killed_folder)
        print("killed after step", max(killed), flush=True)
        resumed = train(killed_folder)
        results = {
            "overrides": OVERRIDES,
            "checkpoint_every": CHECKPOINT_EVERY,
            "whole": whole,
            "killed": killed,
            "resumed": resumed,
            "gate_options": GATE,
            "gate": check_release(whole_folder),
        }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
