"""What runs learned and forgot, and with what certainty, of matrices that a hand can follow."""

from types import SimpleNamespace

import numpy as np
import pytest

from cpt.contrib.advise.advice import Subject, make_advice
from cpt.contrib.advise.candidates import Model, Setting
from cpt.contrib.advise.results import ArmRun, Measured, Wish, trade
from cpt.contrib.advise.runs import SweepPlan

TINY = Model(("model=tiny_gpt2",), ("model=tiny_gpt2",))

NLL = np.array([[4.0, 5.0, 3.0], [3.0, 5.0, 3.1], [3.4, 4.5, 3.3]])  # base, law, food x law, food, general
COUNTS = np.array([10.0, 30.0, 0.0])  # the last document scores nothing
UP = np.array([[0.0, 0, 0], [1, 0, 0], [1, 0, 0]])  # a nat less is learned of law


def made(nll, *, shift=0.0):
    """A run whose documents differ from the mean by a shift: of the first three times as much, and up."""
    told = SimpleNamespace(rows=["base", "law", "food"], learned=["law", "food"], matrix=nll)
    told.domains = ["law", "food", "general"]
    off = shift * np.array([3.0, -1.0, 0.0])
    drift = np.array([0.0, 1.0, 1.0])[:, None]  # not of the base
    sums = [(nll[:, column, None] + drift * off) * COUNTS for column in range(3)]
    return ArmRun(told, sums, [COUNTS] * 3)


def bounds(runs, **options):
    return Measured(runs).bounds(**{"chosen": "ncl", "steps": 40, "weight": 1.0, "at": None} | options)


def test_forgotten_is_the_mean_over_earlier_domains_and_the_general_text():
    found = trade(NLL, made(NLL).scores)
    assert found["learned"] == pytest.approx((1.0 + 0.5) / 2)
    assert (found["FG"], found["drift"]) == (pytest.approx(0.4), pytest.approx(0.3))
    assert found["forgotten"] == pytest.approx(0.35)


def test_means_are_over_the_seeds_that_all_arms_have():
    runs = {("ncl", 40, 0): made(NLL), ("ncl", 40, 1): made(NLL + UP), ("kd", 40, 0): made(NLL)}
    both = Measured(runs | {("kd", 40, 1): made(NLL + UP)})
    assert both.means()["ncl", 40]["learned"] == pytest.approx((0.75 + 0.25) / 2)
    alone = Measured(runs)
    assert alone.seeds == {40: [0]}
    assert alone.means()["ncl", 40]["learned"] == pytest.approx(0.75)


def test_documents_are_redrawn():
    (low, high) = bounds({("ncl", 40, 0): made(NLL, shift=0.1)})["ncl"]["learned"]
    assert low == pytest.approx(0.75 - 0.3) and high == pytest.approx(0.75 + 0.1)
    (low, high) = bounds({("ncl", 40, 0): made(NLL)})["ncl"]["learned"]
    assert (low, high) == pytest.approx((0.75, 0.75))


def test_seeds_are_redrawn():
    runs = {("ncl", 40, 0): made(NLL), ("ncl", 40, 1): made(NLL + UP)}
    assert bounds(runs)["ncl"]["learned"] == pytest.approx((0.25, 0.75))


def test_differences_between_arms_are_paired():
    runs = {("ncl", 40, 0): made(NLL, shift=0.1), ("ncl", 40, 1): made(NLL + UP, shift=0.1)}
    runs |= {
        ("kd", 40, seed): made(run.scores.matrix + 0.2 * UP, shift=0.1) for (_, _, seed), run in runs.items()
    }
    found = bounds(runs)
    assert found["kd"]["learned"][1] - found["kd"]["learned"][0] > 0.4
    assert found["kd"]["worth"] == pytest.approx((-0.1, -0.1))  # 0.2 nats less of one of two domains
    assert found["ncl"]["worth"] == (0, 0)
    wider = bounds(runs, weight=0.0)
    assert wider["kd"]["worth"] == pytest.approx((-0.1, -0.1))


def test_more_tokens_are_told_from_two_lengths_alone():
    runs = {("ncl", 40, 0): made(NLL)}
    assert "learned_at" not in bounds(runs, at=160)["ncl"]
    runs[("ncl", 10, 0)] = made(NLL + UP)
    found = bounds(runs, at=160)["ncl"]
    assert found["learned_at"] == pytest.approx((1.25, 1.25))  # 0.25, 0.75, and as much again
    assert found["learned"] == pytest.approx((0.75, 0.75))
    assert found["forgotten_at"] == pytest.approx((0.35, 0.35))


@pytest.mark.parametrize(
    ("epoch", "arm", "why"),
    [
        (41.0, "kd", "forgotten"),
        (160.0, "ncl", "to 160 steps a domain"),
        (1e6, "ncl", "to 600 steps a domain"),
    ],
)
@pytest.mark.parametrize("wish", [Wish(None, 1.0), Wish(0.4, 1.0)])
def test_an_arm_is_recommended_by_what_an_epoch_brings(wish, epoch, arm, why):
    runs = {("ncl", 40, 0): made(NLL), ("ncl", 10, 0): made(NLL + UP)}
    runs |= {("kd", 40, 0): made(NLL - 0.2 * UP), ("kd", 10, 0): made(NLL)}  # ahead, and slower
    subject = Subject(("domains=texts",), (), TINY, Setting(1e-3, 2, 2), epoch, 512, 0)
    advice = make_advice(Measured(runs), subject, SweepPlan(("ncl", "kd"), 40, 1, True, 60.0), wish, lost=[])
    assert advice["recommended"]["arm"] == arm
    assert advice["recommended"]["why"].endswith(why) or wish.bound
    worth = {each["arm"]: each["intervals"]["worth"] for each in advice["arms"]}
    assert worth.pop(arm) == [0, 0] and all(high < 0 for _, high in worth.values())
    assert [each["arm"] for each in advice["arms"]] == ["kd", "ncl"]  # as measured
