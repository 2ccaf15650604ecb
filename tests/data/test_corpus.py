"""What of a source's documents stays, and in which split: against slow loops over the documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.core.randomness import key, sample_keys
from cpt.data import corpus
from cpt.data.corpora import Corpora, SharedDocuments, find_shared_documents
from cpt.data.corpus import SPLITS, assign_splits, read_documents
from cpt.data.sources.base import TextOptions
from tests.support.data_fixtures import HELD_OUT, TEXT_SOURCE, make_prose


class MemorySource:
    """A source of documents in memory that counts how often it is read."""

    names = ["a", "b"]
    orders = None
    score_on = "test"
    class_limit = None
    encoding = None
    isolated = False
    text_packing = "concat"
    text_options = TextOptions()
    form = staticmethod(TEXT_SOURCE["form"])
    members = staticmethod(TEXT_SOURCE["members"])

    def __init__(self, documents, *, held_out=HELD_OUT):
        self.documents = documents
        self.held_out = held_out
        self.num_reads = 0
        self.skipped = {}

    def read(self, name):
        self.num_reads += 1
        for document in self.documents:
            # Stands for a reader that is killed.
            if document is KeyboardInterrupt:
                raise KeyboardInterrupt
            yield document

    def fingerprint(self, name):
        return [[document for document in self.documents if document is not KeyboardInterrupt], name]


def make_corpus(folder, documents):
    return corpus.make_corpus(MemorySource(documents), "a", cache=folder)


def list_texts(text_corpus):
    return {split: list(text_corpus.documents(split)["text"]) for split in SPLITS}


def mark_as_train(texts):
    return [("train", text) for text in texts]


@st.composite
def draw_documents(draw):
    """Hashes of documents, of which some are equal, and the splits that the source names (train: 0)."""
    count = draw(st.integers(1, 60))
    hashes = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    named = draw(st.sampled_from([[0], [0, 1], [0, 2], [0, 1, 2]]))
    splits = draw(st.lists(st.sampled_from(named), min_size=count, max_size=count))
    return np.array(hashes, np.uint64), np.array(splits, np.int8)


@given(documents=draw_documents(), max_documents=st.sampled_from([None, 1, 5]))
@settings(max_examples=100, deadline=None)
def test_the_split_is_that_of_a_slow_loop(documents, max_documents):
    hashes, splits = documents
    held_out = {"valid": 0.1, "test": 0.2, "seed": 3, "max_documents": max_documents}

    # Of equal documents one stays: in training text, where it is there too, and the first.
    expected = np.full(len(splits), -1)
    for number in set(hashes.tolist()):
        copies = np.flatnonzero(hashes == number).tolist()
        first = min(copies, key=lambda at: (splits[at], at))
        expected[first] = splits[first]

    def rank(documents, stream):
        return sorted(documents, key=lambda at: int(sample_keys(key(stream, 3), hashes[[at]])[0]))

    # A split that the source does not name is a share of the training text.
    train = np.flatnonzero(expected == 0).tolist()
    ranked = rank(train, "split")
    for split, share in ((1, 0.1), (2, 0.2)):
        if split not in splits:
            count = max(1, round(share * len(train)))
            expected[ranked[:count]] = split
            ranked = ranked[count:]

    for split in (1, 2):
        if max_documents:
            members = np.flatnonzero(expected == split).tolist()
            expected[rank(members, "most")[max_documents:]] = -2

    if all((expected == split).any() for split in range(3)):
        assert assign_splits(hashes, splits, name="x", held_out=held_out).tolist() == expected.tolist()
    else:
        with pytest.raises(ValueError, match="too few to train, validate and test on"):
            assign_splits(hashes, splits, name="x", held_out=held_out)


def test_copies_are_left_out_and_counted_and_text_that_is_no_unicode_is_mended(tmp_path, caplog):
    documents = [("test", text) for text in ("a", "v", "t")]
    documents += [("valid", text) for text in ("b", "v", "v")]
    documents += mark_as_train(["a", "b", "a"])
    # No two of these are equal.
    similar = ["half \ud800 a pair", "nul \x00 byte", "🙂", "One.", "one.", "Öne.", "O\u0308ne."]
    text_corpus = make_corpus(tmp_path, documents + mark_as_train(similar))
    assert "by question marks in 1 document of" in caplog.text
    expected = {"train": ["a", "b", "half ? a pair", *similar[1:]], "valid": ["v"], "test": ["t"]}
    assert list_texts(text_corpus) == expected
    assert (text_corpus.facts["duplicates"], text_corpus.facts["held_out_copies"]) == (1, 4)
    assert text_corpus.facts["documents"] == {split: len(texts) for split, texts in expected.items()}
    num_bytes = {split: len("".join(texts).encode()) for split, texts in expected.items()}
    assert text_corpus.facts["bytes"] == num_bytes

    # White space makes no other document.
    plain = [*mark_as_train(["a b", "c d", "e f", "g h"]), ("test", "i j"), ("test", "k l")]
    copies = [("test", "a  b\n"), ("train", "c\u00a0d"), ("train", "\te f "), ("valid", "i\nj")]
    splits = read_documents(MemorySource(plain + copies), "x").splits
    assert splits.tolist() == [0, 0, 0, 0, -1, 2, -1, -1, -1, 1]


def test_too_few_documents_are_refused_and_nothing_is_left(tmp_path):
    for documents in ([], mark_as_train("bcbc"), [("valid", "b"), ("test", "c")]):
        with pytest.raises(ValueError, match="domain a has"):
            make_corpus(tmp_path, documents)
    assert not list((tmp_path / "corpora").glob("a-*[0-9a-f]"))
    smallest = make_corpus(tmp_path, mark_as_train(["b", "c", "d"]))
    assert smallest.facts["documents"] == {"train": 1, "valid": 1, "test": 1}


def test_a_source_is_read_once_and_again_where_it_or_the_split_changes(tmp_path):
    source = MemorySource(mark_as_train(make_prose(20)))
    first = corpus.make_corpus(source, "a", cache=tmp_path)
    assert corpus.make_corpus(source, "a", cache=tmp_path) == first
    assert source.num_reads == 1
    for change in ({"seed": 1}, {"valid": 0.3}):
        source.held_out = {**HELD_OUT, **change}
        assert corpus.make_corpus(source, "a", cache=tmp_path).folder != first.folder
    source.held_out = HELD_OUT
    source.documents = [*source.documents, ("train", "another")]
    assert corpus.make_corpus(source, "a", cache=tmp_path).facts["documents"]["train"] == 15
    assert source.num_reads == 4


def test_held_out_documents_in_the_training_text_of_another_domain_are_reported(tmp_path, caplog):
    texts = make_prose(60)
    # The last five documents of a, which are held out, are the first of b.
    documents = {
        "a": mark_as_train(texts[:25]) + [("test", text) for text in texts[25:30]],
        "b": mark_as_train(texts[25:50]),
        "general": mark_as_train(texts[50:]),
    }
    # A corpus needs a document in each split: one of the five is held out of b, too.
    for name, domain_documents in documents.items():
        _, text = domain_documents[0]
        documents[name] = [("valid", text), *domain_documents[1:]]
    source = MemorySource([])
    source.fingerprint = lambda name: name
    source.read = lambda name: documents[name]
    corpora = Corpora.read(source, ["a", "b"], cache=tmp_path)
    assert find_shared_documents(corpora.by_name) == [SharedDocuments("a", "b", 4)]
    assert "bias the losses: 4 of a in b" in caplog.text


def test_the_digest_is_that_of_the_text_and_its_splits_and_a_killed_reader_changes_nothing(tmp_path):
    texts = make_prose(20)
    documents = [*mark_as_train(texts[2:]), ("valid", texts[0]), ("test", texts[1])]
    first_text = documents[0][1]
    changed = [
        documents[::-1],
        documents[1:],
        [("valid", first_text), *documents[1:]],
        [("train", first_text + " "), *documents[1:]],
    ]
    digests = [make_corpus(tmp_path / "first", case).facts["digest"] for case in [documents, *changed]]
    assert len(set(digests)) == len(digests)

    with pytest.raises(KeyboardInterrupt):
        make_corpus(tmp_path / "second", [*documents[:15], KeyboardInterrupt, *documents[15:]])
    restarted = make_corpus(tmp_path / "second", documents)
    assert restarted.facts["digest"] == digests[0] and list_texts(restarted)["train"] == texts[2:]
