"""`python -m cpt.tune OVERRIDE…`: tune methods on validation text, then compare them on test text."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

EPILOG = """Other arguments are those of run.py, with values of several methods after commas:
python -m cpt.tune name=tuned method=ncl,ewc,kd --budget 12 --seeds 3"""


def build_command(arguments: Sequence[str]) -> list[str]:
    """The sweep of run.py that the arguments stand for."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m cpt.tune", description=__doc__, epilog=EPILOG, formatter_class=form
    )
    parser.add_argument("--budget", type=int, help="trials of each method (default: 12)")
    parser.add_argument(
        "--seeds", type=int, help="final runs of each method, with seeds 0, 1, … (default: 3)"
    )
    options, overrides = parser.parse_known_args(arguments)
    for name, value in (("--budget", options.budget), ("--seeds", options.seeds)):
        if value is not None and value < 1:
            parser.error(f"{name} {value} is invalid. Allowed: 1, 2, …")

    tuning = ["hydra/sweeper=tune"]
    if options.budget is not None:
        tuning.append(f"hydra.sweeper.n_trials={options.budget}")
    has_seed_override = any(override.startswith("seed=") for override in overrides)
    if has_seed_override and options.seeds is not None:
        parser.error(f"--seeds {options.seeds} is invalid with seed=…. Allowed: one of them")
    if not has_seed_override:
        tuning.append(f"seed={','.join(map(str, range(options.seeds or 3)))}")
    return [sys.executable, "-m", "cpt", *overrides, *tuning, "--multirun"]


def main(arguments: Sequence[str]) -> NoReturn:
    """Becomes the sweep's process: signals and exit codes are its own."""
    command = build_command(arguments)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
