"""Where units live is checked against the models themselves, in float64: gates against zeroed slices."""

from functools import cache
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
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 40, "vocab_size": V}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": V}
T5 |= {"feed_forward_proj": "gelu"}
BART = {"d_model": 32, "vocab_size": V, "max_position_embeddings": 40}
for side in ("encoder", "decoder"):
    BART |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
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
T5_PLACES = (("encoder.block", "decoder.block"), "o", "DenseReluDense.wo", "t5")
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": V}
OPT = SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "activation_function": "gelu"}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": V}
MODERN = SIZES | {"cls_token_id": 1, "sep_token_id": 2}
STACKS = ("model.encoder.layers", "model.decoder.layers")
FAMILIES = {
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
    "t5": (SEQ2SEQ, T5, *T5_PLACES),
    "t5-gated": (SEQ2SEQ, T5 | {"feed_forward_proj": "gated-gelu"}, *T5_PLACES),
    "bart": (SEQ2SEQ, BART, STACKS, "self_attn.out_proj", "fc2"),
    "bloom": (CAUSAL, BLOOM, ("transformer.h",), "self_attention.dense", "mlp.dense_4h_to_h"),
}
FAMILIES = {name: Family(*values) for name, values in FAMILIES.items()}
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
    groups, inputs = find_units(model, ["heads", "neurons", "outputs"]), inputs_of(model)
    heads, others = ([each for each in groups if (each.kind == "heads") == own] for own in (True, False))
    for group in heads[-2:] + others[-2:]:
        unit, suffix = (1, FAMILIES[name].out) if group.kind == "heads" else (5, FAMILIES[name].down)
        gate = torch.ones(group.count).index_fill(0, torch.tensor(unit), 0)
        with gate_units([group], {group.name: gate}):
            shut = logits(model, inputs)
        linear = group.gate
        assert [n for n, m in model.named_modules() if m is linear][0].endswith(suffix.rpartition(".")[2])
        saved = {key: value.clone() for key, value in linear.state_dict().items()}
        rows = linear.weight.T if type(linear).__name__ == "Conv1D" else linear.weight
        size = rows.shape[1] // group.count
        if group.side == "in":
            rows[:, unit * size : (unit + 1) * size] = 0
        else:
            rows[unit] = 0
            if linear.bias is not None:
                linear.bias[unit] = 0
        by_hand = logits(model, inputs)
        linear.load_state_dict(saved)
        assert not torch.allclose(by_hand, logits(model, inputs), atol=1e-4)
        # Zeros added in another order: the last bits differ, of float32 where a norm computes in it.
        torch.testing.assert_close(shut, by_hand, rtol=0, atol=1e-5 if name in ROUGH else 1e-11)


def per_sample(model: nn.Module, groups: list[Units], inputs: dict[str, Tensor], gates: dict) -> list[Tensor]:
    leaves = {key: gate.clone().requires_grad_() for key, gate in gates.items()}
    with gate_units(groups, leaves):
        return list(torch.autograd.grad(loss(model, inputs), list(leaves.values())))


@pytest.mark.parametrize("name", FAMILIES)
def test_gates_of_samples_are_apart_and_open_ones_change_no_bit(name):
    model = shared_model(name)
    groups, inputs = find_units(model, UNIT_KINDS), inputs_of(model)
    with torch.no_grad():
        for shape in ((), (B,)):
            with gate_units(groups, {group.name: torch.ones(*shape, group.count) for group in groups}):
                inside = logits(model, inputs)
            assert torch.equal(inside, logits(model, inputs))
    torch.manual_seed(3)
    gates = {group.name: torch.rand(B, group.count, dtype=torch.float64) + 0.5 for group in groups}
    together = per_sample(model, groups, inputs, gates)
    one = {key: x[1:2] for key, x in inputs.items()}
    alone = per_sample(model, groups, one, {key: gate[1] for key, gate in gates.items()})
    order = torch.tensor([2, 0, 1])
    moved = {key: gate[order] for key, gate in gates.items()}
    permuted = per_sample(model, groups, {key: x[order] for key, x in inputs.items()}, moved)
    for rows, row, other in zip(together, alone, permuted, strict=True):
        near = {"rtol": 0, "atol": 1e-5 * rows.abs().max().item()}
        assert not torch.allclose(rows[0], rows[1], **near)
        torch.testing.assert_close(rows[1], row, **near)
        torch.testing.assert_close(rows[order], other, **near)


@pytest.mark.parametrize("name", FUSED)
def test_segments_are_what_the_model_uses_as_q_k_v(name):
    model = shared_model(name)
    fused = [p for p in find_projections(model) if len(p.segments) == 3][-1]
    ids = inputs_of(model)["input_ids"]
    kv = 16 if name == "phi3" else 32
    assert [len(segment) for segment in fused.segments] == [32, kv, kv]

    def gradient(ids: Tensor) -> list[Tensor]:
        kept = []
        handle = fused.module.register_forward_hook(lambda m, args, y: kept.append(y))
        last = logits(model, {"input_ids": ids})[:, -1].square().sum()
        handle.remove()
        (g,) = torch.autograd.grad(last, kept)
        return [g[..., segment] for segment in fused.segments]

    query, key, value = gradient(ids)
    assert not query[:, :-1].any() and (query[:, -1] != 0).any(0).all()
    assert all((x[:, :-1] != 0).any(0).any(0).all() for x in (key, value))


def kept(group: Units, *keep: float) -> list[tuple[tuple[int, ...], list[float]]]:
    return [(tuple(f.shape), f.flatten().tolist()) for _, f in make_factors(group, torch.tensor(keep))]


def test_factors_of_separate_grouped_and_fused_maps():
    eight = [x for x in (0.0, 0.25, 0.5, 1.0) for _ in range(8)]
    keep = (0.0, 0.25, 0.5, 1.0)
    plain = kept(find_units(shared_model("bert"), ["heads"])[0], *keep)
    assert plain == [((32, 1), eight), ((32,), eight)] * 3 + [((1, 32), eight)]
    grouped = [0.0] * 8 + [0.5] * 8  # the least of heads 0 and 1, and of 2 and 3
    assert kept(find_units(shared_model("llama"), ["heads"])[0], *keep) == [
        ((32, 1), eight), ((16, 1), grouped), ((16, 1), grouped), ((1, 32), eight),
    ]  # fmt: skip
    phi3 = kept(find_units(shared_model("phi3"), ["heads"])[0], *keep)
    assert phi3 == [((64, 1), eight + grouped * 2), ((1, 32), eight)]
    neox = [x for x in keep for _ in range(24)]
    for name in ("gpt_neox", "bloom"):
        found = kept(find_units(shared_model(name), ["heads"])[0], *keep)
        assert found == [((96, 1), neox), ((96,), neox), ((1, 32), eight)]


S, L = 9, 4
PAIRS = {"r": 2, "alpha": 4, "dropout": 0.1, "targets": "all-linear", "embeddings": False}
ATTACHED = {
    "nothing": lambda model: None,
    "pairs": lambda model: attach_lora(model, **PAIRS),
    "houlsby": lambda model: attach_bottlenecks(model, placement="houlsby", reduction=4, activation="relu"),
    "plugins": lambda model: attach_plugins(model, attention=0.5, ffn=0.5, output_relu=False),
}


@pytest.mark.parametrize("attached", ATTACHED)
@pytest.mark.parametrize("name", ["t5", "t5-gated", "bart"])
def test_a_map_works_on_the_tokens_that_go_through_it(name, attached):
    model, found = build(name).float(), {}
    ATTACHED[attached](model)
    head = next(each for each, module in model.named_modules() if module is model.get_output_embeddings())
    for each, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, args, y, each=each: found.update({each: y.shape[1]}))
    model(input_ids=torch.randint(3, 60, (2, S)), decoder_input_ids=torch.randint(3, 60, (2, L)))
    told = {each: find_token_side(model, each) for each in found}
    assert told.pop(head) is None and found.pop(head) == L
    assert told == {each: SOURCE_TOKENS if length == S else TARGET_TOKENS for each, length in found.items()}
    assert len({*told.values()}) == 2 and len(told) >= 20
