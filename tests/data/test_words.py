"""Words that are remembered: the same ids as without, for every kind of tokenizer that is cut."""

import json
import pickle
import re
from functools import cache
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from cpt.data import words
from cpt.data.cutting import BLANK, BLANK_FIRST, COMPOSED_ASCII, LINE_END_LAST, PATTERNS, SIGNS_ALONE, cuts_of
from cpt.data.words import Quick, Words
from tests.support import data_fixtures as made

ASKEW = [
    *(
        "a",
        "Z",
        "foo",
        "e\u0301",
        "\u0301",
        "\u00a8",
        "\u00e9",
        "\u0131",
        "\u0130",
        "\u00df",
        "\u017f",
        "\u212a",
    ),
    *(" ", " ", " ", "  ", "\n", "\n", "\r\n", "\r", "\t", "\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\xa0"),
    *(
        "\u1680",
        "\u2003",
        "\u2000",
        "\u2028",
        "\u2029",
        "\u202f",
        "\u3000",
        "\u180e",
        "\u200b",
        "\ufeff",
        "\x00",
    ),
    *(
        "'",
        "'s",
        "'LL",
        "\u2019ve",
        "1",
        "2345",
        "\u0661",
        "\u00bd",
        ".",
        "!",
        "...",
        "/",
        "_",
        "\u037e",
        "\ufffd",
    ),
    *("\u6f22", "\u5b57", "\ud55c", "\u1112", "\U0001f600", "\U0001f469\u200d\U0001f467", "\u0600", "\u0e01"),
    *("\x08", "-", "(a", "b-c", "x\x01", "<s>", "</s>", "<tool>", "[SEP]", "##a", "\u2581"),
]
TEXTS = st.lists(st.sampled_from(ASKEW) | st.characters(codec="utf-8"), max_size=14).map("".join)
CHARACTERS = [chr(each) for each in chain(range(0xD800), range(0xE000, 0x32400), range(0xE0000, 0xE1000))]


def showing(alphabet):
    """A model whose ids show where a word begins."""
    names = [each for letter in sorted(set(alphabet)) for each in (letter, f"##{letter}")]
    vocabulary = {name: number for number, name in enumerate(["[UNK]", *names])}
    return models.BPE(vocabulary, [], unk_token="[UNK]", continuing_subword_prefix="##")


def level(**options):
    return pre_tokenizers.ByteLevel(**options)


def split(pattern, **options):
    return pre_tokenizers.Split(Regex(pattern), options.pop("behavior", "isolated"), **options)


def by_bytes(pre_tokenizer, *, normalizer=None, added=(), frame="<s> $A </s>"):
    """A tokenizer of bytes."""
    backend = Tokenizer(showing(level().alphabet()))
    backend.pre_tokenizer = pre_tokenizer
    if normalizer:
        backend.normalizer = normalizer
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(list(added))
    ids = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    template = processors.TemplateProcessing(single=frame, special_tokens=ids)
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def by_letters(pre_tokenizer, normalizer=None):
    """A tokenizer of characters, as they are when a normaliser has changed them."""
    shown = "".join(ASKEW) + "\u2581"
    backend = Tokenizer(showing((normalizer.normalize_str(shown) if normalizer else "") + shown))
    backend.pre_tokenizer = pre_tokenizer
    if normalizer:
        backend.normalizer = normalizer
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    ids = [(name, backend.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    backend.post_processor = processors.BertProcessing(*ids)
    return backend


def roberta():
    backend = by_bytes(level(add_prefix_space=True))
    backend.post_processor = processors.RobertaProcessing(("</s>", 514), ("<s>", 513))
    return backend


def framed_twice():
    backend = by_bytes(level())
    ids = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    outer = processors.TemplateProcessing(single="<s> <s> $A <s>", special_tokens=ids)
    backend.post_processor = processors.Sequence([backend.post_processor, outer])
    return backend


_, LLAMA, QWEN = PATTERNS
GPT = next(iter(PATTERNS))
TOOL = AddedToken("<tool>", special=False, normalized=False, lstrip=True)
BLANKS = AddedToken("  ", special=False, normalized=True)
KINDS = {
    "gpt-2": lambda: by_bytes(level(add_prefix_space=False), frame="$A"),
    "gpt-2, a space first": lambda: by_bytes(level(add_prefix_space=True)),
    "gpt-2, spelled out": lambda: by_bytes(
        pre_tokenizers.Sequence([split(GPT), level(add_prefix_space=False, use_regex=False)])
    ),
    "roberta": roberta,
    "neox": lambda: by_bytes(
        level(add_prefix_space=False), normalizer=normalizers.NFC(), added=[BLANKS, TOOL]
    ),
    "llama 3": lambda: by_bytes(
        pre_tokenizers.Sequence([split(LLAMA), level(add_prefix_space=False, use_regex=False)])
    ),
    "qwen 2": lambda: by_bytes(
        pre_tokenizers.Sequence([split(QWEN), level(add_prefix_space=False, use_regex=False)]),
        **{"normalizer": normalizers.NFC(), "added": [TOOL]},
    ),
    "bert": lambda: by_letters(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    "bert, cased": lambda: by_letters(
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(clean_text=False, lowercase=False, strip_accents=True),
    ),
    "words": lambda: by_letters(pre_tokenizers.Whitespace()),
    "words of words": lambda: by_letters(
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(True)]),
        normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]),
    ),
    "pieces": lambda: made.wordpieces().backend_tokenizer,
    "learned here": lambda: made.framed().backend_tokenizer,
}


@cache
def both(kind):
    """What is compared."""
    written = KINDS[kind]().to_str()
    return Quick(written), Words(written, cuts_of(written))


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(TEXTS, max_size=5))
@example(
    texts=[
        "",
        " ",
        "\n",
        "  a",
        "a  ",
        "a\n\n  b",
        "a.\n\nb \n c\t\td\x1ce",
        "\u0301 \u0301a\xa0 b",
        "a<tool> b",
    ]
)
@example(
    texts=["x" * 70 + " y" + " z" * 40, "1  2\n3 \n4\n 5", "it's\n's 's", "\u2028\u2028a\r\n\r\nb\r\r c"]
)
@settings(max_examples=100, deadline=None)
def test_the_ids_are_those_of_the_whole_text(kind, texts):
    whole, remembering = both(kind)
    assert remembering(texts) == whole(texts)
    assert remembering(texts) == whole(texts)  # from memory


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@settings(max_examples=25, deadline=None)
def test_a_long_text_is_looked_up_in_turn(kind, text):
    whole, remembering = both(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "LONG", 3)
        patch.setattr(words, "AT_ONCE", 2)
        assert remembering([text, "a", text]) == whole([text, "a", text])


def test_blanks_are_those_of_the_library():
    lost = split(r"\s", behavior="removed").pre_tokenize_str("".join(CHARACTERS))
    left = set(chain.from_iterable(text for text, _ in lost))
    assert set(CHARACTERS) - left == set(re.findall(f"[{BLANK}]", "".join(CHARACTERS)))


@pytest.mark.parametrize("kind", [normalizers.NFC, normalizers.NFD])
def test_composing_keeps_blanks_and_makes_none(kind):
    texts = [each for each in CHARACTERS if each != "\n"]
    alone = kind().normalize_str("\n".join(texts)).split("\n")
    behind = kind().normalize_str("\n".join(f" {each}" for each in texts)).split("\n")
    assert behind == [f" {each}" for each in alone]
    blank, ascii = re.compile(f"[{BLANK}]"), set(map(chr, range(128)))
    for text, found in zip(texts, alone, strict=True):
        if found != text:
            assert len(blank.findall(found)) == len(blank.findall(text)) == len(found) or not blank.search(
                found
            )
            assert kind is normalizers.NFD or not set(found) & ascii - COMPOSED_ASCII


def told(kind, **changed):
    return json.dumps(json.loads(KINDS[kind]().to_str()) | changed)


def changed_model(**options):
    model = json.loads(KINDS["gpt-2"]().to_str())["model"]
    return {"model": model | options}


ISOLATED = pre_tokenizers.Sequence([split(LLAMA), level(add_prefix_space=False, use_regex=False)])
OTHERS = {  # of which nothing is known
    "dropout": lambda: told("gpt-2", **changed_model(dropout=0.1)),
    "a model with more options": lambda: told("gpt-2", **changed_model(noise=1)),
    "another model": lambda: told("gpt-2", **changed_model(type="Other")),
    "no pre-tokenizer": lambda: told("gpt-2", pre_tokenizer=None),
    "bytes that are not split": lambda: by_bytes(level(use_regex=False)).to_str(),
    "a space before each part": lambda: by_bytes(
        pre_tokenizers.Sequence([split(LLAMA), level(add_prefix_space=True, use_regex=False)])
    ).to_str(),
    "parts split again": lambda: by_bytes(pre_tokenizers.Sequence([split(LLAMA), level()])).to_str(),
    "an unknown pattern": lambda: by_bytes(
        pre_tokenizers.Sequence([split(r"\S+ "), level(add_prefix_space=False, use_regex=False)])
    ).to_str(),
    "a pattern that is lost": lambda: by_bytes(
        pre_tokenizers.Sequence(
            [split(LLAMA, behavior="removed"), level(add_prefix_space=False, use_regex=False)]
        )
    ).to_str(),
    "a string for a pattern": lambda: by_bytes(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "isolated"), level(add_prefix_space=False, use_regex=False)]
        )
    ).to_str(),
    "blanks that a normaliser makes": lambda: by_bytes(ISOLATED, normalizer=normalizers.NFKC()).to_str(),
    "an unknown normaliser": lambda: by_letters(
        pre_tokenizers.Whitespace(), normalizers.Replace("a", " ")
    ).to_str(),
    "words found in what a normaliser makes": lambda: by_bytes(
        ISOLATED, normalizer=normalizers.NFC(), added=[AddedToken("Ka", special=False, normalized=True)]
    ).to_str(),
    "a text that is put there twice": lambda: by_bytes(ISOLATED, frame="$A <s> $A").to_str(),
    "two frames": lambda: framed_twice().to_str(),
    "nothing of the text": lambda: by_bytes(ISOLATED, frame="<s>").to_str(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_known_is_not_cut(other):
    assert cuts_of(OTHERS[other]()) is None and cuts_of(told("gpt-2")).part == BLANK_FIRST


def test_what_is_cut_where():
    def parts(pattern, text):
        found = re.findall(pattern, text)
        assert "".join(found) == text
        return found

    text = " a  b!\n\n c\n\td-e \n (f1) "
    same = [" a", " ", " b", "!", "\n\n", " c", "\n", "\td", "-e", " \n", " (f", "1)", " "]
    assert parts(BLANK_FIRST, text) == same
    assert parts(LINE_END_LAST, text) == [" a ", " b", "!\n\n", " c\n", "\td", "-e \n", " (f", "1) "]
    assert re.findall(SIGNS_ALONE, text) == ["a", "b", "!", "c", "d", "-", "e", "(", "f1", ")"]


def counting(remembering):
    asked = []
    real = remembering.alone
    remembering.alone = lambda texts: asked.append(len(texts)) or real(texts)
    return asked


def test_a_word_is_made_once_and_a_batch_asks_once():
    written = KINDS["llama 3"]().to_str()
    remembering = Words(written, cuts_of(written))
    asked = counting(remembering)
    remembering(["a b a b", " b a"])
    remembering(["b a b", "c"])
    assert asked == [3, 2] and set(remembering.known) == {"a", " a", " b", "b", "c"}


def test_what_is_remembered_is_bounded(monkeypatch):
    written = KINDS["gpt-2"]().to_str()
    remembering, whole = Words(written, cuts_of(written)), Quick(written)
    long = "x" * (words.LONGEST + 1)
    assert remembering([f"a {long}"]) == whole([f"a {long}"]) and set(remembering.known) == {"a"}
    monkeypatch.setattr(words, "ROOM", 20_000)
    most = 0
    for number in range(300):
        text = f"{number} and {number + 1} {long}"
        assert remembering([text]) == whole([text])
        most = max(most, remembering.held)
    assert 15_000 < most <= 20_000 and 20 < len(remembering.known) < 150


def test_memory_is_left_behind():
    written = KINDS["gpt-2"]().to_str()
    remembering = Words(written, cuts_of(written))
    remembering(["a b"])
    sent = pickle.loads(pickle.dumps(remembering))
    assert not sent.known and sent.held == 0 and sent(["a b"]) == remembering(["a b"])


def test_ids_are_whole_numbers_of_four_bytes():
    assert np.frombuffer(words.as_bytes([1, 70_000]), np.int32).tolist() == [1, 70_000]
