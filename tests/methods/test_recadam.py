"""RecAdam: the pull in closed form, and what a step counts."""

import math

import pytest
import torch
from torch import nn

from cpt.gradient_masks.base import StepSnapshot
from cpt.methods.options import RecAdamOptions
from cpt.methods.recadam import Recall
from tests.support.making import ORDER, made

GIVEN = {"strength": 5.0, "annealed": True, "middle": 0.5, "slope": 8.0, "towards": "previous"}


class Anchor:
    def __init__(self, value):
        self.value = value

    def named(self):
        return {"weight": self.value}

    def at_hand(self, stored):
        return stored


def recalled(share, *, gradient, **options):
    """A weight that was 3 and whose anchor is 1 after a step of AdamW at a rate of 0.1."""
    weight = nn.Parameter(torch.tensor([3.0]))
    recall = Recall(Anchor(torch.tensor([1.0])), RecAdamOptions(**{**GIVEN, **options}))
    recall.anchors, recall.share = {weight: "weight"}, share
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.tensor([gradient])
    held = StepSnapshot(recall, recall.covered())
    optimizer.step()
    held.apply(optimizer)
    return weight.item()


def test_without_a_gradient_it_is_the_pull_alone():
    """3 - eta (1 - lambda) gamma (3 - 1)"""
    for share in (0.0, 0.25, 1.0):
        assert recalled(share, gradient=0.0) == pytest.approx(3 - 0.1 * (1 - share) * 5 * 2)


def test_the_step_counts_its_share_and_the_pull_comes_after_it():
    """Adam's first step is the rate against the gradient's sign."""
    moved = 3 + 0.25 * -0.1
    assert recalled(0.25, gradient=2.0) == pytest.approx(moved - 0.1 * 0.75 * 5 * (moved - 1), rel=1e-5)
    moved = 3 - 0.1
    assert recalled(1.0, gradient=2.0, annealed=False) == pytest.approx(
        moved - 0.1 * 5 * (moved - 1), rel=1e-5
    )


def test_the_sigmoid_runs_over_a_domains_steps(small):
    module = made(small("method=recadam", ORDER, "method.middle=0.5", "method.slope=10")).module
    for step in (0, 30, 50, 99):
        assert module.anneal(step, 100) == pytest.approx(1 / (1 + math.exp(-0.1 * (step - 50))))


def test_a_strong_pull_brings_the_model_back(small):
    """What is left of a domain is less, the stronger the pull; it goes to the model before or to the base."""
    moved = {}
    for strength, towards in ((0, "previous"), (100, "previous"), (100, "base")):
        work = made(small("method=recadam", ORDER, f"method.strength={strength}", f"method.towards={towards}",
                          "method.annealed=false", "trainer.steps=10", "optim.lr=5e-3"))  # fmt: skip
        base = work.weights()
        for number in (0, 1):
            work.learn(number)
        moved[strength, towards] = sum(float((v - base[n]).square().sum()) for n, v in work.weights().items())
    assert moved[100, "base"] < moved[100, "previous"] < moved[0, "previous"]


@pytest.mark.parametrize(("rate", "told"), [("1e-4", True), ("1e-3", False)])
def test_a_pull_that_is_not_the_papers_is_logged(rate, told, small, caplog):
    with caplog.at_level("INFO", logger="cpt"):
        made(small("method=recadam", ORDER, "method.strength=100", f"optim.lr={rate}")).learn(0)
    assert ("pulls up to 0.01 of the way" in caplog.text) == told
    assert ("the paper: 0.1, method.strength=1000" in caplog.text) == told


def test_a_pull_past_where_a_weight_was_is_refused(small):
    with pytest.raises(
        ValueError, match="method.strength=500 at optim.lr=0.01 pulls weights past where they"
    ):
        made(small("method=recadam", ORDER, "method.strength=500", "optim.lr=0.01"))
