"""Prompt tuning and Progressive Prompts: what learns, where a prompt begins, what stands before what."""

import pytest
import torch

from tests.methods.test_lifelong_moe import First
from tests.support.forward_passes import token_nll
from tests.support.method_fixtures import equal_tensors

FEW = ["method.num_virtual_tokens=4", "trainer.steps=3", "optim.lr=0.03"]


@pytest.fixture
def prompt(build):
    return lambda *overrides: build("prompt", *FEW, *overrides)


@pytest.fixture
def prog(build):
    return lambda *overrides: build("progprompt", *FEW, *overrides)


def rest(work) -> dict[str, torch.Tensor]:
    return {name: value for name, value in work.weights().items() if name != work.module.name}


def links(work) -> list[torch.Tensor]:
    named = work.module.domain_params.named()
    return [named[f"{domain}:{work.module.name}"] for domain in work.module.domain_params.domains]


BEGUN = {"start=vocabulary": False, "start=previous": True, "start=vocabulary method.per_domain=false": True}


@pytest.mark.parametrize("options", BEGUN)
def test_where_a_prompt_begins(options, prompt):
    work, starts, carried = prompt(*f"method.{options}".split()), [], BEGUN[options]
    noted = First(lambda module, batch: starts.append(module.prompt.detach().clone()))
    work.learn(0, noted)
    last = work.module.prompt.detach().clone()
    work.learn(1, noted)
    rows = work.module.model.get_input_embeddings().weight
    from_rows = [(each[:, None] == rows).all(-1).any(1).all().item() for each in starts]
    assert from_rows == [True, not carried] and torch.equal(starts[1], last) == carried
    for seed in (0, 1) if not carried else ():
        prompt(f"seed={seed}", f"method.{options}").learn(0, noted)
        assert torch.equal(starts[-1], starts[0]) == (seed == 0)


def test_new_prompts_stand_in_front_and_learned_domains_keep_every_bit(prog, prompt):
    work, plain = prog("optim.weight_decay=0.5"), prompt("optim.weight_decay=0.5")
    [batch], before, module = work.batches(), rest(work), work.module
    for each in (work, plain):
        each.learn(0)
    known = module.nll(batch, 0)[0]
    assert equal_tensors(work.weights(), plain.weights())
    work.learn(1)
    one, two = links(work)
    assert not torch.equal(one, two) and torch.equal(two, module.prompt)
    assert torch.equal(module.nll(batch, 0)[0], known) and equal_tensors(rest(work), before)
    expected = token_nll(module.model, batch, weights={module.name: torch.cat([two, one])})
    assert torch.equal(module.nll(batch, 1)[0], expected)
    loss = module.losses(batch)["lm"]
    assert loss.item() == (expected.sum() * batch["weight"]).item()
    assert {n for n, p in module.named_parameters() if p.requires_grad} == {f"model.{module.name}"}
    assert torch.autograd.grad(loss, [module.prompt])[0].abs().amax(1).min() > 0


def test_what_is_learned_through_maps_is_kept_without_them(prog):
    work, plain = prog("method.residual=8"), prog()
    for each in (work, plain):
        each.learn(0)
    (kept,), down = links(work), work.module.residual[0].weight.clone()
    assert torch.equal(kept, work.module.residual_prompt()) and not torch.equal(kept, work.module.prompt)
    assert not torch.equal(kept, links(plain)[0])
    work.learn(1)
    assert torch.equal(links(work)[0], kept) and not torch.equal(work.module.residual[0].weight, down)
    [batch], chain = work.batches(), {work.module.name: torch.cat([work.module.residual_prompt(), kept])}
    assert torch.equal(work.module.nll(batch, 1)[0], token_nll(work.module.model, batch, weights=chain))


def test_a_prompt_of_the_chain_begins_as_the_newest_before_it(prog):
    work, starts = prog("method.start=previous", "order=[law,food,space]"), []
    begin = First(lambda module, batch: starts.append(module.prompt.detach().clone()))
    for number in range(3):
        work.learn(number, begin)
    oldest, newer, _ = links(work)
    assert torch.equal(starts[1], oldest)
    assert torch.equal(starts[2], newer) and not torch.equal(newer, oldest)
