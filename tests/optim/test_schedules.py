"""Learning-rate policies within and across domains: hand values, what happens at the edges, decays that are
branches; and an optimizer's state that goes along."""

import math

import pytest
import torch
from torch import nn

from cpt.evaluation.scores import Scores
from cpt.optim.schedulers import (
    WSD,
    Autoregressive,
    Constant,
    Cosine,
    Decayed,
    Infinite,
    Linear,
    Once,
    Progress,
    ReciprocalRoot,
    Rewarm,
    Schedule,
)
from cpt.optim.state import CarriedState
from tests.support.making import ORDER, Watch, made, same

STEPS = (10, 10, 20)
ACROSS = "schedule._target_=tests.support.seams.Across"
BRANCHED = ["schedule=wsd", "schedule.warmup=0", "schedule.decay=0.5"]


def factors(schedule: Schedule, steps: tuple[int, ...] = STEPS) -> list[list[float]]:
    """Every factor of every domain."""

    def at(step: int, own: int, place: int) -> Progress:
        before = sum(steps[:place])
        return Progress(step, own, place, len(steps), before + step, sum(steps), steps[0])

    return [[schedule(at(step, own, place)) for step in range(own)] for place, own in enumerate(steps)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Linear(warmup=0.2), {0: 1 / 3, 1: 2 / 3, 2: 1, 6: 0.5, 10: 0}),
        (Cosine(warmup=0.2, final=0.1), {1: 2 / 3, 2: 1, 6: 0.55, 10: 0.1}),
        (Constant(warmup=0.2), {0: 1 / 3, 2: 1, 9: 1}),
    ],
)
def test_the_schedules_are_warm_ups_and_decays_of_a_domain(schedule, expected):
    """What came before it changes nothing."""
    for before in (0, 20):
        found = {
            step: schedule(Progress(step, 10, before // 10, 3, before + step, 30, 10)) for step in expected
        }
        assert found == pytest.approx(expected)


def test_rewarming_gives_each_domain_a_peak_of_its_own():
    first, second, third = factors(Rewarm(warmup=0.2, final=0.1, peaks=[1, 0.5]))
    assert first[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert second == pytest.approx([value / 2 for value in first])
    assert third[4] == pytest.approx(0.5) and third[12] == pytest.approx(0.5 * 0.55)
    assert factors(Rewarm(warmup=0.2, final=0.1, peaks=None)) == factors(Cosine(warmup=0.2, final=0.1))


def test_once_is_the_schedule_of_all_domains_together():
    """A decayed rate stays."""
    joined = factors(Cosine(warmup=0.1, final=0.1), (sum(STEPS),))[0]
    assert sum(factors(Once(warmup=0.1, final=0.1)), []) == joined
    first, second, third = factors(Decayed(warmup=0.2, final=0.25))
    assert first == factors(Cosine(warmup=0.2, final=0.25))[0] and second + third == [0.25] * 30


@pytest.mark.parametrize(("form", "half"), [("cosine", 0.75), ("inverse_square_root", None)])
def test_an_infinite_schedule_cools_down_once_and_is_continuous(form, half):
    """More domains change no rate of it."""
    options = {
        "warmup": 0.2,
        "cooldown": 0.6,
        "constant": 0.5,
        "form": form,
        "final": 0.05,
        "annealed": "last",
    }
    endless = Infinite(**options, anneal=0.0)
    first, second, third = factors(endless)
    assert first[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    fallen = (1 / math.sqrt(6) - 1) / (1 / math.sqrt(11) - 1)
    assert first[5] == pytest.approx(half or 1 - 0.5 * fallen)
    assert first[8:] + second + third == [0.5] * 32
    assert factors(endless, (*STEPS, 30))[:3] == [first, second, third]
    annealed = factors(Infinite(**options, anneal=0.2))
    assert annealed[:2] == [first, second] and annealed[2][:17] == third[:17]
    assert annealed[2][18] == pytest.approx(0.5 * 0.1**0.5)


@pytest.mark.parametrize(("form", "left"), [("root", 1 - math.sqrt(0.5)), ("linear", 0.5)])
def test_warm_up_stable_decay(form, left):
    chain = factors(WSD(warmup=0.1, decay=0.2, form=form, final=0.1, branched=False))
    assert chain[0][:9] == [0.5, *[1.0] * 8]
    assert chain[0][9] == pytest.approx(0.1 + 0.9 * left) and chain[1] == chain[0]
    branched = factors(WSD(warmup=0.1, decay=0.2, form=form, final=0.1, branched=True))
    assert branched[0] == chain[0] and branched[1] == [1.0, *chain[0][1:]]


def test_a_branch_begins_where_the_decay_does():
    """Of six steps, 0 to 3 are at the peak."""
    options = {"warmup": 0.0, "cooldown": 0.1, "constant": 0.5, "form": "cosine", "final": 0.1}
    wsd = WSD(warmup=0.0, decay=0.5, form="root", final=0.1, branched=True)
    for schedule in (wsd, Infinite(**options, anneal=0.5, annealed="each")):
        assert schedule.branches and schedule.branch_step(6) == 4
        assert [step for step, factor in enumerate(factors(schedule, (6, 6))[1]) if factor < 0.5][0] == 4


def test_a_reciprocal_root_counts_within_or_across_domains():
    within, across = (
        factors(ReciprocalRoot(warmup=0.4, cooldown=0.2, final=0.1, across=each)) for each in (False, True)
    )
    assert within[0][:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert within[0][7] == pytest.approx(0.9 * math.sqrt(4 / 8) + 0.1)
    assert within[0][9] == pytest.approx(0.1 + (0.9 * math.sqrt(4 / 9)) * 0.5)
    assert within[1] == within[0] == across[0]
    assert across[1][0] == pytest.approx(0.9 * math.sqrt(4 / 11) + 0.1)


@pytest.mark.parametrize(("steps", "warmups"), [((100,) * 5, [10] * 5), ((10, 10, 1000), [1, 1, 100])])
def test_autoregressive_peaks_are_on_one_cosine(steps, warmups):
    """Which counts the warm-ups of earlier domains as they were."""
    found = factors(Autoregressive(warmup=0.1, final=0.1), steps)
    for place, rates in enumerate(found):
        before, risen = sum(steps[:place]), sum(warmups[: place + 1])
        share = (before + warmups[place] - risen) / (before + steps[place] - risen)
        assert max(rates) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))
    assert len(steps) == 3 or found[3][55] == pytest.approx(0.1 + (max(found[3]) - 0.1) * 0.5)


def test_a_schedule_is_told_where_the_run_is(small):
    work, seen = made(small("order=[law,food,space]", "trainer.steps=null", "trainer.epochs=1")), []
    work.module.schedule = lambda progress: seen.append(progress) or 1.0
    steps = [work.data.steps(domain) for domain in work.data.domains]
    work.learn(1)
    assert len(set(steps)) > 1
    assert seen[0] == Progress(0, steps[1], 1, 3, steps[0], sum(steps), first=steps[0])
    assert list(dict.fromkeys(each.step for each in seen)) == list(range(steps[1] + 1))
    assert all(each.total_step == steps[0] + each.step for each in seen)


def rate(module: object) -> float:
    return module.trainer.optimizers[0].param_groups[0]["lr"]


def counts(module: object) -> set[float]:
    return {each["step"].item() for each in module.trainer.optimizers[0].state.values()}


@pytest.mark.parametrize("given", [ACROSS, "optim.carry=all"])
def test_all_that_is_carried_makes_one_domain_of_two(given, small):
    work, watch = made(small(ORDER, given, "optim.lr=1", "schedule.warmup=0")), Watch(rate)
    for number in (0, 1):
        work.learn(number, watch)
    assert [each for _, each in watch.seen] == pytest.approx([1 - step / 12 for step in range(1, 13)])
    with pytest.raises(ValueError, match=r"^optim\.carry=all makes one domain of all for schedule=WSD"):
        made(small(ORDER, *BRANCHED, "optim.carry=all"))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_next_domain_goes_on_with_the_weights_before_the_branch(accumulate, small):
    work = made(
        small(ORDER, *BRANCHED, "optim.carry=moments", f"trainer.accumulate_grad_batches={accumulate}")
    )
    seen, later, start = Watch(lambda module: (work.weights(), counts(module))), Watch(counts), []
    work.learn(0, seen)
    # after the fourth step: steps 0 to 3 are at the peak, 6 * 0.5 = 3 of them before x = 0
    weights, steps = [noted for step, noted in seen.seen if step == 4][-1]
    assert same(work.module.trunk.named(), weights) and not same(work.weights(), weights)
    work.module.before_domain = lambda probe: start.append(work.weights())
    work.learn(1, later)
    assert same(start[0], weights) and steps == {4.0} and later.seen[accumulate - 1][1] == {5.0}
    none = made(small(ORDER, "schedule=wsd", "schedule.warmup=0", "schedule.decay=0.1"))  # no steps of decay
    none.learn(0)
    assert same(none.module.trunk.named(), none.weights())


def test_the_rates_that_were_used_are_in_the_scores(start, small, tmp_path):
    start(small(ORDER, *BRANCHED, "optim.lr=1e-3"), tmp_path)
    noted = Scores.load(tmp_path / "scores.json").rates
    assert noted[0] == [] and noted[1] == noted[2]
    assert noted[1] == pytest.approx([1e-3, 1e-3, 1e-3 * (1 - math.sqrt(2 / 3))])


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


@pytest.mark.parametrize(("carry", "step"), [("moments", 7.0), ("true", 7.0), ("none", 1.0)])
def test_the_optimizer_goes_on_or_begins_anew(carry, step, small):
    work, first = made(small(ORDER, f"optim.carry={carry}")), Watch(counts)
    work.learn(0)
    assert any("carried" in name for name in work.module.state_dict()) == (carry != "none")
    work.learn(1, first)
    assert first.seen[0][1] == {step}


def test_the_moments_carried_are_those_of_the_domain_before(small):
    def moments(module) -> dict[str, torch.Tensor]:
        optimizer = module.trainer.optimizers[0]
        return {name: optimizer.state[each]["exp_avg"].clone() for name, each in module.named_parameters()}

    work, gradients, watch = (
        made(small(ORDER, "optim.carry=moments", "trainer.gradient_clip_val=null")),
        {},
        Watch(moments),
    )
    work.learn(0)
    before, state = moments(work.module), work.module.state_dict()
    assert state["carried.model/head/norm/weight:exp_avg"].equal(before["model.head.norm.weight"])
    parts = dict(work.module.named_parameters())
    work.module.transform_gradients = lambda optimizer: [
        gradients.setdefault(name, each.grad.clone()) for name, each in parts.items()
    ]
    work.learn(1, watch)
    for name, value in watch.seen[0][1].items():
        torch.testing.assert_close(value, 0.9 * before[name] + 0.1 * gradients[name])


def pair(**shapes: int) -> tuple[torch.optim.Optimizer, list[tuple[str, nn.Parameter]]]:
    named = [(name, nn.Parameter(torch.ones(size, 2))) for name, size in shapes.items()]
    optimizer = torch.optim.AdamW([each for _, each in named])
    for _, each in named:
        each.grad = torch.ones_like(each)
    return optimizer, named


def test_what_is_new_or_gone_is_told_in_a_line(caplog):
    caplog.set_level("INFO")
    carried, (first, named), (second, others) = (
        CarriedState(),
        pair(kept=3, wider=3, left=3),
        pair(kept=3, wider=4, added=3),
    )
    first.step()
    carried.take(first, named)
    carried.give(second, others)
    lines = [record.getMessage() for record in caplog.records]
    assert [line[line.index("(") :] for line in lines] == ["(wider, added)", "(wider, left)"]
    assert [name for name, each in others if each in second.state] == ["kept"]


def test_it_keeps_its_precision_and_goes_around():
    """An optimizer whose state is no tensor is named."""
    carried, (optimizer, [(_, one)]), other = CarriedState(), pair(one=2), CarriedState()
    optimizer.step()
    optimizer.state[one]["step"].fill_(1001)
    carried.take(optimizer, [("one", one)])
    other.load_state_dict(carried.bfloat16().state_dict())
    fresh, [(_, again)] = pair(one=2)
    other.give(fresh, [("one", again)])
    assert fresh.state[again]["step"].item() == 1001
    assert fresh.state[again]["exp_avg"].equal(optimizer.state[one]["exp_avg"])
    optimizer.state[one]["mode"] = "fast"
    with pytest.raises(ValueError, match="AdamW keeps mode=fast"):
        carried.take(optimizer, [("one", one)])
