"""What runs are taken to say about a paper's claim (benchmarks/claims.py)."""

import sys
from dataclasses import replace

import pytest

from tests.conftest import ROOT
from tests.support.comparing import endtasks, made, run, section

sys.path.insert(0, str(ROOT / "benchmarks"))
import claims  # noqa: E402

sys.path.pop(0)

CLAIM = claims.Claim(text="more", of="das", against="ncl", measure="LC/nats", better=-1, show=claims.nats)


def runs(shifts):
    """das and ncl by seed, das's last row shifted."""
    pairs = [
        (run(method="ncl", seed=seed), run(method="das", seed=seed, shift=shift))
        for seed, shift in enumerate(shifts)
    ]
    return section([each for pair in pairs for each in pair])


@pytest.mark.parametrize(
    ("shifts", "better", "verdict"),
    [
        ([-0.1, -0.2, -0.3, -0.2, -0.1, -0.3], -1, "held"),
        ([-0.1, -0.2, -0.3, -0.2, -0.1, -0.3], 1, "the contrary"),
        ([-0.1, -0.2, -0.3], -1, "not shown"),
        ([-0.1, 0.2, -0.3, 0.2, -0.1, 0.3], -1, "not shown"),
        ([-0.1, 0.2, -0.3, 0.2, -0.1, 0.3], 0, "no difference shown"),
        ([0.1, 0.2, 0.3, 0.2, 0.1, 0.3], 0, "differs"),
    ],
)
def test_a_claim_holds_where_the_test_says_so_in_its_direction(shifts, better, verdict):
    claim = replace(CLAIM, better=better)
    found = claims.tested(claim, runs(shifts))
    assert found.n == len(shifts) and found.mean == pytest.approx(sum(shifts) / len(shifts))
    ((*_, p, holm, _, _, told),) = claims.tell({claim: found})
    assert p == holm and told == verdict


def test_a_verdict_goes_by_the_corrected_p():
    given = runs([-0.1, -0.2, -0.3, -0.2, -0.1, -0.3])
    both = [replace(CLAIM, measure="LC/nats"), replace(CLAIM, measure="FG/nats")]
    told = claims.rows(given, both)
    assert [(line[3], line[4], line[-1]) for line in told] == [("0.0312", "0.0625", "not shown")] * 2


def test_a_claim_against_zero_is_one_about_the_group_alone():
    claim = replace(CLAIM, against="", measure="FG/nats")
    found = claims.tested(claim, runs([0.0] * 6))
    assert found.mean == pytest.approx(((4.9 - 4.6) + (4.5 - 4.2)) / 2)


def test_what_was_not_run_is_said_to_be_so():
    told = claims.rows(section([run(method="ncl", seed=seed) for seed in range(3)]), claims.ON_TEXT)
    assert {line[-1] for line in told} == {"not run"} and len(told) == len(claims.ON_TEXT)


def test_early_and_late_tasks_are_those_of_the_order_of_learning():
    given = endtasks([[None] * 3, [None] * 3, [None] * 3, [0.5, 0.7, 0.9]])
    one = run(endtasks=given)
    assert claims.accuracy(one, late=False) == pytest.approx(0.6)
    assert claims.accuracy(one, late=True) == pytest.approx(0.8)
    assert claims.accuracy(run(), late=True) is None
    assert claims.measured(run(), "late loss") == pytest.approx((4.2 + 4.0) / 2)
    assert made().run["order"] == ["law", "food", "space"]
