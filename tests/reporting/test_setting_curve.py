"""Learned against forgotten over a setting: which runs make a curve, and where its points are."""

import numpy as np
import pytest

from cpt.report import main
from tests.support.comparing import NLL, saved

STRENGTHS = {1: 0.0, 10: 0.1, 100: 0.3}  # by how much less is learned, and less forgotten


@pytest.fixture
def folder(tmp_path):
    """Two methods at three strengths with two seeds each, and ncl."""
    given = np.asarray(NLL, float)
    for seed in (0, 1):
        base = {"seed": seed, "nll": (given + seed / 50).tolist()}
        saved(tmp_path / f"ncl-{seed}", config={"seed": seed, "method": {"name": "ncl"}}, **base)
        for method in ("ewc", "l2"):
            for strength, less in STRENGTHS.items():
                nll = given + seed / 50
                nll[1:] += less
                config = {"seed": seed, "method": {"name": method, "strength": strength}}
                variant = f"method.strength={strength}"
                saved(tmp_path / f"{method}-{strength}-{seed}", config=config, method=method, variant=variant,
                      seed=seed, nll=nll.tolist())  # fmt: skip
    return tmp_path


def test_it_comes_first_with_what_was_learned_and_forgotten(folder):
    assert main([str(folder), "--curve", "method.strength", "--export", "none"]) == 0
    page = (folder / "comparison.md").read_text()
    assert page.index("Learned against forgotten over method.strength") < page.index("## Compute")
    assert (folder / "comparison-strengths.png").stat().st_size > 10_000
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ewc | 1")]
    assert [row[1] for row in rows] == ["1", "10", "100"]
    assert [line for line in page.splitlines() if line.startswith("| ncl | – | 2 |")]
    learned = [float(row[3]) for row in rows[:3]]
    assert learned[0] - learned[1] == pytest.approx(0.1, abs=2e-4)
    assert learned[0] - learned[2] == pytest.approx(0.3, abs=2e-4)


def test_a_setting_that_makes_no_difference_is_told(folder, capsys):
    assert main([str(folder), "--curve", "method.strenth"]) == 1
    told = capsys.readouterr().err
    differing = "method.name, method.strength, seed"
    assert told == f"cpt: --curve method.strenth; allowed: a setting in which runs differ: {differing}\n"
