"""What a run is called beside others."""

import subprocess
import sys

import pytest

from cpt.reporting.frames import label, megabytes
from tests.conftest import ROOT

RUN = {"method": "das", "mask": "none", "replay": "none", "variant": ""}


def test_a_label_names_what_is_laid_over_the_method():
    assert label(RUN) == "das"
    assert label(RUN | {"mask": "migu", "replay": "past"}) == "das + migu + replay past"


def test_values_that_all_runs_share_are_left_out():
    one = RUN | {"variant": "trainer.steps=5; units=[heads]"}
    other = RUN | {"variant": "trainer.steps=5; contrast=0"}
    assert label(one, shared={"trainer.steps=5"}) == "das (units=[heads])"
    assert label(other) == "das (trainer.steps=5, contrast=0)"


def test_a_variant_is_what_the_command_line_gives_beyond_the_names():
    given = ["method=migu", "method.mask.threshold=0.5", "trainer.steps=7", "seed=2", "logger=none", "name=x"]
    given += ["trainer.workers=1", "order=1", "model=tiny_gpt2", "hydra.verbose=false"]
    command = [sys.executable, "run.py", *given, "--cfg", "job", "--resolve"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60).stdout
    assert "variant: mask.threshold=0.5; trainer.steps=7\n" in shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (None, "–"),
        (0, "0 B"),
        (600, "600 B"),
        (4_096, "4.10 kB"),
        (10_000, "10.00 kB"),
        (100_000, "0.10 MB"),
        (2e8, "200 MB"),
    ],
)
def test_a_small_state_is_not_nothing(size, shown):
    assert megabytes(size) == shown
