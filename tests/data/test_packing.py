"""Token by token: rows are the encodings of documents, whoever makes them, and whenever it was killed."""

import hashlib
import itertools
import time
from dataclasses import replace
from multiprocessing import active_children

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.core.randomness import key, sample_keys
from cpt.data import corpus, packing, tokenize
from cpt.data.corpora import Corpora
from cpt.data.packers import NUM_OPEN_ROWS, PACKERS
from cpt.data.packing import balance_texts
from cpt.data.replay import Samples
from cpt.data.sampler import stack_rows
from cpt.data.separator import find_terminator
from cpt.data.sources.base import TextOptions
from cpt.data.text_format import TextFormat, make_text_format
from cpt.data.token_rows import join_ranges
from cpt.data.tokenize import TokenizeBatch
from cpt.data.tokenizer_hash import hash_tokenizer
from cpt.models.objectives import Causal
from tests.support.data_fixtures import (
    TOKENIZERS,
    framed_tokenizer,
    list_documents,
    list_ids,
    make_prose,
    make_rows,
    pack,
    tokenizer_with_template,
    write_corpus,
)
from tests.support.forked_scripts import kill_self_or_sleep
from tests.support.kill_callback import KilledError

STYLES = {  # the tokens before and after a document's, and what is appended to add the latter
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
    return {style: TOKENIZERS[style]() for style in STYLES}


def convert_to_ids(tokenizer, tokens):
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens if token]


def count_text_tokens(row, special_ids):
    return len([token for token in row if token not in special_ids])


@pytest.mark.parametrize("style", STYLES)
def test_no_token_is_lost_doubled_or_moved(tmp_path, tokenizers, monkeypatch, style):
    monkeypatch.setattr(corpus, "BATCH", 5)
    tokenizer = tokenizers[style]
    texts = [*make_prose(43), *TRICKY, "ba"]
    before, after, appended = STYLES[style]
    documents = []
    document_numbers = []  # of each token
    for number, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        ids = convert_to_ids(tokenizer, [before]) + ids + convert_to_ids(tokenizer, [after])
        documents.append(ids)
        document_numbers += [number] * len(ids)
    all_ids = list(itertools.chain(*documents))
    special_ids = set(convert_to_ids(tokenizer, tokenizer.all_special_tokens))

    for length in (2, 64):
        packed = pack(tmp_path, texts, tokenizer, length)
        rows = list_ids(packed)
        assert list(itertools.chain(*rows)) == all_ids
        assert list(itertools.chain(*list_documents(packed))) == document_numbers
        assert {len(row) for row in rows[:-1]} <= {length} and 1 <= len(rows[-1]) <= length
        assert packed.text_tokens.tolist() == [count_text_tokens(row, special_ids) for row in rows]
        assert packed.documents == len(texts)
        assert packed.bytes == sum(len(text.encode()) for text in texts)

    # A text that spells a special token, as some of TRICKY do, does not give its id.
    frame_ids = set(convert_to_ids(tokenizer, [before, after, "[UNK]"]))
    assert not set(all_ids) & (special_ids - frame_ids)
    assert find_terminator(tokenizer) == convert_to_ids(tokenizer, [appended])

    # A call that truncates leaves its settings in the tokenizer's backend.
    table = pa.table({"text": texts})
    expected = TokenizeBatch(TextFormat(tokenizer, (7,)))(table)
    tokenizer(TRICKY, truncation=True, max_length=3)
    assert TokenizeBatch(TextFormat(tokenizer, (7,)))(table) == expected


def test_a_text_is_tokenised_once_for_what_its_tokenizer_gives(tmp_path, tokenizers, monkeypatch):
    calls = []
    tokenize_batch = TokenizeBatch.__call__

    def count_call(self, documents):
        calls.append(documents)
        return tokenize_batch(self, documents)

    monkeypatch.setattr(TokenizeBatch, "__call__", count_call)
    texts = Corpora(
        {"a": write_corpus(tmp_path, make_prose(20)), "b": write_corpus(tmp_path, make_prose(9), name="b")},
        tmp_path,
    )
    framed = make_text_format(tokenizers["framed"], TextOptions())
    bare = make_text_format(tokenizers["bare"], TextOptions())
    with_starts = replace(framed, row_start=0)
    packed_rows = []
    for name, split, text_format, length, packing_name, is_new in (
        ("a", "train", framed, 16, "concat", True),
        ("b", "train", framed, 16, "concat", True),
        ("a", "valid", framed, 16, "concat", True),
        ("a", "train", bare, 16, "concat", True),
        # Rows of another length or packing, or with another beginning, are cut from the same ids.
        ("a", "train", framed, 17, "concat", False),
        ("a", "train", framed, 16, "document_mask", False),
        ("a", "train", framed, 16, "none", False),
        ("a", "train", with_starts, 16, "concat", False),
    ):
        num_calls = len(calls)
        packed = texts.packed(name, split, format=text_format, length=length, packing=packing_name)
        packed_rows.append(list_ids(packed))
        assert (len(calls) > num_calls) == is_new and packed_rows.count(packed_rows[-1]) == 1
    num_calls = len(calls)
    assert list_ids(texts.packed("a", "train", format=framed, length=16)) == packed_rows[0]
    assert len(calls) == num_calls

    # What a call leaves in a tokenizer does not make it another one.
    digests = {style: hash_tokenizer(tokenizer) for style, tokenizer in tokenizers.items()}
    assert len(set(digests.values())) == len(digests)
    used_tokenizer = framed_tokenizer()
    used_tokenizer(["ba de", "lo"], truncation=True, max_length=3, padding=True)
    assert hash_tokenizer(used_tokenizer) == digests["framed"]
    with pytest.raises(ValueError, match="no token to separate documents"):
        find_terminator(tokenizer_with_template("$A", pad_token="<pad>"))

    # A corpus that lacks documents is not packed.
    complete = write_corpus(tmp_path, make_prose(80))
    facts = {**complete.facts, "documents": {**complete.facts["documents"], "train": 81}}
    damaged = Corpora({"broken": corpus.Corpus(complete.folder, facts)}, tmp_path, workers=1)
    with pytest.raises(ValueError, match="is damaged: 80 documents in train, not 81"):
        damaged.packed("broken", "train", format=framed, length=16)


LENGTH = 16
SPECIAL = (0, 1)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=200)


def pack_sizes(kind, sizes, batch_size):
    """The rows of documents of these sizes, as (ids, documents, text tokens); and the documents."""
    ids = (np.arange(sum(sizes), dtype=np.int32) * 7) % 50
    owners = np.repeat(np.arange(len(sizes)), sizes)
    ends = np.cumsum([0, *sizes])
    packer = PACKERS[kind](LENGTH, SPECIAL)
    batches = []
    for start in range(0, len(sizes), batch_size):
        batch_sizes = np.array(sizes[start : start + batch_size])
        batch_ids = ids[ends[start] : ends[start] + batch_sizes.sum()]
        batches.append(packer.add(batch_ids, batch_sizes))
    batches.append(packer.finish())

    rows = []
    for batch in batches:
        for first, count in zip(batch.first_pieces, batch.num_pieces, strict=True):
            pieces = batch.pieces[first : first + count]
            positions = join_ranges(pieces["begin"], pieces["size"])
            assert pieces["first_id"].tolist() == ids[pieces["begin"]].tolist()
            rows.append(
                (ids[positions].tolist(), owners[positions].tolist(), int(pieces["text_tokens"].sum()))
            )
    return rows, [ids[begin:end].tolist() for begin, end in itertools.pairwise(ends)]


def cut_document(ids):
    """The pieces of a document that are packed."""
    return [ids[start : start + LENGTH] for start in range(0, len(ids), LENGTH)]


def pack_by_best_fit(documents):
    """The document of each token of the rows, by a slow loop over all open rows."""
    rows = []
    open_rows = []
    for number, ids in enumerate(documents):
        for piece_ids in cut_document(ids):
            piece = [number] * len(piece_ids)
            fitting = [row for row in open_rows if len(row) + len(piece) <= LENGTH]
            finished = None
            if fitting:
                # max gives the oldest of the fullest rows.
                fullest = max(fitting, key=len)
                fullest += piece
                if len(fullest) == LENGTH:
                    finished = fullest
            elif len(piece) == LENGTH:
                rows.append(piece)
            else:
                if len(open_rows) == NUM_OPEN_ROWS:
                    finished = max(open_rows, key=len)
                open_rows.append(piece)

            if finished:
                rows.append(finished)
                open_rows = [row for row in open_rows if row is not finished]
    return rows + open_rows


@given(
    sizes=SIZES,
    batch_size=st.integers(1, 20),
    other_batch_size=st.integers(1, 20),
    kind=st.sampled_from(list(PACKERS)),
)
@settings(max_examples=60, deadline=None)
def test_every_token_is_in_one_row_however_documents_come(sizes, batch_size, other_batch_size, kind):
    rows, documents = pack_sizes(kind, sizes, batch_size)
    assert rows == pack_sizes(kind, sizes, other_batch_size)[0]

    pieces = [[] for _ in documents]
    for ids, owners, text_tokens in rows:
        assert 0 < len(ids) == len(owners) <= LENGTH
        assert text_tokens == count_text_tokens(ids, SPECIAL)
        for owner, pairs in itertools.groupby(zip(owners, ids, strict=True), key=lambda pair: pair[0]):
            pieces[owner].append([token for _, token in pairs])

    if kind == "concat":
        assert list(itertools.chain(*(ids for ids, _, _ in rows))) == list(itertools.chain(*documents))
        assert all(len(ids) == LENGTH for ids, _, _ in rows[:-1])
    else:
        # Pieces of a document may be in rows of any order.
        expected = [sorted(cut_document(ids)) for ids in documents]
        assert list(map(sorted, pieces)) == expected
    if kind == "document_mask":
        assert [owners for _, owners, _ in rows] == pack_by_best_fit(documents)
    if kind == "none":
        first_owners = [owners[0] for _, owners, _ in rows]
        assert first_owners == sorted(first_owners)
        assert all(len(set(owners)) == 1 for _, owners, _ in rows)


def test_rows_of_documents_that_fit_are_nearly_full_and_few_are_open():
    sizes = np.random.default_rng(0).integers(1, 12, 3000).tolist()
    rows, documents = pack_sizes("document_mask", sizes, 7)
    assert sum(sizes) / (LENGTH * len(rows)) > 0.97
    assert [owners for _, owners, _ in rows] == pack_by_best_fit(documents)

    # No two of these documents fit into a row, so that the fullest of the open rows is finished first.
    sizes = [9 + number % 7 for number in range(NUM_OPEN_ROWS + 30)]
    rows, documents = pack_sizes("document_mask", sizes, 1)
    assert [owners for _, owners, _ in rows] == pack_by_best_fit(documents)
    assert len(rows[0][0]) == 15


@pytest.mark.parametrize("kind", PACKERS)
def test_a_packed_text_says_what_its_rows_hold_and_what_will_be_scored(tmp_path, kind):
    packed = packing.pack(
        write_corpus(tmp_path, make_prose(200)),
        "train",
        format=make_text_format(framed_tokenizer(), TextOptions()),
        length=LENGTH,
        name="a",
        cache=tmp_path,
        packing=kind,
    )
    numbers = np.arange(len(packed))
    documents = packed.document_of(numbers)
    sizes = packed.sizes(numbers)
    assert packed.row_lengths.tolist() == (documents >= 0).sum(1).tolist()
    assert packed.tokens_per_row == (LENGTH if kind == "concat" else pytest.approx(packed.row_lengths.mean()))
    assert set(documents.ravel().tolist()) - {-1} == set(range(packed.documents))
    if kind == "document_mask":
        num_documents = [len(set(row[row >= 0].tolist())) for row in documents]
        assert packed.sharing.tolist() == num_documents == sizes.documents.tolist()
        assert max(num_documents) > 1
    else:
        assert sizes.documents is None

    # The counts of scored tokens that a text gives are those of its batches.
    stacked = stack_rows([packed], Samples(np.zeros_like(numbers), numbers, sample_keys(7, numbers)))
    batch, scored_positions = Causal().batch(stacked)
    num_scored = np.bincount(batch["rows"].numpy(), minlength=len(packed))
    assert num_scored.tolist() == Causal().scored(sizes).tolist()
    assert ("segments" in batch) == (kind == "document_mask")
    if kind == "document_mask":
        owners = documents.ravel()
        assert (owners[scored_positions] == owners[batch["positions"]]).all()

    # Rows of one document differ in length: they are sorted, and a batch is as wide as its longest.
    longest_first = np.argsort(-packed.row_lengths, kind="stable") if kind == "none" else numbers
    assert packed.by_length(numbers).tolist() == longest_first.tolist()
    shortest = np.argsort(packed.row_lengths)[:3]
    stacked = stack_rows([packed], Samples(np.zeros(3, int), shortest, sample_keys(7, shortest)))
    assert stacked.ids.shape[1] == (packed.row_lengths[shortest].max() if kind == "none" else LENGTH)


def test_every_balanced_domain_has_the_tokens_of_the_smallest_but_for_a_row():
    texts = {
        "a": make_rows(40, last=8, seed=40),
        "b": make_rows(7, last=3, seed=7),
        "c": make_rows(25, last=1, seed=25),
    }
    balanced = balance_texts(texts)
    tokens = {name: int(text.row_lengths.sum()) for name, text in balanced.items()}
    assert tokens["b"] == 6 * 8 + 3 and all(51 <= count < 51 + 8 for count in tokens.values())

    # Rows are drawn by the name of the text.
    text = texts["a"]
    rows = text.draw_rows(51, stream=key("balanced", "a"))
    assert len(balanced["a"]) == len(rows) == 7 and list(rows) != list(range(7))
    assert (balanced["a"].ids(np.arange(7)) == text.ids(rows)).all()
    assert (balanced["a"].document_of(np.arange(7)) == text.document_of(rows)).all()
    assert balanced["a"].text_tokens.tolist() == text.text_tokens[rows].tolist()

    # With the last row, which is short, fewer tokens are drawn than the rows could have.
    drawn = balance_texts({"a": make_rows(9, last=2, seed=9)}, tokens=57)["a"]
    assert len(drawn) < 9 and drawn.row_lengths[-1] == 2


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(tokenize, "SHARD", 900)
    monkeypatch.setattr(tokenize, "BATCH", 500)


def hash_packed_rows(folder, tokenizer, *, workers=1):
    packed = packing.pack(
        write_corpus(folder, make_prose(80)),
        "train",
        format=make_text_format(tokenizer, TextOptions()),
        length=16,
        name="a",
        cache=folder,
        workers=workers,
    )
    (tokens,) = (folder / "tokens").glob("a-train-*[0-9a-f]")
    assert sorted(path.name for path in tokens.iterdir()) == [
        "checksums.json",
        "ends.uint16",
        "facts.json",
        "ids.uint16",
    ]
    return hashlib.sha256(repr([list_ids(packed), list_documents(packed)]).encode()).hexdigest()


@pytest.mark.slow
def test_rows_do_not_depend_on_how_many_make_them(tmp_path, tokenizers, small_shards):
    expected = hash_packed_rows(tmp_path / "1", tokenizers["framed"])
    assert hash_packed_rows(tmp_path / "2", tokenizers["framed"], workers=2) == expected
    documents = write_corpus(tmp_path, make_prose(80))
    shards = [list(documents.documents("train", number, 7)["text"]) for number in range(7)]
    assert sum(shards, []) == make_prose(80) and all(shards)


@pytest.mark.parametrize("num_finished", [0, 5])
def test_tokenizing_continues_where_it_was_killed(
    tmp_path, tokenizers, small_shards, monkeypatch, num_finished
):
    expected = hash_packed_rows(tmp_path / "uninterrupted", tokenizers["framed"])
    tokenize_batch = TokenizeBatch.__call__
    batches = []
    is_killing = True

    def tokenize_or_die(self, documents):
        batches.append(documents["text"].to_pylist())
        if is_killing and len(batches) > num_finished:
            raise KilledError
        return tokenize_batch(self, documents)

    monkeypatch.setattr(TokenizeBatch, "__call__", tokenize_or_die)
    with pytest.raises(KilledError):
        hash_packed_rows(tmp_path, tokenizers["framed"])
    finished_shards = list(tmp_path.glob("tokens/*.partial/shards/*-of-*.arrow"))
    batches.clear()
    is_killing = False
    assert hash_packed_rows(tmp_path, tokenizers["framed"]) == expected

    # The shards that were finished are not made again.
    num_documents = sum(map(len, batches))
    if num_finished == 0:
        assert num_documents == 80
    else:
        assert num_documents < 80 and finished_shards


@pytest.mark.slow
def test_where_one_process_is_killed_the_others_are_not_waited_for():
    start = time.monotonic()
    seconds = [0.0] + [60.0] * 9  # of sleep; 0 is killed
    with pytest.raises(ValueError, match="a tokenization process was killed"):
        list(tokenize.map_in_processes(kill_self_or_sleep, seconds, 2))
    assert time.monotonic() - start < 50 and not active_children()
