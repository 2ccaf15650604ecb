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
        shake(other, scope)  # a copy has parts of its own
        assert torch.equal(logits(model, inputs), moved) and not torch.equal(logits(other, inputs), moved)


@torch.no_grad()
def assert_hooked(family, put, by_hand, **options) -> None:
    """A model with parts that have moved computes what its base does with hooks on the modules of blocks."""
    model = build(family)
    plain = copy.deepcopy(model)
    shake(model, put(model, **options))
    for block in (f"{stack}.{n}" for stack in FAMILIES[family].stacks for n in range(2)):
        by_hand(model, plain, block)
    torch.testing.assert_close(logits(model, inputs_of(model)), logits(plain, inputs_of(model)))


def added(part, h, activation="gelu"):
    down, up = part.down, part.up
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
    places = {"pfeiffer": [""], "houlsby": houlsby, "ffn": houlsby[:1]}[placement]

    def expected(part, module, args, output):
        if norm:
            return module.forward(args[0] + added(part, output, activation))
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden = hidden + added(part, hidden, activation)
        return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

    def by_hand(model, plain, block):
        for place in places:
            hook = partial(expected, model.get_submodule(block + place).adapter)
            plain.get_submodule(block + place + norm).register_forward_hook(hook)

    given = {"placement": placement, "reduction": 4, "activation": activation}
    assert_hooked(family, attach_bottlenecks, by_hand, **given)


@pytest.mark.parametrize(("family", "output_relu", "entrances"), [
    ("roberta", False, ("attention.self.query", "intermediate.dense")),
    ("gpt2", True, ("attn.c_attn", "mlp.c_fc")),
])  # fmt: skip
def test_plugins_map_what_the_sub_layer_reads_to_what_it_writes(family, output_relu, entrances):
    def by_hand(model, plain, block):
        for entrance, exit in zip(entrances, (FAMILIES[family].out, FAMILIES[family].down), strict=True):
            part, read = model.get_submodule(f"{block}.{exit}").plugin, []

            def written(module, args, output, part=part, read=read):
                extra = added(part, read.pop(), "relu")
                return output + (extra.clamp(min=0) if output_relu else extra)

            note = lambda module, args, read=read: read.append(args[0])  # noqa: E731
            plain.get_submodule(f"{block}.{entrance}").register_forward_pre_hook(note)
            plain.get_submodule(f"{block}.{exit}").register_forward_hook(written)

    assert_hooked(family, attach_plugins, by_hand, **PLUGINS | {"output_relu": output_relu})
