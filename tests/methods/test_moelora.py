"""MoELoRA: what is trained, and what a mask sees of it."""

import pytest
import torch

from cpt.adapters import lora
from cpt.gradient_masks.base import recording
from tests.support.making import ORDER, made


@pytest.fixture
def experts(small):
    return lambda *overrides: made(
        small("method=moelora", "method.experts=3", "method.r=2", ORDER, *overrides)
    )


def test_pairs_and_routers_learn_and_nothing_else(experts):
    work = experts("optim.weight_decay=0.5", "optim.lr=0.01")
    before = work.weights()
    work.learn(0)
    for name, value in work.weights().items():
        own = ".lora_" in name or ".router." in name
        assert torch.equal(value, before[name]) != own, name
    layers = lora.lora_layers(work.module.model)
    sizes = [layer.in_features + layer.out_features for layer in layers.values()]
    routers = sum(3 * layer.in_features for layer in layers.values())
    trained = sum(p.numel() for p in work.module.parameters() if p.requires_grad)
    assert trained == 3 * 2 * sum(sizes) + routers


def test_a_mask_ranks_rows_of_a_by_what_the_gates_leave_of_them(experts):
    work = experts("mask=migu", "trainer.steps=1")
    work.learn(0)
    [mask], batch = work.module.masks, work.batches()[0]
    mask.sums.zero_()
    name, layer = next(iter(lora.lora_layers(work.module.model).items()))
    names = [each.name for each in mask.maps]
    place = mask.places[names.index(f"{name}.lora_A")]
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with recording([mask]):
        work.module.objective.nll(work.module.model, batch)
    gates = layer.router(seen[0]).float().softmax(-1).repeat_interleave(2, -1)
    weighed = gates * (seen[0] @ layer.lora_A["default"].weight.T)
    present = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[..., None]
    expected = (weighed.abs() * present).sum((0, 1))
    torch.testing.assert_close(mask.sums[place] / mask.sums[place].sum(), expected / expected.sum())
