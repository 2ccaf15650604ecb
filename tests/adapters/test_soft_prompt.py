"""Prompts against batches that are widened by hand, on the tiny models of the tests of units in float64."""

import pytest
import torch
from torch.func import functional_call

from cpt.adapters.soft_prompt import attach_prompt
from tests.models.test_units import FAMILIES, V, build, inputs_of
from tests.support.forward_passes import encode_batch, make_batch

pytestmark = pytest.mark.slow

N, B, T = 5, 3, 7
LENGTHS = (7, 5, 3)
CAUSAL = [name for name, family in FAMILIES.items() if "CausalLM" in family.auto.__name__]
MASKED = [name for name, family in FAMILIES.items() if "MaskedLM" in family.auto.__name__]


def build_prompted(name: str, *, tokens: int = N, **changes):
    model = build(name, **changes)
    [parameter] = attach_prompt(model, tokens=tokens, causal=name in CAUSAL).names
    part = model.get_submodule(parameter.rpartition(".")[0])
    return model, part, {parameter: part.weight.detach()[:0]}


def padded_batch() -> dict[str, torch.Tensor]:
    """Ids [B, T] with rows of 7, 5 and 3 tokens, as an objective makes them."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, V, (B, T), generator=generator)
    is_text = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    labels = torch.where(is_text & (torch.rand(B, T, generator=generator) < 0.6), ids, -100)
    labels[:, 1] = ids[:, 1]
    return make_batch(ids.where(is_text, 0), labels, is_text.long())


def close(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*MASKED, *CAUSAL])
def test_it_is_the_model_of_the_widened_input(name):
    model, part, none = build_prompted(name)
    inputs = inputs_of(model)
    output = model.get_input_embeddings()(inputs["input_ids"])
    widened = torch.cat([output[:, :1], part.weight.expand(B, -1, -1), output[:, 1:]], dim=1)
    expected = functional_call(model, none, kwargs={"inputs_embeds": widened}).logits
    positions = [0, *range(N + 1, N + T)] if name in MASKED else list(range(N, N + T))
    output = model(**inputs).logits
    assert output.shape == (B, T, V)
    close(output, expected[:, positions])
    assert (output - functional_call(model, none, kwargs=inputs).logits).abs().max() > 0.1


@pytest.mark.parametrize("name", [*MASKED, *CAUSAL])
def test_a_padded_row_is_the_row_without_padding(name):
    (model, *_) = build_prompted(name)
    batch = padded_batch()
    states = encode_batch(model, batch)
    assert states.shape == (B, T, 32)
    for row, length in enumerate(LENGTHS):
        row_states = encode_batch(model, {"input_ids": batch["input_ids"][row : row + 1, :length]})
        close(states[row, :length], row_states[0])


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama"])
def test_positions_that_are_given_count_on_through_the_prompt(name):
    model, *_ = build_prompted(name)
    ids = inputs_of(model)["input_ids"]
    first = 1 if name == "roberta" else 0
    positions = torch.arange(first, first + T).expand(B, T)
    logits = model(input_ids=ids).logits
    close(model(input_ids=ids, position_ids=positions).logits, logits)
    assert (
        not torch.allclose(model(input_ids=ids, position_ids=positions + 1).logits, logits) or name == "llama"
    )


@pytest.mark.parametrize("name", ["t5", "t5-gated", "bart"])
def test_with_a_decoder_it_is_the_model_of_the_source_behind_the_prompt(name):
    model, part, none = build_prompted(name)
    target = torch.randint(3, V, (B, 4), generator=torch.Generator().manual_seed(4))
    batch = {**padded_batch(), "decoder_input_ids": target}
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "decoder_input_ids")}
    output = model.get_encoder().get_input_embeddings()(batch["input_ids"])
    wide = {"inputs_embeds": torch.cat([part.weight.expand(B, -1, -1), output], dim=1)}
    wide["attention_mask"] = torch.cat([torch.ones(B, N, dtype=torch.long), batch["attention_mask"]], dim=1)
    expected = functional_call(model, none, kwargs={**inputs, "input_ids": None, **wide})
    output = model(**inputs).logits
    close(output, expected.logits)
    assert (output - functional_call(model, none, kwargs=inputs).logits).abs().max() > 0.01
    close(encode_batch(model, batch), expected.encoder_last_hidden_state[:, N:])
