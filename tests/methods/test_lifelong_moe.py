"""Lifelong-MoE: what a domain begins as, what it leaves alone, what holds it to the model before."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from cpt.adapters.experts import find_mixtures
from cpt.methods.experts import check_ffns
from cpt.methods.options import LifelongMoEOptions
from cpt.models.forward import kl_divergence
from tests.support.decoders import build_decoder
from tests.support.forward_passes import logits_at
from tests.support.method_fixtures import MethodFixture, equal_tensors
from tests.support.mixtures import build_mixture
from tests.support.task_fixtures import write_tasks

STRONG = ["optim.lr=0.01", "optim.weight_decay=0.5"]
ALL = "method.moe_every_n_blocks=1"


@pytest.fixture
def moe(build):
    options = ["order=[law,food,space]", "trainer.steps=4"]
    return lambda *overrides, **arguments: build("lifelong_moe", *options, *overrides, **arguments)


def test_layers_of_unknown_form_may_be_frozen_and_mixtures_are_not_made_again():
    options = LifelongMoEOptions(
        num_experts=1,
        moe_every_n_blocks=1,
        top_k=2,
        start="base",
        fade_in=0.1,
        dense="trained",
        strength=1.0,
        balance=0.01,
    )
    falcon = build_decoder("falcon_h1")
    with pytest.raises(ValueError, match="^method.dense=trained is invalid: .*mamba.* Allowed: frozen$"):
        check_ffns(falcon, options)
    check_ffns(falcon, replace(options, dense="frozen"))
    with pytest.raises(
        ValueError, match="^method.num_experts=1 is invalid: .*mixture of experts.* Allowed: 0$"
    ):
        check_ffns(build_mixture("mixtral"), options)


class First(Callback):
    def __init__(self, look) -> None:
        self.look = look

    def on_train_batch_start(self, trainer, module, batch, number):
        if number == 0:
            self.look(module, batch)


def select_group(run: MethodFixture, group: int) -> dict[str, torch.Tensor]:
    """The weights of a group of experts with its router, or (-1) of the base's own FFNs."""
    weights = run.weights()
    if group >= 0:
        return {name: weight for name, weight in weights.items() if f".groups.{group}." in name}
    base_parameters = set()
    for mixture in find_mixtures(run.module.model).values():
        for layer in mixture.ffn_layers:
            base_parameters.update(layer.module.parameters())
    names = [name for name, parameter in run.module.model.named_parameters() if parameter in base_parameters]
    return {name: weights[name] for name in names}


@pytest.mark.parametrize(("family", "dense"), [("causal", "frozen"), ("both", "trained")])
def test_earlier_experts_and_their_rows_keep_their_bits(family, dense, moe):
    run = moe("method.num_experts=2", f"method.dense={dense}", *STRONG, on=family)
    base = select_group(run, -1)
    run.learn(0)
    first_group = select_group(run, 0)
    before = run.weights()
    run.learn(1)
    assert (
        base
        and equal_tensors(select_group(run, -1), base)
        and equal_tensors(select_group(run, 0), first_group)
    )

    after = run.weights()
    changed = {name for name, weight in before.items() if not torch.equal(after[name], weight)}
    dense_names = {name for name in before if ".groups." not in name and name not in base}
    if dense == "trained":
        assert changed <= dense_names and len(changed) > 0.9 * len(dense_names)
    else:
        assert not changed
    new_group = select_group(run, 1)
    assert set(new_group) == set(after) - set(before) and len(new_group) == len(first_group) > 4


@pytest.mark.parametrize(
    ("family", "start"), [("masked", "base"), ("causal", "previous"), ("both", "nearest")]
)
def test_a_domain_begins_with_the_model_before_it(family, start, moe):
    run = moe(f"method.start={start}", ALL, *STRONG, on=family)
    distances = []
    copied_groups = []  # by domain, from the base's on

    def sums_of_group(group: int) -> set[float]:
        return {
            float(weight.sum()) for name, weight in select_group(run, group).items() if "router" not in name
        }

    def compare(module, batch) -> None:
        newest = module.domain.index
        copied_groups.append([sums_of_group(group) == sums_of_group(newest) for group in range(-1, newest)])
        module.losses(batch)  # which opens the experts so far as they are
        for mixture in module.mixtures:
            mixture.groups[-1].router.data.mul_(100)
        with torch.no_grad():
            differences = logits_at(deepcopy(module.model).eval(), batch) - logits_at(before, batch)
        distances.append(differences.abs().max())

    for number in range(3):
        before = deepcopy(run.module.model).eval()
        run.learn(number, First(compare))
        assert all(mixture.opening == 1 for mixture in run.module.mixtures)
        assert copied_groups[number][run.module.sources[number] + 1]
    assert all(distance < 1e-6 for distance in distances)
    if start != "nearest":
        assert run.module.sources.tolist() == {"base": [-1] * 3, "previous": [-1, 0, 1]}[start]


@pytest.mark.parametrize(("dense", "experts"), [("trained", 0), ("frozen", 1)])
def test_the_term_is_the_divergence_from_the_model_before(dense, experts, moe):
    options = [f"method.dense={dense}", f"method.num_experts={experts}", "method.strength=2"]
    run = moe(*options, *STRONG)
    run.learn(0)
    before = deepcopy(run.module.model).eval()
    run.learn(1)
    [batch] = run.batches(text="food")
    term = run.module.losses(batch)["kd"]
    run.module.open_newest(1.0)
    logits = logits_at(run.module.model, batch)
    with torch.no_grad():
        expected = 2 * kl_divergence(logits_at(before, batch), logits).sum() * batch["weight"]
    torch.testing.assert_close(term, expected)
    assert term > 5e-6 and (len(run.module.teacher.named()) == 0) == (dense == "frozen")


def test_the_term_balances_by_the_first_choices_of_the_step_before(moe):
    run = moe("method.balance=3", "method.strength=0", "method.num_experts=2", ALL, *STRONG)
    run.learn(0)
    module = run.module
    [batch] = run.batches()
    module.first_choice_shares.clear()

    def mean_term(*parts) -> float:
        return float(sum(module.losses(part)["balance"].detach() for part in parts)) / len(parts)

    assert mean_term(batch) == pytest.approx(3)  # nothing is known yet
    module.on_gradients_ready()
    term = mean_term(batch)
    shares = module.first_choice_shares.named()["firsts"].clone()
    expected = []
    for mixture, first_shares in zip(module.mixtures, shares, strict=True):
        probabilities = mixture.record.probabilities.detach()
        first_choices = torch.bincount(probabilities.argmax(1), minlength=3)
        torch.testing.assert_close(first_shares, first_choices / first_choices.sum())
        expected.append(3 * float((first_shares * probabilities.mean(0)).sum()))
    assert term == pytest.approx(3 * sum(expected) / 2, rel=1e-5) != 3

    module.first_choices = None
    assert mean_term(*run.batches(2, accumulate=2)) == pytest.approx(term, rel=1e-5)
    module.on_gradients_ready()
    assert torch.equal(module.first_choice_shares.named()["firsts"], shares)


@pytest.mark.parametrize("family", ["causal", "both"])
def test_rows_of_any_length_are_balanced_by_the_mean_over_their_tokens(family, moe, tmp_path):
    names = ["law", "food", "space"]
    options = ["domains=tasks", f"domains.root={write_tasks(tmp_path, names, train=30, test=6)}"]
    options += ["domains/template=bare", "answers=none", "model.max_seq_length=200"]
    run = moe("method.balance=3", "method.strength=0", "method.num_experts=2", ALL, *options, on=family)
    run.learn(0)
    run.module.first_choice_shares.clear()
    parts = run.batches(2, accumulate=2)
    assert any("attention_mask" in batch for batch in parts)
    # With equal shares of first choices it is alpha, as the mean probabilities of a token sum to 1.
    terms = [run.module.losses(batch)["balance"].detach() for batch in parts]
    assert float(sum(terms)) / 2 == pytest.approx(3)


def test_every_second_block_that_is_not_frozen_has_a_mixture(moe):
    for options, blocks in (([], [1]), ([ALL], [0, 1]), ([ALL, "freeze.layers=1"], [1])):
        mixtures = find_mixtures(moe(*options).module.model)
        assert list(mixtures) == [f"model.layers.{number}.mixture" for number in blocks]
