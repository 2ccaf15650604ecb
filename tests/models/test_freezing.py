"""What is frozen stays as it is, under every method."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from cpt.models.options import Freeze
from cpt.models.weights import frozen_parameters
from tests.support.making import ORDER


def names(model: torch.nn.Module, freeze: Freeze) -> set[str]:
    chosen = {id(parameter) for parameter in frozen_parameters(model, freeze)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=3, n_head=2, vocab_size=20, n_positions=8))


def test_embeddings_take_tokens_and_positions():
    assert names(gpt2(), Freeze(embeddings=True, layers=0)) == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    }


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "vocab_size": 20}
    return T5ForConditionalGeneration(T5Config(**sizes))


def trained(model: torch.nn.Module, only: object) -> set[str]:
    return {name for name, _ in model.named_parameters()} - names(
        model, Freeze(embeddings=False, layers=0, only=only)
    )


def test_only_norms_are_the_layers_that_normalise():
    assert trained(gpt2(), "norms") == {name for name, _ in gpt2().named_parameters() if ".ln_" in name}
    assert trained(t5(), "norms") == {name for name, _ in t5().named_parameters() if "layer_norm" in name}


def test_only_attention_is_its_maps():
    assert trained(gpt2(), "attention") == {name for name, _ in gpt2().named_parameters() if ".attn." in name}
    expected = {
        f"{part}.{letter}.weight" for part in ("SelfAttention", "EncDecAttention") for letter in "qkvo"
    }
    assert {".".join(name.split(".")[-3:]) for name in trained(t5(), "attention")} == expected


def test_only_what_a_regular_expression_or_a_list_means():
    last = trained(gpt2(), r"\.h\.2\.")
    assert last == {name for name, _ in gpt2().named_parameters() if ".h.2." in name}
    assert trained(gpt2(), ["norms", r"\.h\.2\."]) == last | trained(gpt2(), "norms")


@pytest.mark.parametrize("method", ["ncl", "das", "ewc", "derpp"])
def test_frozen_weights_keep_their_bits_through_a_run(method, small, start, tmp_path):
    frozen = ["freeze.embeddings=true", "freeze.layers=1", "optim.weight_decay=0.3"]
    start(small(ORDER, f"method={method}", "keep_stages=true", *frozen), tmp_path)
    assert json.loads((tmp_path / "scores.json").read_text())["run"]["finished"]
    first, last = (torch.load(tmp_path / "stages" / f"00{n}.pt", weights_only=True) for n in (1, 2))
    kept = {name for name, value in first.items() if torch.equal(value, last[name])}
    assert "model.model.embeddings.tok_embeddings.weight" in kept
    assert "model.model.layers.0.attn.Wqkv.weight" in kept
    assert "model.model.layers.1.attn.Wqkv.weight" not in kept
