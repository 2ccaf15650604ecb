"""Merging: what a domain starts from, and what its end is."""

import pytest
import torch

from cpt.adapters import lora
from cpt.methods.merge import slerp
from tests.support.making import ORDER, assert_close, made, same


@pytest.fixture
def merge(small):
    return lambda *options: made(small("method=merge", ORDER, *options))


def continued(small, work):
    """A plain run whose model has the weights that another one has now."""
    plain = made(small("method=ncl", ORDER))
    plain.module.model.load_state_dict(work.module.model.state_dict())
    return plain


def test_each_domain_starts_from_the_merged_model(merge, small):
    work = merge("method.rule=slerp", "method.share=0.25")
    work.learn(0)
    first = work.weights()
    plain = continued(small, work)
    work.learn(1)
    plain.learn(1)
    assert not same(work.weights(), plain.weights())
    for name, value in work.weights().items():
        own = plain.weights()[name]
        torch.testing.assert_close(value, slerp(first[name], own, 0.25, like=own))


def test_each_domain_starts_from_the_base(merge, small):
    work = merge("method.rule=task_arithmetic", "method.start=base", "method.scale=0.5")
    base, ends = work.weights(), []
    for number in (0, 1):
        alone = made(small("method=one", ORDER))
        alone.learn(number)
        ends.append(alone.weights())
        work.learn(number)
    expected = {name: value + 0.5 * sum(end[name] - value for end in ends) for name, value in base.items()}
    assert_close(work.weights(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "plain"),
    [
        (["method.rule=task_arithmetic", "method.scale=1", "method.start=merged"], True),
        (["method.rule=slerp", "method.share=1"], True),
        (["method.rule=task_arithmetic"], False),
        (["method.rule=dare", "method.drop=0.5"], False),
    ],
)
def test_a_choice_that_is_plain_training_is_told(rule, plain, merge, small, caplog):
    caplog.set_level("INFO", logger="cpt")
    work, sequential = merge(*rule), made(small("method=ncl", ORDER))
    for number in (0, 1):
        work.learn(number)
        sequential.learn(number)
    assert same(work.weights(), sequential.weights()) == plain
    assert ("the run equals method=ncl by construction" in caplog.text) == plain


@pytest.mark.parametrize(
    "rule", ["task_arithmetic", "ties", "dare", "dare_ties", "average", "slerp", "fisher"]
)
def test_rules_over_task_vectors_start_from_the_base(rule, merge):
    point = "merged" if rule in ("average", "slerp", "fisher") else "base"
    assert merge(f"method.rule={rule}").module.merging.start == point


def test_each_domain_goes_on_from_what_the_last_one_ended_with(merge, small):
    work, plain = merge("method.start=previous"), made(small("method=ncl", ORDER))
    ends = []
    for number in (0, 1):
        work.learn(number)
        plain.learn(number)
        ends.append(plain.weights())
    assert_close(work.weights(), {name: (ends[0][name] + ends[1][name]) / 2 for name in ends[0]})
    assert not same(work.weights(), ends[1])


def test_fisher_weighs_what_its_domain_knows(merge):
    work = merge("method.rule=fisher")
    before = work.weights()
    work.learn(0)
    sums = work.module.merging.merged.fishers.named()
    assert all((each > 0).any() for each in sums.values())
    work.learn(1)
    assert not same(before, work.weights())
    assert all(
        (work.module.merging.merged.fishers.named()[name] >= each).all() for name, each in sums.items()
    )


def test_pairs_are_merged_by_their_products(small):
    rule = ["method.rule=task_arithmetic", "method.start=base", "method.scale=0.5"]
    work = made(small("method=merge_lora", ORDER, *rule))
    apart = made(small("method=lora", ORDER, "method.per_domain=true"))
    maps, base = lora.lora_layers(apart.module.model), work.weights()
    products = dict.fromkeys(maps, 0)
    for number in (0, 1):
        apart.learn(number)
        products = {n: products[n] + each.get_delta_weight("default").detach() for n, each in maps.items()}
        work.learn(number)
    assert maps
    for name, product in products.items():
        found = work.weights()[f"{name}.base_layer.weight"]
        torch.testing.assert_close(found, base[f"{name}.base_layer.weight"] + 0.5 * product)


def test_all_of_each_pair_is_inclora(small):
    rule = ["method.rule=task_arithmetic", "method.scale=1", "method.start=merged"]
    work = made(small("method=merge_lora", ORDER, *rule))
    sums = made(small("method=inclora", ORDER))
    for number in (0, 1):
        work.learn(number)
        sums.learn(number)
    ours, theirs = (dict(each.module.model_for(1).named_parameters()) for each in (work, sums))
    assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_what_is_added_has_the_rank_that_is_asked_for(small):
    work = made(small("method=merge_lora", ORDER, "method.truncated=2", "method.rule=average"))
    base = work.weights()
    for number in (0, 1):
        work.learn(number)
        for name, value in work.weights().items():
            if name.endswith("base_layer.weight"):
                assert torch.linalg.matrix_rank(value - base[name], rtol=1e-3) == 2
