"""Token by token: the rows of a text, laid end to end, are the encodings of its documents."""

import itertools
import random
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.core.randomness import key, sample_keys
from cpt.data import corpus, packing
from cpt.data.corpora import Corpora, tokenizer_digest
from cpt.data.packing import OPEN_ROWS, PACKERS, balance, padding_id, terminator
from cpt.data.sampler import stack_rows
from cpt.models.objectives import Causal
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


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path):
    """36 MB of documents of 60 kB, a token for four bytes: what Python, NumPy and Arrow hold at once."""

    def tokenizer(texts, add_special_tokens=True, **options):
        if isinstance(texts, str):
            return {"input_ids": [1]}
        return {
            "input_ids": [
                (np.frombuffer(each.encode().ljust(60_000), np.int32) % 200).tolist() for each in texts
            ]
        }

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


LENGTH, SPECIAL = 16, (0, 1)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=200)


def rows_of(kind, sizes, at_once):
    """The rows of documents of these sizes, as (ids, documents, text tokens); and the documents."""
    ids = (np.arange(sum(sizes), dtype=np.int32) * 7) % 50
    packer, tables, ends = PACKERS[kind](LENGTH, SPECIAL), [], np.cumsum([0, *sizes])
    for at in range(0, len(sizes), at_once):
        few = np.array(sizes[at : at + at_once])
        tables.append(packer.add(ids[ends[at] : ends[at] + few.sum()], few))
    tables.append(packer.finish())
    assert packer.documents == len(sizes)
    found = [tuple(row.values()) for table in tables for row in table.to_pylist()]
    return found, [ids[begin:end].tolist() for begin, end in itertools.pairwise(ends)]


def by_best_fit(documents):
    """The owners of each row, by a slow loop."""
    rows, waiting = [], []
    for number, ids in enumerate(documents):
        for at in range(0, len(ids), LENGTH):
            piece = [number] * len(ids[at : at + LENGTH])
            fitting = [row for row in waiting if len(row) + len(piece) <= LENGTH]
            if fitting:
                best = max(fitting, key=len)  # the oldest of equal ones
                best += piece
                if len(best) == LENGTH:
                    rows.append(best)
                    waiting = [row for row in waiting if row is not best]
            elif len(piece) == LENGTH:
                rows.append(piece)
            else:
                if len(waiting) == OPEN_ROWS:
                    fullest = max(waiting, key=len)
                    rows.append(fullest)
                    waiting = [row for row in waiting if row is not fullest]
                waiting.append(piece)
    return rows + waiting


@given(sizes=SIZES, at_once=st.integers(1, 20), more=st.integers(1, 20), kind=st.sampled_from(list(PACKERS)))
@settings(max_examples=60, deadline=None)
def test_every_token_is_in_one_row_however_documents_come(sizes, at_once, more, kind):
    found, documents = rows_of(kind, sizes, at_once)
    assert found == rows_of(kind, sizes, more)[0]
    pieces = [[] for _ in documents]
    for ids, owners, text in found:
        assert 0 < len(ids) == len(owners) <= LENGTH
        assert text == sum(each not in SPECIAL for each in ids)
        for owner, run in itertools.groupby(zip(owners, ids, strict=True), key=lambda pair: pair[0]):
            pieces[owner].append([each for _, each in run])
    if kind == "concat":
        assert [row for ids, _, _ in found for row in ids] == list(itertools.chain(*documents))
        assert all(len(ids) == LENGTH for ids, _, _ in found[:-1])
    else:
        whole = [[ids[at : at + LENGTH] for at in range(0, len(ids), LENGTH)] for ids in documents]
        assert list(map(sorted, pieces)) == list(map(sorted, whole))
    if kind == "isolated":
        assert [owners for _, owners, _ in found] == by_best_fit(documents)
    if kind == "per_document":
        assert [owners[0] for _, owners, _ in found] == sorted(owners[0] for _, owners, _ in found)
        assert all(len(set(owners)) == 1 for _, owners, _ in found)


def test_rows_of_documents_that_fit_are_nearly_full_and_few_are_open():
    sizes = np.random.default_rng(0).integers(1, 12, 3000).tolist()
    assert sum(sizes) / (LENGTH * len(rows_of("isolated", sizes, 7)[0])) > 0.97
    half = [9 + number % 7 for number in range(OPEN_ROWS + 30)]  # no two fit
    found, documents = rows_of("isolated", half, 1)
    assert [owners for _, owners, _ in found] == by_best_fit(documents)
    assert len(found[0][0]) == 15  # the fullest is done first


@pytest.fixture(params=list(PACKERS))
def packed(request, tmp_path):
    how = {"tokenizer": made.framed(), "length": LENGTH, "name": "a", "tokenizer_digest": "0"}
    return packing.pack(written(tmp_path, prose(200)), "train", cache=tmp_path, packing=request.param, **how)


def test_a_packed_text_says_what_its_rows_hold(packed):
    numbers = np.arange(len(packed))
    documents = packed.document_of(numbers)
    assert packed.row_lengths.tolist() == (documents >= 0).sum(1).tolist()
    assert packed.tokens_per_row == (
        LENGTH if packed.packing == "concat" else pytest.approx(packed.row_lengths.mean())
    )
    assert set(documents.ravel().tolist()) - {-1} == set(range(packed.documents))
    counted = [len(set(row[row >= 0].tolist())) for row in documents]
    sizes = packed.sizes(numbers)
    if packed.packing == "isolated":
        assert packed.sharing.tolist() == counted == sizes.documents.tolist() and max(counted) > 1
    else:
        assert sizes.documents is None
    assert packed.packing != "per_document" or counted == [1] * len(packed)


def test_what_will_be_scored_is_known_before_rows_are_read(packed):
    numbers = np.arange(len(packed))
    gathered = stack_rows([packed], np.zeros_like(numbers), numbers, sample_keys(7, numbers))
    batch, places = Causal().batch(gathered)
    counts = np.bincount(batch["rows"].numpy(), minlength=len(packed))
    assert counts.tolist() == Causal().scored(packed.sizes(numbers)).tolist()
    assert ("segments" in batch) == (packed.packing == "isolated")
    if packed.packing == "isolated":
        documents = packed.document_of(numbers).ravel()
        assert (documents[places] == documents[batch["positions"]]).all()
    few = np.argsort(packed.row_lengths)[:3]
    width = stack_rows([packed], np.zeros(3, int), few, sample_keys(7, few)).ids.shape[1]
    assert width == (packed.row_lengths[few].max() if packed.packing == "per_document" else LENGTH)


@pytest.fixture
def texts():
    sizes = {"a": (40, 8), "b": (7, 3), "c": (25, 1)}  # rows, tokens of the last
    return {name: rows_by_hand(count, last=last, seed=count) for name, (count, last) in sizes.items()}


def scored(text) -> int:
    return int(Causal().scored(text.sizes()).sum())


def test_every_balanced_domain_has_the_tokens_of_the_smallest_but_for_a_row(texts, caplog):
    with caplog.at_level("INFO"):
        equal = balance(texts)
    tokens = {name: int(text.row_lengths.sum()) for name, text in equal.items()}
    assert tokens["b"] == 6 * 8 + 3 and all(51 <= count < 51 + 8 for count in tokens.values())
    assert all(abs(scored(text) - scored(equal["b"])) <= 8 for text in equal.values())
    assert "2 of 3 domains are cut to 51 tokens, those of b" in caplog.text
    assert scored(texts["a"]) > 4 * scored(equal["a"])


def test_what_is_balanced_reads_as_the_rows_that_were_drawn(texts):
    chosen, whole = balance(texts)["a"], texts["a"]
    drawn = whole.draw_rows(51, stream=key("balanced", "a"))
    assert len(chosen) == len(drawn) == 7 and list(drawn) != list(range(7))
    here = np.arange(len(chosen))
    assert (chosen.ids(here) == whole.ids(drawn)).all()
    assert (chosen.document_of(here) == whole.document_of(drawn)).all()
    assert (chosen.text_tokens == whole.text_tokens[drawn]).all()
    assert (chosen.row_lengths == whole.row_lengths[drawn]).all()


def test_a_short_last_row_that_is_drawn_keeps_its_length():
    text = rows_by_hand(9, last=2)
    chosen = balance({"a": text}, tokens=57)["a"]
    assert 8 in text.draw_rows(57, stream=key("balanced", "a")) and len(chosen) < 9
    assert list(chosen.row_lengths) == (chosen.document_of(np.arange(len(chosen))) >= 0).sum(1).tolist()
    assert chosen.row_lengths[-1] == 2


def test_a_budget_leaves_what_is_smaller(texts, caplog):
    with caplog.at_level("INFO"):
        equal = balance(texts, tokens=100)
    assert len(equal["b"]) == 7 and len(equal["a"]) == 13 and len(equal["c"]) in (13, 14)
    assert "2 of 3 domains are cut to 100 tokens" in caplog.text and "those of" not in caplog.text
    few, more = (set(texts["a"].draw_rows(count, stream=3)) for count in (50, 150))
    assert few < more


def test_rows_made_by_hand_are_like_packed_ones():
    found = rows_by_hand(5, length=8, last=3)
    assert found.row_lengths.tolist() == [8, 8, 8, 8, 3]
    assert found.text_tokens.tolist() == [sum(each not in (0, 1) for each in row) for row in rows(found)]
    assert found.ids(np.array([4])).tolist() == [rows(found)[4] + [49] * 5]
