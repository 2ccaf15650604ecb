"""Mixtures of low-rank pairs against sums over pairs, written out."""

import pytest
import torch

from cpt.adapters import lora
from cpt.adapters.routed_lora import attach_experts, weigh_ranks
from tests.models.test_units import build, inputs_of

E, R, ALPHA = 3, 2, 5.0


def test_each_pair_counts_as_its_weight_says():
    torch.manual_seed(0)
    features, weights = torch.randn(2, 4, E * R), torch.rand(2, 4, E)
    found = weigh_ranks(features, weights)
    for pair in range(E):
        for rank in range(R):
            place = pair * R + rank
            assert torch.equal(found[..., place], features[..., place] * weights[..., pair])


@pytest.fixture(params=["roberta", "gpt2", "t5"])
def mixed(request):
    """A model with experts whose B are not 0, and its inputs."""
    torch.manual_seed(1)
    model = build(request.param).float()
    attach_experts(model, experts=E, r=R, alpha=ALPHA, dropout=0.0, targets="all-linear")
    with torch.no_grad():
        for layer in lora.lora_layers(model).values():
            lora.factors_of(layer)[1].normal_(std=0.1)
            layer.router.weight.normal_()
    return model.eval(), inputs_of(model)


def test_experts_are_summed_by_the_gates_of_each_token(mixed):
    model, inputs = mixed
    noted = {}
    for name, layer in lora.lora_layers(model).items():
        layer.register_forward_hook(
            lambda m, args, output, name=name: noted.update({name: (args[0], output)})
        )
    model(**inputs)
    assert len(noted) > 4
    for name, layer in lora.lora_layers(model).items():
        x, output = noted[name]
        a, b = lora.factors_of(layer)
        gates = torch.softmax(x @ layer.router.weight.T, -1)
        expected = layer.get_base_layer()(x)
        for e in range(E):
            own = slice(e * R, (e + 1) * R)
            expected = expected + ALPHA / R * gates[..., e : e + 1] * (x @ a[own].T @ b[:, own].T)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        assert (gates.sum(-1) - 1).abs().max() < 1e-6 and gates.std() > 0.01


def test_gates_are_made_in_32_bits():
    model = build("roberta").bfloat16()
    attach_experts(model, experts=E, r=R, alpha=ALPHA, dropout=0.0, targets="all-linear")
    layer = next(iter(lora.lora_layers(model).values()))
    assert layer.router.weight.dtype == torch.bfloat16
    x = torch.randn(5, layer.in_features, dtype=torch.bfloat16)
    gates = layer.router.weigh(layer, (x,), torch.ones(5, E * R))
    assert (gates.unflatten(-1, (E, R)).sum(1) - 1).abs().max() < 1e-6
