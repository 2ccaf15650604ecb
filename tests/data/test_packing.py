"""Token by token: the rows of a text, laid end to end, are the encodings of its documents."""

import itertools
import random
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from cpt.data import corpus, packing, tokenising
from cpt.data.corpora import Corpora, tokenizer_digest
from cpt.data.packing import padding_id, terminator
from tests.support import data_fixtures as made
from tests.support.data_fixtures import HELD_OUT, OF_TEXT, pack, prose, rows_by_hand, written

# What stands before and after a document's own tokens.
STYLES = {
    "framed": ("<s>", "</s>"),
    "wordpieces": ("[CLS]", "[SEP]"),
    "wordpieces_without_frame": (None, "[SEP]"),
    "bare": (None, "</s>"),
    "opened": ("<s>", "</s>"),
    "closed": (None, "</s>"),
    "separated": (None, "</s>"),
}
TRICKY = [
    "a",
    "a </s><s> a",
    "<mask> ba <pad></s>",
    "[CLS] de [SEP] [MASK]",
    "qqq",
    "\u200b",
    " ".join(prose(400, seed=1)),
    "\n\nlo  mu\t",
]


@pytest.fixture(scope="module")
def tokenizers():
    return {style: getattr(made, style)() for style in STYLES}


def encoded(tokenizer, style, text):
    """The ids of one document, put together by hand."""
    own = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    before, after = ([tokenizer.convert_tokens_to_ids(each)] if each else [] for each in STYLES[style])
    return before + own + after


def rows(packed):
    return packed.rows[:]["ids"]


def owners(packed):
    return packed.rows[:]["documents"]


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 7, 64, 5000])
@pytest.mark.parametrize("style", STYLES)
def test_no_token_is_lost_doubled_or_moved(tmp_path, tokenizers, monkeypatch, style, length):
    monkeypatch.setattr(corpus, "BATCH", 5)
    monkeypatch.setattr(corpus, "CHARACTERS", 2000)
    tokenizer, texts = tokenizers[style], [*prose(43), *TRICKY, "ba"]
    documents = [encoded(tokenizer, style, text) for text in texts]
    found = pack(tmp_path, texts, tokenizer, length)
    assert list(itertools.chain(*rows(found))) == list(itertools.chain(*documents))
    numbers = [[number] * len(ids) for number, ids in enumerate(documents)]
    assert list(itertools.chain(*owners(found))) == list(itertools.chain(*numbers))
    assert {len(row) for row in rows(found)[:-1]} <= {length}
    assert 1 <= len(rows(found)[-1]) <= length
    special = {tokenizer.convert_tokens_to_ids(each) for each in tokenizer.all_special_tokens}
    assert found.text_tokens.tolist() == [sum(each not in special for each in row) for row in rows(found)]


@pytest.mark.parametrize("style", STYLES)
def test_special_tokens_in_the_text_stay_text(tmp_path, tokenizers, style):
    tokenizer = tokenizers[style]
    texts = [
        "ba " + token + " de" for token in ("<s>", "</s>", "<pad>", "<mask>", "[SEP]", "[CLS]", "[MASK]")
    ]
    found = pack(tmp_path, texts, tokenizer, 9)
    ids = list(itertools.chain(*rows(found)))
    for token in set(STYLES[style]) - {None}:
        assert ids.count(tokenizer.convert_tokens_to_ids(token)) == len(texts)
    others = set(tokenizer.all_special_tokens) - set(STYLES[style]) - {"[UNK]"}
    assert not set(ids) & {tokenizer.convert_tokens_to_ids(token) for token in others}


def test_what_ends_a_document(tokenizers):
    ends = {style: tokenizers[style].convert_ids_to_tokens(terminator(tokenizers[style])) for style in STYLES}
    assert ends == {
        "framed": [],
        "wordpieces": [],
        "wordpieces_without_frame": ["[SEP]"],
        "bare": ["</s>"],
        "opened": ["</s>"],
        "closed": [],
        "separated": ["</s>"],
    }
    with pytest.raises(ValueError, match="has no token to separate documents"):
        terminator(made.restyled("$A", pad_token="<pad>"))


def test_what_fills_a_row(tokenizers):
    assert padding_id(tokenizers["framed"]) == tokenizers["framed"].convert_tokens_to_ids("<pad>")
    assert padding_id(tokenizers["bare"]) == 0


def test_batches_of_rows_are_padded_and_in_the_order_asked_for(tmp_path, tokenizers):
    found = pack(tmp_path, prose(30), tokenizers["framed"], 32)
    ids, numbers = rows(found), owners(found)
    last = len(ids) - 1
    assert 0 < len(ids[last]) < 32
    pad = tokenizers["framed"].pad_token_id
    for asked in (
        [3],
        [last],
        [last, 0, 5, 5, 2],
        [0, 1, 2, 3],
        random.Random(0).choices(range(last + 1), k=40),
    ):
        expected = [ids[row] + [pad] * (32 - len(ids[row])) for row in asked]
        assert found.ids(np.array(asked)).tolist() == expected
        expected = [numbers[row] + [-1] * (32 - len(numbers[row])) for row in asked]
        assert found.document_of(np.array(asked)).tolist() == expected
    assert found.ids(np.array([1])).dtype == found.document_of(np.array([1])).dtype == np.int64
    assert found.row_lengths.tolist() == [len(row) for row in ids]
    assert len(found) == len(ids)


def test_a_text_shorter_than_a_row(tmp_path, tokenizers):
    found = pack(tmp_path, ["ba"], tokenizers["framed"], 16)
    assert found.row_lengths.tolist() == [len(rows(found)[0])]
    assert found.ids(np.array([0]))[0, -1] == tokenizers["framed"].pad_token_id


def test_rows_that_come_out_even(tmp_path, tokenizers):
    ids = tokenizers["bare"]("ba de ki")["input_ids"]
    found = pack(tmp_path, ["ba de ki"] + ["lo"] * 2, tokenizers["bare"], len(ids) + 1)
    assert rows(found)[0] == [*ids, tokenizers["bare"].eos_token_id]
    whole = sum(map(len, rows(found)))
    even = pack(tmp_path, ["ba de ki", "lo"], tokenizers["bare"], whole)
    assert even.row_lengths.tolist() == [whole]


def test_the_size_of_a_packed_text(tmp_path, tokenizers):
    texts = ["ä 🙂", "ba", "de"]
    found = pack(tmp_path, texts, tokenizers["framed"], 8)
    assert (found.documents, found.bytes) == (3, 7 + 2 + 2)


def test_a_text_is_tokenised_once(tmp_path, tokenizers):
    class Counted:
        def __init__(self, tokenizer):
            self.tokenizer, self.calls = tokenizer, 0

        def __getattr__(self, name):
            return getattr(self.tokenizer, name)

        def __call__(self, *texts, **options):
            self.calls += 1
            return self.tokenizer(*texts, **options)

    tokenizer = Counted(tokenizers["framed"])
    texts = Corpora({"a": written(tmp_path, prose(20)), "b": written(tmp_path, prose(9), name="b")}, tmp_path)
    texts.packed("a", "train", tokenizer=tokenizer, length=16)
    calls = tokenizer.calls
    first = texts.packed("a", "train", tokenizer=tokenizer, length=16)
    assert tokenizer.calls == calls > 0
    for changed in (("b", "train", 16), ("a", "valid", 16), ("a", "train", 17)):
        other = texts.packed(*changed[:2], tokenizer=tokenizer, length=changed[2])
        assert tokenizer.calls > calls
        assert rows(other) != rows(first)
        calls = tokenizer.calls
    bare = texts.packed("a", "train", tokenizer=tokenizers["bare"], length=16)
    assert rows(bare) != rows(first)
    again = texts.packed("a", "train", tokenizer=tokenizer, length=16)
    assert rows(again) == rows(first)


def test_the_digest_of_a_tokenizer(tokenizers):
    digests = {style: tokenizer_digest(tokenizer) for style, tokenizer in tokenizers.items()}
    assert len(set(digests.values())) == len(digests)
    changed = made.framed()
    assert tokenizer_digest(changed) == digests["framed"]
    changed(["ba de", "lo"], truncation=True, max_length=3, padding=True)
    assert tokenizer_digest(changed) == digests["framed"]
    changed.add_tokens(["new"])
    assert tokenizer_digest(changed) != digests["framed"]
    slow = SimpleNamespace(get_vocab=lambda: {"truncation": 1}, special_tokens_map={})
    other = SimpleNamespace(get_vocab=lambda: {"truncation": 2}, special_tokens_map={})
    assert tokenizer_digest(slow) != tokenizer_digest(other)


def test_a_killed_tokenizer_leaves_nothing_wrong(tmp_path, tokenizers, monkeypatch):
    texts = prose(40)
    whole = pack(tmp_path / "whole", texts, tokenizers["framed"], 16)
    real = packing.tokenise

    def killed(*arguments, **options):
        yield next(real(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "BATCH", 10)
    monkeypatch.setattr(tokenising, "PIECE", 1)
    monkeypatch.setattr(packing, "tokenise", killed)
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path, texts, tokenizers["framed"], 16)
    monkeypatch.setattr(packing, "tokenise", real)
    assert rows(pack(tmp_path, texts, tokenizers["framed"], 16)) == rows(whole)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path):
    """36 MB of documents of 60 kB, a token for four bytes: what Python, NumPy and Arrow hold at once."""

    def tokenizer(texts, add_special_tokens=True, **options):
        texts = [texts] if isinstance(texts, str) else texts
        ids = [(np.frombuffer(text.encode().ljust(60_000), np.int32) % 200).tolist() for text in texts]
        return {"input_ids": ids if len(ids) > 1 or add_special_tokens else ids[0]}

    fake = SimpleNamespace(
        eos_token_id=7, sep_token_id=None, all_special_ids=[7], pad_token_id=None, vocab_size=200
    )
    fake = type("Fake", (), {**vars(fake), "__call__": lambda self, *a, **b: tokenizer(*a, **b)})()
    text = " ".join(prose(1000))[:59_000]
    documents = (("train", f"{number} {text}") for number in range(600))
    source = SimpleNamespace(
        **OF_TEXT, held_out=HELD_OUT, fingerprint=lambda name: 0, read=lambda name: documents
    )
    read = corpus.make_corpus(source, "a", cache=tmp_path)
    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        options = {
            "tokenizer": fake,
            "length": 64,
            "name": "a",
            "cache": tmp_path,
            "tokenizer_digest": "fake",
        }
        found = packing.pack(read, "train", **options)
        written_peak, held = tracemalloc.get_traced_memory()[1] + pool.max_memory(), pool.bytes_allocated()
        for start in range(0, len(found), 100):
            found.ids(np.arange(start, min(start + 100, len(found))))
        read_peak = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    assert len(found) * 64 * 8 > 40e6  # bytes of ids and documents
    assert written_peak < 10e6
    assert held < 1e5
    assert read_peak < written_peak + 1e6


def test_rows_made_by_hand_are_like_packed_ones():
    found = rows_by_hand(5, length=8, last=3)
    assert found.row_lengths.tolist() == [8, 8, 8, 8, 3]
    assert found.text_tokens.tolist() == [sum(each not in (0, 1) for each in row) for row in rows(found)]
    assert found.ids(np.array([4])).tolist() == [rows(found)[4] + [49] * 5]
