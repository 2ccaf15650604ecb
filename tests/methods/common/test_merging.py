"""The rules of merging against their papers' formulas, written out over all domains at once."""

import math
from typing import get_args

import pytest
import torch

from cpt.core.randomness import key
from cpt.methods.merge import Ended, Merged, drop_entries, slerp
from cpt.methods.options import MergeOptions, Rule

SHAPES = {"a.weight": (7, 5), "a.bias": (5,), "b.weight": (3, 4)}
TIES = {"density": 0.2, "trimmed": "model", "start": "base", "estimator": "per_sample"}
OPTIONS = {**TIES, "scale": 1.0, "drop": 0.5, "share": 0.5, "base": False, "epsilon": 1e-8}


def draw(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


BASE = draw(0)
ENDS = [draw(1), draw(2), draw(3)]
FISHERS = [{name: each.square() for name, each in draw(seed).items()} for seed in (4, 5, 6)]


def options(**chosen):
    return MergeOptions(**{**OPTIONS, **chosen})


def merge(ends=ENDS, *, fishers=FISHERS, began=None, **chosen):
    """The merged weights of domains that each began at the base, or where it is told."""
    merged = Merged(options(**chosen), BASE)
    for place, end in enumerate(ends):
        start = BASE if began is None else began[place]
        merged.add(Ended(like=BASE, began=start, ended=end, fisher=fishers[place], seed=place))
    return merged.weights.named()


def assert_close(found, expected, **tolerance):
    for name in SHAPES:
        torch.testing.assert_close(found[name], expected[name], **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


def of_each(function, *stacks):
    return {
        name: function(*(torch.stack([each[name] for each in stack]) for stack in stacks)) for name in SHAPES
    }


@pytest.mark.parametrize("rule", get_args(Rule))
def test_one_domain_gives_its_weights(rule):
    found = merge(ENDS[:1], rule=rule, density=1.0, drop=0.0)
    assert_close(found, ENDS[0])


@pytest.mark.parametrize("rule", get_args(Rule))
def test_domains_that_end_alike_give_what_they_ended_with(rule):
    scale = 1 / 3 if rule in ("task_arithmetic", "dare") else 1.0
    found = merge([ENDS[0]] * 3, rule=rule, density=1.0, drop=0.0, scale=scale)
    assert_close(found, ENDS[0])


def test_the_average_is_the_mean_with_and_without_the_base():
    assert_close(merge(rule="average"), of_each(lambda ends: ends.mean(0), ENDS))
    assert_close(merge(rule="average", base=True), of_each(lambda ends: ends.mean(0), [BASE, *ENDS]))


def test_task_arithmetic_adds_what_all_domains_changed():
    expected = {name: BASE[name] + 0.4 * sum(end[name] - BASE[name] for end in ENDS) for name in SHAPES}
    assert_close(merge(rule="task_arithmetic", scale=0.4), expected)
    began = [BASE, draw(7), draw(8)]
    told = {
        name: BASE[name] + 0.4 * sum(end[name] - s[name] for end, s in zip(ENDS, began, strict=True))
        for name in SHAPES
    }
    assert_close(merge(rule="task_arithmetic", scale=0.4, began=began), told)


def ties(tasks, density, trimmed):
    """Algorithm 1 of the paper, entry by entry."""
    cut = []
    for task in tasks:
        groups = [list(SHAPES)] if trimmed == "model" else [[name] for name in SHAPES]
        own = {}
        for group in groups:
            flat = sorted((abs(v) for name in group for v in task[name].flatten().tolist()), reverse=True)
            least = flat[max(1, int(density * len(flat) + 1e-9)) - 1]
            own |= {
                name: [v if abs(v) >= least else 0.0 for v in task[name].flatten().tolist()] for name in group
            }
        cut.append(own)
    found = {}
    for name, shape in SHAPES.items():
        values = []
        for entries in zip(*(each[name] for each in cut), strict=True):
            total = sum(entries)
            same = [v for v in entries if v * total > 0]
            values.append(sum(same) / len(same) if same else 0.0)
        found[name] = torch.tensor(values).view(shape)
    return found


@pytest.mark.parametrize("trimmed", ["model", "tensor"])
@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_is_the_papers_algorithm(density, trimmed):
    tasks = [{name: end[name] - BASE[name] for name in SHAPES} for end in ENDS]
    elected = ties(tasks, density, trimmed)
    expected = {name: BASE[name] + 0.7 * elected[name] for name in SHAPES}
    assert_close(merge(rule="ties", density=density, trimmed=trimmed, scale=0.7), expected)


def test_what_two_domains_changed_the_other_way_round_is_not_changed_by_ties():
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    tasks = {name: each.round() for name, each in ENDS[0].items()}  # whole numbers: their sums are exact
    opposite = {name: -each for name, each in tasks.items()}
    merged = Merged(options(rule="ties", density=1.0), zero)
    for place, end in enumerate((tasks, opposite)):
        merged.add(Ended(like=zero, began=zero, ended=end, fisher={}, seed=place))
    assert all(torch.equal(each, zero[name]) for name, each in merged.weights.named().items())


@pytest.mark.parametrize("rule", ["average", "task_arithmetic", "ties", "fisher"])
def test_the_order_of_domains_that_are_learned_apart_makes_no_difference(rule):
    there = merge(rule=rule)
    back = merge(ENDS[::-1], fishers=FISHERS[::-1], rule=rule)
    assert_close(there, back)


def test_fisher_is_the_weighted_mean():
    expected = of_each(lambda ends, f: (f * ends).sum(0) / f.sum(0), ENDS, FISHERS)
    assert_close(merge(rule="fisher"), expected, rtol=1e-4, atol=1e-5)
    alike = [FISHERS[0]] * 3
    assert_close(merge(rule="fisher", fishers=alike), of_each(lambda ends: ends.mean(0), ENDS))
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    known = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    assert_close(merge(ENDS[:2], fishers=[nothing, known], rule="fisher"), ENDS[1])
    assert_close(
        merge(ENDS[:2], fishers=[nothing, nothing], rule="fisher"), of_each(lambda e: e.mean(0), ENDS[:2])
    )


def test_slerp_keeps_to_the_arc():
    one, other = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])
    third = slerp(one, other, 1 / 3, like=one)
    torch.testing.assert_close(third, 3 * torch.tensor([math.cos(math.pi / 6), math.sin(math.pi / 6)]))
    assert torch.equal(slerp(one, other, 1.0, like=one), other)
    assert torch.equal(slerp(one, other, 0.0, like=one), one)
    for same in (one * 2, -one, torch.zeros(2)):  # no arc: a line
        assert torch.equal(slerp(one, same, 0.5, like=one), torch.lerp(one, same, 0.5))


def test_slerp_goes_on_from_the_domains_before():
    for base in (False, True):
        found = merge(rule="slerp", share=0.3, base=base)
        for name in SHAPES:
            expected = slerp(BASE[name], ENDS[0][name], 0.3, like=BASE[name]) if base else ENDS[0][name]
            for end in ENDS[1:]:
                expected = slerp(expected, end[name], 0.3, like=expected)
            torch.testing.assert_close(found[name], expected)


def test_dare_drops_entries_and_keeps_the_mean():
    task = torch.ones(200, 200)
    dropped = drop_entries(task, task, p=0.9, seed=3)
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 10.0]))
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.06)
    assert not torch.equal(dropped, drop_entries(task, task, p=0.9, seed=4))
    found = merge(ENDS[:1], rule="dare", drop=0.5, scale=2.0)
    moved = {name: (found[name] - BASE[name]) / (ENDS[0][name] - BASE[name]) for name in SHAPES}
    shares = torch.cat([each.flatten() for each in moved.values()])
    torch.testing.assert_close(shares, 4.0 * (shares > 1))  # scale 2, divided by 1 - p
    assert 0 < (shares > 1).sum() < len(shares)


def test_dare_before_ties_leaves_out_what_was_dropped():
    """What one of two domains has dropped has no vote: the other's stands."""
    found = merge(ENDS[:2], rule="dare_ties", drop=0.5, density=1.0)
    tasks = [
        {
            name: drop_entries(
                end[name] - BASE[name], BASE[name], p=0.5, seed=key(place, "drop", name) % 2**63
            )
            for name in SHAPES
        }
        for place, end in enumerate(ENDS[:2])
    ]
    assert_close({name: found[name] - BASE[name] for name in SHAPES}, ties(tasks, 1.0, "model"))
    assert any(((tasks[0][name] == 0) & (found[name] != BASE[name])).any() for name in SHAPES)


def test_coarse_weights_are_merged_in_32_bits():
    coarse = {name: each.bfloat16() for name, each in BASE.items()}
    merged = Merged(options(rule="average"), coarse)
    merged.bfloat16()  # as the trainer casts a module
    assert {each.dtype for each in merged.weights.named().values()} == {torch.float32}
    assert_close(merged.double().weights.named(), {name: each.float() for name, each in coarse.items()})
