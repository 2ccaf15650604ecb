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


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_at_first_the_model_is_the_base_bit_for_bit_and_then_it_is_not(family):
    plain = build(family)
    inputs = inputs_of(plain)
    keys = set(plain.state_dict())
    before = logits(plain, inputs_of(plain))
    for options in (HOULSBY, PFEIFFER, PLUGINS):
        put = attach_plugins if options is PLUGINS else attach_bottlenecks
        model = copy.deepcopy(plain)
        scope = put(model, **options)
        assert torch.equal(logits(model, inputs), before)
        assert keys < set(model.state_dict()) and set(model.state_dict()) - keys == set(scope.names)
        shake(model, scope)
        adapted_logits = logits(model, inputs)
        twin = copy.deepcopy(model)
        assert not torch.allclose(adapted_logits, before, atol=1e-3) and torch.equal(
            logits(twin, inputs), adapted_logits
        )
        shake(twin, scope)  # a copy has parts of its own
        assert torch.equal(logits(model, inputs), adapted_logits) and not torch.equal(
            logits(twin, inputs), adapted_logits
        )


@torch.no_grad()
def assert_hooked(family, attach, hook_block) -> None:
    """A model with parts that have moved computes what its base does with hooks on the modules of blocks."""
    model = build(family)
    plain = copy.deepcopy(model)
    shake(model, attach(model))
    for stack in FAMILIES[family].stacks:
        for number in range(2):
            hook_block(model, plain, f"{stack}.{number}")
    torch.testing.assert_close(logits(model, inputs_of(model)), logits(plain, inputs_of(model)))


def compute_bottleneck(part, h, activation="gelu"):
    down = part.down
    up = part.up
    return getattr(functional, activation)(h @ down.weight.T + down.bias) @ up.weight.T + up.bias


@pytest.mark.parametrize(("family", "placement", "activation", "norm"), [
    ("roberta", "ffn", "relu", ""),
    ("gpt2", "houlsby", "gelu", ""),
    ("llama", "ffn", "silu", ""),
    ("bert", "pfeiffer", "gelu", ".output.LayerNorm"),
    ("distilbert", "pfeiffer", "gelu", ".output_layer_norm"),
    ("gpt2", "pfeiffer", "gelu", ""),
    ("gpt_neox", "pfeiffer", "gelu", ""),
])  # fmt: skip
def test_bottlenecks_act_on_what_projections_write_and_pfeiffers_on_what_blocks_give(
    family, placement, activation, norm
):
    """Pfeiffer, post-norm: norm(s + A(norm(s))) of the sum s of FFN and residual; else h + A(h)."""
    houlsby = [f".{FAMILIES[family].down}", f".{FAMILIES[family].out}"]
    submodules = {"pfeiffer": [""], "houlsby": houlsby, "ffn": houlsby[:1]}[placement]

    def add_bottleneck(part, module, args, output):
        if norm:
            return module.forward(args[0] + compute_bottleneck(part, output, activation))
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden = hidden + compute_bottleneck(part, hidden, activation)
        return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

    def hook_block(model, plain, block):
        for submodule in submodules:
            hook = partial(add_bottleneck, model.get_submodule(block + submodule).adapter)
            plain.get_submodule(block + submodule + norm).register_forward_hook(hook)

    attach = partial(attach_bottlenecks, placement=placement, reduction=4, activation=activation)
    assert_hooked(family, attach, hook_block)


@pytest.mark.parametrize(("family", "output_relu", "entrances"), [
    ("roberta", False, ("attention.self.query", "intermediate.dense")),
    ("gpt2", True, ("attn.c_attn", "mlp.c_fc")),
])  # fmt: skip
def test_plugins_map_what_the_sub_layer_reads_to_what_it_writes(family, output_relu, entrances):
    def hook_sub_layer(plugin, entrance, exit):
        inputs = []

        def record_input(module, args):
            inputs.append(args[0])

        def add_plugin(module, args, output):
            extra = compute_bottleneck(plugin, inputs.pop(), "relu")
            return output + (extra.clamp(min=0) if output_relu else extra)

        entrance.register_forward_pre_hook(record_input)
        exit.register_forward_hook(add_plugin)

    def hook_block(model, plain, block):
        exits = (FAMILIES[family].out, FAMILIES[family].down)
        for entrance, exit in zip(entrances, exits, strict=True):
            hook_sub_layer(
                model.get_submodule(f"{block}.{exit}").plugin,
                plain.get_submodule(f"{block}.{entrance}"),
                plain.get_submodule(f"{block}.{exit}"),
            )

    attach = partial(attach_plugins, attention=0.667, ffn=1.0, output_relu=output_relu)
    assert_hooked(family, attach, hook_block)
