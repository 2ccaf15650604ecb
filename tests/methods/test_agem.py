"""A-GEM: what is left of a gradient, or of a step, that goes against the memory."""

import pytest
import torch
from torch import nn

from cpt.methods.agem import AGEM, Reference, dot
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
    constrain, gradients, update = AGEM.constrain, AGEM.gradients, AGEM.after_update

    def before(module, optimizer):
        module.expected = reference_of(module) if module.domain.index else None
        module.old = [each.detach().clone() for each in module.model.parameters()]
        gradients(module, optimizer)

    def between(module, optimizer):
        constrain(module, optimizer)
        if module.expected is not None:
            own = [each.grad for each in module.model.parameters()]
            seen["gradient"].append(dot(own, module.expected) / length(own) / length(module.expected))

    def after(module):
        update(module)
        if module.expected is not None:
            own = [p.detach() - old for p, old in zip(module.model.parameters(), module.old, strict=True)]
            seen["step"].append(dot(own, module.expected) / length(own) / length(module.expected))

    monkeypatch.setattr(AGEM, "gradients", before)
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
    reference.gradients = {weight: torch.tensor([1.0, 0.0])}
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
