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
from cpt.core.errors import readable
from cpt.core.output import run_program
from cpt.trainer.plan import make_plan

NEEDED = "a folder to write to, and what python run.py is given: FOLDER domains=tasks model=…"


def main(arguments: Sequence[str]) -> None:
    about = "Writes the held-out examples of supervised tasks as tasks of the lm-evaluation-harness."
    parser = argparse.ArgumentParser(prog="python -m cpt.contrib.lm_eval_export", description=about)
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="where to write the tasks")
    run = "options of python run.py, as domains=tasks model=…"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=run)
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with readable():
        if given.folder is None or "=" in given.folder:
            raise ValueError(f"FOLDER={given.folder} is invalid. Allowed: {NEEDED}")
        overrides = [each.replace("+experiment=", "experiment=") for each in given.overrides]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            plan = make_plan(compose("config", overrides))
        if plan.source.encoding is None:
            told = f"domains={plan.settings['domains']['name']} is invalid: it is raw text"
            raise ValueError(f"{told}. Allowed: domains=tasks")
        from cpt.contrib.lm_eval_export.tasks import export  # loads torch

        print("\n".join(export(plan, Path(given.folder))))


if __name__ == "__main__":
    run_program(main)
