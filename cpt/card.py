"""The certificate of an exported model: `python -m cpt.card RUN`, and `--check`.

Writes RUN/model/CARD.md and card.json from the run's folder alone, or says whether they are what the folder
says: exit code 1 names the first figure that differs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cpt.core.errors import readable
from cpt.core.output import run_program
from cpt.reporting.card.files import DATA, PAGE, count_figures, find_difference, read_card, write_card
from cpt.training.run_folder import RunFolder

DIFFERS = 1


def main(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    with readable(errors_only=True):
        if not given.run.is_dir():
            raise ValueError(f"{given.run} is no folder; needed: the folder of a finished run")
        return check(given.run) if given.check else write(RunFolder(given.run))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m cpt.card", description=__doc__.split("\n\n")[1])
    made.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    made.add_argument(
        "--check",
        action="store_true",
        help="writes nothing; exit code 1 if the card is not what the folder says",
    )
    return made


def write(place: RunFolder) -> int:
    """Writes the card, whose checksums the folder then remembers."""
    with place.locked():
        written = write_card(place.path)
        place.seal_again(written)
    print(*written, sep="\n")
    return 0


def check(folder: Path) -> int:
    """Says whether the card is what the folder says."""
    if difference := find_difference(folder):
        print(f"{folder}: {difference}")
        return DIFFERS
    figures = count_figures(read_card(folder / "model" / DATA))
    print(f"{folder}: {PAGE} and {DATA} say what the folder says ({figures} figures)")
    return 0


if __name__ == "__main__":
    run_program(main)
