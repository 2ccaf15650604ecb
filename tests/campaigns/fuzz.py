"""Inputs that nobody meant, made by hypothesis: is each taken, or refused in one line that names its
file?

    python tests/campaigns/fuzz.py --trials 40 --seed 0

A trial is 250 inputs of one area, in turn: overrides of the config, files of text, examples of end tasks,
files of run folders and all that reads them (verify, status, scores, the run folder itself). Where one
fails, the smallest such input is told. The same seed makes the same inputs with the same version of
hypothesis."""

import random
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

from tests.campaigns.frame import LONGEST, conduct  # noqa: E402
from tests.support.fuzzing import AREAS, try_examples  # noqa: E402

EXAMPLES = 250


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    area = list(AREAS)[number % len(AREAS)]
    warnings.simplefilter("ignore")
    try:
        inputs = try_examples(area, EXAMPLES, seed=draw.getrandbits(32))
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        told = "".join(traceback.format_exception(error))[-LONGEST:]
        return {"area": area, "fine": False, "error": f"{notes}\n{told}"}
    return {"area": area, "fine": True, "inputs": inputs}


if __name__ == "__main__":
    sys.exit(conduct(trial, name="fuzz", about=__doc__, trials=40))
