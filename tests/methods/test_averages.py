"""EMA, WiSE-FT, Reptile and merging: averages of models."""

import math
from typing import get_args

import pytest
import torch

from cpt.adapters import lora
from cpt.methods.merge import FinishedDomain, Merged, drop_entries, slerp
from cpt.methods.options import MergeOptions, Rule
from tests.methods.test_lifelong_moe import First
from tests.support.method_fixtures import StepRecorder, assert_close, clone_tensors, equal_tensors


def test_the_average_is_that_of_the_optimizer_steps(build):
    work = build("ema", "method.decay=0.6", "trainer.accumulate_grad_batches=2")
    for number in (0, 1):
        for parameter in work.module.model.parameters():
            parameter.data.add_(0.1)  # it starts at the model that it finds
        watch = StepRecorder(lambda m: (work.weights(), clone_tensors(m.average.named())))
        expected = {name: value.double() for name, value in work.weights().items()}
        work.learn(number, watch)
        assert len(watch.seen) == 12 and not equal_tensors(work.weights(), watch.seen[-1][1][0])
        for _, (weights, average) in watch.seen[1::2]:
            expected = {n: 0.6 * each + 0.4 * weights[n].double() for n, each in expected.items()}
            assert_close(average, expected, rtol=1e-4, atol=1e-6)
        assert_close(work.weights(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("method", "options", "kept"), [
    ("wise_ft", ["method.previous=0.3"], 0.3),
    ("reptile", ["method.every=9", "method.share=0.3"], 0.7),
])  # fmt: skip
def test_a_domain_ends_between_before_and_after(method, options, kept, build):
    """With `kept` of the weights before; after: those of plain training from the same start."""
    work = build(method, *options)
    for number in (0, 1):
        plain, before = build("ncl"), work.weights()
        plain.module.model.load_state_dict(work.module.model.state_dict())
        for each in (work, plain):
            each.learn(number)
        expected = {n: torch.lerp(v.double(), before[n].double(), kept) for n, v in plain.weights().items()}
        assert_close(work.weights(), expected, rtol=1e-5, atol=1e-7)
        assert not equal_tensors(plain.weights(), before)


def test_it_is_gone_after_every_so_many_steps(build, monkeypatch):
    work = build("reptile", "method.every=0.5", "method.share=0.5", "trainer.steps=4")
    ways, kind, interpolate = [], type(work.module), type(work.module).interpolate

    def watched(module):
        fast, anchor = work.weights(), clone_tensors(module.anchor.named())
        ways.append(int(module.steps_since_anchor))
        interpolate(module)
        assert_close(work.weights(), {n: torch.lerp(anchor[n], v, 0.5) for n, v in fast.items()})

    monkeypatch.setattr(kind, "interpolate", watched)
    work.learn(0)
    assert ways == [2, 2] and int(work.module.steps_since_anchor) == 0


def test_each_domain_starts_from_the_base_and_pairs_are_merged_by_their_products(build):
    given = ["method.rule=task_arithmetic", "method.start=base", "method.scale=0.5"]
    work, pairs = build("merge", *given), build("merge_lora", *given)
    apart = build("lora", "method.per_domain=true")
    base, maps = work.weights(), lora.lora_layers(apart.module.model)
    expected, products = {name: value.clone() for name, value in base.items()}, dict.fromkeys(maps, 0)
    assert maps
    for number in (0, 1):
        alone = build("one")
        for each in (work, alone, pairs, apart):
            each.learn(number)
        expected = {n: each + 0.5 * (alone.weights()[n] - base[n]) for n, each in expected.items()}
        products = {n: products[n] + each.get_delta_weight("default").detach() for n, each in maps.items()}
    assert_close(work.weights(), expected, rtol=1e-5, atol=1e-6)
    for name, product in products.items():
        found = pairs.weights()[f"{name}.base_layer.weight"]
        torch.testing.assert_close(found, base[f"{name}.weight"] + 0.5 * product)


def test_a_domain_begins_where_the_last_one_ended_with_start_previous(build):
    # With the base in the average, the merged model differs from the end of the first domain.
    merge = build("merge", "method.rule=average", "method.base=true", "method.start=previous")
    plain, base, starts = build("ncl"), merge.weights(), []
    begin = First(lambda module, batch: starts.append(merge.weights()))
    for number in (0, 1):
        merge.learn(number, begin)
    plain.learn(0)
    assert equal_tensors(starts[0], base)
    assert_close(starts[1], plain.weights())
    assert not equal_tensors(starts[1], base)


SHAPES = {"a.weight": (7, 5), "a.bias": (5,), "b.weight": (3, 4)}
OPTIONS = {"density": 0.2, "trimmed": "model", "start": "base", "estimator": "per_sample", "scale": 1.0}
OPTIONS |= {"drop": 0.5, "share": 0.5, "base": False, "epsilon": 1e-8}


def drawing(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


BASE, *ENDS = (drawing(seed) for seed in range(4))
FISHERS = [{name: each.square() for name, each in drawing(seed).items()} for seed in (4, 5, 6)]
ZERO, ONE = ({name: torch.full(shape, value) for name, shape in SHAPES.items()} for value in (0.0, 1.0))
TASKS = [{name: end[name] - BASE[name] for name in SHAPES} for end in ENDS]


def merge(ends=ENDS, *, start=BASE, fishers=FISHERS, began=None, **chosen):
    """The merged weights of domains that each began at the base, or where it is told."""
    merged = Merged(MergeOptions(**{**OPTIONS, **chosen}), start)
    for place, (end, at) in enumerate(zip(ends, began or [start] * len(ends), strict=True)):
        merged.add(FinishedDomain(parameters=start, started=at, ended=end, fisher=fishers[place], seed=place))
    return merged.weights.named()


def mean(ends, weights=None):
    weights = weights or [ONE] * len(ends)
    pairs = list(zip(ends, weights, strict=True))
    return {name: sum(w[name] * e[name] for e, w in pairs) / sum(w[name] for w in weights) for name in SHAPES}


@pytest.mark.parametrize("rule", get_args(Rule))
def test_domains_that_end_alike_give_what_they_ended_with(rule):
    scale = 1 / 3 if rule in ("task_arithmetic", "dare") else 1.0
    assert_close(merge(ENDS[:1], rule=rule, density=1.0, drop=0.0), ENDS[0])
    assert_close(merge([ENDS[0]] * 3, rule=rule, density=1.0, drop=0.0, scale=scale), ENDS[0])


def test_means_and_sums_of_what_domains_changed():
    assert_close(merge(rule="average"), mean(ENDS))
    assert_close(merge(rule="average", base=True), mean([BASE, *ENDS]))
    for began in ([BASE] * 3, [BASE, drawing(7), drawing(8)]):
        ways = [{name: end[name] - s[name] for name in SHAPES} for end, s in zip(ENDS, began, strict=True)]
        expected = {name: BASE[name] + 0.4 * sum(way[name] for way in ways) for name in SHAPES}
        assert_close(merge(rule="task_arithmetic", scale=0.4, began=began), expected)


def ties(tasks, density, trimmed):
    """Algorithm 1 of the paper, entry by entry."""
    cut, found = [{} for _ in tasks], {}
    for task, own in zip(tasks, cut, strict=True):
        for group in [list(SHAPES)] if trimmed == "model" else [[name] for name in SHAPES]:
            flat = sorted((abs(v) for name in group for v in task[name].flatten().tolist()), reverse=True)
            least = flat[max(1, int(density * len(flat) + 1e-9)) - 1]
            own |= {n: [v if abs(v) >= least else 0.0 for v in task[n].flatten().tolist()] for n in group}
    for name, shape in SHAPES.items():
        values = []
        for entries in zip(*(each[name] for each in cut), strict=True):
            agreeing = [v for v in entries if v * sum(entries) > 0]
            values.append(sum(agreeing) / len(agreeing) if agreeing else 0.0)
        found[name] = torch.tensor(values).view(shape)
    return found


@pytest.mark.parametrize(("density", "trimmed"), [(0.2, "model"), (0.5, "tensor"), (1.0, "model")])
def test_ties_is_the_papers_algorithm(density, trimmed):
    elected = ties(TASKS, density, trimmed)
    expected = {name: BASE[name] + 0.7 * elected[name] for name in SHAPES}
    assert_close(merge(rule="ties", density=density, trimmed=trimmed, scale=0.7), expected)
    whole = {name: each.round() for name, each in ENDS[0].items()}  # whole numbers: their sums are exact
    opposite = {name: -each for name, each in whole.items()}
    found = merge([whole, opposite], start=ZERO, rule="ties", density=1.0)
    assert not any(each.any() for each in found.values())


def test_fisher_is_the_weighted_mean():
    cases = [(ENDS, FISHERS, mean(ENDS, FISHERS)), (ENDS, [FISHERS[0]] * 3, mean(ENDS))]
    cases += [(ENDS[:2], [ZERO, ONE], ENDS[1]), (ENDS[:2], [ZERO, ZERO], mean(ENDS[:2]))]
    for ends, fishers, expected in cases:
        assert_close(merge(ends, fishers=fishers, rule="fisher"), expected, rtol=1e-4, atol=1e-5)


def test_slerp_keeps_to_the_arc():
    one, other = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])
    third = slerp(one, other, 1 / 3, like=one)
    torch.testing.assert_close(third, 3 * torch.tensor([math.cos(math.pi / 6), math.sin(math.pi / 6)]))
    for flat in (one * 2, -one, torch.zeros(2)):  # no arc: a line
        assert torch.equal(slerp(one, flat, 0.5, like=one), torch.lerp(one, flat, 0.5))
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


def test_coarse_weights_are_merged_in_32_bits():
    coarse = {name: each.bfloat16() for name, each in BASE.items()}
    merged = Merged(MergeOptions(**{**OPTIONS, "rule": "average"}), coarse)
    merged.bfloat16()  # as the trainer casts a module
    assert {each.dtype for each in merged.weights.named().values()} == {torch.float32}
    assert_close(merged.double().weights.named(), {name: each.float() for name, each in coarse.items()})
