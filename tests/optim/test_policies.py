"""Learning-rate policies across domains: hand values, what happens at the edges, decays that are branches."""

import math

import pytest

from cpt.evaluation.scores import Scores
from cpt.optim.schedulers import (
    WSD,
    Autoregressive,
    Cosine,
    Decayed,
    Infinite,
    Once,
    Progress,
    ReciprocalRoot,
    Rewarm,
    Schedule,
)
from tests.support.making import ORDER, Watch, made, same

STEPS = (10, 10, 20)


def factors(schedule: Schedule, steps: tuple[int, ...] = STEPS) -> list[list[float]]:
    """Every factor of every domain."""
    return [
        [
            schedule(Progress(step, own, place, len(steps), sum(steps[:place]) + step, sum(steps), steps[0]))
            for step in range(own)
        ]
        for place, own in enumerate(steps)
    ]


def test_rewarming_gives_each_domain_a_peak_of_its_own():
    first, second, third = factors(Rewarm(warmup=0.2, final=0.1, peaks=[1, 0.5]))
    assert first[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert second == pytest.approx([value / 2 for value in first])
    assert third[4] == pytest.approx(0.5)
    assert third[12] == pytest.approx(0.5 * 0.55)
    assert factors(Rewarm(warmup=0.2, final=0.1, peaks=None)) == factors(Cosine(warmup=0.2, final=0.1))


def test_once_is_the_schedule_of_all_domains_together():
    joined = factors(Cosine(warmup=0.1, final=0.1), (sum(STEPS),))[0]
    assert sum(factors(Once(warmup=0.1, final=0.1)), []) == joined


def test_a_decayed_rate_stays():
    first, second, third = factors(Decayed(warmup=0.2, final=0.25))
    assert first == factors(Cosine(warmup=0.2, final=0.25))[0]
    assert second + third == [0.25] * 30


@pytest.mark.parametrize(("form", "half"), [("cosine", 0.75), ("inverse_square_root", None)])
def test_an_infinite_schedule_cools_down_once_and_is_continuous(form, half):
    options = {"warmup": 0.2, "cooldown": 0.6, "constant": 0.5, "form": form, "final": 0.05}
    first, second, third = factors(Infinite(**options, anneal=0.0, annealed="last"))
    assert first[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    fallen = (1 / math.sqrt(6) - 1) / (1 / math.sqrt(11) - 1)
    assert first[5] == pytest.approx(half or 1 - 0.5 * fallen)
    assert first[8:] + second + third == [0.5] * 32
    annealed = factors(Infinite(**options, anneal=0.2, annealed="last"))
    assert annealed[:2] == [first, second] and annealed[2][:17] == third[:17]
    assert annealed[2][18] == pytest.approx(0.5 * 0.1**0.5)


def test_more_domains_change_no_rate_of_an_infinite_schedule_but_those_of_a_single_decay():
    options = {"warmup": 0.2, "cooldown": 0.5, "constant": 0.5, "form": "cosine", "anneal": 0.0, "final": 0.1}
    endless = Infinite(**options, annealed="last")
    assert factors(endless, (*STEPS, 30))[:3] == factors(endless)
    once = Once(warmup=0.1, final=0.1)
    assert factors(once, (*STEPS, 30))[0] != factors(once)[0]


@pytest.mark.parametrize(("form", "left"), [("root", 1 - math.sqrt(0.5)), ("linear", 0.5)])
def test_warm_up_stable_decay(form, left):
    chain = factors(WSD(warmup=0.1, decay=0.2, form=form, final=0.1, branched=False))
    assert chain[0][:9] == [0.5, *[1.0] * 8]
    assert chain[0][9] == pytest.approx(0.1 + 0.9 * left)
    assert chain[1] == chain[0]
    branched = factors(WSD(warmup=0.1, decay=0.2, form=form, final=0.1, branched=True))
    assert branched[0] == chain[0] and branched[1] == [1.0, *chain[0][1:]]


def test_a_branch_begins_where_the_decay_does():
    """Of six steps, 0 to 3 are at the peak."""
    wsd = WSD(warmup=0.0, decay=0.5, form="root", final=0.1, branched=True)
    options = {"warmup": 0.0, "cooldown": 0.1, "constant": 0.5, "form": "cosine", "final": 0.1}
    annealed = Infinite(**options, anneal=0.5, annealed="each")
    for schedule in (wsd, annealed):
        assert schedule.branches and schedule.branch_step(6) == 4
        assert [step for step, factor in enumerate(factors(schedule, (6, 6))[1]) if factor < 0.5][0] == 4


def test_a_reciprocal_root_counts_within_or_across_domains():
    within = factors(ReciprocalRoot(warmup=0.4, cooldown=0.2, final=0.1, across=False))
    assert within[0][:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert within[0][7] == pytest.approx(0.9 * math.sqrt(4 / 8) + 0.1)
    assert within[0][9] == pytest.approx(0.1 + (0.9 * math.sqrt(4 / 9)) * 0.5)
    assert within[1] == within[0]
    across = factors(ReciprocalRoot(warmup=0.4, cooldown=0.2, final=0.1, across=True))
    assert across[0] == within[0]
    assert across[1][0] == pytest.approx(0.9 * math.sqrt(4 / 11) + 0.1)


def test_autoregressive_peaks_are_on_one_cosine():
    equal = (100,) * 5
    found = factors(Autoregressive(warmup=0.1, final=0.1), equal)
    peaks = [max(each) for each in found]
    heights = [
        0.1
        + 0.9 * 0.5 * (1 + math.cos(math.pi * (100 * i + 10 - 10 * (i + 1)) / (100 * (i + 1) - 10 * (i + 1))))
        for i in range(5)
    ]
    assert peaks == pytest.approx(heights) and peaks[0] == 1
    assert all(later < earlier for earlier, later in zip(peaks, peaks[1:], strict=False))
    assert found[3][55] == pytest.approx(0.1 + (peaks[3] - 0.1) * 0.5)


def test_an_autoregressive_peak_counts_the_warm_ups_of_earlier_domains_as_they_were():
    unequal = (10, 10, 1000)
    peaks = [max(each) for each in factors(Autoregressive(warmup=0.1, final=0.1), unequal)]
    warmups = [1, 1, 100]
    for place, peak in enumerate(peaks):
        before, risen = sum(unequal[:place]), sum(warmups[: place + 1])
        share = (before + warmups[place] - risen) / (before + unequal[place] - risen)
        assert peak == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


def rates(watch: Watch) -> list[float]:
    return [rate for _, rate in watch.seen]


def rate(module: object) -> float:
    return module.trainer.optimizers[0].param_groups[0]["lr"]


def test_all_that_is_carried_makes_one_domain_of_two(small):
    work, watch = made(small(ORDER, "optim.carry=all", "optim.lr=1", "schedule.warmup=0")), Watch(rate)
    for number in (0, 1):
        work.learn(number, watch)
    assert rates(watch) == pytest.approx([1 - step / 12 for step in range(1, 13)])


BRANCHED = ["schedule=wsd", "schedule.warmup=0", "schedule.decay=0.5"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_next_domain_goes_on_with_the_weights_before_the_branch(accumulate, small):
    cut = f"trainer.accumulate_grad_batches={accumulate}"
    work = made(small(ORDER, *BRANCHED, "optim.carry=moments", cut))
    seen = Watch(
        lambda module: ({name: p.clone() for name, p in module.model.named_parameters()}, counts(module))
    )
    work.learn(0, seen)
    # after the fourth step: steps 0 to 3 are at the peak, 6 * 0.5 = 3 of them before x = 0
    before = [noted for step, noted in seen.seen if step == 4][-1]
    assert same(work.module.trunk.named(), before[0])
    assert not same(work.weights(), before[0])
    start = []
    work.module.before_domain = lambda probe: start.append(work.weights())
    later = Watch(counts)
    work.learn(1, later)
    assert same(start[0], before[0])
    assert before[1] == {4.0} and later.seen[accumulate - 1][1] == {5.0}


def counts(module: object) -> set[float]:
    return {each["step"].item() for each in module.trainer.optimizers[0].state.values()}


def test_a_decay_without_steps_branches_nowhere(small):
    work = made(small(ORDER, "schedule=wsd", "schedule.warmup=0", "schedule.decay=0.1"))
    work.learn(0)
    assert same(work.module.trunk.named(), work.weights())


def test_the_rates_that_were_used_stand_in_the_report(start, small, tmp_path):
    start(small(ORDER, *BRANCHED, "optim.lr=1e-3"), tmp_path)
    noted = Scores.load(tmp_path / "scores.json").rates
    assert noted[0] == [] and noted[1] == noted[2]
    low = 1e-3 * (1 - math.sqrt(2 / 3))
    assert noted[1] == pytest.approx([1e-3, 1e-3, low])
    assert f"| law | 0.001 | 0.001 | {low:.3g} |" in (tmp_path / "report.md").read_text()


def test_what_is_carried_as_one_domain_has_no_branches(small):
    with pytest.raises(ValueError, match=r"^optim\.carry=all makes one domain of all for schedule=WSD"):
        made(small(ORDER, *BRANCHED, "optim.carry=all"))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (WSD, {"warmup": 0.5, "decay": 0.6, "form": "root", "final": 0.0, "branched": True}),
        (ReciprocalRoot, {"warmup": 0, "cooldown": 0.1, "final": 0.0, "across": False}),
    ],
)
def test_options_that_do_not_go_together(kind, options):
    with pytest.raises(ValueError, match="allowed: "):
        kind(**options).__post_init__()
