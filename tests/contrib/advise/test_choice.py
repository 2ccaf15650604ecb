"""The front, the choice and the line over tokens, against numbers small enough for a hand."""

import math

import pytest

from cpt.contrib.advise.results import Point, Wish, choose, find_front, weigh_lengths

POINTS = {
    "strong": Point(1.0, 0.5),
    "mild": Point(0.8, 0.1),
    "weak": Point(0.5, 0.2),
    "same": Point(1.0, 0.6),
}
HIGHEST = {"strong": 0.7, "mild": 0.35, "weak": 0.25, "same": 0.8}


def test_the_front_is_what_no_other_arm_beats():
    assert find_front(POINTS) == ["strong", "mild"]
    assert find_front(POINTS | {"none": Point(0.0, 0.0)}) == ["strong", "mild", "none"]
    assert find_front({"one": Point(1.0, 0.5), "twin": Point(1.0, 0.5)}) == ["one"]


@pytest.mark.parametrize(("weight", "arm"), [(1.0, "mild"), (0.1, "strong"), (0.5, "strong"), (0.51, "mild")])
def test_a_weight_says_what_forgetting_costs(weight, arm):
    # strong: 1 - 0.5 w, mild: 0.8 - 0.1 w; they are equal at 0.5, where the first is taken
    choice = choose(POINTS, HIGHEST, Wish(None, weight))
    assert choice.arm == arm and f"- {weight:g} x forgotten" in choice.why


@pytest.mark.parametrize(
    ("bound", "arm", "why"),
    [
        (0.3, "weak", "by the whole of its interval"),  # mild learns more, but may forget 0.35
        (0.35, "mild", "by the whole of its interval"),
        (0.15, "mild", "by its mean, not by its interval"),
        (0.05, "mild", "no arm forgets at most 0.05 nats; this one forgets least"),
        (9.0, "strong", "at most 9 nats"),
    ],
)
def test_a_bound_is_kept_by_the_interval_where_one_can(bound, arm, why):
    choice = choose(POINTS, HIGHEST, Wish(bound, 1.0))
    assert choice.arm == arm and why in choice.why


def test_without_an_interval_nothing_is_shown():
    choice = choose({"one": Point(1.0, 0.1)}, {"one": math.nan}, Wish(0.2, 1.0))
    assert choice.arm == "one" and "by its mean" in choice.why


def test_the_line_over_tokens_goes_on_by_the_logarithm():
    # from 100 to 400 as much is added as from 400 to 1600: 2 b - a
    assert weigh_lengths([100, 400], 1600) == pytest.approx([-1, 2])
    assert weigh_lengths([100, 400], 400) == pytest.approx([0, 1])
    # three lengths: the middle of the line is the mean of the values
    assert weigh_lengths([10, 100, 1000], 100) == pytest.approx([1 / 3] * 3)
    with pytest.raises(ValueError, match="1 length; needed: two or more"):
        weigh_lengths([100, 100], 400)
