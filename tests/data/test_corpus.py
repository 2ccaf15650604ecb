"""What of a source's documents stays, and in which split: against slow loops over the documents."""

import random
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.core.randomness import key, sample_keys
from cpt.data import corpus
from cpt.data.corpora import Corpora
from cpt.data.corpus import SPLITS, DocumentHashes, assign, in_batches, split_documents
from tests.support.data_fixtures import HELD_OUT, OF_TEXT, prose


class Given:
    """A source of documents in memory that counts how often it is read."""

    names, orders, score_on = ["a", "b"], None, "test"
    encoding, class_limit, isolated, form = None, None, False, staticmethod(OF_TEXT["form"])
    members, text_packing = staticmethod(OF_TEXT["members"]), "concat"

    def __init__(self, documents, *, held_out=HELD_OUT):
        self.documents, self.held_out, self.reads = documents, held_out, 0

    def read(self, name):
        self.reads += 1
        yield from self.documents

    def fingerprint(self, name):
        return [self.documents if isinstance(self.documents, list) else "streamed", name]


def made(folder, documents, **options):
    return corpus.make_corpus(Given(documents, **options), "a", cache=folder)


def split_up(found):
    return {split: list(found.documents(split)["text"]) for split in SPLITS}


def as_train(texts):
    return [("train", text) for text in texts]


@st.composite
def hashed(draw):
    """Hashes, of which some are equal, and the splits that are given with them."""
    count = draw(st.integers(1, 60))
    known = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    splits = draw(st.sampled_from([[0], [0, 1], [0, 2], [0, 1, 2]]))
    given = draw(st.lists(st.sampled_from(splits), min_size=count, max_size=count))
    return np.array(known, np.uint64), np.array(given, np.int8)


@given(found=hashed(), most=st.sampled_from([None, 1, 5]))
@settings(max_examples=100, deadline=None)
def test_the_split_is_that_of_a_slow_loop(found, most):
    """Of equal documents one stays: the first, in train rather than in valid rather than in test."""
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


def test_the_split_is_the_documents_own(tmp_path):
    """Neither its place in the source nor other documents decide it."""
    texts = prose(1000)
    first = split_up(made(tmp_path, as_train(texts)))
    assert sorted(sum(first.values(), [])) == sorted(texts)
    assert {split: len(each) for split, each in first.items()} == {"train": 700, "valid": 100, "test": 200}
    places = [texts.index(text) for text in first["test"]]
    assert places == sorted(places) and 400 < np.mean(places) < 600 and np.mean(np.diff(places) == 1) < 0.3
    shuffled = random.Random(1).sample(texts, len(texts))
    again = split_up(made(tmp_path, as_train([*shuffled, *texts[:50]])))
    assert {split: set(each) for split, each in again.items()} == {s: set(each) for s, each in first.items()}
    more = split_up(made(tmp_path, as_train([*texts, "one more"])))
    assert len(set(more["test"]) ^ set(first["test"])) <= 2
    other = split_up(made(tmp_path, as_train(texts), held_out={**HELD_OUT, "seed": 1}))
    assert len(other["test"]) == 200 and len(set(other["test"]) & set(first["test"])) < 80


@pytest.mark.parametrize("seed", range(2))
def test_copies_are_left_out_and_counted(tmp_path, seed):
    draw = random.Random(seed)
    documents = [(split, f"{split} only") for split in SPLITS]
    documents += [(draw.choice(SPLITS), f"ä{draw.randint(0, 15)}") for _ in range(60)]
    draw.shuffle(documents)
    kept, copies = {split: [] for split in SPLITS}, {"duplicates": 0, "held_out_copies": 0}
    for number, (split, text) in enumerate(documents):
        better = SPLITS[: SPLITS.index(split)]
        if (split, text) in documents[:number] or any((other, text) in documents for other in better):
            copies["duplicates" if split == "train" else "held_out_copies"] += 1
        else:
            kept[split].append(text)
    found = made(tmp_path, documents)
    assert split_up(found) == kept and min(copies.values()) > 0
    assert {name: found.facts[name] for name in copies} == copies
    assert found.facts["documents"] == {split: len(each) for split, each in kept.items()}
    sizes = {split: sum(len(text.encode()) for text in each) for split, each in kept.items()}
    assert found.facts["bytes"] == sizes


def test_documents_that_differ_in_white_space_only_are_duplicates_in_all_splits():
    words = ["a b", "c d", "e f", "g h"]
    plain = [("train", text.encode()) for text in words] + [("test", b"i j"), ("test", b"k l")]
    copies = [("test", b"a  b\n"), ("train", "c\u00a0d".encode()), ("train", b"\te f "), ("valid", b"i\nj")]
    hashes = DocumentHashes("text")
    for split, raw in [*plain, *copies]:
        hashes.add(split, raw)
    found = split_documents(hashes, name="x", held_out=HELD_OUT).tolist()
    assert found == [0, 0, 0, 0, -1, 2, -1, -1, -1, 1]


@pytest.mark.parametrize("given, counts", [("valid", (32, 2, 8)), ("test", (36, 4, 2))])
def test_what_the_source_does_not_split_is_taken_from_train(tmp_path, given, counts):
    texts = prose(40)
    found = split_up(made(tmp_path, [*as_train(texts), (given, "b"), (given, "c"), (given, texts[3])]))
    assert tuple(len(found[split]) for split in SPLITS) == counts
    assert found[given] == ["b", "c"]
    assert sorted(sum(found.values(), [])) == sorted([*texts, "b", "c"])


def test_text_that_is_no_unicode_is_mended_and_what_looks_alike_stays(tmp_path):
    texts = ["half \ud800 a pair", "nul \x00 byte", "🙂", "One.", "one.", "Öne.", "O\u0308ne."]
    found = made(tmp_path, [*as_train(texts), ("valid", "v"), ("test", "t")])
    assert split_up(found)["train"] == ["half ? a pair", *texts[1:]]
    assert found.facts["bytes"]["train"] == 13 + 10 + 4 + 4 + 4 + 5 + 6


@pytest.mark.parametrize(
    "documents",
    [
        [],
        as_train(["b"]),
        as_train(["b", "c", "b", "c"]),
        [*as_train(["b"]), ("valid", "b"), ("test", "c")],
        [("valid", "b"), ("test", "c")],
    ],
)
def test_too_few_documents_are_refused_and_nothing_is_left(tmp_path, documents):
    with pytest.raises(ValueError, match="domain a has"):
        made(tmp_path, documents)
    assert not list((tmp_path / "corpora").glob("a-*[0-9a-f]"))
    found = made(tmp_path, as_train(["b", "c", "d"]))  # the fewest
    assert found.facts["documents"] == {"train": 1, "valid": 1, "test": 1}


def test_a_source_is_read_once_and_again_where_it_or_the_split_changes(tmp_path):
    source = Given(as_train(prose(20)))
    first = corpus.make_corpus(source, "a", cache=tmp_path)
    assert corpus.make_corpus(source, "a", cache=tmp_path) == first
    assert source.reads == 1
    for change in ({"seed": 1}, {"valid": 0.3}):
        source.held_out = {**HELD_OUT, **change}
        assert corpus.make_corpus(source, "a", cache=tmp_path).folder != first.folder
    source.held_out = HELD_OUT
    source.documents = [*source.documents, ("train", "another")]
    assert corpus.make_corpus(source, "a", cache=tmp_path).facts["documents"]["train"] == 15
    assert source.reads == 4
    texts = Corpora.read(source, ["b", "a"], cache=tmp_path)
    assert list(texts.by_name) == ["b", "a", "general"] and texts.general is texts.by_name["general"]
    assert len({each.folder for each in texts.by_name.values()}) == 3 and source.reads == 6


def test_the_digest_is_that_of_the_text_and_its_splits(tmp_path):
    texts = prose(20)
    documents = [*as_train(texts[2:]), ("valid", texts[0]), ("test", texts[1])]
    cases = [
        documents,
        documents[::-1],
        documents[1:],
        [("valid", documents[0][1]), *documents[1:]],
        [("train", documents[0][1] + " "), *documents[1:]],
    ]
    digests = [made(tmp_path / "first", case).facts["digest"] for case in cases]
    assert len(set(digests)) == len(cases)
    assert made(tmp_path / "second", documents).facts["digest"] == digests[0]


def test_a_killed_reader_leaves_nothing_wrong(tmp_path):
    class Killed(Given):
        def read(self, name):
            yield from self.documents[:15]
            raise KeyboardInterrupt

    texts = prose(20)
    with pytest.raises(KeyboardInterrupt):
        corpus.make_corpus(Killed(as_train(texts)), "a", cache=tmp_path)
    assert split_up(made(tmp_path, as_train(texts))) == split_up(made(tmp_path / "other", as_train(texts)))


def test_memory_does_not_grow_with_the_text(tmp_path):
    """Documents of 100 kB, 20 MB in all; what Arrow holds at once is counted by its own pool."""
    text = " ".join(prose(1000))[:100_000]
    documents = (("train", f"{number} {text}") for number in range(200))
    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        found = made(tmp_path, documents)
        written_peak, held = pool.max_memory(), pool.bytes_allocated()
        read = sum(len(each) for batch in in_batches(found.documents("train")) for each in batch)
        read_peak = pool.max_memory()
    finally:
        pa.set_memory_pool(usual)
    assert read > 13e6 and 1e5 < written_peak < 3e6 and held < 1e5 and read_peak < 3e6


def test_a_document_costs_a_few_bytes_beside_its_hash():
    count = 200_000
    draw = np.random.default_rng(0)
    hashes, given = draw.integers(0, 2**63, count, np.uint64), np.zeros(count, np.int8)
    tracemalloc.start()
    try:
        assign(hashes, given, name="x", held_out={"valid": 0.01, "test": 0.02, "seed": 3})
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 32 * count


@pytest.mark.parametrize("given", [False, True])
def test_no_more_held_out_documents_than_asked_for(tmp_path, given):
    texts = [f"text number {number}" for number in range(60)]
    documents = [(SPLITS[n % 3] if given else "train", text) for n, text in enumerate(texts)]
    half = {**HELD_OUT, "valid": 0.2, "test": 0.2}
    again = made(tmp_path / "whole", documents, held_out=half)
    few, whole = made(tmp_path / "few", documents, held_out={**half, "most": 4}), split_up(again)
    found = split_up(few)
    assert found["train"] == whole["train"]
    for split in ("valid", "test"):
        assert len(found[split]) == 4 and set(found[split]) < set(whole[split])
    assert few.facts["duplicates"] == few.facts["held_out_copies"] == 0
    assert few.facts["digest"] != again.facts["digest"]
    assert few.facts["train_digest"] == again.facts["train_digest"]  # so the base model is the same
    more = made(tmp_path / "more", [*documents, ("train", "one more")], held_out=half)
    assert more.facts["train_digest"] != again.facts["train_digest"]
