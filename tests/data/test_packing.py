"""Token by token: rows are the encodings of documents, whoever makes them, and whenever it was killed."""

import hashlib
import itertools
import time
from multiprocessing import active_children

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.core.randomness import key, sample_keys
from cpt.data import corpus, packing, tokenize
from cpt.data.corpora import Corpora
from cpt.data.packing import OPEN_ROWS, PACKERS, balance
from cpt.data.replay import Samples
from cpt.data.sampler import stack_rows
from cpt.data.separator import terminator
from cpt.data.sources.base import TextOptions
from cpt.data.text_format import TextFormat, make_text_format
from cpt.data.tokenize import TokenizeBatch
from cpt.data.tokenizer_hash import tokenizer_digest
from cpt.models.objectives import Causal
from tests.support import data_fixtures as made
from tests.support.data_fixtures import make_prose, make_rows, pack, write_corpus
from tests.support.forked_scripts import kill_self_or_sleep
from tests.support.kill_callback import KilledError

STYLES = {  # what stands before and after a document's own tokens, and what is appended for that
    "framed": ("<s>", "</s>", None),
    "wordpieces": ("[CLS]", "[SEP]", None),
    "wordpieces_without_frame": (None, "[SEP]", "[SEP]"),
    "bare": (None, "</s>", "</s>"),
    "opened": ("<s>", "</s>", "</s>"),
    "separated": (None, "</s>", "</s>"),
}
TRICKY = ["a", "qqq", "\u200b", "\n\nlo  mu\t", " ".join(make_prose(400, seed=1))]
TRICKY += [f"ba {token} de" for token in ("<s>", "</s>", "<pad>", "<mask>", "[SEP]", "[CLS]", "[MASK]")]


@pytest.fixture(scope="module")
def tokenizers():
    return {style: made.TOKENIZERS[style]() for style in STYLES}


def ids_of(tokenizer, tokens):
    return [tokenizer.convert_tokens_to_ids(each) for each in tokens if each]


@pytest.mark.parametrize("style", STYLES)
def test_no_token_is_lost_doubled_or_moved(tmp_path, tokenizers, monkeypatch, style):
    monkeypatch.setattr(corpus, "BATCH", 5)
    tokenizer, texts = tokenizers[style], [*make_prose(43), *TRICKY, "ba"]
    (before, after, appended), documents = STYLES[style], []
    for text in texts:
        own = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        documents.append([*ids_of(tokenizer, [before]), *own, *ids_of(tokenizer, [after])])
    whole, special = list(itertools.chain(*documents)), set(ids_of(tokenizer, tokenizer.all_special_tokens))
    for length in (2, 64):
        found = pack(tmp_path, texts, tokenizer, length)
        rows, owners = found.rows[:]["ids"], found.rows[:]["documents"]
        assert list(itertools.chain(*rows)) == whole
        numbers = [[number] * len(ids) for number, ids in enumerate(documents)]
        assert list(itertools.chain(*owners)) == list(itertools.chain(*numbers))
        assert {len(row) for row in rows[:-1]} <= {length} and 1 <= len(rows[-1]) <= length
        assert found.text_tokens.tolist() == [sum(each not in special for each in row) for row in rows]
        assert (found.documents, found.bytes) == (len(texts), sum(len(each.encode()) for each in texts))
    assert not set(whole) & (special - set(ids_of(tokenizer, [before, after, "[UNK]"])))
    assert terminator(tokenizer) == ids_of(tokenizer, [appended])
    table = pa.table({"text": texts})
    expected = TokenizeBatch(TextFormat(tokenizer, (7,)))(table)
    tokenizer(TRICKY, truncation=True, max_length=3)  # leaves its settings in the backend
    assert TokenizeBatch(TextFormat(tokenizer, (7,)))(table) == expected


def test_a_text_is_tokenised_once_for_what_its_tokenizer_gives(tmp_path, tokenizers, monkeypatch):
    calls, real = [], TokenizeBatch.__call__
    monkeypatch.setattr(TokenizeBatch, "__call__", lambda *given: calls.append(1) or real(*given))
    texts = Corpora(
        {"a": write_corpus(tmp_path, make_prose(20)), "b": write_corpus(tmp_path, make_prose(9), name="b")},
        tmp_path,
    )
    formats = {style: make_text_format(made, TextOptions()) for style, made in tokenizers.items()}
    seen, how = [], {"format": formats["framed"], "length": 16}
    for name, split, changed in (
        ("a", "train", {}), ("b", "train", {}), ("a", "valid", {}), ("a", "train", {"length": 17}),
        ("a", "train", {"format": formats["bare"]}),
    ):  # fmt: skip
        before = len(calls)
        seen.append(texts.packed(name, split, **how | changed).rows[:])
        assert len(calls) > before and seen.count(seen[-1]) == 1
    before = len(calls)
    assert texts.packed("a", "train", **how).rows[:] == seen[0] and len(calls) == before
    digests = {style: tokenizer_digest(tokenizer) for style, tokenizer in tokenizers.items()}
    assert len(set(digests.values())) == len(digests)
    changed = made.framed_tokenizer()
    changed(["ba de", "lo"], truncation=True, max_length=3, padding=True)
    assert tokenizer_digest(changed) == digests["framed"]
    with pytest.raises(ValueError, match="no token to separate documents"):
        terminator(made.tokenizer_with_template("$A", pad_token="<pad>"))
    found = write_corpus(tmp_path, make_prose(80))  # a corpus that lacks documents is not packed
    facts = {**found.facts, "documents": {**found.facts["documents"], "train": 81}}
    broken = Corpora({"broken": corpus.Corpus(found.folder, facts)}, tmp_path, workers=1)
    with pytest.raises(ValueError, match="is damaged: 80 documents in train, not 81"):
        broken.packed("broken", "train", **how)


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
    rows, waiting = [], []
    for number, ids in enumerate(documents):
        for at in range(0, len(ids), LENGTH):
            piece = [number] * len(ids[at : at + LENGTH])
            fitting = [row for row in waiting if len(row) + len(piece) <= LENGTH]
            best = max(fitting, key=len, default=None)  # the oldest of equal ones
            done = None
            if fitting:
                best += piece
                done = best if len(best) == LENGTH else None
            elif len(piece) == LENGTH:
                rows.append(piece)
            else:
                done = max(waiting, key=len) if len(waiting) == OPEN_ROWS else None
                waiting.append(piece)
            if done:
                rows.append(done)
                waiting = [row for row in waiting if row is not done]
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
    if kind == "document_mask":
        assert [owners for _, owners, _ in found] == by_best_fit(documents)
    if kind == "none":
        assert [owners[0] for _, owners, _ in found] == sorted(owners[0] for _, owners, _ in found)
        assert all(len(set(owners)) == 1 for _, owners, _ in found)


def test_rows_of_documents_that_fit_are_nearly_full_and_few_are_open():
    sizes = np.random.default_rng(0).integers(1, 12, 3000).tolist()
    found, documents = rows_of("document_mask", sizes, 7)
    assert sum(sizes) / (LENGTH * len(found)) > 0.97
    assert [owners for _, owners, _ in found] == by_best_fit(documents)
    half = [9 + number % 7 for number in range(OPEN_ROWS + 30)]  # no two fit
    found, documents = rows_of("document_mask", half, 1)
    assert [owners for _, owners, _ in found] == by_best_fit(documents)
    assert len(found[0][0]) == 15  # the fullest is done first


@pytest.mark.parametrize("kind", PACKERS)
def test_a_packed_text_says_what_its_rows_hold_and_what_will_be_scored(tmp_path, kind):
    how = {"format": make_text_format(made.framed_tokenizer(), TextOptions()), "length": LENGTH, "name": "a"}
    packed = packing.pack(
        write_corpus(tmp_path, make_prose(200)), "train", cache=tmp_path, packing=kind, **how
    )
    numbers = np.arange(len(packed))
    documents, sizes = packed.document_of(numbers), packed.sizes(numbers)
    assert packed.row_lengths.tolist() == (documents >= 0).sum(1).tolist()
    assert packed.tokens_per_row == (LENGTH if kind == "concat" else pytest.approx(packed.row_lengths.mean()))
    assert set(documents.ravel().tolist()) - {-1} == set(range(packed.documents))
    if kind == "document_mask":
        counted = [len(set(row[row >= 0].tolist())) for row in documents]
        assert packed.sharing.tolist() == counted == sizes.documents.tolist() and max(counted) > 1
    else:
        assert sizes.documents is None
    stacked = stack_rows([packed], Samples(np.zeros_like(numbers), numbers, sample_keys(7, numbers)))
    batch, places = Causal().batch(stacked)
    scored = np.bincount(batch["rows"].numpy(), minlength=len(packed))
    assert scored.tolist() == Causal().scored(sizes).tolist()
    assert ("segments" in batch) == (kind == "document_mask")
    if kind == "document_mask":
        assert (documents.ravel()[places] == documents.ravel()[batch["positions"]]).all()
    few = np.argsort(packed.row_lengths)[:3]
    longest = np.argsort(-packed.row_lengths, kind="stable") if kind == "none" else numbers
    assert packed.by_length(numbers).tolist() == longest.tolist()
    width = stack_rows([packed], Samples(np.zeros(3, int), few, sample_keys(7, few))).ids.shape[1]
    assert width == (packed.row_lengths[few].max() if kind == "none" else LENGTH)


def test_every_balanced_domain_has_the_tokens_of_the_smallest_but_for_a_row():
    sizes = {"a": (40, 8), "b": (7, 3), "c": (25, 1), "short": (9, 2)}  # rows, tokens of the last
    texts = {name: make_rows(count, last=last, seed=count) for name, (count, last) in sizes.items()}
    short = texts.pop("short")
    equal, whole = balance(texts), texts["a"]
    tokens = {name: int(text.row_lengths.sum()) for name, text in equal.items()}
    assert tokens["b"] == 6 * 8 + 3 and all(51 <= count < 51 + 8 for count in tokens.values())
    chosen, drawn, here = equal["a"], whole.draw_rows(51, stream=key("balanced", "a")), np.arange(7)
    assert len(chosen) == len(drawn) == 7 and list(drawn) != list(range(7))
    for table in (packing.Packed.ids, packing.Packed.document_of):
        assert (table(chosen, here) == table(whole, drawn)).all()
    assert chosen.text_tokens.tolist() == whole.text_tokens[drawn].tolist()
    chosen = balance({"a": short}, tokens=57)["a"]  # with the last row, which is short
    assert len(chosen) < 9 and chosen.row_lengths[-1] == 2


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(tokenize, "SHARD", 900)
    monkeypatch.setattr(tokenize, "BATCH", 500)


def packed_by(folder, tokenizer, *, workers=1):
    text_format = make_text_format(tokenizer, TextOptions())
    how = {"format": text_format, "length": 16, "name": "a", "cache": folder, "workers": workers}
    packing.pack(write_corpus(folder, make_prose(80)), "train", **how)
    (path,) = (folder / "packed").glob("*/rows.arrow")
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "checksums.json",
        "facts.json",
        "rows.arrow",
    ]
    return hashlib.sha256(repr(Dataset.from_file(str(path)).to_dict()).encode()).hexdigest()


@pytest.mark.slow
def test_rows_do_not_depend_on_how_many_make_them(tmp_path, tokenizers, small_shards):
    whole = packed_by(tmp_path / "1", tokenizers["framed"])
    assert packed_by(tmp_path / "2", tokenizers["framed"], workers=2) == whole
    found = write_corpus(tmp_path, make_prose(80))
    shards = [list(found.documents("train", number, 7)["text"]) for number in range(7)]
    assert sum(shards, []) == make_prose(80) and all(shards)


@pytest.mark.parametrize("at", [0, 5])
def test_tokenizing_continues_where_it_was_killed(tmp_path, tokenizers, small_shards, monkeypatch, at):
    whole = packed_by(tmp_path / "whole", tokenizers["framed"])
    real, asked, most = TokenizeBatch.__call__, [], [at]

    def counted(self, documents):
        asked.append(documents["text"].to_pylist())
        if len(asked) > most[0]:
            raise KilledError
        return real(self, documents)

    monkeypatch.setattr(TokenizeBatch, "__call__", counted)
    with pytest.raises(KilledError):
        packed_by(tmp_path, tokenizers["framed"])
    done = list(tmp_path.glob("packed/*.partial/tokens/*-of-*.arrow"))
    asked.clear()
    most[0] = 10**6
    assert packed_by(tmp_path, tokenizers["framed"]) == whole
    again = sum(map(len, asked))  # the shards that were complete are not made again
    assert (again < 80 and done) if at == 5 else again == 80


@pytest.mark.slow
def test_where_one_process_is_killed_the_others_are_not_waited_for():
    began = time.monotonic()
    with pytest.raises(ValueError, match="a tokenization process was killed"):
        list(tokenize.map_in_processes(kill_self_or_sleep, [0.0, *[60.0] * 9], 2))
    assert time.monotonic() - began < 50 and not active_children()
