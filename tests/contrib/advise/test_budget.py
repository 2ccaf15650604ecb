"""What fits into a budget, by hand: 10 s a run, 0.1 s a step, two stages."""

import pytest

from cpt.contrib.advise.candidates import NAMES, Setting, choose_arms, overrides
from cpt.contrib.advise.runs import Costs, Round, plan_sweep

COSTS = Costs(step=0.1, fixed=10, stages=2)
FIVE = ["ncl", "replay-5", "lr-1/4", "replay-25", "lora"]


def planned(seconds, *, arms=("ncl", "lora"), jobs=1, most=500, **given):
    plan = plan_sweep(arms, COSTS, seconds=seconds, jobs=jobs, most=most, **given)
    return plan.seeds, plan.short, plan.steps


@pytest.mark.parametrize(
    ("seconds", "plan"),
    [
        (1000, (3, True, 500)),  # more steps than an epoch has are of no use
        (600, (2, True, 500)),  # 6 starts, then 540 s / (2 x 0.1 x 2 x 2.25)
        (500, (1, True, 500)),
        (200, (1, True, 320)),  # 4 starts, then 160 s / (2 x 0.1 x 2 x 1.25)
        (45, (1, False, 62)),  # with a shorter length 10 steps, below 20
    ],
)
def test_more_time_is_for_more_steps_up_to_an_epoch_then_for_more_seeds(seconds, plan):
    assert planned(seconds) == plan


def test_the_time_of_the_whole_is_the_sum_of_its_runs():
    plan = plan_sweep(["ncl", "lora"], COSTS, seconds=1000, jobs=1, most=500)
    assert plan.seconds == pytest.approx(3 * 220 + 70)
    assert plan.rounds == [Round(0, 500), Round(0, 125), Round(1, 500), Round(2, 500)]
    both = plan_sweep(["ncl", "kd"], COSTS, seconds=1000, jobs=1, most=500)
    assert both.seconds == pytest.approx(plan.seconds + 0.4 * 0.2 * (1500 + 125))  # a teacher's pass


def test_fewer_seeds_leave_more_steps():
    assert planned(1000, most=900) == (3, True, 707) and planned(1000, most=900, seeds=2) == (2, True, 900)
    assert planned(1000, most=900, seeds=1) == (1, True, 900)


def test_twice_the_jobs_are_half_the_time():
    assert planned(100, jobs=2) == planned(200)
    assert planned(75, jobs=2) == planned(150)


def test_arms_are_left_out_from_the_end():
    plan = plan_sweep(FIVE, COSTS, seconds=60, jobs=1, most=500)
    assert (len(plan.arms), plan.steps) == (5, 10)
    plan = plan_sweep(FIVE, COSTS, seconds=50, jobs=1, most=500)
    assert (plan.arms, plan.steps) == (("ncl", "replay-5", "lr-1/4", "replay-25"), 12)


def test_a_budget_that_nothing_fits_into_says_what_would():
    with pytest.raises(
        ValueError, match=r"30 s are left of --hours, and 3 runs of 10 steps take 36 s; allowed"
    ):
        plan_sweep(FIVE, COSTS, seconds=30, jobs=1, most=500)


def test_every_arm_says_what_it_sets():
    setting = Setting(rate=1e-3, blocks=12, domains=3)
    made = {arm: overrides(arm, setting) for arm in NAMES}
    assert made["ncl"] == [] and made["freeze"] == ["freeze.layers=6"]
    assert made["lr-1/4"] == ["model.lr=0.00025"] and made["lr-1/2"] == ["model.lr=0.0005"]
    assert made["replay-5"] == ["replay=past", "replay.past=0.025", "replay.general=0.025"]
    assert made["ewc"] == ["method=ewc", "method.strength=5000"]  # whatever the method's default
    assert made["ewc-strong"] == ["method=ewc", "method.strength=500000"]
    assert len(set(map(tuple, made.values()))) == len(NAMES)
    alone = overrides("replay-25", Setting(rate=1e-3, blocks=2, domains=1))
    assert alone == ["replay=past", "replay.past=0", "replay.general=0.25"]


def test_arms_are_chosen_by_name_beside_the_reference():
    assert choose_arms(None) == list(NAMES)
    assert choose_arms("kd,lora,kd") == ["ncl", "kd", "lora"]
    with pytest.raises(ValueError, match="--arms replay-7; allowed: ncl, replay-5"):
        choose_arms("kd,replay-7")
    with pytest.raises(ValueError, match="--arms ncl; allowed: one or more beside ncl"):
        choose_arms("ncl")
