"""Lifelong-MoE: what a domain begins as, what it leaves alone, what holds it to the model before."""

from copy import deepcopy

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from cpt.adapters.experts import find_mixtures
from cpt.models.forward import kl_divergence
from tests.support.forward_passes import logits_at
from tests.support.method_fixtures import MethodFixture, equal_tensors

STRONG = ["optim.lr=0.01", "optim.weight_decay=0.5"]
ALL = "method.every=1"


@pytest.fixture
def moe(build):
    given = ["order=[law,food,space]", "trainer.steps=4"]
    return lambda *overrides, **how: build("lifelong_moe", *given, *overrides, **how)


class First(Callback):
    def __init__(self, look) -> None:
        self.look = look

    def on_train_batch_start(self, trainer, module, batch, number):
        if number == 0:
            self.look(module, batch)


def of_group(work: MethodFixture, group: int) -> dict[str, torch.Tensor]:
    if group >= 0:
        return {name: value for name, value in work.weights().items() if f".groups.{group}." in name}
    experts = [each for m in find_mixtures(work.module.model).values() for each in m.ffn_layers]
    own = {id(p) for each in experts for p in each.module.parameters()}
    return {n: p.detach().clone() for n, p in work.module.model.named_parameters() if id(p) in own}


@pytest.mark.parametrize(("family", "dense"), [("causal", "frozen"), ("both", "trained")])
def test_earlier_experts_and_their_rows_keep_their_bits(family, dense, moe):
    work = moe("method.num_experts=2", f"method.dense={dense}", *STRONG, on=family)
    base = of_group(work, -1)
    work.learn(0)
    kept, before = of_group(work, 0), work.weights()
    work.learn(1)
    assert base and equal_tensors(of_group(work, -1), base) and equal_tensors(of_group(work, 0), kept)
    after, new = work.weights(), of_group(work, 1)
    moved = {name for name, value in before.items() if not torch.equal(after[name], value)}
    others = {name for name in before if ".groups." not in name and name not in base}
    assert moved <= others and (len(moved) > 0.9 * len(others) if dense == "trained" else not moved)
    assert set(new) == set(after) - set(before) and len(new) == len(kept) > 4


@pytest.mark.parametrize(("family", "start"), [("masked", "base"), ("causal", "last"), ("both", "nearest")])
def test_a_domain_begins_with_the_model_before_it(family, start, moe):
    work, seen, copied = moe(f"method.start={start}", ALL, *STRONG, on=family), [], []
    sums = lambda group: {float(v.sum()) for n, v in of_group(work, group).items() if "router" not in n}  # noqa: E731

    def look(module, batch) -> None:
        copied.append([sums(group) == sums(module.domain.index) for group in range(-1, module.domain.index)])
        module.losses(batch)  # which opens the experts so far as they are
        for mixture in module.mixtures:
            mixture.groups[-1].router.data.mul_(100)
        with torch.no_grad():
            apart = logits_at(deepcopy(module.model).eval(), batch) - logits_at(before, batch)
        seen.append(apart.abs().max())

    for number in range(3):
        before = deepcopy(work.module.model).eval()
        work.learn(number, First(look))
        assert all(each.opening == 1 for each in work.module.mixtures)
        assert copied[number][work.module.sources[number] + 1]
    assert all(each < 1e-6 for each in seen)
    assert start == "nearest" or work.module.sources.tolist() == {"base": [-1] * 3, "last": [-1, 0, 1]}[start]


@pytest.mark.parametrize(("dense", "experts"), [("trained", 0), ("frozen", 1)])
def test_the_term_is_the_divergence_from_the_model_before(dense, experts, moe):
    given = [f"method.dense={dense}", f"method.num_experts={experts}", "method.strength=2"]
    work = moe(*given, *STRONG)
    work.learn(0)
    before = deepcopy(work.module.model).eval()
    work.learn(1)
    (batch,) = work.batches(text="food")
    found = work.module.losses(batch)["kd"]
    work.module.open_newest(1.0)
    now = logits_at(work.module.model, batch)
    with torch.no_grad():
        expected = 2 * kl_divergence(logits_at(before, batch), now).sum() * batch["weight"]
    torch.testing.assert_close(found, expected)
    assert found > 5e-6 and (len(work.module.teacher.named()) == 0) == (dense == "frozen")


def test_the_term_balances_by_the_first_choices_of_the_step_before(moe):
    work = moe("method.balance=3", "method.strength=0", "method.num_experts=2", ALL, *STRONG)
    work.learn(0)
    module, (batch,), terms = work.module, work.batches(), []
    module.shares.clear()

    def balance(*parts) -> float:
        return float(sum(module.losses(part)["balance"].detach() for part in parts)) / len(parts)

    assert balance(batch) == pytest.approx(3)  # nothing is known yet
    module.on_gradients_ready()
    found = balance(batch)
    shares = module.shares.named()["firsts"].clone()
    for mixture, own in zip(module.mixtures, shares, strict=True):
        probabilities = mixture.record.probabilities.detach()
        firsts = torch.bincount(probabilities.argmax(1), minlength=3)
        torch.testing.assert_close(own, firsts / firsts.sum())
        terms.append(3 * float((own * probabilities.mean(0)).sum()))
    assert found == pytest.approx(3 * sum(terms) / 2, rel=1e-5) != 3
    module.first_choices = None
    assert balance(*work.batches(2, accumulate=2)) == pytest.approx(found, rel=1e-5)
    module.on_gradients_ready()
    assert torch.equal(module.shares.named()["firsts"], shares)


def test_every_second_block_that_is_not_frozen_has_a_mixture(moe):
    for options, blocks in (([], [1]), ([ALL], [0, 1]), ([ALL, "freeze.layers=1"], [1])):
        assert list(find_mixtures(moe(*options).module.model)) == [
            f"model.layers.{n}.mixture" for n in blocks
        ]
