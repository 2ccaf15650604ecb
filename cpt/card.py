"""Write the model card (`model/README.md`) of a finished run again: `python -m cpt.card RUN`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cpt.core.errors import readable
from cpt.core.files import CHECKSUMS, read_checksums, write_checksums
from cpt.core.output import run_program
from cpt.reporting.model_card import write_model_card
from cpt.trainer.run_dir import RunDir


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpt.card", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    run = RunDir(parser.parse_args(arguments).run)
    with readable():
        scores = run.load_scores()
        if scores is None or not scores.run["finished"] or len(scores.rows) < 2:
            raise ValueError(f"RUN={run.path} is invalid. Allowed: the folder of a finished run that trained")
        if not (run.model / "config.json").is_file():
            raise ValueError(f"{run.model} holds no exported model; the command of the run exports it again")

        with run.locked():
            card = write_model_card(run.path, scores)
            # Else the next start of the run would find the new card damaged.
            if (run.path / CHECKSUMS).exists():
                write_checksums(run.path, [card], unread=read_checksums(run.path))
    print(card)
    return 0


if __name__ == "__main__":
    run_program(main)
