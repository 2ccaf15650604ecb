"""Where units live is checked against the models themselves, in float64: gates against zeroed slices."""

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from cpt.adapters.bottleneck import attach_bottlenecks, attach_plugins
from cpt.adapters.lora import attach_lora
from cpt.models.forward import SOURCE_TOKENS, TARGET_TOKENS, find_token_side
from cpt.models.units import UNIT_KINDS, Units, find_projections, find_units, gate_units, make_factors

pytestmark = pytest.mark.slow

B, T, V = 3, 7, 60
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40, "vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 40, "vocab_size": V,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": V,
    "feed_forward_proj": "gelu",
}  # fmt: skip
BART = {
    "d_model": 32, "vocab_size": V, "max_position_embeddings": 40,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
}  # fmt: skip
MASKED, CAUSAL, SEQ2SEQ = AutoModelForMaskedLM, AutoModelForCausalLM, AutoModelForSeq2SeqLM


class Family(NamedTuple):
    """A tiny configuration, and by name what the code under test must find by shape."""

    auto: type
    config: dict
    stacks: tuple[str, ...]  # lists of blocks
    out: str
    down: str
    type: str | None = None


BERT = ("attention.output.dense", "output.dense")
LLAMA = (CAUSAL, GROUPED, ("model.layers",), "self_attn.o_proj", "mlp.down_proj")
T5_LAYERS = (("encoder.block", "decoder.block"), "o", "DenseReluDense.wo", "t5")
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": V}
OPT = SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "activation_function": "gelu"}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": V}
MODERN = SIZES | {"cls_token_id": 1, "sep_token_id": 2}
STACKS = ("model.encoder.layers", "model.decoder.layers")
FAMILY_FIELDS = {
    "roberta": (MASKED, SIZES, ("roberta.encoder.layer",), *BERT),
    "bert": (MASKED, SIZES, ("bert.encoder.layer",), *BERT),
    "mpnet": (MASKED, SIZES, ("mpnet.encoder.layer",), "attention.attn.o", "output.dense"),
    "modernbert": (MASKED, MODERN, ("model.layers",), "attn.Wo", "mlp.Wo"),
    "distilbert": (MASKED, DISTILBERT, ("distilbert.transformer.layer",), "attention.out_lin", "ffn.lin2"),
    "electra": (MASKED, SIZES | {"embedding_size": 16}, ("electra.encoder.layer",), *BERT),
    "gpt2": (CAUSAL, GPT2, ("transformer.h",), "attn.c_proj", "mlp.c_proj"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2"), LLAMA),
    "gpt_neox": (CAUSAL, SIZES, ("gpt_neox.layers",), "attention.dense", "mlp.dense_4h_to_h"),
    "opt": (CAUSAL, OPT, ("model.decoder.layers",), "self_attn.out_proj", "fc2"),
    "t5": (SEQ2SEQ, T5, *T5_LAYERS),
    "t5-gated": (SEQ2SEQ, T5 | {"feed_forward_proj": "gated-gelu"}, *T5_LAYERS),
    "bart": (SEQ2SEQ, BART, STACKS, "self_attn.out_proj", "fc2"),
    "bloom": (CAUSAL, BLOOM, ("transformer.h",), "self_attention.dense", "mlp.dense_4h_to_h"),
}
FAMILIES = {name: Family(*fields) for name, fields in FAMILY_FIELDS.items()}
FUSED = ("gpt2", "modernbert", "phi3", "gpt_neox", "bloom")
# These compute something in float32 whatever the weights' type, so that differences of losses are no better:
# an RMS norm; ModernBERT the rotation of queries and keys; Bloom the softmax of attention.
ROUGH = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "t5", "t5-gated", "modernbert", "bloom")


def build(name: str, **changes) -> nn.Module:
    """A family's model in float64 and eval mode, untied, its weights large enough for gradients of size 1."""
    family = FAMILIES[name]
    fields = family.config | {"tie_word_embeddings": False} | changes
    torch.manual_seed(0)
    model = family.auto.from_config(AutoConfig.for_model(family.type or name, **fields)).double()
    generator = torch.Generator().manual_seed(1)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5, generator=generator)
        elif key.endswith("bias"):
            nn.init.normal_(parameter, 0, 0.1, generator=generator)
    if family.type == "t5" and not fields["tie_word_embeddings"]:  # its configuration ties all the same
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0))
    return model.eval().requires_grad_()


@cache
def shared_model(name: str) -> nn.Module:
    return build(name)


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    names = ("input_ids", "decoder_input_ids") if model.config.is_encoder_decoder else ("input_ids",)
    return {name: torch.randint(3, V, (B, T), generator=generator) for name in names}


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).logits


def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The sum over samples of a scalar that depends on all positions."""
    labels = (inputs["input_ids"] * 7 + 3) % V
    return functional.cross_entropy(logits(model, inputs).flatten(0, 1), labels.flatten(), reduction="sum")


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_gates_shut_what_zeroed_weights_shut(name):
    model = build(name)
    inputs = inputs_of(model)
    groups = find_units(model, ["heads", "neurons", "outputs"])
    heads = [group for group in groups if group.kind == "heads"]
    neurons_and_outputs = [group for group in groups if group.kind != "heads"]
    for group in heads[-2:] + neurons_and_outputs[-2:]:
        unit, suffix = (1, FAMILIES[name].out) if group.kind == "heads" else (5, FAMILIES[name].down)
        gate = torch.ones(group.count).index_fill(0, torch.tensor(unit), 0)
        with gate_units([group], {group.name: gate}):
            gated = logits(model, inputs)
        linear = group.gate
        [linear_name] = [name for name, module in model.named_modules() if module is linear]
        assert linear_name.endswith(suffix.rpartition(".")[2])

        saved = {key: tensor.clone() for key, tensor in linear.state_dict().items()}
        zero_unit(group, unit)
        by_hand = logits(model, inputs)
        linear.load_state_dict(saved)
        assert not torch.allclose(by_hand, logits(model, inputs), atol=1e-4)
        # Zeros added in another order: the last bits differ, of float32 where a norm computes in it.
        torch.testing.assert_close(gated, by_hand, rtol=0, atol=1e-5 if name in ROUGH else 1e-11)


def zero_unit(group: Units, unit: int) -> None:
    """Sets what the gated layer reads or writes of a unit to zero."""
    linear = group.gate
    rows = linear.weight.T if type(linear).__name__ == "Conv1D" else linear.weight
    if group.side == "in":
        size = rows.shape[1] // group.count
        rows[:, unit * size : (unit + 1) * size] = 0
        return
    rows[unit] = 0
    if linear.bias is not None:
        linear.bias[unit] = 0


def gate_gradients(
    model: nn.Module, groups: list[Units], inputs: dict[str, Tensor], gates: dict[str, Tensor]
) -> list[Tensor]:
    leaves = {name: gate.clone().requires_grad_() for name, gate in gates.items()}
    with gate_units(groups, leaves):
        return list(torch.autograd.grad(loss(model, inputs), list(leaves.values())))


@pytest.mark.parametrize("name", FAMILIES)
def test_gates_of_samples_are_apart_and_open_ones_change_no_bit(name):
    model = shared_model(name)
    groups = find_units(model, UNIT_KINDS)
    inputs = inputs_of(model)
    with torch.no_grad():
        for shape in ((), (B,)):
            with gate_units(groups, {group.name: torch.ones(*shape, group.count) for group in groups}):
                gated = logits(model, inputs)
            assert torch.equal(gated, logits(model, inputs))

    torch.manual_seed(3)
    gates = {group.name: torch.rand(B, group.count, dtype=torch.float64) + 0.5 for group in groups}
    gradients = gate_gradients(model, groups, inputs, gates)

    # The second sample alone, and all in another order, have the same gradients.
    second_inputs = {key: ids[1:2] for key, ids in inputs.items()}
    second_gates = {key: gate[1] for key, gate in gates.items()}
    second_gradients = gate_gradients(model, groups, second_inputs, second_gates)
    order = torch.tensor([2, 0, 1])
    reordered_inputs = {key: ids[order] for key, ids in inputs.items()}
    reordered_gates = {key: gate[order] for key, gate in gates.items()}
    reordered_gradients = gate_gradients(model, groups, reordered_inputs, reordered_gates)
    for gradient, of_second, reordered in zip(gradients, second_gradients, reordered_gradients, strict=True):
        atol = 1e-5 * gradient.abs().max().item()
        assert not torch.allclose(gradient[0], gradient[1], rtol=0, atol=atol)
        torch.testing.assert_close(gradient[1], of_second, rtol=0, atol=atol)
        torch.testing.assert_close(gradient[order], reordered, rtol=0, atol=atol)


@pytest.mark.parametrize("name", FUSED)
def test_segments_are_what_the_model_uses_as_q_k_v(name):
    model = shared_model(name)
    fused = [projection for projection in find_projections(model) if len(projection.segments) == 3][-1]
    key_size = 16 if name == "phi3" else 32
    assert [len(segment) for segment in fused.segments] == [32, key_size, key_size]

    # The gradient of the last position's logits by what the fused layer writes.
    outputs = []
    handle = fused.module.register_forward_hook(lambda module, args, output: outputs.append(output))
    ids = inputs_of(model)["input_ids"]
    last_logits = logits(model, {"input_ids": ids})[:, -1].square().sum()
    handle.remove()
    [gradient] = torch.autograd.grad(last_logits, outputs)
    query, key, value = [gradient[..., segment] for segment in fused.segments]
    assert not query[:, :-1].any()
    assert (query[:, -1] != 0).any(0).all()
    for earlier_positions in (key[:, :-1], value[:, :-1]):
        assert (earlier_positions != 0).any(0).any(0).all()


KEEP = (0.0, 0.25, 0.5, 1.0)  # of the four heads


def factors_of_first_heads(name: str) -> list[tuple[tuple[int, ...], list[float]]]:
    """The shapes and numbers of the factors for the heads of a model's first block."""
    group = find_units(shared_model(name), ["heads"])[0]
    factors = [factor for _, factor in make_factors(group, torch.tensor(KEEP))]
    return [(tuple(factor.shape), factor.flatten().tolist()) for factor in factors]


def repeat(values: Sequence[float], times: int) -> list[float]:
    """Each value as often, one after another."""
    return torch.tensor(values).repeat_interleave(times).tolist()


def test_factors_of_separate_grouped_and_fused_maps():
    heads = repeat(KEEP, 8)
    separate = [((32, 1), heads), ((32,), heads)]
    assert factors_of_first_heads("bert") == separate * 3 + [((1, 32), heads)]
    grouped = repeat((0.0, 0.5), 8)  # the least of heads 0 and 1, and of 2 and 3
    assert factors_of_first_heads("llama") == [
        ((32, 1), heads), ((16, 1), grouped), ((16, 1), grouped), ((1, 32), heads),
    ]  # fmt: skip
    assert factors_of_first_heads("phi3") == [((64, 1), heads + grouped * 2), ((1, 32), heads)]
    by_head = repeat(KEEP, 24)
    for name in ("gpt_neox", "bloom"):
        assert factors_of_first_heads(name) == [((96, 1), by_head), ((96,), by_head), ((1, 32), heads)]


SOURCE_LENGTH, TARGET_LENGTH = 9, 4
LORA = {"r": 2, "alpha": 4, "dropout": 0.1, "targets": "all-linear", "embeddings": False}
ATTACHED = {
    "nothing": lambda model: None,
    "pairs": lambda model: attach_lora(model, **LORA),
    "houlsby": lambda model: attach_bottlenecks(model, placement="houlsby", reduction=4, activation="relu"),
    "plugins": lambda model: attach_plugins(model, attention=0.5, ffn=0.5, output_relu=False),
}


@pytest.mark.parametrize("attached", ATTACHED)
@pytest.mark.parametrize("name", ["t5", "t5-gated", "bart"])
def test_the_token_side_of_a_layer_is_that_of_the_tokens_it_reads(name, attached):
    model = build(name).float()
    ATTACHED[attached](model)
    lengths = {}  # by the name of a linear layer, of its outputs

    def record(layer_name, module, args, output):
        lengths[layer_name] = output.shape[1]

    for layer_name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(partial(record, layer_name))
    model(
        input_ids=torch.randint(3, 60, (2, SOURCE_LENGTH)),
        decoder_input_ids=torch.randint(3, 60, (2, TARGET_LENGTH)),
    )
    output_embeddings = model.get_output_embeddings()
    [head] = [key for key, module in model.named_modules() if module is output_embeddings]
    sides = {layer_name: find_token_side(model, layer_name) for layer_name in lengths}
    assert sides.pop(head) is None
    assert lengths.pop(head) == TARGET_LENGTH
    expected = {SOURCE_LENGTH: SOURCE_TOKENS, TARGET_LENGTH: TARGET_TOKENS}
    assert sides == {layer_name: expected[length] for layer_name, length in lengths.items()}
    assert len(set(sides.values())) == 2
    assert len(sides) >= 20
