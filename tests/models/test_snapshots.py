"""Snapshots, and the quadratic pull against slow sums."""

import pytest
import torch
from torch import nn

from cpt.models.snapshots import PerParameter, Snapshot, pull

SHAPES = [(3, 4), (5,), (2, 3, 2)]


def drawn(*, trained: bool = False) -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=trained) for shape in SHAPES]


def slow(parameters, anchors, weights) -> float:
    """1/2 sum_i w_i (p_i - a_i)^2, number by number."""
    total = 0.0
    for p, a, w in zip(parameters, anchors, weights, strict=True):
        for x, y, z in zip(p.flatten().tolist(), a.flatten().tolist(), w.flatten().tolist(), strict=True):
            total += 0.5 * z * (x - y) ** 2
    return total


def test_the_pull_is_the_weighted_sum_of_squares():
    parameters, anchors, weights = drawn(trained=True), drawn(), [w.abs() for w in drawn()]
    value = pull(parameters, anchors, weights)
    assert value.item() == pytest.approx(slow(parameters, anchors, weights), rel=1e-5)
    (7 * value).backward()
    for p, a, w in zip(parameters, anchors, weights, strict=True):
        torch.testing.assert_close(p.grad, 7 * w * (p - a).detach())


def test_without_weights_all_count_alike():
    parameters, anchors = drawn(trained=True), drawn()
    value = pull(parameters, anchors)
    ones = [torch.ones(shape) for shape in SHAPES]
    assert value.item() == pytest.approx(slow(parameters, anchors, ones), rel=1e-5)
    value.backward()
    for p, a in zip(parameters, anchors, strict=True):
        torch.testing.assert_close(p.grad, (p - a).detach())


def test_the_pull_adds_to_what_there_is_of_a_gradient():
    parameters, anchors = drawn(trained=True), drawn()
    loss = sum(p.sum() for p in parameters) + pull(parameters, anchors)
    loss.backward()
    loss = sum(p.sum() for p in parameters) + pull(parameters, anchors)
    loss.backward()
    for p, a in zip(parameters, anchors, strict=True):
        torch.testing.assert_close(p.grad, 2 + 2 * (p - a).detach())


def test_what_is_not_trained_is_not_pulled():
    parameters, anchors, weights = drawn(trained=True), drawn(), [w.abs() for w in drawn()]
    parameters[1].requires_grad_(False)
    rest = [parameters[0], parameters[2]], [anchors[0], anchors[2]], [weights[0], weights[2]]
    assert pull(parameters, anchors, weights).item() == pytest.approx(slow(*rest), rel=1e-5)


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


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_shares_of_nothing_and_of_all_are_exact(share):
    model, other = nn.Linear(50, 50), nn.Linear(50, 50)
    snapshot, expected = Snapshot(other, persistent=True), (other if share else nn.Linear(50, 50))
    if not share:
        expected.load_state_dict(model.state_dict())
    snapshot.restore(model, share=share)
    for p, want in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, want)


def test_a_snapshot_is_no_part_of_the_models_gradient():
    model = nn.Linear(2, 2)
    assert not any(copy.requires_grad for copy in Snapshot(model, persistent=True).buffers())


def test_what_construction_gives_again_is_not_saved():
    model = nn.Linear(2, 2)
    assert len(Snapshot(model, persistent=True).state_dict()) == 2
    assert not Snapshot(model, persistent=False).state_dict()
    assert not PerParameter((torch.zeros_like(p) for p in model.parameters()), persistent=False).state_dict()
