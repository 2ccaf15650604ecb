"""Scaled RoPE: parameters as transformers has them, the positions that follow, and what is refused."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.models.loading import check_length, find_max_positions, load_model
from cpt.models.objectives import Causal
from cpt.models.rope import count_scaled_positions, forget_lengths, scale_rope, set_max_length
from tests.support.data_fixtures import tokenizer_with_template

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4}
YARN = {"rope_type": "yarn", "factor": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config_of(model_type="llama", **options):
    settings = SIZES | options
    return AutoConfig.for_model(model_type, **settings)


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def logits_of(model, length):
    with torch.no_grad():
        return model(3 + torch.arange(length)[None] % 90).logits


@pytest.mark.parametrize(
    "parameters", [LINEAR, DYNAMIC, YARN, LLAMA3], ids=lambda parameters: parameters["rope_type"]
)
def test_a_scaled_model_is_longer_and_loads_with_the_same_logits(parameters, tmp_path):
    plain = build(config_of())
    plain.save_pretrained(tmp_path / "base")
    with pytest.raises(
        ValueError, match="^model.max_seq_length=256 is invalid. Allowed: 2 to 64, the positions"
    ):
        check_length(256, plain, Causal())

    model = load_model(tmp_path / "base", "causal", rope=parameters).eval()
    check_length(256, model, Causal())
    with pytest.raises(ValueError, match="Allowed: 2 to 256, "):
        check_length(257, model, Causal())
    expected = logits_of(model, 200)
    assert (expected - logits_of(plain, 200)).abs().max() > 1e-4
    assert model.config.rope_parameters["rope_theta"] == 10000.0

    model.save_pretrained(tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    torch.testing.assert_close(logits_of(exported, 200), expected, rtol=0, atol=0)
    assert find_max_positions(exported) == 256

    # Given again, as in a run that continues from the export, they change nothing.
    unchanged = scale_rope(exported.config, parameters)
    assert unchanged.rope_parameters == exported.config.rope_parameters
    assert unchanged.max_position_embeddings == exported.config.max_position_embeddings


def test_what_is_not_given_stays_and_another_type_replaces_it():
    stored = {**LLAMA3, "factor": 2, "original_max_position_embeddings": 32, "rope_theta": 5e5}
    config = config_of(rope_parameters=stored)
    longer = scale_rope(config, {"factor": 8})
    assert longer.rope_parameters == {**stored, "factor": 8} and longer.max_position_embeddings == 256
    yarn = scale_rope(config, YARN)
    assert yarn.rope_parameters == {**YARN, "original_max_position_embeddings": 32, "rope_theta": 5e5}
    assert yarn.max_position_embeddings == 128
    assert config.rope_parameters == stored  # as it was

    faster = scale_rope(config_of(), {"rope_theta": 1e6})
    assert faster.rope_parameters["rope_theta"] == 1e6 and faster.max_position_embeddings == 64


def test_parameters_by_type_of_layer():
    config = config_of("gemma3_text", sliding_window=16)
    scaled = scale_rope(config, {"full_attention": LINEAR})
    assert scaled.rope_parameters["sliding_attention"] == config.rope_parameters["sliding_attention"]
    assert scaled.rope_parameters["full_attention"] == {**LINEAR, "rope_theta": 1e6}
    assert count_scaled_positions(scaled) == 256
    logits_of(build(scaled), 200)
    assert count_scaled_positions(scale_rope(config, {"full_attention": DYNAMIC})) == 256


@pytest.mark.parametrize(
    "parameters", [LINEAR, DYNAMIC, YARN], ids=lambda parameters: parameters["rope_type"]
)
def test_the_tokenizer_takes_as_much_text_as_the_scaled_model(parameters):
    tokenizer = tokenizer_with_template("$A", eos_token="</s>")
    unlimited = tokenizer.model_max_length
    set_max_length(tokenizer, scale_rope(config_of(), parameters))
    assert tokenizer.model_max_length == unlimited
    tokenizer.model_max_length = 64
    set_max_length(tokenizer, scale_rope(config_of(), parameters))
    assert tokenizer.model_max_length == 256


REFUSED = {
    "gpt2": (YARN, "a gpt2 has no rotary positions. Allowed: null"),
    "llama": ({"full_attention": YARN}, "a llama has one set of parameters for all layers"),
    "gemma3_text": (
        YARN,
        "a gemma3_text has them by type of layer. Allowed: null, or keys of sliding_attention, ",
    ),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_without_these_parameters_are_refused(model_type):
    parameters, message = REFUSED[model_type]
    with pytest.raises(ValueError, match=r"^model.rope_parameters=\{.*\} is invalid: " + message):
        scale_rope(config_of(model_type), parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rope_type": "yran", "factor": 4},
            "model.rope_parameters.rope_type=yran is invalid. Allowed: default, ",
        ),
        ({"rope_type": "yarn"}, "Missing required keys"),
        ({"factor": 4}, "Unrecognized keys .*factor"),
        (LINEAR | {"beta_fast": 3}, "Unrecognized keys .*beta_fast"),
        (YARN | {"factor": 0.5}, "factor field must be a float or int >= 1, got 0.5"),
        (YARN | {"factor": "four"}, "factor field must be a float or int >= 1, got four"),
        (LLAMA3 | {"high_freq_factor": 0.5}, "high_freq_factor field must be greater"),
        ({}, "is invalid. Allowed: null"),
    ],
)
def test_parameters_that_transformers_refuses_or_warns_of_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message) as raised:
        scale_rope(config_of(), parameters)
    assert "\n" not in str(raised.value) and str(raised.value).startswith("model.rope_parameters")


def test_dynamic_frequencies_are_those_of_the_pass_whatever_was_before():
    model = build(scale_rope(config_of(), DYNAMIC))
    forget_lengths(model)
    first_logits = logits_of(model, 100)
    logits_of(model, 200)
    torch.testing.assert_close(logits_of(model, 100), first_logits, rtol=0, atol=0)
    torch.testing.assert_close(logits_of(model, 60), logits_of(build(config_of()), 60), rtol=0, atol=0)
