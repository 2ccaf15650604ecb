"""L2: the pull, its anchors, and what it keeps."""

import pytest
import torch

from tests.support.making import (
    ORDER,
    made,
    parameter_bytes,
    same,
    state_beside_the_model,
)


@pytest.fixture
def l2(small):
    return lambda *overrides: made(small("method=l2", ORDER, *overrides))


def slow(module, anchors) -> float:
    """lambda/2 ||theta - theta*||^2, parameter by parameter in double precision."""
    pairs = zip(module.model.parameters(), anchors.values(), strict=True)
    return (
        module.options.strength
        / 2
        * sum(((p.detach().double() - a.double()) ** 2).sum().item() for p, a in pairs)
    )


def test_the_penalty_is_the_squared_distance(l2):
    work = l2("method.strength=0.3")
    anchors = work.weights()
    assert work.module.weighted_distance(0.3).item() == 0
    torch.manual_seed(0)
    for parameter in work.module.model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    penalty = work.module.weighted_distance(0.3)
    assert penalty.item() == pytest.approx(slow(work.module, anchors), rel=1e-5)
    penalty.backward()
    for (name, parameter), anchor in zip(work.module.model.named_parameters(), anchors.values(), strict=True):
        torch.testing.assert_close(parameter.grad, 0.3 * (parameter.detach() - anchor), msg=name)


@pytest.mark.parametrize(("towards", "moves"), [("previous", True), ("base", False)])
def test_the_anchor_is_the_previous_model_or_the_base(towards, moves, l2):
    work = l2(f"method.towards={towards}")
    base = work.weights()
    work.learn(0)
    assert same(work.module.anchor.named(), base)
    between = work.weights()
    work.learn(1)
    assert same(work.module.anchor.named(), between if moves else base)
    assert not same(between, base)
    kept = state_beside_the_model(work.module)
    assert kept == (parameter_bytes(work.module) if moves else 0)
