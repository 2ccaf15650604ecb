"""Rates within a domain and across all of them, and an optimizer's state that goes along."""

import logging

import pytest
import torch
from torch import nn

from cpt.optim.schedulers import Constant, Cosine, Linear, Progress
from cpt.optim.state import CarriedState
from tests.support.making import ORDER, Watch, made

ACROSS = "schedule._target_=tests.support.seams.Across"


def at(step: int) -> Progress:
    return Progress.alone(step, steps=10)


def test_the_schedules_are_warm_ups_and_decays_of_a_domain():
    assert [Linear(warmup=0.2)(at(step)) for step in (0, 1, 2, 6, 10)] == pytest.approx(
        [1 / 3, 2 / 3, 1, 0.5, 0]
    )
    assert [Cosine(warmup=0.2, final=0.1)(at(step)) for step in (1, 2, 6, 10)] == pytest.approx(
        [2 / 3, 1, 0.55, 0.1]
    )
    assert [Constant(warmup=0.2)(at(step)) for step in (0, 2, 9)] == pytest.approx([1 / 3, 1, 1])


SCHEDULES = [Linear(warmup=0.1), Cosine(warmup=0.1, final=0.0), Constant(warmup=0.1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_came_before_a_domain_does_not_change_its_rates(schedule):
    third = [
        Progress(step, 10, domain=2, domains=3, total_step=20 + step, total_steps=30, first=10)
        for step in range(10)
    ]
    assert [schedule(each) for each in third] == [schedule(at(step)) for step in range(10)]


def test_a_schedule_is_told_where_the_run_is(small):
    seen = []
    work = made(small("order=[law,food,space]", "trainer.steps=null", "trainer.epochs=1"))
    work.module.schedule = lambda progress: seen.append(progress) or 1.0
    steps = [work.data.steps(domain) for domain in work.data.domains]
    work.learn(1)
    assert len(set(steps)) > 1
    assert seen[0] == Progress(0, steps[1], 1, 3, steps[0], sum(steps), first=steps[0])
    assert list(dict.fromkeys(each.step for each in seen)) == list(range(steps[1] + 1))
    assert all(each.total_step == steps[0] + each.step for each in seen)


def test_one_decay_may_run_over_all_domains(small):
    work = made(small(ORDER, ACROSS, "schedule.warmup=0", "optim.lr=1"))
    watch = Watch(lambda module: module.trainer.optimizers[0].param_groups[0]["lr"])
    for number in (0, 1):
        work.learn(number, watch)
    assert [rate for _, rate in watch.seen] == pytest.approx([1 - step / 12 for step in range(1, 13)])


def moments(module) -> dict[str, torch.Tensor]:
    optimizer = module.trainer.optimizers[0]
    return {name: optimizer.state[each]["exp_avg"].clone() for name, each in module.named_parameters()}


def counts(module) -> set[float]:
    return {each["step"].item() for each in module.trainer.optimizers[0].state.values()}


@pytest.mark.parametrize(("carry", "step"), [("moments", 7.0), ("true", 7.0), ("none", 1.0)])
def test_the_optimizer_goes_on_or_begins_anew(carry, step, small):
    work = made(small(ORDER, f"optim.carry={carry}"))
    work.learn(0)
    first = Watch(counts)
    work.learn(1, first)
    assert first.seen[0][1] == {step}


def test_the_moments_carried_are_those_of_the_domain_before(small):
    work = made(small(ORDER, "optim.carry=moments", "trainer.gradient_clip_val=null"))
    work.learn(0)
    before, state, gradients = moments(work.module), work.module.state_dict(), []
    assert state["carried.model/head/norm/weight:exp_avg"].equal(before["model.head.norm.weight"])
    work.module.transform_gradients = lambda optimizer: gradients.append(
        {name: each.grad.clone() for name, each in work.module.named_parameters()}
    )
    watch = Watch(moments)
    work.learn(1, watch)
    for name, value in watch.seen[0][1].items():
        torch.testing.assert_close(value, 0.9 * before[name] + 0.1 * gradients[0][name])


def test_without_it_a_stage_file_is_as_ever(small):
    work = made(small(ORDER))
    work.learn(0)
    assert not [name for name in work.module.state_dict() if "carried" in name]


def pair(**shapes: int) -> tuple[torch.optim.Optimizer, list[tuple[str, nn.Parameter]]]:
    named = [(name, nn.Parameter(torch.ones(size, 2))) for name, size in shapes.items()]
    optimizer = torch.optim.AdamW([each for _, each in named])
    for _, each in named:
        each.grad = torch.ones_like(each)
    return optimizer, named


def test_what_is_new_or_gone_is_told_in_a_line(caplog):
    carried, (first, named) = CarriedState(), pair(kept=3, wider=3, left=3)
    first.step()
    carried.take(first, named)
    second, others = pair(kept=3, wider=4, added=3)
    with caplog.at_level(logging.INFO):
        carried.give(second, others)
    assert [record.getMessage() for record in caplog.records] == [
        "optim.carry: of the parameters 2 are new and begin without a state of the optimizer (wider, added)",
        "optim.carry: of the parameters 2 are gone (wider, left)",
    ]
    assert [name for name, each in others if each in second.state] == ["kept"]


def test_it_keeps_its_precision_and_goes_around():
    carried, (optimizer, named) = CarriedState(), pair(one=2)
    optimizer.step()
    optimizer.state[named[0][1]]["step"].fill_(1001)
    carried.take(optimizer, named)
    other = CarriedState()
    other.load_state_dict(carried.bfloat16().state_dict())
    fresh, others = pair(one=2)
    other.give(fresh, others)
    assert fresh.state[others[0][1]]["step"].item() == 1001
    assert fresh.state[others[0][1]]["exp_avg"].equal(optimizer.state[named[0][1]]["exp_avg"])


def test_an_optimizer_whose_state_is_no_tensor_is_named():
    carried, (optimizer, named) = CarriedState(), pair(one=2)
    optimizer.state[named[0][1]]["mode"] = "fast"
    with pytest.raises(ValueError, match=r"^optim\.carry: AdamW keeps mode=fast; allowed: none$"):
        carried.take(optimizer, named)
