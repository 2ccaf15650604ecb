"""A tokenizer with more entries than the embedding has rows."""

import copy

import pytest
import torch

from cpt.models.growth import entries, fit_rows
from cpt.models.loading import build_model, is_tied, load_model, skeleton, train_tokenizer

ADDED = ["contract", "pasta", "section"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "roberta": ("masked", {**SIZES, "max_position_embeddings": 64}),
    "bert": ("masked", SIZES),
    "modernbert": ("masked", SIZES),
    "deberta-v2": ("masked", SIZES),
    "gpt2": ("causal", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "llama": ("causal", {**SIZES, "num_key_value_heads": 2}),
    "gpt_neox": ("causal", SIZES),  # its head is not tied
}


@pytest.fixture(scope="module")
def words():
    lines = ["the court finds that a party to this contract must pay", "fresh pasta with basil"]
    return train_tokenizer(iter([lines] * 20), vocabulary=300, objective="masked")


@pytest.fixture
def more(words):
    added = copy.deepcopy(words)
    assert added.add_tokens(ADDED) == len(ADDED)
    return added


def model(kind: str, tokenizer):
    objective, sizes = CONFIGS[kind]
    return build_model({"model_type": kind, **sizes}, tokenizer, objective, seed=0).eval()


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_are_added_to_embedding_and_head_the_same_ones_each_time(kind, words, more, tmp_path):
    start = model(kind, words)
    rows = start.get_input_embeddings().weight.shape[0]
    before = start.get_input_embeddings().weight.detach().clone()
    tied = start.get_output_embeddings().weight is start.get_input_embeddings().weight
    one, other = copy.deepcopy(start), copy.deepcopy(start)
    drawn = torch.random.get_rng_state()
    for number, each in enumerate((one, other)):
        torch.manual_seed(number)
        fit_rows(each, more, checkpoint="x")
    torch.random.set_rng_state(drawn)
    assert all(
        torch.equal(a, b) for a, b in zip(*(each.state_dict().values() for each in (one, other)), strict=True)
    )
    embedding, head = one.get_input_embeddings().weight, one.get_output_embeddings().weight
    assert (embedding is head) == tied
    assert torch.equal(embedding[:rows], before)
    assert embedding.shape[0] == head.shape[0] == one.config.vocab_size == rows + len(ADDED) == entries(more)
    ids = torch.tensor([more.convert_tokens_to_ids(ADDED)])
    logits = one(input_ids=ids).logits
    assert logits.shape[-1] == entries(more) and torch.isfinite(logits).all()
    one.save_pretrained(tmp_path)
    assert torch.equal(type(one).from_pretrained(tmp_path).eval()(input_ids=ids).logits, logits)


T5 = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
UNTIED = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def with_sentinels():
    return train_tokenizer(
        iter(["the court finds that a party must pay"] * 20), vocabulary=400, objective="span"
    )


@pytest.mark.parametrize("config", [T5, UNTIED], ids=["tied", "untied"])
def test_a_head_stays_tied_or_untied(config, with_sentinels, tmp_path):
    """transformers 5 says of every T5 that it is tied, and ties what it resizes."""
    start = build_model(config, with_sentinels, "span", seed=0).eval()
    tied, rows = config is T5, len(with_sentinels)
    assert is_tied(start) == tied and start.config.scale_decoder_outputs == tied
    more = copy.deepcopy(with_sentinels)
    more.add_tokens(ADDED)
    before = start.lm_head.weight.detach().clone()
    fit_rows(start, more, checkpoint="x")
    assert is_tied(start) == tied and start.config.tie_word_embeddings
    assert start.lm_head.weight.shape == start.shared.weight.shape == (rows + 3, 32)
    assert torch.equal(start.lm_head.weight[:rows], before)
    assert start.encoder.embed_tokens.weight is start.decoder.embed_tokens.weight is start.shared.weight
    ids = torch.randint(3, rows, (2, 7))
    start.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "span").eval()
    assert is_tied(loaded) == tied
    given = {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
    assert torch.equal(loaded(**given).logits, start(**given).logits)
    assert {*skeleton(loaded).state_dict()} == {*loaded.state_dict()}
