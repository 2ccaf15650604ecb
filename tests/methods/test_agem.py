"""A-GEM and GEM: what is left of a gradient, or of a step, that goes against the memory."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from cpt.methods.agem import AGEM, Reference, inner_product, solve
from tests.support.making import ORDER, made
from tests.support.running import token_nll

SMALL = ["method=agem", "method.memory=16", "method.draw=8", ORDER, "trainer.steps=20", "optim.lr=0.01"]


def reference_of(module):
    """g_ref made here, from the samples that the method draws."""
    trained = list(module.model.parameters())
    slots = module.memory.draw(8, purpose=f"step {module.trainer.global_step}")
    loss = token_nll(module.model, module.memory.batch(slots)).mean()
    return list(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))


def length(tensors):
    return torch.cat([each.flatten() for each in tensors]).norm()


@pytest.mark.parametrize("acts_on", ["gradient", "update"])
def test_no_step_raises_the_loss_on_the_memory(acts_on, small, monkeypatch):
    """With `update` none, under Adam and weight decay; with `gradient` no gradient, but steps do."""
    seen = {"gradient": [], "step": []}
    constrain, gradients, update = AGEM.constrain, AGEM.transform_gradients, AGEM.after_update

    def before(module, optimizer):
        module.expected = reference_of(module) if module.domain.index else None
        module.old = [each.detach().clone() for each in module.model.parameters()]
        gradients(module, optimizer)

    def between(module, optimizer):
        constrain(module, optimizer)
        if module.expected is not None:
            own = [each.grad for each in module.model.parameters()]
            seen["gradient"].append(
                inner_product(own, module.expected) / length(own) / length(module.expected)
            )

    def after(module):
        update(module)
        if module.expected is not None:
            own = [p.detach() - old for p, old in zip(module.model.parameters(), module.old, strict=True)]
            seen["step"].append(inner_product(own, module.expected) / length(own) / length(module.expected))

    monkeypatch.setattr(AGEM, "transform_gradients", before)
    monkeypatch.setattr(AGEM, "constrain", between)
    monkeypatch.setattr(AGEM, "after_update", after)
    work = made(small(*SMALL, f"method.acts_on={acts_on}", "optim.weight_decay=0.1"))
    for number in (0, 1):
        work.learn(number)
    assert len(seen["step"]) == 20
    if acts_on == "gradient":
        assert min(seen["gradient"]) > -1e-4
        assert max(seen["step"]) > 1e-2  # Adam's steps do go against it
    else:
        assert max(seen["step"]) < 1e-4
        assert min(seen["gradient"]) < -1e-2


def test_a_gradient_that_does_no_harm_is_left_alone():
    weight = nn.Parameter(torch.zeros(2))
    reference = Reference(acts_on="gradient")
    reference.gradients = [{weight: torch.tensor([1.0, 0.0])}]
    for given, expected in (([1.0, 2.0], [1.0, 2.0]), ([-1.0, 2.0], [0.0, 2.0])):
        step = torch.tensor(given)
        reference.constrain([(weight, step)], None)
        assert step.tolist() == expected
    assert reference.diagnostics()["projected"].item() == 0.5


def test_the_memory_has_samples_of_every_domain(small):
    """Not the last batch of each, nor of one alone."""
    work = made(small(*SMALL, "method.memory=40", "trainer.steps=2", "trainer.probe_samples=20"))
    for number in (0, 1):
        work.learn(number)
    rows = work.module.memory.input_ids[work.module.memory.lengths > 0]
    probes = work.probe()
    newest = sum(any(torch.equal(row, each.int()) for b in probes for each in b["input_ids"]) for row in rows)
    assert len(rows) == 40 and 10 <= newest <= 30


def test_the_first_domain_is_learned_as_by_ncl(small):
    ours, plain = made(small(*SMALL)), made(small("method=ncl", *SMALL[3:]))
    for work in (ours, plain):
        work.learn(0)
    assert all(torch.equal(each, plain.weights()[name]) for name, each in ours.weights().items())


def by_hand(gram, products, *, least):
    """The best v among those with any of its entries at the bound, by brute force."""
    best = None
    for free in product([False, True], repeat=len(products)):
        found, chosen = torch.full_like(products, least), torch.tensor(free)
        if chosen.any():
            rest = products + gram[:, ~chosen] @ found[~chosen]
            found[chosen] = -torch.linalg.solve(gram[chosen][:, chosen], rest[chosen])
        value = found @ gram @ found / 2 + products @ found
        if (found >= least - 1e-12).all() and (best is None or value < best[0]):
            best = value, found
    return best[1]


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_the_constraints_of_several_domains_are_those_of_brute_force(least):
    draw = torch.Generator().manual_seed(0)
    bound = []
    for _ in range(50):
        references, gradient = torch.randn(3, 6, generator=draw), torch.randn(6, generator=draw)
        gram, products = (references @ references.T).double(), (references @ gradient).double()
        found = solve(gram, products, least=least)
        assert torch.allclose(found, by_hand(gram, products, least=least), atol=1e-8)
        bound.append((found > least).sum().item())
        left = references.double() @ (gradient + references.T @ found.float()).double()
        assert (left > -1e-5).all() or least  # with a margin the step may not turn by as little
    assert len(set(bound)) > 2  # none, some and several of them bind


@pytest.mark.parametrize("acts_on", ["gradient", "update"])
def test_gem_raises_the_loss_of_no_domain(acts_on, small, monkeypatch):
    """After two domains; A-GEM's one constraint is broken for one of them at some step."""
    worst = {"each": [], "mean": []}
    constrain, gradients = Reference.constrain, AGEM.transform_gradients

    def before(module, optimizer):
        gradients(module, optimizer)
        module.found = [module.refer(domain) for domain in range(module.domain.index)]

    def watched(reference, steps, optimizer):
        constrain(reference, steps, optimizer)
        module, sign = work.module, 1 if acts_on == "gradient" else -1
        if module.domain.index == 2:
            ways = [[each[parameter] for parameter, _ in steps] for each in module.found]
            moved = [each for _, each in steps]
            along = [sign * inner_product(moved, way) / length(moved) / length(way) for way in ways]
            worst[module.options.constraints].append(min(along).item())

    monkeypatch.setattr(AGEM, "transform_gradients", before)
    monkeypatch.setattr(Reference, "constrain", watched)
    three = [*SMALL, "order=[food,law,space]", "trainer.steps=10", f"method.acts_on={acts_on}"]
    for constraints in worst:
        work = made(small(*three, "method.constraints=each"))
        work.module.options = replace(work.module.options, constraints=constraints)
        for number in (0, 1, 2):
            work.learn(number)
    assert len(worst["each"]) == 10 and min(worst["each"]) > -1e-4
    assert min(worst["mean"]) < -1e-3


def test_each_domain_has_a_reference_of_its_own_samples(small):
    work = made(small(*SMALL, "method.constraints=each", "trainer.steps=2", "trainer.probe_samples=20"))
    for number in (0, 1):
        work.learn(number)
    memory = work.module.memory
    for domain in (0, 1):
        drawn = memory.draw(100, purpose="all", domain=domain)
        assert len(drawn) and (memory.domains[drawn] == domain).all()
    assert len(memory.draw(100, purpose="all")) == (memory.domains >= 0).sum()
