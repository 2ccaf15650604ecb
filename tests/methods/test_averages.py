"""EMA, WiSE-FT, Reptile and merging: averages of models."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from cpt.adapters import lora
from cpt.methods.merge import FinishedDomain, Merged, drop_entries, slerp
from cpt.methods.options import MergeOptions, Rule
from tests.methods.test_lifelong_moe import First
from tests.support.method_fixtures import StepRecorder, assert_close, clone_tensors, equal_tensors


def test_the_average_is_that_of_the_optimizer_steps(build):
    run = build("ema", "method.decay=0.6", "trainer.accumulate_grad_batches=2")
    for number in (0, 1):
        for parameter in run.module.model.parameters():
            parameter.data.add_(0.1)  # it starts at the model that it finds
        watch = StepRecorder(lambda module: (run.weights(), clone_tensors(module.average.named())))
        expected = {name: weight.double() for name, weight in run.weights().items()}
        run.learn(number, watch)
        assert len(watch.seen) == 12 and not equal_tensors(run.weights(), watch.seen[-1][1][0])

        # Every second micro-batch ends an optimizer step.
        for _, (weights, measured) in watch.seen[1::2]:
            expected = {
                name: 0.6 * average + 0.4 * weights[name].double() for name, average in expected.items()
            }
            assert_close(measured, expected, rtol=1e-4, atol=1e-6)
        assert_close(run.weights(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("method", "options", "previous_share"), [
    ("wise_ft", ["method.previous=0.3"], 0.3),
    ("reptile", ["method.interpolate_every=9", "method.share=0.3"], 0.7),
])  # fmt: skip
def test_a_domain_ends_between_before_and_after(method, options, previous_share, build):
    """With `previous_share` of the weights before; after: those of plain training from the same start."""
    run = build(method, *options)
    for number in (0, 1):
        plain = build("ncl")
        before = run.weights()
        plain.module.model.load_state_dict(run.module.model.state_dict())
        run.learn(number)
        plain.learn(number)
        expected = {
            name: torch.lerp(after.double(), before[name].double(), previous_share)
            for name, after in plain.weights().items()
        }
        assert_close(run.weights(), expected, rtol=1e-5, atol=1e-7)
        assert not equal_tensors(plain.weights(), before)


def test_weights_are_interpolated_after_each_interval_of_steps(build, monkeypatch):
    run = build("reptile", "method.interpolate_every=0.5", "method.share=0.5", "trainer.steps=4")
    method_class = type(run.module)
    interpolate = method_class.interpolate
    step_counts = []

    def check_interpolation(module):
        fast = run.weights()
        anchor = clone_tensors(module.anchor.named())
        step_counts.append(int(module.steps_since_anchor))
        interpolate(module)
        expected = {name: torch.lerp(anchor[name], weight, 0.5) for name, weight in fast.items()}
        assert_close(run.weights(), expected)

    monkeypatch.setattr(method_class, "interpolate", check_interpolation)
    run.learn(0)
    assert step_counts == [2, 2] and int(run.module.steps_since_anchor) == 0


def test_each_domain_starts_from_the_base_and_pairs_are_merged_by_their_products(build):
    options = ["method.rule=task_arithmetic", "method.start=base", "method.scale=0.5"]
    merged = build("merge", *options)
    merged_pairs = build("merge_lora", *options)
    pairs = build("lora", "method.per_domain=true")
    base = merged.weights()
    layers = lora.find_lora_layers(pairs.module.model)
    assert layers

    expected = {name: weight.clone() for name, weight in base.items()}
    products = dict.fromkeys(layers, 0)
    for number in (0, 1):
        single = build("one")
        for run in (merged, single, merged_pairs, pairs):
            run.learn(number)
        for name, weight in single.weights().items():
            expected[name] = expected[name] + 0.5 * (weight - base[name])
        for name, layer in layers.items():
            products[name] = products[name] + layer.get_delta_weight("default").detach()

    assert_close(merged.weights(), expected, rtol=1e-5, atol=1e-6)
    for name, product in products.items():
        weight = merged_pairs.weights()[f"{name}.base_layer.weight"]
        torch.testing.assert_close(weight, base[f"{name}.weight"] + 0.5 * product)


def test_a_domain_begins_where_the_last_one_ended_with_start_previous(build):
    # With the base in the average, the merged model differs from the end of the first domain.
    merged = build("merge", "method.rule=average", "method.base=true", "method.start=previous")
    plain = build("ncl")
    base = merged.weights()
    starts = []
    record_start = First(lambda module, batch: starts.append(merged.weights()))
    for number in (0, 1):
        merged.learn(number, record_start)
    plain.learn(0)

    assert equal_tensors(starts[0], base)
    assert_close(starts[1], plain.weights())
    assert not equal_tensors(starts[1], base)


SHAPES = {"a.weight": (7, 5), "a.bias": (5,), "b.weight": (3, 4)}
OPTIONS = MergeOptions(
    rule="average",
    start="base",
    scale=1.0,
    density=0.2,
    trimmed="model",
    drop=0.5,
    share=0.5,
    base=False,
    epsilon=1e-8,
    estimator="per_sample",
)


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def fill(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


def square_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.square() for name, tensor in tensors.items()}


def subtract(end: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: end[name] - start[name] for name in SHAPES}


BASE, *ENDS = (draw(seed) for seed in range(4))
FISHERS = [square_tensors(draw(seed)) for seed in (4, 5, 6)]
ZERO = fill(0.0)
ONE = fill(1.0)
TASKS = [subtract(end, BASE) for end in ENDS]


def merge(ends=ENDS, *, start=BASE, fishers=FISHERS, starts=None, **options):
    """The merged weights of domains that each began at the base, or at its entry of `starts`."""
    merged = Merged(replace(OPTIONS, **options), start)
    starts = starts or [start] * len(ends)
    for number, (domain_start, end) in enumerate(zip(starts, ends, strict=True)):
        merged.add(
            FinishedDomain(
                parameters=start,
                start_weights=domain_start,
                end_weights=end,
                fisher=fishers[number],
                seed=number,
            )
        )
    return merged.weights.named()


def mean(ends, weights=None):
    weights = weights or [ONE] * len(ends)
    means = {}
    for name in SHAPES:
        weighted = sum(weight[name] * end[name] for weight, end in zip(weights, ends, strict=True))
        means[name] = weighted / sum(weight[name] for weight in weights)
    return means


@pytest.mark.parametrize("rule", get_args(Rule))
def test_domains_that_end_alike_give_what_they_ended_with(rule):
    scale = 1 / 3 if rule in ("task_arithmetic", "dare") else 1.0
    assert_close(merge(ENDS[:1], rule=rule, density=1.0, drop=0.0), ENDS[0])
    assert_close(merge([ENDS[0]] * 3, rule=rule, density=1.0, drop=0.0, scale=scale), ENDS[0])


def test_means_and_sums_of_what_domains_changed():
    assert_close(merge(rule="average"), mean(ENDS))
    assert_close(merge(rule="average", base=True), mean([BASE, *ENDS]))
    for starts in ([BASE] * 3, [BASE, draw(7), draw(8)]):
        changes = [subtract(end, start) for end, start in zip(ENDS, starts, strict=True)]
        expected = {}
        for name in SHAPES:
            expected[name] = BASE[name] + 0.4 * sum(change[name] for change in changes)
        assert_close(merge(rule="task_arithmetic", scale=0.4, starts=starts), expected)


def trim(task, group, density):
    """The tensors of a group without all but the share `density` of their entries that is largest."""
    flat = torch.cat([task[name].flatten() for name in group])
    magnitudes = sorted(flat.abs().tolist(), reverse=True)
    threshold = magnitudes[max(1, int(density * len(magnitudes) + 1e-9)) - 1]
    trimmed = {}
    for name in group:
        entries = task[name].flatten().tolist()
        trimmed[name] = [entry if abs(entry) >= threshold else 0.0 for entry in entries]
    return trimmed


def ties(tasks, density, trimmed):
    """Algorithm 1 of the paper, entry by entry."""
    groups = [list(SHAPES)] if trimmed == "model" else [[name] for name in SHAPES]
    elected = {}
    for group in groups:
        trimmed_tasks = [trim(task, group, density) for task in tasks]
        for name in group:
            means = []
            for entries in zip(*(task[name] for task in trimmed_tasks), strict=True):
                agreeing = [entry for entry in entries if entry * sum(entries) > 0]
                means.append(sum(agreeing) / len(agreeing) if agreeing else 0.0)
            elected[name] = torch.tensor(means).view(SHAPES[name])
    return elected


@pytest.mark.parametrize(("density", "trimmed"), [(0.2, "model"), (0.5, "tensor"), (1.0, "model")])
def test_ties_is_the_papers_algorithm(density, trimmed):
    elected = ties(TASKS, density, trimmed)
    expected = {name: BASE[name] + 0.7 * elected[name] for name in SHAPES}
    assert_close(merge(rule="ties", density=density, trimmed=trimmed, scale=0.7), expected)

    rounded = {
        name: tensor.round() for name, tensor in ENDS[0].items()
    }  # whole numbers: their sums are exact
    opposite = {name: -tensor for name, tensor in rounded.items()}
    merged = merge([rounded, opposite], start=ZERO, rule="ties", density=1.0)
    assert not any(tensor.any() for tensor in merged.values())


def test_fisher_is_the_weighted_mean():
    cases = [
        (ENDS, FISHERS, mean(ENDS, FISHERS)),
        (ENDS, [FISHERS[0]] * 3, mean(ENDS)),
        (ENDS[:2], [ZERO, ONE], ENDS[1]),
        (ENDS[:2], [ZERO, ZERO], mean(ENDS[:2])),
    ]
    for ends, fishers, expected in cases:
        assert_close(merge(ends, fishers=fishers, rule="fisher"), expected, rtol=1e-4, atol=1e-5)


def test_slerp_keeps_to_the_arc():
    first = torch.tensor([3.0, 0.0])
    second = torch.tensor([0.0, 3.0])
    third_of_arc = slerp(first, second, 1 / 3, like=first)
    angle = math.pi / 6
    torch.testing.assert_close(third_of_arc, 3 * torch.tensor([math.cos(angle), math.sin(angle)]))
    for parallel in (first * 2, -first, torch.zeros(2)):  # no arc: a line
        assert torch.equal(slerp(first, parallel, 0.5, like=first), torch.lerp(first, parallel, 0.5))

    for base in (False, True):
        expected, *ends = [BASE, *ENDS] if base else ENDS
        for end in ends:
            expected = {name: slerp(expected[name], end[name], 0.3, like=end[name]) for name in SHAPES}
        assert_close(merge(rule="slerp", share=0.3, base=base), expected)


def test_dare_drops_entries_and_keeps_the_mean():
    task = torch.ones(200, 200)
    dropped = drop_entries(task, task, p=0.9, seed=3)
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 10.0]))
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.06)
    assert not torch.equal(dropped, drop_entries(task, task, p=0.9, seed=4))


def test_coarse_weights_are_merged_in_32_bits():
    coarse = {name: tensor.bfloat16() for name, tensor in BASE.items()}
    merged = Merged(replace(OPTIONS, rule="average"), coarse)
    merged.bfloat16()  # as the trainer casts a module
    assert {weight.dtype for weight in merged.weights.named().values()} == {torch.float32}
    expected = {name: tensor.float() for name, tensor in coarse.items()}
    assert_close(merged.double().weights.named(), expected)
