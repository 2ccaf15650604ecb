"""Bottlenecks and plug-ins on every family that blocks are known of: at first the base bit for bit, then what
the equations say, at the places where the model has them."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cpt.adapters.bottleneck import Bottleneck, attach_bottlenecks, attach_plugins
from tests.models.test_units import FAMILIES, build, inputs_of, logits

pytestmark = pytest.mark.slow

HOULSBY = {"placement": "houlsby", "reduction": 4, "activation": "gelu"}
PFEIFFER = HOULSBY | {"placement": "pfeiffer"}
PLUGINS = {"attention": 0.667, "ffn": 1.0, "output_relu": False}
ADDED = [(attach_bottlenecks, HOULSBY), (attach_bottlenecks, PFEIFFER), (attach_plugins, PLUGINS)]
BLOCKS = 2


@torch.no_grad()
def shake(model, scope, *, scale: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(5)
    for name in scope.names:
        parameter = model.get_parameter(name)
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


@pytest.mark.parametrize(("put", "options"), ADDED, ids=["bottleneck", "pfeiffer", "plugin"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_at_first_the_model_is_the_base_bit_for_bit_and_then_it_is_not(family, put, options):
    """And a copy has parts of its own."""
    model = build(family)
    inputs, keys, before = inputs_of(model), set(model.state_dict()), logits(model, inputs_of(model))
    scope = put(model, **options)
    assert torch.equal(logits(model, inputs), before)
    shake(model, scope)
    shaken, other = logits(model, inputs), copy.deepcopy(model)
    assert not torch.allclose(shaken, before, atol=1e-3) and torch.equal(logits(other, inputs), shaken)
    assert keys < set(model.state_dict()) and set(model.state_dict()) - keys == set(scope.names)
    shake(other, scope)
    assert torch.equal(logits(model, inputs), shaken) and not torch.equal(logits(other, inputs), shaken)


def by_hand(part, h):
    """What a bottleneck adds for h."""
    down, up = part.down, part.up
    return functional.gelu(h @ down.weight.T + down.bias) @ up.weight.T + up.bias


@pytest.mark.parametrize("family", ["roberta", "gpt2", "llama", "opt"])
@pytest.mark.parametrize("placement", ["ffn", "houlsby"])
def test_bottlenecks_act_on_what_the_projections_write(family, placement):
    """Against the equation, put into the model by hand."""
    model = build(family)
    inputs = inputs_of(model)
    plain = copy.deepcopy(model)
    scope = attach_bottlenecks(model, **HOULSBY | {"placement": placement})
    shake(model, scope)
    places = [FAMILIES[family].down] + [FAMILIES[family].out] * (placement == "houlsby")
    assert len(scope.names) == 4 * BLOCKS * len(places)
    for stack in FAMILIES[family].stacks:
        for number in range(BLOCKS):
            for place in places:
                name = f"{stack}.{number}.{place}"
                part = model.get_submodule(name).adapter
                plain.get_submodule(name).register_forward_hook(lambda m, a, h, p=part: h + by_hand(p, h))
    with torch.no_grad():
        torch.testing.assert_close(logits(model, inputs), logits(plain, inputs))


def add_after_norm(part: nn.Module, module: nn.Module, args: tuple, normed: torch.Tensor) -> torch.Tensor:
    """Of a post-norm block, out = norm(s + A(norm(s))) of the sum s of FFN and residual."""
    return module.forward(args[0] + by_hand(part, normed))


def add_to_sum(part: nn.Module, module: nn.Module, args: tuple, output: Any) -> Any:
    """Of a pre-norm block, out = s + A(s): the sum is what the next block reads."""
    tensor = isinstance(output, torch.Tensor)
    hidden = output if tensor else output[0]
    hidden = hidden + by_hand(part, hidden)
    return hidden if tensor else (hidden, *output[1:])


@pytest.mark.parametrize(("family", "place", "expected"), [
    ("bert", ".output.LayerNorm", add_after_norm),
    ("distilbert", ".output_layer_norm", add_after_norm),
    ("bart", ".final_layer_norm", add_after_norm),
    ("gpt2", "", add_to_sum),
    ("modernbert", "", add_to_sum),
    ("gpt_neox", "", add_to_sum),
])  # fmt: skip
def test_pfeiffers_read_and_add_to_what_the_block_gives(family, place, expected):
    model = build(family)
    inputs = inputs_of(model)
    plain = copy.deepcopy(model)
    shake(model, attach_bottlenecks(model, **PFEIFFER))
    for stack in FAMILIES[family].stacks:
        for number in range(BLOCKS):
            part = model.get_submodule(f"{stack}.{number}").adapter
            plain.get_submodule(f"{stack}.{number}{place}").register_forward_hook(partial(expected, part))
    with torch.no_grad():
        torch.testing.assert_close(logits(model, inputs), logits(plain, inputs))


@pytest.mark.parametrize("output_relu", [False, True])
@pytest.mark.parametrize(("family", "entrances"), [
    ("roberta", ("attention.self.query", "intermediate.dense")),
    ("gpt2", ("attn.c_attn", "mlp.c_fc")),
    ("llama", ("self_attn.q_proj", "mlp.gate_proj")),
    ("opt", ("self_attn.q_proj", "fc1")),
])  # fmt: skip
def test_plugins_map_what_the_sub_layer_reads_to_what_it_writes(family, entrances, output_relu):
    model = build(family)
    inputs = inputs_of(model)
    plain = copy.deepcopy(model)
    scope = attach_plugins(model, **PLUGINS | {"output_relu": output_relu})
    shake(model, scope)
    state, read = model.state_dict(), {}

    def by_hand(name, entrance):
        w, c, v, b = (
            state[f"{name}.plugin.{key}"] for key in ("down.weight", "down.bias", "up.weight", "up.bias")
        )

        def add(module, args, output):
            extra = (read[entrance] @ w.T + c).clamp(min=0) @ v.T + b
            return output + (extra.clamp(min=0) if output_relu else extra)

        return add

    def noted(name):
        return lambda module, args: read.update({name: args[0]})

    for stack in FAMILIES[family].stacks:
        for number in range(BLOCKS):
            for first, last in zip(entrances, (FAMILIES[family].out, FAMILIES[family].down), strict=True):
                first, last = f"{stack}.{number}.{first}", f"{stack}.{number}.{last}"
                plain.get_submodule(first).register_forward_pre_hook(noted(first))
                plain.get_submodule(last).register_forward_hook(by_hand(last, first))
    with torch.no_grad():
        torch.testing.assert_close(logits(model, inputs), logits(plain, inputs))


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activations(activation):
    part = Bottleneck(4, 3, activation=activation, like=torch.zeros(1))
    shaken = {name: torch.randn(value.shape) for name, value in part.state_dict().items()}
    part.load_state_dict(shaken)
    x = torch.randn(5, 4)
    inner = getattr(functional, activation)(x @ shaken["down.weight"].T + shaken["down.bias"])
    torch.testing.assert_close(part(x), inner @ shaken["up.weight"].T + shaken["up.bias"])
