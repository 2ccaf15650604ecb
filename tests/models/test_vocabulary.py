"""Rows of tokens that were added to a checkpoint's tokenizer."""

import logging

import pytest
import torch
from tokenizers import AddedToken
from transformers import (
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from cpt.core.messages import log_once
from cpt.models.vocabulary import check_entries, find_new_tokens, fit_rows, warn_of_stale_rows
from tests.support.data_fixtures import bare_tokenizer

WORDS = [" sonata", " fugue", " rondo", " toccata", " partita"]
TAGS = ["<tool>", "</tool>"]  # words of a checkpoint that look like control tokens, and are not special


def tokenizer_with(*words):
    """A tokenizer of 330 tokens, two of which it was trained with later, then with these."""
    tokenizer = bare_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    assert len(tokenizer) == 333
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def model_of(rows, *, is_tied=True, dim=32):
    torch.manual_seed(0)
    if is_tied:
        return GPT2LMHeadModel(GPT2Config(vocab_size=rows, n_embd=dim, n_layer=1, n_head=2))
    sizes = {"hidden_size": dim, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=rows, **sizes))


def sub_tokens(word):
    return bare_tokenizer()(word, add_special_tokens=False)["input_ids"]


def check_rows(before, after, words, *, first=333):
    """Each new row is the mean of its sub-tokens' rows; all other rows of the checkpoint are as they were."""
    for number, word in enumerate(words):
        mean = before[sub_tokens(word)].mean(0)
        torch.testing.assert_close(after[first + number], mean)
    old_rows = [row for row in range(len(before)) if not first <= row < first + len(words)]
    assert torch.equal(after[old_rows], before[old_rows])


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("rows", [333, 335, 333 + len(WORDS), 400])
def test_new_words_begin_as_the_mean_of_their_sub_tokens(rows, is_tied, caplog):
    """Beyond the embedding, partly in its padding, and wholly in it."""
    caplog.set_level(logging.INFO, logger="cpt")
    log_once.cache_clear()  # the other rows log the same
    model = model_of(rows, is_tied=is_tied)
    tokenizer = tokenizer_with(*WORDS)
    before = [model.get_input_embeddings().weight.detach().clone()]
    before.append(model.get_output_embeddings().weight.detach().clone())
    fit_rows(model, tokenizer, checkpoint="x")
    after = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert (after[0] is after[1]) == is_tied and len(after[0]) == max(rows, 333 + len(WORDS))
    if rows == 333 + len(WORDS):  # nothing says that the last rows are not trained
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert "the rows of 7 added tokens stay, since they may be trained" in caplog.text
        return
    for old, new in zip(before, after, strict=True):
        check_rows(old, new, WORDS)
    in_padding = max(0, min(rows - 333, len(WORDS)))
    assert f"for 5 new tokens: each begins as the mean of its sub-tokens, {in_padding} in rows" in caplog.text


def test_special_tokens_beyond_the_embedding_are_new_too():
    model = model_of(333)
    tokenizer = tokenizer_with()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>", "<gene>"]})
    before = model.get_input_embeddings().weight.detach().clone()
    fit_rows(model, tokenizer, checkpoint="x")
    check_rows(before, model.get_input_embeddings().weight, ["<gene>"])


@pytest.mark.parametrize("kind", ["zero", "small"])
def test_untrained_rows_are_told_from_trained_ones(kind):
    """Where rows without a token are unlike others, control tokens among the untrained are new as well."""
    model = model_of(400)
    tokenizer = tokenizer_with(*WORDS, "<gene>")
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[333:] *= 0 if kind == "zero" else 1e-3
    before = table.detach().clone()
    assert sorted(find_new_tokens(table, tokenizer).new) == [*range(333, 339)]
    fit_rows(model, tokenizer, checkpoint="x")
    check_rows(before, table, [*WORDS, "<gene>"])


def test_rows_that_were_trained_from_their_sub_tokens_stay(caplog):
    """The export of a run with model.resize=true is continued by the same command, or with further words."""
    model = model_of(400)
    tokenizer = tokenizer_with(*WORDS)
    fit_rows(model, tokenizer, checkpoint="x")
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[333:338] += 0.01 * torch.randn(5, 32)
    before = table.detach().clone()
    fit_rows(model, tokenizer, checkpoint="x")
    assert torch.equal(table, before)

    model = model_of(333)
    tokenizer = tokenizer_with(*WORDS)
    fit_rows(model, tokenizer, checkpoint="x")
    before = model.get_input_embeddings().weight.detach().clone()
    tokenizer.add_tokens([AddedToken(" cantata", normalized=False)])
    fit_rows(model, tokenizer, checkpoint="x")
    check_rows(before, model.get_input_embeddings().weight, [" cantata"], first=338)


def test_what_resizing_does_is_logged_once_though_the_base_is_loaded_twice(caplog):
    caplog.set_level("INFO", logger="cpt")
    log_once.cache_clear()
    for checkpoint, num_rows, words in (("as it is", 333, ()), ("larger", 333, WORDS)):
        for _ in range(2):
            fit_rows(model_of(num_rows), tokenizer_with(*words), checkpoint=checkpoint)
    unchanged, resized = [record.message for record in caplog.records if record.name.startswith("cpt")]
    assert unchanged.startswith("No effect of model.resize=true: 333 rows, 333 entries of the tokenizer")
    assert resized.startswith("Resizing the embedding of larger from 333 to 338 rows for 5 new tokens: ")


def test_without_resize_the_log_names_stale_rows(caplog):
    log_once.cache_clear()
    model = model_of(400)
    warn_of_stale_rows(model, tokenizer_with(), checkpoint="x")
    assert "look untrained" not in caplog.text
    warn_of_stale_rows(model, tokenizer_with(*WORDS), checkpoint="x")
    assert "The rows of 5 tokens of the tokenizer of x look untrained ( sonata," in caplog.text


def test_words_of_a_slow_tokenizer_are_the_mean_of_their_bytes():
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config)
    before = model.shared.weight.detach().clone()
    tokenizer.add_tokens(["benzol"])
    fit_rows(model, tokenizer, checkpoint="x")
    pieces = [byte + 3 for byte in b"benzol"]
    torch.testing.assert_close(model.shared.weight[259], before[pieces].mean(0))


def test_the_last_entries_of_a_tokenizer_that_has_too_many_are_named():
    check_entries(335, tokenizer_with("quark", "antiquark"), checkpoint="mine")
    entries = r"has 335 entries \(the last antiquark, quark, <\|turn\|>, …\), the embedding 333 rows"
    with pytest.raises(ValueError, match=entries):
        check_entries(333, tokenizer_with("quark", "antiquark"), checkpoint="mine")
