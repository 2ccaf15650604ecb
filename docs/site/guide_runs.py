"""The run that a picture of the guides shows, trained in minutes: `python docs/site/guide_runs.py` trains it
and writes what `python -m cpt.gate` says of it to benchmarks/results/guide_runs.json."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "guide_runs.json"
OVERRIDES = (
    "order=[sympy,networkx]",
    "trainer.steps=60",
    "trainer.batch_size=8",
    "trainer.log_every_n_steps=1",
    "trainer.checkpoint_every_n_steps=15",
    "logger=csv",
)
GATE = ("--min-gain", "0.05", "--max-forgetting", "0.02", "--json")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "run.py", *OVERRIDES, f"hydra.run.dir={folder}"], cwd=ROOT, check=True
        )
        command = [sys.executable, "-m", "cpt.gate", folder, *GATE]
        gate = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    results = {
        "overrides": OVERRIDES,
        "gate_options": GATE,
        "gate": {"exit_code": gate.returncode, **json.loads(gate.stdout)},
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
