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


def weights_outside_prompt(run) -> dict[str, torch.Tensor]:
    return {name: value for name, value in run.weights().items() if name != run.module.name}


def find_stored_prompts(run) -> list[torch.Tensor]:
    named = run.module.domain_params.named()
    return [named[f"{domain}:{run.module.name}"] for domain in run.module.domain_params.domains]


BEGUN = {"start=vocabulary": False, "start=previous": True, "start=vocabulary method.per_domain=false": True}


@pytest.mark.parametrize("options", BEGUN)
def test_where_a_prompt_begins(options, prompt):
    run = prompt(*f"method.{options}".split())
    is_carried = BEGUN[options]
    starts = []
    record_start = First(lambda module, batch: starts.append(module.prompt.detach().clone()))
    run.learn(0, record_start)
    end = run.module.prompt.detach().clone()
    run.learn(1, record_start)

    table = run.module.model.get_input_embeddings().weight
    is_of_table = [(start[:, None] == table).all(-1).any(1).all().item() for start in starts]
    assert is_of_table == [True, not is_carried] and torch.equal(starts[1], end) == is_carried
    if not is_carried:
        for seed in (0, 1):
            prompt(f"seed={seed}", f"method.{options}").learn(0, record_start)
            assert torch.equal(starts[-1], starts[0]) == (seed == 0)


def test_new_prompts_come_first_and_learned_domains_keep_every_bit(prog, prompt):
    run = prog("optim.weight_decay=0.5")
    plain = prompt("optim.weight_decay=0.5")
    [batch] = run.batches()
    before = weights_outside_prompt(run)
    module = run.module
    for method_run in (run, plain):
        method_run.learn(0)
    nll_before = module.nll(batch, 0)[0]
    assert equal_tensors(run.weights(), plain.weights())

    run.learn(1)
    first, second = find_stored_prompts(run)
    assert not torch.equal(first, second) and torch.equal(second, module.prompt)
    assert torch.equal(module.nll(batch, 0)[0], nll_before) and equal_tensors(
        weights_outside_prompt(run), before
    )

    expected = token_nll(module.model, batch, weights={module.name: torch.cat([second, first])})
    assert torch.equal(module.nll(batch, 1)[0], expected)
    loss = module.losses(batch)["lm"]
    assert loss.item() == (expected.sum() * batch["weight"]).item()
    assert {n for n, p in module.named_parameters() if p.requires_grad} == {f"model.{module.name}"}
    assert torch.autograd.grad(loss, [module.prompt])[0].abs().amax(1).min() > 0


def test_what_is_learned_through_maps_is_kept_without_them(prog):
    run = prog("method.residual=8")
    plain = prog()
    for method_run in (run, plain):
        method_run.learn(0)
    [stored] = find_stored_prompts(run)
    down = run.module.residual[0].weight.clone()
    assert torch.equal(stored, run.module.residual_prompt()) and not torch.equal(stored, run.module.prompt)
    assert not torch.equal(stored, find_stored_prompts(plain)[0])
    run.learn(1)
    assert torch.equal(find_stored_prompts(run)[0], stored) and not torch.equal(
        run.module.residual[0].weight, down
    )
    [batch] = run.batches()
    chain = {run.module.name: torch.cat([run.module.residual_prompt(), stored])}
    assert torch.equal(run.module.nll(batch, 1)[0], token_nll(run.module.model, batch, weights=chain))


def test_a_prompt_of_the_chain_begins_as_the_newest_before_it(prog):
    run = prog("method.start=previous", "order=[law,food,space]")
    starts = []
    begin = First(lambda module, batch: starts.append(module.prompt.detach().clone()))
    for number in range(3):
        run.learn(number, begin)
    oldest, newer, _ = find_stored_prompts(run)
    assert torch.equal(starts[1], oldest)
    assert torch.equal(starts[2], newer) and not torch.equal(newer, oldest)
