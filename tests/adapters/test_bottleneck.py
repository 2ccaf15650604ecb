"""Bottlenecks and plug-ins on every family that blocks are known of: at first the base bit for bit."""

import copy
from functools import partial

import pytest
import torch
from torch.nn import functional

from cpt.adapters.bottleneck import attach_bottlenecks, attach_plugins
from tests.models.test_units import FAMILIES, build, inputs_of, logits

pytestmark = pytest.mark.slow

HOULSBY = {"placement": "houlsby", "reduction": 4, "activation": "gelu"}
PFEIFFER = HOULSBY | {"placement": "pfeiffer"}
PLUGINS = {"attention": 0.667, "ffn": 1.0, "output_relu": False}


@torch.no_grad()
def shake(model, scope) -> None:
    generator = torch.Generator().manual_seed(5)
    for name in scope.names:
        parameter = model.get_parameter(name)
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def shaken(family, put, **options):
    """A model whose parts have moved, a plain copy, the scope, and the names of the blocks."""
    model = build(family)
    plain = copy.deepcopy(model)
    scope = put(model, **options)
    shake(model, scope)
    return model, plain, scope, [f"{stack}.{n}" for stack in FAMILIES[family].stacks for n in range(2)]


@torch.no_grad()
def assert_equal_outputs(model, plain) -> None:
    torch.testing.assert_close(logits(model, inputs_of(model)), logits(plain, inputs_of(model)))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_at_first_the_model_is_the_base_bit_for_bit_and_then_it_is_not(family):
    plain = build(family)
    inputs, keys, before = inputs_of(plain), set(plain.state_dict()), logits(plain, inputs_of(plain))
    for options in (HOULSBY, PFEIFFER, PLUGINS):
        put = attach_plugins if options is PLUGINS else attach_bottlenecks
        model = copy.deepcopy(plain)
        scope = put(model, **options)
        assert torch.equal(logits(model, inputs), before)
        assert keys < set(model.state_dict()) and set(model.state_dict()) - keys == set(scope.names)
        shake(model, scope)
        moved, other = logits(model, inputs), copy.deepcopy(model)
        assert not torch.allclose(moved, before, atol=1e-3) and torch.equal(logits(other, inputs), moved)
        shake(other, scope)
        assert torch.equal(logits(model, inputs), moved) and not torch.equal(logits(other, inputs), moved)


def by_hand(part, h, activation="gelu"):
    """What a bottleneck adds for h."""
    down, up = part.down, part.up
    return getattr(functional, activation)(h @ down.weight.T + down.bias) @ up.weight.T + up.bias


@pytest.mark.parametrize(("family", "placement", "activation"), [
    ("roberta", "ffn", "relu"), ("gpt2", "houlsby", "gelu"), ("llama", "ffn", "silu"), ("opt", "ffn", "relu"),
])  # fmt: skip
def test_bottlenecks_act_on_what_the_projections_write(family, placement, activation):
    given = HOULSBY | {"placement": placement, "activation": activation}
    model, plain, scope, blocks = shaken(family, attach_bottlenecks, **given)
    places = [FAMILIES[family].down] + [FAMILIES[family].out] * (placement == "houlsby")
    assert len(scope.names) == 8 * len(places)
    for name in (f"{block}.{place}" for block in blocks for place in places):
        part = model.get_submodule(name).adapter
        plain.get_submodule(name).register_forward_hook(lambda m, a, h, p=part: h + by_hand(p, h, activation))
    assert_equal_outputs(model, plain)


@pytest.mark.parametrize(("family", "norm"), [
    ("bert", ".output.LayerNorm"),
    ("distilbert", ".output_layer_norm"),
    ("bart", ".final_layer_norm"),
    ("gpt2", ""),
    ("gpt_neox", ""),
])  # fmt: skip
def test_pfeiffers_read_and_add_to_what_the_block_gives(family, norm):
    """Post-norm: out = norm(s + A(norm(s))) of the sum s of FFN and residual; pre-norm: out = s + A(s)."""
    model, plain, _, blocks = shaken(family, attach_bottlenecks, **PFEIFFER)

    def expected(part, module, args, output):
        if norm:
            return module.forward(args[0] + by_hand(part, output))
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden = hidden + by_hand(part, hidden)
        return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

    for block in blocks:
        part = model.get_submodule(block).adapter
        plain.get_submodule(f"{block}{norm}").register_forward_hook(partial(expected, part))
    assert_equal_outputs(model, plain)


@pytest.mark.parametrize(("family", "output_relu", "entrances"), [
    ("roberta", False, ("attention.self.query", "intermediate.dense")),
    ("gpt2", True, ("attn.c_attn", "mlp.c_fc")),
    ("llama", False, ("self_attn.q_proj", "mlp.gate_proj")),
])  # fmt: skip
def test_plugins_map_what_the_sub_layer_reads_to_what_it_writes(family, output_relu, entrances):
    model, plain, _, blocks = shaken(family, attach_plugins, **PLUGINS | {"output_relu": output_relu})
    read = {}

    def added(part, entrance, module, args, output):
        inner = (read[entrance] @ part.down.weight.T + part.down.bias).clamp(min=0)
        extra = inner @ part.up.weight.T + part.up.bias
        return output + (extra.clamp(min=0) if output_relu else extra)

    def note(entrance, module, args):
        read[entrance] = args[0]

    exits = (FAMILIES[family].out, FAMILIES[family].down)
    for block in blocks:
        for first, last in zip(entrances, exits, strict=True):
            first, part = f"{block}.{first}", model.get_submodule(f"{block}.{last}").plugin
            plain.get_submodule(first).register_forward_pre_hook(partial(note, first))
            plain.get_submodule(f"{block}.{last}").register_forward_hook(partial(added, part, first))
    assert_equal_outputs(model, plain)
