"""A-GEM and GEM: what is left of a gradient, or of a step, that goes against the memory."""

from itertools import product

import pytest
import torch
from torch import nn

from cpt.methods.reservoir import AGEM, Reference, inner_product, solve
from tests.support.running import token_nll

SMALL = ["method.buffer_size=24", "method.minibatch_size=8", "order=[food,law,space]", "trainer.steps=12"]
SMALL += ["optim.lr=0.01"]


def reference_of(module, domain):
    """g_ref made here, from the samples that the method draws: of a domain, or of all before (None)."""
    trained = list(module.model.parameters())
    slots = module.memory.draw(8, purpose=f"step {module.trainer.global_step}", domain=domain)
    loss = token_nll(module.model, module.memory.batch(slots)).mean()
    return list(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))


def along(moved, references) -> float:
    """The least cosine between a movement and references."""
    long = [torch.cat([each.flatten() for each in tensors]).norm() for tensors in (moved, *references)]
    cosines = zip(references, long[1:], strict=True)
    return min((inner_product(moved, each) / long[0] / norm).item() for each, norm in cosines)


@pytest.mark.parametrize("constraints", ["mean", "each"])
@pytest.mark.parametrize("apply_to", ["gradient", "update"])
def test_no_step_raises_the_loss_on_the_memory(apply_to, constraints, build, monkeypatch):
    seen = {"gradient": [], "step": [], "each": []}
    constrain, gradients, update = AGEM.on_before_optimizer_step, AGEM.transform_gradients, AGEM.after_update

    def before(module, optimizer):
        module.all = [reference_of(module, domain) for domain in range(module.domain.index)]
        module.expected = module.all if constraints == "each" else [reference_of(module, None)]
        module.old = [each.detach().clone() for each in module.model.parameters()]
        gradients(module, optimizer)

    def between(module, optimizer):
        constrain(module, optimizer)
        if module.domain.index == 2:
            own = [each.grad for each in module.model.parameters()]
            seen["gradient"].append(along(own, module.expected))
            seen["each"] += [along(own, module.all)] * (apply_to == "gradient")

    def after(module):
        update(module)
        if module.domain.index == 2:
            own = [old - p.detach() for p, old in zip(module.model.parameters(), module.old, strict=True)]
            seen["step"].append(along(own, module.expected))
            seen["each"] += [along(own, module.all)] * (apply_to == "update")

    monkeypatch.setattr(AGEM, "on_before_optimizer_step", between)
    monkeypatch.setattr(AGEM, "after_update", after)
    given = [f"method.apply_to={apply_to}", "method.constraints=each", "optim.weight_decay=0.1"]
    work = build("agem", *SMALL, *given)
    work.module.each = constraints == "each"
    work.learn(0)
    monkeypatch.setattr(AGEM, "transform_gradients", before)
    work.learn(1)
    work.learn(2)
    order = ("gradient", "step") if apply_to == "gradient" else ("step", "gradient")
    held, free = (seen[each] for each in order)
    assert len(held) == len(free) == 12 and min(held) > -1e-4 and min(free) < -1e-2
    assert (min(seen["each"]) > -1e-4) == (constraints == "each")


def test_a_gradient_that_does_no_harm_is_left_alone():
    weight, reference = nn.Parameter(torch.zeros(2)), Reference(apply_to="gradient")
    reference.gradients = [{weight: torch.tensor([1.0, 0.0])}]
    for given, expected in (([1.0, 2.0], [1.0, 2.0]), ([-1.0, 2.0], [0.0, 2.0])):
        step = torch.tensor(given)
        reference.constrain([(weight, step)], None)
        assert step.tolist() == expected
    assert reference.diagnostics()["projected"].item() == 0.5


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
    draw, bound = torch.Generator().manual_seed(0), []
    for _ in range(50):
        references, gradient = torch.randn(3, 6, generator=draw), torch.randn(6, generator=draw)
        gram, products = (references @ references.T).double(), (references @ gradient).double()
        found = solve(gram, products, least=least)
        assert torch.allclose(found, by_hand(gram, products, least=least), atol=1e-8)
        bound.append((found > least).sum().item())
        left = references.double() @ (gradient + references.T @ found.float()).double()
        assert (left > -1e-5).all() or least  # with a margin the step may not turn by as little
    assert len(set(bound)) > 2  # none, some and several of them bind


def test_each_domain_has_a_reference_of_its_own_samples(build):
    given = ["method.buffer_size=40", "trainer.importance_samples=20", "method.constraints=each"]
    work = build("agem", "trainer.steps=2", *given)
    for number in (0, 1):
        work.learn(number)
    memory, newest = work.module.memory, {tuple(row.tolist()) for b in work.probe() for row in b["input_ids"]}
    rows = memory.input_ids[memory.lengths > 0].tolist()
    assert len(rows) == 40 and 10 <= sum(tuple(row) in newest for row in rows) <= 30
    for domain in (0, 1):
        drawn = memory.draw(100, purpose="all", domain=domain)
        assert len(drawn) and (memory.domains[drawn] == domain).all()
    assert len(memory.draw(100, purpose="all")) == (memory.domains >= 0).sum()
