"""Other weights in a model while it lasts: the bits of a copy with them, and all as it was after."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from cpt.models.weights import swap_weights


class Tied(nn.Module):
    """Two maps that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).tanh())


X = torch.randn(3, 4)


@pytest.mark.parametrize("names", [["inner.weight"], ["outer.bias"], ["inner.weight", "inner.bias"], []])
def test_it_is_a_functional_call_and_leaves_no_trace(names):
    model = Tied()
    own, state = list(model.parameters()), copy.deepcopy(model.state_dict())
    weights = {name: torch.randn_like(model.get_parameter(name)) for name in names}
    with swap_weights(model, weights):
        found = model(X)
    assert torch.equal(found, functional_call(model, weights, (X,)))
    assert all(one is other for one, other in zip(model.parameters(), own, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_gradients_go_to_the_weights_that_are_given():
    model, weight = Tied(), torch.randn(4, 4, requires_grad=True)
    with swap_weights(model, {"inner.weight": weight}):
        loss = model(X).sum()
    loss.backward()
    assert weight.grad.any() and model.inner.weight.grad is None and model.inner.bias.grad.any()
