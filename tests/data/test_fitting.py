"""Rows of whole documents: which fit together, what is too long, a text that is packed on after a kill."""

import json

import numpy as np
import pytest

from cpt.core.randomness import sample_keys
from cpt.data import packing
from cpt.data.arrow import schema_of
from cpt.data.fitting import OPEN, Alone, Fit
from cpt.data.packing import COLUMNS
from cpt.data.sampler import read_rows
from cpt.models.objectives import Causal
from tests.support.data_fixtures import framed, prose, written

LENGTH = 16
SPECIAL = (0, 1)


def documents(count: int = 400, *, seed: int = 0, most: int = 40) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 50, draw.integers(1, most)).astype(np.int32) for _ in range(count)]


def rows_of(kind, given, *, at_once: int = 7, stop: int | None = None):
    """Rows as (ids, documents); what is kept behind `stop` documents goes through JSON into a new object."""
    cut = kind(LENGTH, SPECIAL, schema_of(COLUMNS))
    cut.go_on(None)
    batches = []
    for begin in range(0, len(given), at_once):
        if stop is not None and begin == stop:
            left = json.loads(json.dumps({"begin": 0, "first": 0, "bytes": 0} | cut.left()))
            cut = kind(LENGTH, SPECIAL, schema_of(COLUMNS))
            cut.go_on(left)
        few = given[begin : begin + at_once]
        batches.append(cut.add(np.concatenate(few), np.array([len(each) for each in few])))
    rows = [row for batch in [*batches, cut.rest()] for row in batch.to_pylist()]
    return [(row["ids"], row["documents"], row["text_tokens"]) for row in rows]


@pytest.mark.parametrize("kind", [Fit, Alone])
def test_every_token_stands_once_and_only_what_is_too_long_is_broken(kind):
    given = documents()
    found = [[] for _ in given]
    for ids, owners, text in rows_of(kind, given):
        assert 0 < len(ids) == len(owners) <= LENGTH
        assert text == sum(each not in SPECIAL for each in ids)
        runs = [owner for owner, before in zip(owners, [None, *owners], strict=False) if owner != before]
        assert len(runs) == len(set(runs))
        for owner in runs:
            found[owner].append([each for each, own in zip(ids, owners, strict=True) if own == owner])
    for pieces, ids in zip(found, given, strict=True):
        whole = [ids[at : at + LENGTH].tolist() for at in range(0, len(ids), LENGTH)]
        assert sorted(map(tuple, pieces)) == sorted(map(tuple, whole))


def test_alone_each_row_has_one_document_in_their_order():
    given = documents(50)
    owners = [owners for _, owners, _ in rows_of(Alone, given)]
    assert all(len(set(each)) == 1 for each in owners)
    assert [each[0] for each in owners] == sorted(each[0] for each in owners)


def test_rows_of_documents_that_fit_are_nearly_full():
    given = documents(3000, most=12)
    rows = rows_of(Fit, given)
    assert sum(map(len, given)) / (LENGTH * len(rows)) > 0.97
    assert len(rows_of(Alone, given)) == 3000


def test_a_document_goes_where_it_leaves_the_least_room():
    sizes = [9, 12, 4, 5, 7]  # 4 fits best beside 12, which is full then; 5 and 7 beside 9: 5 comes first
    rows = rows_of(Fit, [np.full(size, 5, np.int32) for size in sizes], at_once=1)
    assert [sorted(set(owners)) for _, owners, _ in rows] == [[1, 2], [0, 3], [4]]


def test_no_more_rows_wait_than_may():
    cut = Fit(LENGTH, SPECIAL, schema_of(COLUMNS))
    given = [np.full(9 + number % 7, 5, np.int32) for number in range(OPEN + 30)]
    made = [cut.add(each, np.array([len(each)])) for each in given]
    assert len(cut.open) == OPEN and sum(map(len, made)) == 30
    assert [len(batch) for batch in made[: OPEN + 1]] == [0] * OPEN + [1]
    assert len(made[OPEN].to_pylist()[0]["ids"]) == 15  # the fullest of them


@pytest.mark.parametrize("kind", [Fit, Alone])
def test_rows_are_the_same_however_documents_come_and_after_a_kill(kind):
    given = documents(140)
    whole = rows_of(kind, given)
    assert rows_of(kind, given, at_once=20) == whole
    assert rows_of(kind, given, stop=70) == whole


@pytest.fixture(params=["concat", "isolated", "per_document"])
def packed(request, tmp_path):
    corpus = written(tmp_path, prose(200))
    how = {"tokenizer": framed(), "length": LENGTH, "name": "a", "tokenizer_digest": "0"}
    return packing.pack(corpus, "train", cache=tmp_path, packing=request.param, **how)


def test_a_packed_text_says_what_its_rows_hold(packed):
    numbers = np.arange(len(packed))
    owners = packed.document_of(numbers)
    assert packed.row_lengths.tolist() == (owners >= 0).sum(1).tolist()
    assert packed.tokens_per_row == (
        LENGTH if packed.packing == "concat" else pytest.approx(packed.row_lengths.mean())
    )
    assert set(owners.ravel().tolist()) - {-1} == set(range(packed.documents))
    counted = [len(set(row[row >= 0].tolist())) for row in owners]
    sizes = packed.sizes(numbers)
    if packed.packing == "isolated":
        assert packed.sharing.tolist() == counted == sizes.documents.tolist() and max(counted) > 1
    else:
        assert sizes.documents is None
    assert packed.packing != "per_document" or counted == [1] * len(packed)


def test_what_will_be_scored_is_known_before_rows_are_read(packed):
    numbers = np.arange(len(packed))
    rows = read_rows([packed], np.zeros_like(numbers), numbers, sample_keys(7, numbers))
    batch, places = Causal().batch(rows)
    counts = np.bincount(batch["rows"].numpy(), minlength=len(packed))
    assert counts.tolist() == Causal().scored(packed.sizes(numbers)).tolist()
    assert ("segments" in batch) == (packed.packing == "isolated")
    if packed.packing == "isolated":
        owners = packed.document_of(numbers).ravel()
        assert (owners[places] == owners[batch["positions"]]).all()
    few = np.argsort(packed.row_lengths)[:3]
    width = read_rows([packed], np.zeros(3, int), few, sample_keys(7, few)).ids.shape[1]
    assert width == (packed.row_lengths[few].max() if packed.packing == "per_document" else LENGTH)
