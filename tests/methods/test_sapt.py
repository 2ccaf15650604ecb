"""SAPT and MoCL: what learns, what keeps a text with its pair, which pairs score it."""

import math

import pytest
import torch

from cpt.adapters import lora
from cpt.adapters.routed_lora import router_of
from cpt.methods.lora import attention_divergence, kept_attention
from tests.support.making import ORDER, made, same
from tests.support.pairs import pair_of

MOCL = ["method.key=cosine", "method.query=encoder"]
ROWS = torch.tensor([0, 1, 1, 0, -1, 1, 0, 1])  # the domains that the rows of a batch are of
STRONG = ["optim.lr=0.01", "optim.weight_decay=0.5"]


@pytest.fixture
def sapt(small):
    return lambda *overrides: made(small("method=sapt", ORDER, "trainer.steps=3", *overrides))


def test_the_divergence_is_the_kl_of_padded_means():
    kept = kept_attention([torch.tensor([1.0]), torch.tensor([0.25, 0.75])], 3)
    assert kept.tolist() == [[1, 0, 0], [0.25, 0.75, 0]]
    a = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.375, 0.5]])
    found = attention_divergence(kept, a.log())
    assert found.tolist() == pytest.approx([math.log(2), math.log(2)])
    assert attention_divergence(kept, kept.log().clamp_min(-50)).abs().max() < 1e-6


@pytest.mark.parametrize("form", [[], MOCL], ids=["sapt", "mocl"])
def test_of_the_second_domain_its_pair_its_key_and_the_query_learn(form, sapt, small):
    given = [*STRONG, "method.target_modules=[Wqkv,Wo,Wi]"]  # SAPT has no pair in the head
    work = sapt("method.strength=0", *given, *form)
    plain = made(small("method=lora", ORDER, "trainer.steps=3", *given))
    for each in (work, plain):
        each.learn(0)
    assert same({n: value for n, value in work.weights().items() if "pair_router" not in n}, plain.weights())
    first, before = pair_of(work.module), work.weights()
    key = router_of(work.module.model).key.detach().clone()
    work.learn(1)
    router, after = router_of(work.module.model), work.weights()
    moved = {name for name, value in before.items() if not torch.equal(after[name], value)}
    wanted = {n for n in before if ".default." in n or "pair_router" in n}
    assert moved == wanted == {n for n, p in work.module.model.named_parameters() if p.requires_grad}
    assert torch.equal(router.earlier, key)
    for name, layer in lora.lora_layers(work.module.model).items():
        for half, earlier in zip("AB", lora.factors_of(layer, "earlier"), strict=True):
            assert torch.equal(earlier, first[f"{name}.lora_{half}.default.weight"])


def test_keys_start_as_released_and_train_at_a_rate_of_their_own(sapt):
    work = sapt("trainer.steps=1", "method.key_rate=0.25")
    router = router_of(work.module.model)
    for number in (0, 1):
        work.learn(number)
        groups = work.module.trainer.optimizers[0].param_groups
        rates = {group["initial_lr"] for group in groups}
        slow = [each for group in groups if group["initial_lr"] == min(rates) for each in group["params"]]
        assert len(slow) == 5 and set(slow) == set(router.parameters())
        assert max(rates) == pytest.approx(4 * min(rates))
        assert router.key.abs().max() < 1.05 and 0.45 < router.key.std() < 0.7  # U(-1, 1): 0.58


def test_texts_of_earlier_domains_are_kept_with_their_pairs(sapt):
    work = sapt("replay=past", "replay.past_ratio=0.5", "method.strength=2")
    work.learn(0)
    assert [each.tolist() for each in work.module.kept] == [[1.0]]
    work.learn(1)
    router, batch = router_of(work.module.model), work.batches()[0] | {"domains": ROWS}
    terms = work.module.losses(batch)
    own = router.whole[batch["domains"] == 0]
    expected = 2 * -own[:, 0].sum() / len(batch["domains"])  # of domain 0, p = (1, 0)
    torch.testing.assert_close(terms["reflection"], expected)
    trained = {n: p for n, p in work.module.model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(terms["reflection"], list(trained.values()), allow_unused=True)
    reached = {n for n, gradient in zip(trained, gradients, strict=True) if gradient is not None}
    assert reached == {n for n in trained if "pair_router" in n}
    means = work.module.diagnostics()["sapt/attention"]
    assert means.shape == (2, 2) and torch.allclose(means.sum(1), torch.ones(2)) and means[0, 1] == 0


def test_mocl_pulls_the_new_key_to_new_texts(sapt):
    work = sapt(*MOCL, "method.strength=3")
    for number in (0, 1):
        work.learn(number)
    router, batch = router_of(work.module.model), work.batches()[0] | {"domains": ROWS}
    term = work.module.losses(batch)["matching"]
    new = router.cosines[:, 0, 1][batch["domains"] == 1]
    torch.testing.assert_close(term, 3 * (1 - new).sum() / len(batch["domains"]))
    assert torch.autograd.grad(term, [router.key])[0].any()
