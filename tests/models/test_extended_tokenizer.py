"""A tokenizer that adds tokens to that of its checkpoint: whether it fits, and the rows of its tokens."""

import json
import logging

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import BertConfig, BertForMaskedLM, ByT5Tokenizer, PreTrainedTokenizerFast

from cpt.models.extended_tokenizer import check_fit, describe_other_roles, find_sub_tokens
from cpt.models.vocabulary import extend_rows, log_extension
from tests.models.test_vocabulary import WORDS, check_rows, model_of, sub_tokens, tokenizer_with
from tests.support.data_fixtures import bare_tokenizer, bos_tokenizer, wordpiece_tokenizer


def rebuild_tokenizer(tokenizer, change):
    """A tokenizer with another definition, to which `change` is applied."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    change(definition)
    backend = Tokenizer.from_str(json.dumps(definition))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", sep_token="<s>")


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("rows", [333, 335, 333 + len(WORDS), 400])
def test_new_tokens_begin_as_the_mean_of_what_the_checkpoint_has_in_their_place(rows, is_tied, caplog):
    """Beyond the embedding, partly in its padding, and wholly in it; whatever the rows there hold."""
    caplog.set_level(logging.INFO, logger="cpt")
    model = model_of(rows, is_tied=is_tied)
    before = [model.get_input_embeddings().weight.detach().clone()]
    before.append(model.get_output_embeddings().weight.detach().clone())
    own_tokenizer = tokenizer_with()
    tokenizer = tokenizer_with(*WORDS)
    extend_rows(model, tokenizer, own_tokenizer)
    after = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert (after[0] is after[1]) == is_tied and len(after[0]) == max(rows, 333 + len(WORDS))
    for old, new in zip(before, after, strict=True):
        check_rows(old, new, WORDS)

    caplog.clear()
    log_extension(tokenizer, own_tokenizer, name="y", checkpoint="x", rows=rows)
    in_padding = max(0, min(rows - 333, len(WORDS)))
    (message,) = caplog.messages
    assert message.startswith("Adding 5 tokens of model.tokenizer=y to x: ")
    assert f" {in_padding} in rows that" in message and message.endswith(f"{len(after[0])}, before {rows}")


def test_tokens_of_a_tokenizer_that_adds_none_are_not_set(caplog):
    caplog.set_level(logging.INFO, logger="cpt")
    model = model_of(400)
    before = model.get_input_embeddings().weight.detach().clone()
    extend_rows(model, tokenizer_with(*WORDS), tokenizer_with(*WORDS))
    assert torch.equal(model.get_input_embeddings().weight, before)
    caplog.clear()
    log_extension(tokenizer_with(), tokenizer_with(), name="y", checkpoint="x", rows=400)
    assert caplog.messages == ["model.tokenizer=y adds no token to the 333 of x"]


def test_entries_that_merges_make_are_cut_by_the_merges_of_the_checkpoint():
    """` bade` is one entry: the byte sign of its blank is no text."""

    def change(definition):
        model = definition["model"]
        entries = ["\u0120bade", "\u0120badeki"]
        for number, entry in enumerate(entries):
            model["vocab"][entry] = 330 + number
        own_pieces = bare_tokenizer().tokenize(" bade")
        model["merges"] += [own_pieces, [entries[0], "ki"]]

    tokenizer = rebuild_tokenizer(bare_tokenizer(), change)
    own_tokenizer = bare_tokenizer()
    assert len(sub_tokens(" bade")) == 2 and tokenizer.tokenize(" badeki") == ["\u0120badeki"]
    assert find_sub_tokens(tokenizer, own_tokenizer) == {330: sub_tokens(" bade"), 331: sub_tokens(" badeki")}
    check_fit(tokenizer, own_tokenizer, name="y", checkpoint="x")


def test_word_pieces_within_a_word_unknown_text_and_the_bias_of_a_head():
    own_tokenizer = wordpiece_tokenizer()
    tokenizer = wordpiece_tokenizer()
    count = len(own_tokenizer)
    definition = json.loads(own_tokenizer.backend_tokenizer.to_str())
    definition["model"]["vocab"].update({"##bade": count, "bade": count + 1})
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.add_tokens(["qqq"])
    vocabulary = own_tokenizer.get_vocab()
    pieces = {
        count: [vocabulary[f"##{letter}"] for letter in "bade"],
        count + 1: [vocabulary["ba"], vocabulary["##d"], vocabulary["##e"]],
        count + 2: [],
    }
    assert find_sub_tokens(tokenizer, own_tokenizer) == pieces

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=count, **sizes))
    head = model.get_output_embeddings()
    torch.nn.init.normal_(head.bias)
    weight, bias = (part.detach().clone() for part in (head.weight, head.bias))
    extend_rows(model, tokenizer, own_tokenizer)
    head = model.get_output_embeddings()
    for old, new in ((weight, head.weight), (bias, head.bias)):
        for token_id, ids in pieces.items():
            torch.testing.assert_close(new[token_id], old[ids or [*range(count)]].mean(0))
        assert torch.equal(new[:count], old)
    assert head.weight is model.get_input_embeddings().weight


def test_words_of_a_slow_tokenizer_are_its_bytes():
    own_tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.add_tokens(["benzol"])
    check_fit(tokenizer, own_tokenizer, name="y", checkpoint="x")
    assert find_sub_tokens(tokenizer, own_tokenizer) == {259: [byte + 3 for byte in b"benzol"]}


def drop_token(definition):
    vocabulary = definition["model"]["vocab"]
    merge = definition["model"]["merges"].pop()
    del vocabulary["".join(merge)]


def swap_ids(definition):
    vocabulary = definition["model"]["vocab"]
    first_id = vocabulary["a"]
    vocabulary["a"] = vocabulary["b"]
    vocabulary["b"] = first_id


def swap_merges(definition):
    merges = definition["model"]["merges"]
    merges.insert(3, merges.pop(4))


def make_ordinary(definition):
    definition["added_tokens"] = [token | {"special": False} for token in definition["added_tokens"]]


MISFITS = {
    "it lacks 1 token of the checkpoint, like '": drop_token,
    "it has 2 tokens of the checkpoint at other ids, like 'a' (": swap_ids,
    "its normalizer is NFKC instead of none": lambda d: d.update(normalizer={"type": "NFKC"}),
    "its pre-tokenizer is ByteLevel with other options": lambda d: d["pre_tokenizer"].update(
        add_prefix_space=True
    ),
    "its pre-tokenizer is Whitespace instead of ByteLevel": lambda d: d.update(
        pre_tokenizer={"type": "Whitespace"}
    ),
    "its BPE has ignore_merges=true instead of false": lambda d: d["model"].update(ignore_merges=True),
    "of the checkpoint is missing, or in another order": swap_merges,
    "of the checkpoint without that mark, like '": make_ordinary,
}


@pytest.mark.parametrize("complaint", MISFITS)
def test_a_tokenizer_that_does_not_fit_is_reported_with_what_differs(complaint):
    tokenizer = rebuild_tokenizer(bare_tokenizer(), MISFITS[complaint])
    with pytest.raises(ValueError) as raised:
        check_fit(tokenizer, bare_tokenizer(), name="y", checkpoint="x")
    message = str(raised.value)
    assert message.startswith(
        "model.tokenizer=y is invalid: it is not the tokenizer of x with added tokens: "
    )
    assert complaint in message and "Allowed: null, or one with all tokens" in message
    check_fit(
        rebuild_tokenizer(bare_tokenizer(), lambda definition: None),
        bare_tokenizer(),
        name="y",
        checkpoint="x",
    )


def test_other_roles_of_tokens_are_named_and_allowed():
    own_tokenizer = bare_tokenizer()
    tokenizer = bare_tokenizer()
    own_tokenizer.chat_template = "{{ messages }}"
    tokenizer.eos_token = "<mask>"
    assert describe_other_roles(tokenizer, own_tokenizer) == (
        "eos_token is <mask> instead of </s>; it has no chat template"
    )
    assert describe_other_roles(bos_tokenizer(), bare_tokenizer()).startswith("it puts other tokens around")
    tokenizer.add_tokens([AddedToken("x", special=True)])
    check_fit(tokenizer, own_tokenizer, name="y", checkpoint="x")
