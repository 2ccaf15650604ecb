"""Tokens that are learned from text and follow those of a checkpoint's tokenizer."""

import json

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cpt.data.new_tokens import (
    WordCounts,
    check_tokenizer_kind,
    encode_in_batches,
    extend_definition,
    learn_extension,
    learn_merges,
    make_text_backend,
    make_word_rules,
    name_merges,
)
from tests.support.data_fixtures import bare_tokenizer, make_prose, wordpiece_tokenizer
from tests.support.tokenizer_kinds import bert_legacy, word_level

GENERAL = [*make_prose(60, seed=1), "Größe naïve 12 (3)"]
DOMAIN = [f"benzol-toluol en {word}, 2024 == xylolen" for word in make_prose(60, seed=2)]


def chat_tokenizer():
    """As Qwen's: byte-level, with control tokens whose ids follow the vocabulary."""
    tokenizer = bare_tokenizer()
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True), AddedToken("<|end|>", special=True)])
    return tokenizer


def sentencepiece_tokenizer():
    """As Gemma's: blanks are a sign, nothing splits words, and unknown characters are bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[a-z]+|."), "isolated")
    control = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=control, show_progress=False)
    backend.train_from_iterator(GENERAL, trainer)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    names = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def unigram_tokenizer():
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(GENERAL, trainer)
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True)])
    return tokenizer


KINDS = {
    "byte-level": chat_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "word pieces": wordpiece_tokenizer,
    "unigram": unigram_tokenizer,
}


def count_words(tokenizer, texts):
    words = WordCounts()
    rules = make_word_rules(tokenizer)
    for encoding in encode_in_batches(make_text_backend(tokenizer), texts, size=1000):
        words.add(encoding, rules)
    return words


def extend(tokenizer, folder, *, num_tokens=40, texts=DOMAIN):
    """The tokenizer with tokens of texts, as it is loaded from a folder."""
    words = count_words(tokenizer, texts)
    extension = learn_extension(tokenizer, words, num_tokens=num_tokens, min_count=2, shows_progress=False)
    definition = extend_definition(tokenizer, extension)
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return AutoTokenizer.from_pretrained(folder), extension


def encode(tokenizer, texts):
    return [encoding.ids for encoding in encode_in_batches(make_text_backend(tokenizer), texts, size=1000)]


@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_follow_all_others_and_leave_other_text_as_it_was(kind, tmp_path):
    own_tokenizer = KINDS[kind]()
    tokenizer, extension = extend(own_tokenizer, tmp_path)
    vocabulary = tokenizer.get_vocab()
    own_vocabulary = own_tokenizer.get_vocab()
    assert own_vocabulary.items() <= vocabulary.items()  # control tokens too
    new_ids = [vocabulary[entry] for entry in extension.entries]
    assert new_ids == [*range(len(own_tokenizer), len(own_tokenizer) + len(new_ids))] and len(new_ids) > 4
    assert tokenizer.all_special_tokens == own_tokenizer.all_special_tokens

    before = encode(own_tokenizer, DOMAIN)
    after = encode(tokenizer, DOMAIN)
    assert sum(map(len, after)) < 0.85 * sum(map(len, before))
    if kind == "byte-level":
        assert [*map(tokenizer.decode, after)] == DOMAIN
    words = [f"{word} " for word in " ".join([*GENERAL, *DOMAIN]).split()]
    unchanged = [word for word in words if not {*new_ids} & {*encode(tokenizer, [word])[0]}]
    assert len(unchanged) > 300 and encode(own_tokenizer, unchanged) == encode(tokenizer, unchanged)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_token_is_within_a_word_and_has_a_letter(kind, tmp_path):
    own_tokenizer = KINDS[kind]()
    _, extension = extend(own_tokenizer, tmp_path, num_tokens=200)
    prefix = "##" if kind == "word pieces" else ""
    texts = [entry.removeprefix(prefix).lstrip("Ġ▁") for entry in extension.entries]
    assert "benzol" in texts and any(text.startswith("xylol") for text in texts)
    assert all(text.isalpha() for text in texts), texts


def test_the_same_text_gives_the_same_tokens_in_any_order(tmp_path):
    extensions = [extend(chat_tokenizer(), tmp_path, texts=texts)[1] for texts in (DOMAIN, DOMAIN[::-1])]
    assert extensions[0] == extensions[1]


def test_merges_are_those_of_byte_pair_encoding():
    """By hand: 1-2 stands 5 times, then 12-3 3 times; 4-5 is rarer than asked for."""
    words = {(1, 2, 3): 3, (1, 2): 2, (4, 5): 1}
    merges = learn_merges(words, num_merges=9, min_count=2, shows_progress=False)
    assert merges == [((1,), (2,)), ((1, 2), (3,))]


def test_a_merge_that_would_make_an_entry_of_the_vocabulary_is_left_out():
    """`de`, an entry, is made of `d` and `e` by no merge of the checkpoint: its text has to stay d, e."""
    backend = Tokenizer(models.BPE({"d": 0, "e": 1, "k": 2, "de": 3}, []))
    own_tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    extension = name_merges(
        own_tokenizer, [((0,), (1,)), ((0, 1), (2,)), ((1,), (2,)), ((2,), (0,))], num_tokens=1
    )
    assert (extension.entries, extension.merges) == (["ek"], [("e", "k")])


def test_words_seen_once_are_dropped_where_there_are_too_many(monkeypatch):
    monkeypatch.setattr("cpt.data.new_tokens.MAX_WORDS", 20)
    words = count_words(bare_tokenizer(), [*DOMAIN, *make_prose(40, seed=5)])
    assert words.dropped and len(words.counts) < 60
    assert any(count >= 60 for count in words.counts.values())


def test_a_tokenizer_whose_vocabulary_cannot_be_extended_is_named(tmp_path):
    for tokenizer, kind in ((word_level(), "WordLevel"), (bert_legacy(tmp_path / "v"), "without a fast ver")):
        with pytest.raises(ValueError, match=f"^--base=x is invalid: its tokenizer is {kind}.* Allowed: "):
            check_tokenizer_kind(tokenizer, "x")
