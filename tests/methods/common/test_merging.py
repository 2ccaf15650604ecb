"""The rules of merging against their papers' formulas, written out over all domains at once."""

import math

import pytest
import torch

from cpt.core.randomness import key
from cpt.methods.common.options import RULES
from cpt.methods.merge import Ended, Merged, drop_entries, slerp
from cpt.methods.options import MergingOptions

SHAPES = {"a.weight": (7, 5), "a.bias": (5,), "b.weight": (3, 4)}
OPTIONS = {"density": 0.2, "trimmed": "model", "start": "base", "estimator": "per_sample", "scale": 1.0}
OPTIONS |= {"drop": 0.5, "share": 0.5, "base": False, "epsilon": 1e-8}


def draw(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


BASE, *ENDS = (draw(seed) for seed in range(4))
FISHERS = [{name: each.square() for name, each in draw(seed).items()} for seed in (4, 5, 6)]
ZERO, ONE = ({name: torch.full(shape, value) for name, shape in SHAPES.items()} for value in (0.0, 1.0))
TASKS = [{name: end[name] - BASE[name] for name in SHAPES} for end in ENDS]


def merge(ends=ENDS, *, start=BASE, fishers=FISHERS, began=None, **chosen):
    """The merged weights of domains that each began at the base, or where it is told."""
    merged = Merged(MergingOptions(**{**OPTIONS, **chosen}), start)
    for place, (end, at) in enumerate(zip(ends, began or [start] * len(ends), strict=True)):
        merged.add(Ended(like=start, began=at, ended=end, fisher=fishers[place], seed=place))
    return merged.weights.named()


def assert_close(found, expected, **tolerance):
    for name in SHAPES:
        torch.testing.assert_close(found[name], expected[name], **({"rtol": 1e-5, "atol": 1e-6} | tolerance))


def mean(ends, weights=None):
    weights = weights or [ONE] * len(ends)
    pairs = list(zip(ends, weights, strict=True))
    return {name: sum(w[name] * e[name] for e, w in pairs) / sum(w[name] for w in weights) for name in SHAPES}


@pytest.mark.parametrize("rule", RULES)
def test_domains_that_end_alike_give_what_they_ended_with(rule):
    """One, or three."""
    scale = 1 / 3 if rule in ("task_arithmetic", "dare") else 1.0
    assert_close(merge(ENDS[:1], rule=rule, density=1.0, drop=0.0), ENDS[0])
    assert_close(merge([ENDS[0]] * 3, rule=rule, density=1.0, drop=0.0, scale=scale), ENDS[0])


@pytest.mark.parametrize("rule", ["average", "task_arithmetic", "ties", "fisher"])
def test_the_order_of_domains_that_are_learned_apart_makes_no_difference(rule):
    assert_close(merge(rule=rule), merge(ENDS[::-1], fishers=FISHERS[::-1], rule=rule))


def test_the_average_is_the_mean_with_and_without_the_base():
    assert_close(merge(rule="average"), mean(ENDS))
    assert_close(merge(rule="average", base=True), mean([BASE, *ENDS]))


def test_task_arithmetic_adds_what_all_domains_changed():
    for began in ([BASE] * 3, [BASE, draw(7), draw(8)]):
        ways = [{name: end[name] - s[name] for name in SHAPES} for end, s in zip(ENDS, began, strict=True)]
        expected = {name: BASE[name] + 0.4 * sum(way[name] for way in ways) for name in SHAPES}
        assert_close(merge(rule="task_arithmetic", scale=0.4, began=began), expected)


def ties(tasks, density, trimmed):
    """Algorithm 1 of the paper, entry by entry."""
    cut, found = [], {}
    for task in tasks:
        groups, own = [list(SHAPES)] if trimmed == "model" else [[name] for name in SHAPES], {}
        for group in groups:
            flat = sorted((abs(v) for name in group for v in task[name].flatten().tolist()), reverse=True)
            least = flat[max(1, int(density * len(flat) + 1e-9)) - 1]
            own |= {n: [v if abs(v) >= least else 0.0 for v in task[n].flatten().tolist()] for n in group}
        cut.append(own)
    for name, shape in SHAPES.items():
        values = []
        for entries in zip(*(each[name] for each in cut), strict=True):
            same = [v for v in entries if v * sum(entries) > 0]
            values.append(sum(same) / len(same) if same else 0.0)
        found[name] = torch.tensor(values).view(shape)
    return found


@pytest.mark.parametrize("trimmed", ["model", "tensor"])
@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_is_the_papers_algorithm(density, trimmed):
    """What two domains changed the other way round is not changed."""
    elected = ties(TASKS, density, trimmed)
    expected = {name: BASE[name] + 0.7 * elected[name] for name in SHAPES}
    assert_close(merge(rule="ties", density=density, trimmed=trimmed, scale=0.7), expected)
    whole = {name: each.round() for name, each in ENDS[0].items()}  # whole numbers: their sums are exact
    opposite = {name: -each for name, each in whole.items()}
    found = merge([whole, opposite], start=ZERO, rule="ties", density=1.0)
    assert not any(each.any() for each in found.values())


def test_fisher_is_the_weighted_mean():
    """Where no domain knows a weight, the mean."""
    cases = [(ENDS, FISHERS, mean(ENDS, FISHERS)), (ENDS, [FISHERS[0]] * 3, mean(ENDS))]
    cases += [(ENDS[:2], [ZERO, ONE], ENDS[1]), (ENDS[:2], [ZERO, ZERO], mean(ENDS[:2]))]
    for ends, fishers, expected in cases:
        assert_close(merge(ends, fishers=fishers, rule="fisher"), expected, rtol=1e-4, atol=1e-5)


def test_slerp_keeps_to_the_arc():
    """And goes on from the domains before."""
    one, other = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])
    third = slerp(one, other, 1 / 3, like=one)
    torch.testing.assert_close(third, 3 * torch.tensor([math.cos(math.pi / 6), math.sin(math.pi / 6)]))
    assert torch.equal(slerp(one, other, 1.0, like=one), other)
    assert torch.equal(slerp(one, other, 0.0, like=one), one)
    for same in (one * 2, -one, torch.zeros(2)):  # no arc: a line
        assert torch.equal(slerp(one, same, 0.5, like=one), torch.lerp(one, same, 0.5))
    for base in (False, True):
        expected = BASE if base else ENDS[0]
        for end in ENDS[not base :]:
            expected = {n: slerp(expected[n], end[n], 0.3, like=end[n]) for n in SHAPES}
        assert_close(merge(rule="slerp", share=0.3, base=base), expected)


def test_dare_drops_entries_and_keeps_the_mean():
    task = torch.ones(200, 200)
    dropped = drop_entries(task, task, p=0.9, seed=3)
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 10.0]))
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.06)
    assert not torch.equal(dropped, drop_entries(task, task, p=0.9, seed=4))
    found = merge(ENDS[:1], rule="dare", drop=0.5, scale=2.0)
    shares = torch.cat([((found[name] - BASE[name]) / TASKS[0][name]).flatten() for name in SHAPES])
    torch.testing.assert_close(shares, 4.0 * (shares > 1))  # scale 2, divided by 1 - p
    assert 0 < (shares > 1).sum() < len(shares)


def test_dare_before_ties_leaves_out_what_was_dropped():
    """What one of two domains has dropped has no vote: the other's stands."""
    found, seed = merge(ENDS[:2], rule="dare_ties", drop=0.5, density=1.0), lambda *of: key(*of) % 2**63
    tasks = [
        {n: drop_entries(task[n], BASE[n], p=0.5, seed=seed(place, "drop", n)) for n in SHAPES}
        for place, task in enumerate(TASKS[:2])
    ]
    assert_close({name: found[name] - BASE[name] for name in SHAPES}, ties(tasks, 1.0, "model"))
    assert any(((tasks[0][name] == 0) & (found[name] != BASE[name])).any() for name in SHAPES)


def test_coarse_weights_are_merged_in_32_bits():
    coarse = {name: each.bfloat16() for name, each in BASE.items()}
    merged = Merged(MergingOptions(**{**OPTIONS, "rule": "average"}), coarse)
    merged.bfloat16()  # as the trainer casts a module
    assert {each.dtype for each in merged.weights.named().values()} == {torch.float32}
    assert_close(merged.double().weights.named(), {name: each.float() for name, each in coarse.items()})
