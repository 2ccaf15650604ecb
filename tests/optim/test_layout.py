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


def test_a_matrix_by_columns_learns_as_one_by_rows():
    weight, *gradients = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))

    def reload(optimizer, laid=True):
        state = optimizer.state_dict()
        for each in state["state"].values():  # row after row, as from a file
            each.update({name: value.contiguous() for name, value in each.items()})
        optimizer.load_state_dict(state)
        if laid:
            lay_out_moments(optimizer)

    expected = learned(by_columns(weight), gradients)
    torch.testing.assert_close(expected, learned(weight, gradients), rtol=0, atol=1e-6)
    assert torch.equal(learned(by_columns(weight), gradients, between=reload), expected)
    wrong = learned(by_columns(weight), gradients, between=lambda each: reload(each, laid=False))
    assert (wrong - expected).abs().max() > 0.01
    laid = lie_as(weight.double(), by_columns(torch.ones(5, 3)))
    assert laid.stride() == (1, 5) and laid.dtype == torch.float64 and lie_as(weight, torch.ones(2)) is weight


@pytest.mark.parametrize(("shared", "fused"), [([], True), ([0, 1], True), ([1], False)])
def test_a_group_of_shared_out_and_whole_parameters_is_not_fused(monkeypatch, shared, fused):
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    chosen = {id(parameters[place]) for place in shared}
    monkeypatch.setattr("cpt.optim.state.is_sharded", lambda each: id(each) in chosen)
    unfuse_mixed(optimizer)
    assert optimizer.param_groups[0]["fused"] is fused
