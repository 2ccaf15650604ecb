"""EMA, WiSE-FT, Reptile and merging: averages of models, against formulas over the runs that they are of."""

import pytest
import torch

from cpt.adapters import lora
from cpt.methods.merge import slerp
from tests.methods.test_base import Half
from tests.support.making import Watch, assert_close, clones, same


def averaged(start, path, *, decay: float) -> dict[str, torch.Tensor]:
    """The recurrence of EMA in double precision."""
    average = {name: value.double() for name, value in start.items()}
    for weights in path:
        average = {name: decay * average[name] + (1 - decay) * weights[name].double() for name in average}
    return average


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_average_is_that_of_the_optimizer_steps(accumulate, build):
    """Of each domain's from where it begins, at each step: a batch in several parts is one."""
    work = build("ema", "method.decay=0.6", f"trainer.accumulate_grad_batches={accumulate}")
    for number in (0, 1):
        for parameter in work.module.model.parameters():
            parameter.data.add_(0.1)  # it starts at the model that it finds
        start, watch = work.weights(), Watch(lambda m: (work.weights(), clones(m.average.named())))
        work.learn(number, watch)
        seen = watch.seen[accumulate - 1 :: accumulate]
        path = [weights for _, (weights, _) in seen]
        assert len(path) == 6 and not same(work.weights(), path[-1])
        for step, (_, average) in seen:
            assert_close(average, averaged(start, path[:step], decay=0.6), rtol=1e-4, atol=1e-6)
        assert_close(work.weights(), averaged(start, path, decay=0.6), rtol=1e-4, atol=1e-6)


def test_masks_count_before_the_average(build):
    work = build("ema", "method.decay=0.6")
    work.module.masks.append(Half(acts_on="update", factor=0.0, model=work.module.model))
    before = work.weights()
    work.learn(0)
    for name, value in work.weights().items():
        if value.ndim == 2:
            still = (value == before[name]).all(1)
            assert still[: len(value) // 2].all() and not still[len(value) // 2 :].all(), name


def beside_ncl(work, build, *options):
    """Of each domain: the weights before it, after it, and after plain training from the same start."""
    for number in (0, 1):
        plain, before = build("ncl", *options), work.weights()
        plain.module.model.load_state_dict(work.module.model.state_dict())
        for each in (work, plain):
            each.learn(number)
        yield before, work.weights(), plain.weights()


@pytest.mark.parametrize("kept", [0.3, 1])
def test_a_domain_ends_between_before_and_after(kept, build):
    """Both domains: the second one mixes with what the first one ended with, not with the base."""
    for before, found, after in beside_ncl(build("wise_ft", f"method.previous={kept}"), build):
        mixed = {name: (1 - kept) * after[name].double() + kept * before[name].double() for name in before}
        assert_close(found, mixed, rtol=1e-5, atol=1e-7)
        assert not same(found, after) and same(found, before) == (kept == 1)


def test_a_share_of_the_way_is_gone_at_a_domains_end(build):
    work = build("reptile", "method.every=9", "method.share=0.3")
    for before, found, after in beside_ncl(work, build):
        assert_close(found, {name: torch.lerp(before[name], value, 0.3) for name, value in after.items()})


@pytest.mark.parametrize("every", ["2", "0.5"])
def test_it_is_gone_after_every_so_many_steps(every, build, monkeypatch):
    """A share of the steps is a number of them."""
    work = build("reptile", f"method.every={every}", "method.share=0.5", "trainer.steps=4")
    ways, kind, interpolate = [], type(work.module), type(work.module).interpolate

    def watched(module):
        fast, anchor = work.weights(), clones(module.anchor.named())
        ways.append(int(module.gone))
        interpolate(module)
        assert_close(work.weights(), {n: torch.lerp(anchor[n], v, 0.5) for n, v in fast.items()})
        assert same(work.weights(), module.anchor.named())

    monkeypatch.setattr(kind, "interpolate", watched)
    work.learn(0)
    assert ways == [2, 2] and int(work.module.gone) == 0


def test_more_steps_than_a_domain_has_are_told(build, caplog):
    caplog.set_level("INFO", logger="cpt")
    build("reptile", "method.every=7").learn(0)
    assert "one interpolation, at its end" in caplog.text


def test_each_domain_starts_from_the_merged_model(build):
    work = build("merge", "method.rule=slerp", "method.share=0.25")
    for number, (before, found, after) in enumerate(beside_ncl(work, build)):
        for name in found if number else ():
            torch.testing.assert_close(found[name], slerp(before[name], after[name], 0.25, like=after[name]))


def test_each_domain_starts_from_the_base(build):
    work = build("merge", "method.rule=task_arithmetic", "method.start=base", "method.scale=0.5")
    base, ends = work.weights(), []
    for number in (0, 1):
        alone = build("one")
        alone.learn(number)
        ends.append(alone.weights())
        work.learn(number)
    expected = {name: value + 0.5 * sum(end[name] - value for end in ends) for name, value in base.items()}
    assert_close(work.weights(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "plain"),
    [
        (["method.rule=task_arithmetic", "method.scale=1", "method.start=merged"], True),
        (["method.rule=dare", "method.drop=0.5"], False),
    ],
)
def test_a_choice_that_is_plain_training_is_told(rule, plain, build, caplog):
    caplog.set_level("INFO", logger="cpt")
    build("merge", *rule).learn(0)
    assert ("the run equals method=ncl by construction" in caplog.text) == plain


@pytest.mark.parametrize(
    "rule", ["task_arithmetic", "ties", "dare", "dare_ties", "average", "slerp", "fisher"]
)
def test_rules_over_task_vectors_start_from_the_base(rule, build):
    point = "merged" if rule in ("average", "slerp", "fisher") else "base"
    assert build("merge", f"method.rule={rule}").module.merging.start == point


def test_each_domain_goes_on_from_what_the_last_one_ended_with(build):
    work, plain, ends = build("merge", "method.start=previous"), build("ncl"), []
    for number in (0, 1):
        work.learn(number)
        plain.learn(number)
        ends.append(plain.weights())
    assert_close(work.weights(), {name: (ends[0][name] + ends[1][name]) / 2 for name in ends[0]})


def test_pairs_are_merged_by_their_products(build):
    work = build("merge_lora", "method.rule=task_arithmetic", "method.start=base", "method.scale=0.5")
    apart = build("lora", "method.per_domain=true")
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


def test_all_of_each_pair_is_inclora(build):
    rule = ["method.rule=task_arithmetic", "method.scale=1", "method.start=merged"]
    work, sums = build("merge_lora", *rule), build("inclora")
    for each in (work, sums):
        each.learn(0)
        each.learn(1)
    ours, theirs = (dict(each.module.model_for(1).named_parameters()) for each in (work, sums))
    assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_what_is_added_has_the_rank_that_is_asked_for(build):
    work = build("merge_lora", "method.truncated=2", "method.rule=average")
    base = work.weights()
    for number in (0, 1):
        work.learn(number)
        for name, value in work.weights().items():
            if name.endswith("base_layer.weight"):
                assert torch.linalg.matrix_rank(value - base[name], rtol=1e-3) == 2
