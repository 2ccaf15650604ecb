"""The trial of a model: which tokens its tokens see is found by changing one, whatever its class is."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from cpt.models.objectives import Causal, Masked, Objective, Span
from cpt.models.trial import make_stand_in, try_model

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
DECODER = {**SIZES, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 40}
ENCODER = {**SIZES, "vocab_size": 300, "max_position_embeddings": 40}
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 300, "max_position_embeddings": 40}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": 300}
XLNET = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48, "vocab_size": 300}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 300}
EXPERTS = DECODER | {"num_local_experts": 4}
AUTO = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "span": AutoModelForSeq2SeqLM}


def build_model(model_type: str, objective: str, sizes: dict, kernel: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    return AUTO[objective].from_config(config, attn_implementation=kernel)


def build_stand_in(model_type: str, objective: str, sizes: dict, kernel: str = "sdpa") -> PreTrainedModel:
    with torch.device("meta"):
        skeleton = build_model(model_type, objective, sizes, kernel)
    return make_stand_in(skeleton)


def objective_of(name: str) -> Objective:
    if name == "masked":
        return Masked.__new__(Masked)  # what is masked is not asked
    if name == "span":
        return Span(rate=0.15, mean=3, sentinels=range(200, 300), end=1, pad=0, start=0)
    return Causal()


def refusal(model: PreTrainedModel, name: str, objective: Objective | None = None) -> str:
    """The message of a refused model; "" for one that is accepted."""
    try:
        try_model(model, objective or objective_of(name), name, length=32, source="model.config")
    except ValueError as error:
        return str(error)
    return ""


SEES_AHEAD = {
    "a decoder by is_causal": ("llama", DECODER | {"is_causal": False}),
    "a decoder by use_bidirectional_attention": (
        "gemma3_text",
        DECODER | {"head_dim": 16, "use_bidirectional_attention": True, "sliding_window": 4},
    ),
    "an encoder": ("roberta", ENCODER),
    "a decoder with a window": ("mistral", DECODER | {"sliding_window": 4, "is_causal": False}),
    "a permutation model": ("xlnet", XLNET),
    "a model of both kinds": ("xlm", XLM),
}
SEES_BACK = {
    "a decoder": ("llama", DECODER),
    "a decoder with a window": ("mistral", DECODER | {"sliding_window": 4}),
    "an encoder used as decoder": ("bert", ENCODER | {"is_decoder": True}),
    "a state space model": ("mamba", MAMBA),
    "experts": ("mixtral", EXPERTS),
    "a decoder with dropout": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300}),
    "a model of both kinds": ("xlm", XLM | {"causal": True}),
}


@pytest.mark.parametrize("build", [build_model, build_stand_in])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", SEES_AHEAD)
def test_a_model_that_attends_to_both_sides_has_no_next_token_objective(kind, kernel, build):
    model_type, sizes = SEES_AHEAD[kind]
    if model_type in ("xlnet", "xlm") and kernel == "sdpa":
        kernel = "eager"  # the only one of these classes
    message = refusal(build(model_type, "causal", sizes, kernel), "causal")
    assert message.startswith(f"model.config is invalid: the tokens of a {model_type}")
    assert "see those that follow" in message
    assert ("Allowed: model.objective=masked, or" in message) == (model_type in ("roberta", "xlm"))


@pytest.mark.parametrize("build", [build_model, build_stand_in])
@pytest.mark.parametrize("kind", SEES_BACK)
def test_a_causal_model_has_a_next_token_objective(kind, build):
    model_type, sizes = SEES_BACK[kind]
    kernel = "eager" if model_type in ("xlm", "mamba") else "sdpa"
    assert refusal(build(model_type, "causal", sizes, kernel), "causal") == ""


@pytest.mark.parametrize("isolated", [False, True])
def test_the_rows_of_isolated_documents_are_tried_too(isolated):
    objective = Causal()
    objective.isolated = isolated
    assert refusal(build_model("llama", "causal", DECODER), "causal", objective) == ""
    model = build_model("llama", "causal", DECODER | {"is_causal": False})
    assert "see those that follow" in refusal(model, "causal", objective)


def test_a_masked_objective_needs_tokens_that_see_both_sides():
    flaubert = build_model("flaubert", "masked", XLM, "eager")  # FlaubertWithLMHeadModel
    assert refusal(flaubert, "masked") == ""
    assert refusal(build_model("bert", "masked", ENCODER), "masked") == ""
    window = build_model("modernbert", "masked", ENCODER | {"local_attention": 4, "pad_token_id": 0})
    assert refusal(window, "masked") == ""
    message = refusal(build_model("bert", "masked", ENCODER | {"is_decoder": True}), "masked")
    assert "a bert with is_decoder=true do not see those that follow" in message
    assert message.endswith("Allowed: model.objective=causal, or an encoder")


@pytest.mark.parametrize("build", [build_model, build_stand_in])
def test_a_span_objective_needs_a_causal_decoder_and_an_encoder_of_both_sides(build):
    model = build("t5", "span", T5)
    assert refusal(model, "span") == ""

    # Each side of the model, made to see what it must not.
    for side, is_decoder, change in (("decoder", True, show_following), ("encoder", False, hide_following)):
        model = build("t5", "span", T5, "eager")
        stack = getattr(model, side)
        stack.config.is_decoder = is_decoder
        stack.is_decoder = is_decoder
        for block in stack.block:
            change(block.layer[0].SelfAttention)
        assert f"the {side} of a t5" in refusal(model, "span")


def test_a_stand_in_attends_to_other_tokens_without_a_scale():
    """T5 does not scale queries times keys; where the heads together are as wide as the model, as in all
    published ones, these have one shape."""
    sizes = T5 | {"d_model": 512, "d_kv": 64, "num_heads": 8}
    assert refusal(build_stand_in("t5", "span", sizes), "span") == ""


def hide_following(attention) -> None:
    """Lets each token see only those before it."""
    forward = attention.forward

    def masked(hidden_states, mask=None, **arguments):
        length = hidden_states.shape[1]
        minimum = torch.finfo(hidden_states.dtype).min
        following = torch.full((1, 1, length, length), minimum).triu(1)
        return forward(hidden_states, mask=following, **arguments)

    attention.forward = masked


def show_following(attention) -> None:
    """Lets each token see all others."""
    forward = attention.forward

    def unmasked(hidden_states, mask=None, **arguments):
        length = hidden_states.shape[1]
        return forward(hidden_states, mask=torch.zeros(1, 1, length, length), **arguments)

    attention.forward = unmasked


def test_a_trial_changes_neither_random_numbers_nor_modes():
    model = build_model("gpt2", "causal", SEES_BACK["a decoder with dropout"][1])
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert refusal(model, "causal") == ""
    assert torch.equal(torch.rand(4), expected)
    assert [module.training for module in model.modules()] == modes


REFORMER = {
    "vocab_size": 300,
    "hidden_size": 32,
    "attention_head_size": 16,
    "num_attention_heads": 2,
    "feed_forward_size": 48,
    "is_decoder": True,
    "axial_pos_shape": [4, 8],
    "axial_pos_embds_dim": [16, 16],
    "attn_layers": ["local", "local"],
    "local_attn_chunk_length": 8,
    "max_position_embeddings": 32,
}


def test_a_class_that_is_trained_on_whole_rows_only_is_tried_on_them():
    assert refusal(build_model("reformer", "causal", REFORMER, "eager"), "causal") == ""


PROPHETNET = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_encoder_attention_heads": 2,
    "num_decoder_attention_heads": 2,
    "max_position_embeddings": 40,
}


def test_a_class_that_computes_logits_of_other_states_is_refused():
    message = refusal(build_model("prophetnet", "span", PROPHETNET, "eager"), "span")
    assert "ProphetNetForConditionalGeneration does not run with model.objective=span (" in message


UNUSABLE = {
    "no body": ("llama4_text", EXPERTS | {"head_dim": 16, "intermediate_size_mlp": 48}, "has no body"),
    "no language": ("xmod", ENCODER, "Input language unknown"),
}


@pytest.mark.parametrize("build", [build_model, build_stand_in])
@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_class_that_does_not_run_with_its_objective_is_refused(kind, build):
    model_type, sizes, reason = UNUSABLE[kind]
    message = refusal(build(model_type, "causal", sizes), "causal")
    assert "does not run with model.objective=causal" in message and reason in message
    assert "\n" not in message and message.endswith(". Allowed: another model")


def test_a_stand_in_has_the_memory_of_its_shapes():
    model = build_stand_in("llama", "causal", DECODER | {"num_hidden_layers": 4})
    shapes = {parameter.shape for parameter in model.parameters()}
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) == len(shapes) < len([*model.parameters()]) / 4


def test_a_stand_in_has_other_numbers_in_each_place_of_a_block_and_the_same_in_all_blocks():
    model = build_stand_in("llama", "causal", DECODER | {"num_hidden_layers": 2, "num_key_value_heads": 2})
    first, second = (layer.self_attn for layer in model.model.layers)
    assert not torch.equal(first.q_proj.weight, first.k_proj.weight)
    assert torch.equal(first.q_proj.weight, second.q_proj.weight)


PERCEIVER = {
    "vocab_size": 300,
    "num_latents": 4,
    "d_latents": 16,
    "d_model": 16,
    "num_blocks": 1,
    "num_self_attends_per_block": 1,
    "num_self_attention_heads": 2,
    "num_cross_attention_heads": 2,
    "max_position_embeddings": 40,
}


def test_a_model_whose_embedding_is_no_layer_is_refused_in_one_line():
    message = refusal(build_stand_in("perceiver", "masked", PERCEIVER, "eager"), "masked")
    assert "PerceiverForMaskedLM does not run with model.objective=masked (" in message
