"""Progressive Prompts: what stands in front of what, what learns, what is kept."""

import pytest
import torch

import cpt.adapters.export
from cpt.adapters.domain_store import BASE
from tests.support.making import ORDER, made, same, state_beside_the_model
from tests.support.running import token_nll

N, D = 4, 32
FEW = [f"method.tokens={N}", "trainer.steps=3", "optim.lr=0.03"]


@pytest.fixture
def prog(small):
    return lambda *overrides: made(small("method=progprompt", ORDER, *FEW, *overrides))


def links(work) -> list[torch.Tensor]:
    """The prompts that are kept, [n, D] each, by domain."""
    named = work.module.bank.named()
    return [named[f"{domain}:{work.module.name}"] for domain in work.module.bank.domains]


def test_one_domain_is_that_of_prompt_tuning(prog, small):
    work, plain = prog(), made(small("method=prompt", ORDER, *FEW))
    for each in (work, plain):
        each.learn(0)
    assert same(work.weights(), plain.weights())
    batch = work.batches()[0]
    assert torch.equal(work.module.nll(batch, 0)[0], plain.module.nll(batch, 0)[0])


def test_new_prompts_stand_in_front_and_learned_domains_keep_every_bit(prog):
    work = prog("optim.weight_decay=0.5")
    batch, first = work.batches()[0], prog().module.nll(work.batches()[0], BASE)[0]
    rest = {name: value for name, value in work.weights().items() if name != work.module.name}
    work.learn(0)
    known = work.module.nll(batch, 0)[0]
    work.learn(1)
    one, two = links(work)
    assert not torch.equal(one, two) and torch.equal(two, work.module.prompt)
    assert torch.equal(work.module.nll(batch, 0)[0], known)
    chain = {work.module.name: torch.cat([two, one])}
    assert torch.equal(work.module.nll(batch, 1)[0], token_nll(work.module.model, batch, weights=chain))
    assert torch.equal(work.module.nll(batch, BASE)[0], first)
    assert {name for name, p in work.module.named_parameters() if p.requires_grad} == {
        f"model.{work.module.name}"
    }
    assert same({name: value for name, value in work.weights().items() if name != work.module.name}, rest)
    assert state_beside_the_model(work.module) == 2 * N * D * 4
    assert work.module.needs_domain


def test_the_loss_is_that_of_the_whole_chain(prog):
    work = prog()
    for number in (0, 1):
        work.learn(number)
    batch, (one, _) = work.batches()[0], links(work)
    with torch.no_grad():
        work.module.prompt.add_(1)
        chain = {work.module.name: torch.cat([work.module.prompt, one])}
        expected = token_nll(work.module.model.train(), batch, weights=chain).sum() * batch["weight"]
    loss = work.module.losses(batch)["lm"]
    assert loss.item() == expected.item()
    [gradient] = torch.autograd.grad(loss, [work.module.prompt])
    assert gradient.shape == (N, D) and gradient.abs().amax(1).min() > 0


def test_what_is_learned_through_maps_is_kept_without_them(prog):
    work, plain = prog("method.residual=8"), prog()
    for each in (work, plain):
        each.learn(0)
    (kept,), down = links(work), work.module.residual[0].weight.clone()
    assert torch.equal(kept, work.module.learned()) and not torch.equal(kept, work.module.prompt)
    assert not torch.equal(kept, links(plain)[0])
    work.learn(1)
    assert torch.equal(links(work)[0], kept) and not torch.equal(work.module.residual[0].weight, down)
    batch = work.batches()[0]
    chain = {work.module.name: torch.cat([work.module.learned(), kept])}
    assert torch.equal(work.module.nll(batch, 1)[0], token_nll(work.module.model, batch, weights=chain))


def test_a_new_prompt_is_a_copy_of_the_last_one_where_that_is_asked_for(prog):
    work = prog("method.start=previous", "method.residual=8", "trainer.steps=1", "optim.lr=0")
    work.learn(0)
    with torch.no_grad():
        links(work)[0].add_(1)
    work.learn(1)
    assert torch.equal(*links(work))


def test_each_domain_is_exported_with_its_chain(prog, tmp_path):
    work = prog()
    for number in (0, 1):
        work.learn(number)
    batch = work.batches()[0]
    assert work.module.export(tmp_path, ["law", "food"]).endswith('domain="food")')
    for number, name in enumerate(["law", "food"]):
        loaded = cpt.adapters.export.load(tmp_path, domain=name)
        assert torch.equal(token_nll(loaded, batch), work.module.nll(batch, number)[0])
        assert torch.equal(token_nll(work.module.model_for(number).eval(), batch), token_nll(loaded, batch))
