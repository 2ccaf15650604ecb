"""The hook between the masks and the clipping: what it sees and how often."""

import pytest
import torch
from torch import nn

from cpt.gradient_masks.base import GradientMask
from cpt.methods.ncl import NCL
from tests.support.making import ORDER, made

PLAIN = ["optim=sgd", "optim.lr=1", "schedule.warmup=0", "schedule=constant"]


class Nothing(GradientMask):
    """Factor 0 for every matrix."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(acts_on="gradient")
        self.matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]

    def factors(self):
        return ((parameter, torch.zeros(1, 1)) for parameter in self.matrices)


def norm(tensors) -> float:
    return torch.cat([each.flatten() for each in tensors]).norm().item()


def test_it_sees_each_step_once_when_all_its_parts_are_there(small, monkeypatch):
    seen = []
    works = [
        made(small(ORDER, "trainer.steps=3", f"trainer.accumulate_grad_batches={parts}")) for parts in (1, 2)
    ]
    monkeypatch.setattr(
        NCL,
        "transform_gradients",
        lambda module, optimizer: seen.append(norm(p.grad for p in module.model.parameters())),
    )
    for work in works:
        work.learn(0)
    whole, halved = seen[:3], seen[3:]
    assert len(halved) == 3
    assert halved == pytest.approx(whole, rel=1e-4)


def test_it_comes_after_masks_and_before_clipping(small, monkeypatch):
    seen = []

    def large(module, optimizer):
        seen.append(norm(p.grad for p in module.model.parameters() if p.ndim == 2))
        for parameter in module.model.parameters():
            parameter.grad.fill_(100.0)

    monkeypatch.setattr(NCL, "transform_gradients", large)
    work = made(small(ORDER, *PLAIN, "trainer.steps=1", "trainer.gradient_clip_val=0.5"))
    work.module.masks.append(Nothing(work.module.model))
    before = work.weights()
    work.learn(0)
    assert seen == [0.0]
    moved = norm(value - before[name] for name, value in work.weights().items())
    assert moved == pytest.approx(0.5, rel=1e-4)


def test_the_guard_looks_at_what_it_leaves(small, monkeypatch):
    monkeypatch.setattr(
        NCL,
        "transform_gradients",
        lambda module, optimizer: next(module.model.parameters()).grad.fill_(torch.nan),
    )
    with pytest.raises(ValueError, match="the norm of the gradient is nan at step 0 of law"):
        made(small(ORDER, "trainer.steps=1")).learn(0)
