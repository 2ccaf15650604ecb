"""Which documents are held out: found with little memory beside their hashes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.core.randomness import key, sample_keys
from cpt.data import splitting
from cpt.data.splitting import assign, count_documents, drawn_keys, smallest, split_documents

HELD_OUT = {"valid": 0.01, "test": 0.02, "seed": 3}


@given(keys=st.lists(st.integers(0, 5), max_size=40), count=st.integers(0, 50))
@settings(max_examples=200, deadline=None)
def test_the_smallest_are_the_beginning_of_a_stable_order(keys, count):
    found = np.array(keys, np.uint64)
    assert smallest(found, count).tolist() == np.argsort(found, kind="stable")[:count].tolist()


def test_keys_are_those_of_all_at_once(monkeypatch):
    monkeypatch.setattr(splitting, "AT_ONCE", 3)
    hashes = np.arange(100, 120, dtype=np.uint64)
    places = np.array([1, 2, 5, 7, 11, 13, 17, 19])
    expected = sample_keys(key("split", 3), hashes[places])
    assert drawn_keys(hashes, places, seed=3).tolist() == expected.tolist()


@pytest.mark.parametrize("splits", [1, 3])
def test_memory_of_a_document(splits):
    count = 200_000
    draw = np.random.default_rng(0)
    hashes, given = draw.integers(0, 2**63, count, np.uint64), draw.integers(0, splits, count).astype(np.int8)
    tracemalloc.start()
    try:
        found = assign(hashes, given, name="x", held_out=HELD_OUT)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 32 * count
    assert splits == 3 or [int((found == each).sum()) for each in range(3)] == [194_000, 2000, 4000]


def test_documents_that_differ_in_white_space_only_are_duplicates_in_all_splits():
    words = ["a b", "c d", "e f", "g h"]
    plain = [("train", text.encode()) for text in words] + [("test", b"i j"), ("test", b"k l")]
    copies = [("test", b"a  b\n"), ("train", "c\u00a0d".encode()), ("train", b"\te f "), ("valid", b"i\nj")]
    how = {"name": "x", "held_out": HELD_OUT, "form": "text", "per_class": None}
    found = split_documents(count_documents([*plain, *copies]), **how).tolist()
    assert found == [0, 0, 0, 0, -1, 2, -1, -1, -1, 1]
