"""How much of a stage's squared movement lies inside what a method protects: `python
benchmarks/studies/protection.py` makes the table of docs/studies/protection.md.

Two default domains, so many steps of AdamW with weight decay each, a process for each row; the second
stage's `protected_movement` of scores.json, as released code acts and as here."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import ROOT, save
from study import PAGES, check_page, write_section

PAGE = PAGES / "protection.md"
NAME = "protection"  # in the marks of the page
UNITS = "method.units=[heads,neurons,outputs,tokens]"
ROWS: dict[str, dict[str, list[str]]] = {  # what protects: by what it acts on
    "`das`: soft masks on units": {
        target: [
            "method=das",
            UNITS,
            "method.normalize=rank",
            "method.contrast=0",
            f"method.apply_to={target}",
        ]
        for target in ("gradient", "update", "frozen")
    },
    "`dga`: soft masks on heads": {
        target: ["method=dga", "method.normalize=rank", "method.contrast=0", f"method.apply_to={target}"]
        for target in ("gradient", "update", "frozen")
    },
    "`mask=migu mask.migu.importance=fisher`: rows": {
        target: ["mask=migu", "mask.migu.importance=fisher", f"mask.migu.apply_to={target}"]
        for target in ("gradient", "update", "frozen")
    },
    "`hat`: what the gates of earlier domains have opened": {
        target: ["method=hat", f"method.apply_to={target}"] for target in ("gradient", "update", "frozen")
    },
    "`osf`: large singular directions": {
        target: [
            "method=osf",
            "method.protected_layers=blocks",
            "method.protected_share=0.5",
            f"method.apply_to={target}",
        ]
        for target in ("gradient", "update")
    },
    "`ewc`: the weights that matter most": {"a penalty": ["method=ewc", "method.strength=5000"]},
    "`mas`: the same": {"a penalty": ["method=mas"]},
    "`si`: the same": {"a penalty": ["method=si"]},
}
HEAD = ["what protects", "of a random movement", "gradient", "update", "frozen", "a penalty"]


def learn(overrides: Sequence[str], *, steps: int, folder: Path, threads: int) -> list[list[float]]:
    """The leaks of a run's rows."""
    command = [
        sys.executable,
        "run.py",
        "experiment=smoke",
        "order=[sympy,networkx]",
        f"trainer.steps={steps}",
        "eval.max_tokens=1000",
        "optim.weight_decay=0.1",
        "logger=none",
        *overrides,
        f"hydra.run.dir={folder}",
    ]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{process.stderr[-2000:]}")
    return json.loads((folder / "scores.json").read_text(encoding="utf-8"))["protected_movement"]


def tabulate(movements: Mapping[str, Mapping[str, list[float]]]) -> Iterator[str]:
    yield f"| {' | '.join(HEAD)} |"
    yield f"| :-- |{' --: |' * (len(HEAD) - 1)}"
    for name, leaks in movements.items():
        random = next(iter(leaks.values()))[1]
        cells = [f"{leaks[target][0]:.1e}" if target in leaks else "" for target in HEAD[2:]]
        yield f"| {name} | {random:.3f} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of each of two domains")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="JSON file to write; default: benchmarks/results/")
    options = parser.parse_args()
    check_page(PAGE, NAME)
    movements: dict[str, dict[str, Any]] = {}
    for name, variants in ROWS.items():
        for target, overrides in variants.items():
            with tempfile.TemporaryDirectory() as folder:
                leaks = learn(
                    overrides, steps=options.steps, folder=Path(folder) / "run", threads=options.threads
                )
            movements.setdefault(name, {})[target] = leaks[-1]
            print(f"{name}, {target}: {leaks[-1]}", flush=True)
    write_section(PAGE, NAME, ["\n".join(tabulate(movements))])
    save("protection", {"options": {"steps": options.steps}, "leaks": movements}, out=options.out)


if __name__ == "__main__":
    main()
