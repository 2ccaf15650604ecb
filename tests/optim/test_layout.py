"""A fused step reads memory as it lies: what is replaced or read from a file lies as the parameter does."""

import pytest
import torch
from torch import nn

from cpt.optim.state import lay_out_moments, lie_as, unfuse_mixed


def by_columns(values):
    return values.T.contiguous().T


def learned(weight, gradients, *, between=lambda optimizer: None):
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    for gradient in gradients:
        parameter.grad = lie_as(gradient, parameter)
        optimizer.step()
        between(optimizer)
    return parameter.detach().contiguous()


def reload(optimizer):
    """As from a file: row after row."""
    state = optimizer.state_dict()
    for each in state["state"].values():
        each.update({name: value.contiguous() for name, value in each.items()})
    optimizer.load_state_dict(state)


def test_a_matrix_by_columns_learns_as_one_by_rows():
    draw = torch.Generator().manual_seed(0)
    weight, *gradients = torch.randn(4, 5, 3, generator=draw)
    expected = learned(by_columns(weight), gradients)
    torch.testing.assert_close(expected, learned(weight, gradients), rtol=0, atol=1e-6)

    def again(optimizer):
        reload(optimizer)
        lay_out_moments(optimizer)

    assert torch.equal(learned(by_columns(weight), gradients, between=again), expected)
    wrong = learned(by_columns(weight), gradients, between=reload)  # other entries' moments
    assert (wrong - expected).abs().max() > 0.01


def test_what_lies_alike_or_has_another_shape_is_left_alone():
    values = torch.zeros(3, 2)
    assert lie_as(values, torch.ones(3, 2)) is values and lie_as(values, torch.ones(2)) is values
    laid = lie_as(values.double(), by_columns(torch.ones(3, 2)))
    assert laid.stride() == (1, 3) and laid.dtype == torch.float64


@pytest.mark.parametrize(("shared", "fused"), [([], True), ([0, 1], True), ([1], False)])
def test_a_group_of_shared_out_and_whole_parameters_is_not_fused(monkeypatch, shared, fused):
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    chosen = [parameters[place] for place in shared]
    monkeypatch.setattr("cpt.optim.state.is_sharded", lambda each: any(each is other for other in chosen))
    unfuse_mixed(optimizer)
    assert optimizer.param_groups[0]["fused"] is fused
