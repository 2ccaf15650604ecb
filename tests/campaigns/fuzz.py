"""Inputs that nobody meant (tests/test_fuzz.py), drawn by hypothesis: is each taken, or refused in one line?

A trial is INPUTS of them, of one area in turn: overrides, texts, end tasks, run folders."""

import random
import warnings
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.campaigns.frame import ROOT
from tests.test_fuzz import AREAS

INPUTS = 250


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    area = [*AREAS][number % len(AREAS)]
    check_input, strategies = AREAS[area]

    @seed(draw.getrandbits(32))
    @settings(
        max_examples=INPUTS,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(*strategies))
    def check_drawn_input(arguments: tuple) -> None:
        check_input(*arguments)

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a library warns of is no traceback
        check_drawn_input()
    return {"area": area, "inputs": INPUTS, "fine": True}
