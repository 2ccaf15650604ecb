"""Muon with AdamW as one optimizer: the bits of both, and one state."""

import torch
from torch import nn

from cpt.optim.muon import MuonWithAdamW

ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
MUON = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw"}


def make_weights() -> list[nn.Parameter]:
    """A matrix of a block, an embedding and a norm."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 6), (10, 4), (6,))]


def make_joint_optimizer(weights: list[nn.Parameter]) -> MuonWithAdamW:
    groups = [{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.0}]
    return MuonWithAdamW(
        groups, lr=0.01, weight_decay=0.1, find_matrices=lambda: weights[:1], **MUON, **ADAMW
    )


def make_steps(weights: list[nn.Parameter], optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.step()


def test_each_weight_moves_as_by_its_own_optimizer_also_from_a_stored_state():
    separate = make_weights()
    matrix, embedding, norm = separate
    groups = [{"params": [embedding]}, {"params": [norm], "weight_decay": 0.0}]
    optimizers = [
        torch.optim.Muon([matrix], lr=0.01, weight_decay=0.1, **MUON),
        torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, **ADAMW),
    ]
    make_steps(separate, optimizers, range(4))

    joint = make_weights()
    first = make_joint_optimizer(joint)
    make_steps(joint, [first], range(2))
    second = make_joint_optimizer(joint)
    second.load_state_dict(first.state_dict())
    make_steps(joint, [second], range(2, 4))
    for weight, expected in zip(joint, separate, strict=True):
        assert torch.equal(weight, expected)
    assert [sorted(state) for state in second.state.values()] == [
        ["momentum_buffer"],
        ["exp_avg", "exp_avg_sq", "step"],
        ["exp_avg", "exp_avg_sq", "step"],
    ]


def test_a_step_of_muon_is_about_as_large_as_one_of_adamw():
    """So that the rate of AdamW can be used."""
    matrix = nn.Parameter(torch.zeros(64, 96))
    optimizer = MuonWithAdamW([{"params": [matrix]}], lr=0.01, weight_decay=0.0, **MUON, **ADAMW)
    make_steps([matrix], [optimizer], range(1))
    assert 0.15 < float(matrix.detach().square().mean().sqrt()) / 0.01 < 0.25


def test_decay_is_known_to_be_apart_from_the_step():
    """A mask that filters steps lets it reach all entries (cpt.gradient_masks.constraints)."""
    optimizer = make_joint_optimizer(make_weights())
    assert all(group["decoupled_weight_decay"] for group in optimizer.param_groups)
