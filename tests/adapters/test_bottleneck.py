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
ADDED = [(attach_bottlenecks, HOULSBY), (attach_bottlenecks, PFEIFFER), (attach_plugins, PLUGINS)]


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


@pytest.mark.parametrize(("put", "options"), ADDED, ids=["bottleneck", "pfeiffer", "plugin"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_at_first_the_model_is_the_base_bit_for_bit_and_then_it_is_not(family, put, options):
    model = build(family)
    inputs, keys, before = inputs_of(model), set(model.state_dict()), logits(model, inputs_of(model))
    scope = put(model, **options)
    assert torch.equal(logits(model, inputs), before)
    shake(model, scope)
    moved, other = logits(model, inputs), copy.deepcopy(model)
    assert not torch.allclose(moved, before, atol=1e-3) and torch.equal(logits(other, inputs), moved)
    assert keys < set(model.state_dict()) and set(model.state_dict()) - keys == set(scope.names)
    shake(other, scope)
    assert torch.equal(logits(model, inputs), moved) and not torch.equal(logits(other, inputs), moved)


ACTIVATION = {"roberta": "relu", "gpt2": "gelu", "llama": "silu", "opt": "relu"}


def by_hand(part, h, activation="gelu"):
    """What a bottleneck adds for h."""
    down, up = part.down, part.up
    return getattr(functional, activation)(h @ down.weight.T + down.bias) @ up.weight.T + up.bias


@pytest.mark.parametrize("family", ["roberta", "gpt2", "llama", "opt"])
@pytest.mark.parametrize("placement", ["ffn", "houlsby"])
def test_bottlenecks_act_on_what_the_projections_write(family, placement):
    activation = ACTIVATION[family]
    given = HOULSBY | {"placement": placement, "activation": activation}
    model, plain, scope, blocks = shaken(family, attach_bottlenecks, **given)
    places = [FAMILIES[family].down] + [FAMILIES[family].out] * (placement == "houlsby")
    assert len(scope.names) == 8 * len(places)
    for name in (f"{block}.{place}" for block in blocks for place in places):
        part = model.get_submodule(name).adapter
        plain.get_submodule(name).register_forward_hook(lambda m, a, h, p=part: h + by_hand(p, h, activation))
    assert_equal_outputs(model, plain)


def add_after_norm(part, module, args, normed):
    """Of a post-norm block, out = norm(s + A(norm(s))) of the sum s of FFN and residual."""
    return module.forward(args[0] + by_hand(part, normed))


def add_to_sum(part, module, args, output):
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
    model, plain, _, blocks = shaken(family, attach_bottlenecks, **PFEIFFER)
    for block in blocks:
        part = model.get_submodule(block).adapter
        plain.get_submodule(f"{block}{place}").register_forward_hook(partial(expected, part))
    assert_equal_outputs(model, plain)


@pytest.mark.parametrize("output_relu", [False, True])
@pytest.mark.parametrize(("family", "entrances"), [
    ("roberta", ("attention.self.query", "intermediate.dense")),
    ("gpt2", ("attn.c_attn", "mlp.c_fc")),
    ("llama", ("self_attn.q_proj", "mlp.gate_proj")),
    ("opt", ("self_attn.q_proj", "fc1")),
])  # fmt: skip
def test_plugins_map_what_the_sub_layer_reads_to_what_it_writes(family, entrances, output_relu):
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
