"""Prompt tuning and Progressive Prompts: what learns, where a prompt begins, what stands before what."""

import pytest
import torch

from cpt.adapters.domain_store import BASE
from tests.methods.test_lifelong_moe import First
from tests.support.making import DROPOUT, same
from tests.support.running import encoded, token_nll

N, D = 4, 32
FEW = [f"method.tokens={N}", "trainer.steps=3", "optim.lr=0.03"]


@pytest.fixture
def prompt(build):
    return lambda *overrides, **how: build("prompt", *FEW, *overrides, **how)


@pytest.fixture
def prog(build):
    return lambda *overrides: build("progprompt", *FEW, *overrides)


def rest(work) -> dict[str, torch.Tensor]:
    """The model's weights apart from the prompt."""
    return {name: value for name, value in work.weights().items() if name != work.module.name}


@pytest.mark.parametrize("family", ["masked", "causal"])
def test_the_prompt_learns_and_nothing_else_changes(family, prompt):
    work = prompt("optim.weight_decay=0.5", *DROPOUT * (family == "masked"), on=family)
    before, start, [batch] = rest(work), work.module.prompt.detach().clone(), work.batches()
    ids, base = batch["input_ids"], work.module.model_for(BASE).eval()
    assert not torch.equal(work.module.model.eval()(ids).logits[:, 0], base(ids).logits[:, 0])
    work.learn(0)
    assert same(rest(work), before) and ((work.module.prompt - start).abs().amax(1) > 1e-3).all()
    assert [n for n, p in work.module.model.named_parameters() if p.requires_grad] == [work.module.name]
    model = work.module.model_for(0).eval()
    assert model(ids).logits.shape == (*ids.shape, model.config.vocab_size)
    assert encoded(model, batch).shape == (*ids.shape, D)
    assert model.get_parameter(work.module.name).requires_grad


@pytest.mark.parametrize(
    ("options", "carried"),
    [
        (["method.start=vocabulary"], False),
        (["method.start=previous"], True),
        (["method.start=vocabulary", "method.per_domain=false"], True),
    ],
)
def test_where_a_prompt_begins(options, carried, prompt):
    work, starts = prompt(*options), []
    noted = First(lambda module, batch: starts.append(module.prompt.detach().clone()))
    work.learn(0, noted)
    last = work.module.prompt.detach().clone()
    work.learn(1, noted)
    rows = work.module.model.get_input_embeddings().weight
    from_rows = [(each[:, None] == rows).all(-1).any(1).all().item() for each in starts]
    assert from_rows == [True, not carried] and torch.equal(starts[1], last) == carried
    assert not torch.equal(starts[0], starts[1])


def test_the_draw_is_that_of_seed_and_domain_in_every_process(prompt, monkeypatch):
    """Gradients are averaged over processes, and parameters are not sent again."""
    found = []
    noted = First(lambda module, batch: found.append(module.prompt.detach().clone()))
    for rank, seed in ((0, 0), (1, 0), (0, 1)):
        work = prompt(f"seed={seed}", "method.start=vocabulary")
        monkeypatch.setattr(type(work.module), "global_rank", rank)
        work.learn(0, noted)
        monkeypatch.undo()
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@torch.no_grad()
def test_one_prompt_for_all_domains(prompt, build):
    work, plain = prompt("method.per_domain=false"), build("ncl").module.eval()
    [batch], module = work.batches(), work.module
    base = module.eval().nll(batch, 1)[0]
    assert torch.equal(base, token_nll(plain.model, batch)) and not module.needs_domain
    for number in (0, 1):
        with torch.enable_grad():
            work.learn(number)
        found = token_nll(module.eval().model, batch)
        assert module.bank.domains == [0] and not torch.equal(found, base)
        assert all(torch.equal(module.nll(batch, domain)[0], found) for domain in (BASE, 0, 1))
    assert torch.equal(module.model_for(1).get_parameter(module.name), module.prompt)


def links(work) -> list[torch.Tensor]:
    """The prompts that are kept, [n, D] each, by domain."""
    named = work.module.bank.named()
    return [named[f"{domain}:{work.module.name}"] for domain in work.module.bank.domains]


def test_new_prompts_stand_in_front_and_learned_domains_keep_every_bit(prog, prompt):
    work, plain = prog("optim.weight_decay=0.5"), prompt("optim.weight_decay=0.5")
    [batch], before, module = work.batches(), rest(work), work.module
    for each in (work, plain):
        each.learn(0)
    known = module.nll(batch, 0)[0]
    assert same(work.weights(), plain.weights()) and torch.equal(known, plain.module.nll(batch, 0)[0])
    work.learn(1)
    one, two = links(work)
    assert not torch.equal(one, two) and torch.equal(two, module.prompt)
    assert torch.equal(module.nll(batch, 0)[0], known) and same(rest(work), before)
    chain = {module.name: torch.cat([two, one])}
    assert torch.equal(module.nll(batch, 1)[0], token_nll(module.model, batch, weights=chain))
    assert {n for n, p in module.named_parameters() if p.requires_grad} == {f"model.{module.name}"}
    with torch.no_grad():
        module.prompt.add_(1)
        chain = {module.name: torch.cat([module.prompt, one])}
        expected = token_nll(module.model.train(), batch, weights=chain).sum() * batch["weight"]
    loss = module.losses(batch)["lm"]
    assert loss.item() == expected.item()
    [gradient] = torch.autograd.grad(loss, [module.prompt])
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
    [batch], chain = work.batches(), {work.module.name: torch.cat([work.module.learned(), kept])}
    assert torch.equal(work.module.nll(batch, 1)[0], token_nll(work.module.model, batch, weights=chain))


def test_a_new_prompt_is_a_copy_of_the_last_one_where_that_is_asked_for(prog):
    work = prog("method.start=previous", "method.residual=8", "trainer.steps=1", "optim.lr=0")
    work.learn(0)
    with torch.no_grad():
        links(work)[0].add_(1)
    work.learn(1)
    assert torch.equal(*links(work))
