"""Which documents are held out: found with little memory beside their hashes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.core.randomness import key, sample_keys
from cpt.data.corpus import DocumentHashes, assign, split_documents

HELD_OUT = {"valid": 0.01, "test": 0.02, "seed": 3}


@st.composite
def documents(draw):
    """Hashes, of which some are equal, and the splits that are given with them."""
    count = draw(st.integers(1, 60))
    known = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    splits = draw(st.sampled_from([[0], [0, 1], [0, 2], [0, 1, 2]]))
    given = draw(st.lists(st.sampled_from(splits), min_size=count, max_size=count))
    return np.array(known, np.uint64), np.array(given, np.int8)


@given(found=documents(), most=st.sampled_from([None, 1, 5]))
@settings(max_examples=200, deadline=None)
def test_the_split_is_that_of_a_slow_loop(found, most):
    hashes, told = found
    held_out = {"valid": 0.1, "test": 0.2, "seed": 3, "most": most}
    expected = np.full(len(told), -1)
    for number in set(hashes.tolist()):
        same = [at for at in range(len(told)) if hashes[at] == number]
        first = min(same, key=lambda at: (told[at], at))
        expected[first] = told[first]

    def ranked(places, stream):
        return sorted(places, key=lambda at: int(sample_keys(key(stream, 3), hashes[[at]])[0]))

    train = [at for at in range(len(told)) if expected[at] == 0]
    left = ranked(train, "split")
    for split, name in ((1, "valid"), (2, "test")):
        if split not in told:
            count = max(1, round(held_out[name] * len(train)))
            expected[left[:count]], left = split, left[count:]
    for split in (1, 2):
        if most:
            expected[ranked(np.flatnonzero(expected == split).tolist(), "most")[most:]] = -2
    if all((expected == split).any() for split in range(3)):
        assert assign(hashes, told, name="x", held_out=held_out).tolist() == expected.tolist()
    else:
        with pytest.raises(ValueError, match="too few to train, validate and test on"):
            assign(hashes, told, name="x", held_out=held_out)


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
    hashes = DocumentHashes("text")
    for split, raw in [*plain, *copies]:
        hashes.add(split, raw)
    found = split_documents(hashes, name="x", held_out=HELD_OUT).tolist()
    assert found == [0, 0, 0, 0, -1, 2, -1, -1, -1, 1]
    assert sum(column.itemsize for column in hashes.columns.values() if len(column)) == 25
