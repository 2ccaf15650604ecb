"""Wrong values of every option: is each one line, and is nothing left?

    python tests/campaigns/inputs.py --seed 0
    python tests/campaigns/inputs.py --first OPTIONS  # without the table

The first trials are the rows of tests/support/wrong_options.py, each in a process of its own.
The line has to begin as the table says, on the error stream, with exit code 1 and without a traceback,
and there may be no folder of the run after it. benchmarks/options.py times the same starts.

The trials after these are an option each: of the plain config, then of each choice of each group of
conf/ those of its own. Nineteen wrong values, and the option taken away, are given in this process
(tests/support/leaves.py): each is taken, or refused in one line that names the option and says what is
allowed. Of what the config alone takes three values are tried on the model, and of a tenth of the options one
in a plan of the whole run."""

import random
import re
import shutil
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

from tests.campaigns import runs  # noqa: E402
from tests.campaigns.frame import ROOT, conduct  # noqa: E402
from tests.conftest import SMALL, SMALL_GPT2, SMALL_T5  # noqa: E402
from tests.support import leaves  # noqa: E402
from tests.support import wrong_options as tables  # noqa: E402
from tests.support.processes import ended, started  # noqa: E402

TABLES = (
    (tables.AT_ONCE, []),
    (tables.ON_THE_MODEL, SMALL),
    (tables.ON_A_CAUSAL, SMALL_GPT2),
    (tables.ON_A_DECODER, SMALL_T5),
)
WORD = re.compile(r"(?:\{[^}]*\}|\S)+")  # with the spaces that a mapping has
CASES = [(given, said, size) for table, size in TABLES for given, said in table.items()]


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    texts = runs.write_texts(place)
    if number < len(CASES):
        return of_the_table(texts, place / f"case-{number}", *CASES[number])
    option = next(islice(cycle(leaves.options(texts)), number - len(CASES), None))
    found = leaves.try_option(texts, place, option, draw)
    return {"option": " ".join(option), "values": len(leaves.WRONG) + 1, "wrong": found, "fine": not found}


def of_the_table(texts: Path, home: Path, given: str, said: str, size: list[str]) -> dict[str, Any]:
    home.mkdir()
    (home / "cpt").symlink_to(ROOT / "cpt")  # a folder that some cases name
    places = [f"domains.root={texts}", "domains=texts", f"cache_dir={home / 'cache'}"] if size else []
    words = [each.replace("=(", "='('") for each in WORD.findall(given)]  # as a shell hands them over
    code = ended(started(ROOT / "run.py", *places, *size, *words, cwd=home, log=home / "log"))
    log = (home / "log").read_text()
    line, left = runs.one_line(log), sorted(str(path) for path in home.glob("outputs/*/*"))
    fine = code == 1 and line is not None and line.startswith(f"cpt: {said}") and not left
    shutil.rmtree(home)
    return {"given": given, "code": code, "left": left, "fine": fine, "last": "" if fine else log[-800:]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        many = len(CASES) + len([*leaves.options(runs.write_texts(Path(folder)))])
    sys.exit(conduct(trial, name="inputs", about=__doc__.replace("OPTIONS", str(len(CASES))), trials=many))
