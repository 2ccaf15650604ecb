"""Write held-out examples as lm-eval tasks: `python -m cpt.contrib.lm_eval_export FOLDER domains=tasks …`.

The prompts are those that the model sees in such a run. The arguments after the folder are those of
`python run.py`. Nothing is trained."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir

from cpt.core.config import CONF
from cpt.core.errors import readable_errors
from cpt.core.exceptions import InvalidOptionError
from cpt.core.output import run_program
from cpt.trainer.plan import make_plan

NEEDED = "a folder to write to, and what python run.py is given: FOLDER domains=tasks model=…"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m cpt.contrib.lm_eval_export",
        description="Writes the held-out examples of supervised tasks as tasks of the lm-evaluation-harness.",
    )
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="where to write the tasks")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="options of python run.py, as domains=tasks model=…",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)

    with readable_errors():
        # If the folder is missing, argparse takes the first override, KEY=VALUE, as FOLDER.
        if options.folder is None or "=" in options.folder:
            raise ValueError(f"FOLDER={options.folder} is invalid. Allowed: {NEEDED}")
        overrides = [override.replace("+experiment=", "experiment=") for override in options.overrides]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            plan = make_plan(compose("config", overrides))
        if plan.source.encoding is None:
            raise InvalidOptionError(
                "domains",
                plan.settings["domains"]["name"],
                reason="it is raw text",
                allowed="domains=tasks",
            )
        from cpt.contrib.lm_eval_export.tasks import export  # loads torch

        print("\n".join(export(plan, Path(options.folder))))


if __name__ == "__main__":
    run_program(main)
