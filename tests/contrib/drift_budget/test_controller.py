"""What a drift budget makes of what was evaluated."""

import numpy as np
import pytest

from cpt.contrib.drift_budget.controller import BudgetRecord, find_drift, find_way
from cpt.contrib.drift_budget.options import DriftBudget


def seen(*looks):
    """After looks at the general text: at each its rise and the upper end."""
    made = BudgetRecord({"general": 0.1})
    for step, look in enumerate(looks):
        made.add(step, {"general": look})
    return made


def losses(**means):
    """Of three documents with ten tokens each, nats and tokens."""
    return {text: np.array([[10.0 * each for each in values], [10.0] * 3]) for text, values in means.items()}


def test_over_the_budget_it_goes_back_and_a_stage_without_any_ends():
    found = seen((0, 0), *[(0.05, 0.11), (0.05, float("nan"))] * 4)  # the interval counts, not the mean
    assert found.kept == 0 and not found.ended and len(found.acts) == 8
    made = BudgetRecord({"general": 0.1})
    made.add(0, {"general": (0, 0)})
    assert made.add(5, {"general": (0.05, 0.098)}, way=0.25) and made.ways == [1, 0.25] and made.kept == 5
    found = seen((0.11, 0.12))  # spent before the first step
    assert found.kept is None and found.ended and len(found.acts) == 1


@pytest.mark.parametrize(
    ("rise", "least"),
    [
        (lambda way: 0.97 + 4 * way, 0.97),  # most of it was spent by the stages before
        (lambda way: -0.5 + 40 * way**4, -0.5),
        (lambda way: 1.2 - (way - 0.5) ** 2 - 0.95 * (way < 0.3), 0.0),  # neither even nor smooth
        (lambda way: 2 * way if way < 0.8 else float("nan"), 0.0),
    ],
)
def test_the_way_back_ends_within_the_budget_and_near_to_all_of_it(rise, least):
    seen = []
    way = find_way(lambda way: seen.append(way) or rise(way), least=least, most=rise(1.0))
    assert rise(way) <= 1 and len(seen) <= 8 and all(0 < each < 1 for each in seen)
    assert way in seen and (rise(way) >= 1 - 0.05 * (1 - least) or rise(way + 0.05) > 1)
    assert find_way(lambda way: 1.5, least=0.2, most=2.0) == 0  # where nothing of it is within


def test_the_scarcer_of_two_decides_and_each_stage_adds_its_share():
    made = BudgetRecord({"general": 0.1, "past": 0.2})
    assert made.add(0, {"general": (0, 0.08), "past": (0, 0.12)}) and made.spent == pytest.approx(0.8)
    assert not made.add(1, {"general": (0, 0.02), "past": (0, 0.21)})
    nothing = BudgetRecord({"past": 0.1})
    assert nothing.add(0, {}) and nothing.ways == [1] and not nothing.acts
    options = DriftBudget(general=0.06, past=0.3)
    assert options.allow(1, stages=3) == pytest.approx({"general": 0.02, "past": 0.1})
    assert options.allow(3, stages=3) == pytest.approx(options.given)


def test_drift_is_of_the_general_text_and_the_mean_of_past_ones_to_the_upper_end_over_documents():
    began = losses(general=[4, 4, 4], one=[1, 1, 1], two=[2, 2, 2], mine=[9, 9, 9])
    now = losses(general=[4.1, 4.1, 4.1], one=[1.5, 1.5, 1.5], two=[1.9, 1.9, 1.9], mine=[5, 5, 5])
    found = find_drift(["general", "past"], began, now, own=["mine"])
    assert found["general"] == pytest.approx((0.1, 0.1)) and found["past"] == pytest.approx((0.2, 0.2))
    assert find_drift(["past"], began, {"mine": now["mine"]}, own=["mine"]) == {}
    now = losses(general=[4, 4, 4.3])
    assert find_drift(["general"], began, now, own=[])["general"] == pytest.approx((0.1, 0.3))
    first, single = ({"general": each["general"][:, :1]} for each in (began, now))
    assert find_drift(["general"], first, single, own=[])["general"] == (0, 0)
