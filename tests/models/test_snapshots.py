"""Snapshots, and the quadratic pull against slow sums."""

import pytest
import torch
from torch import nn

from cpt.models.weights import Snapshot, quadratic_penalty

SHAPES = [(3, 4), (5,), (2, 3, 2)]


def drawn() -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in SHAPES]


class Holder(nn.Module):
    """A model of parameters by number."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__()
        for number, each in enumerate(parameters):
            self.register_parameter(str(number), nn.Parameter(each.detach()))


def by_name(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): each for number, each in enumerate(tensors)}


def slow(parameters, anchors, weights) -> float:
    """1/2 sum_i w_i (p_i - a_i)^2, number by number."""
    total = 0.0
    for p, a, w in zip(parameters, anchors, weights, strict=True):
        for x, y, z in zip(p.flatten().tolist(), a.flatten().tolist(), w.flatten().tolist(), strict=True):
            total += 0.5 * z * (x - y) ** 2
    return total


def test_the_pull_is_the_weighted_sum_of_squares():
    model, anchors, weights = Holder(drawn()), drawn(), [w.abs() for w in drawn()]
    value = quadratic_penalty(model, by_name(anchors), by_name(weights))
    assert value.item() == pytest.approx(slow(model.parameters(), anchors, weights), rel=1e-5)
    (7 * value).backward()
    for p, a, w in zip(model.parameters(), anchors, weights, strict=True):
        torch.testing.assert_close(p.grad, 7 * w * (p - a).detach())


def test_what_is_not_trained_is_not_pulled():
    model, anchors, weights = Holder(drawn()), drawn(), [w.abs() for w in drawn()]
    parameters = list(model.parameters())
    parameters[1].requires_grad_(False)
    rest = [parameters[0], parameters[2]], [anchors[0], anchors[2]], [weights[0], weights[2]]
    assert quadratic_penalty(model, by_name(anchors), by_name(weights)).item() == pytest.approx(
        slow(*rest), rel=1e-5
    )


def test_a_snapshot_takes_what_has_grown_and_its_state_goes_around():
    model = nn.Sequential(nn.Linear(2, 2))
    young, old = Snapshot(model, persistent=True), Snapshot(model, persistent=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.append(nn.Linear(2, 2))
    grown = {name: p.detach().clone() for name, p in model.named_parameters()}
    young.take(model, share=0.5)
    other = Snapshot(nn.Sequential(nn.Linear(2, 2)), persistent=True)
    other.load_state_dict(young.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    old.restore(model)
    assert old.named().keys() == before.keys()
    assert all(p.any() == (name in before) for name, p in model.named_parameters())
    other.restore(model)
    assert all(torch.equal(p, grown[name]) for name, p in model.named_parameters())


def test_a_snapshot_moves_by_shares_and_back():
    model = nn.Linear(2, 2)
    snapshot = Snapshot(model, persistent=True)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    snapshot.take(model, share=0.25)
    for copy, old in zip(snapshot.buffers(), before, strict=True):
        torch.testing.assert_close(copy, old + 0.25)
    snapshot.restore(model, share=0.5)
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old + 0.625)
    snapshot.take(model)
    for p, copy in zip(model.parameters(), snapshot.buffers(), strict=True):
        assert torch.equal(p, copy)
