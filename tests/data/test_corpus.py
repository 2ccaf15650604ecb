"""What of a source's documents stays, and in which split: against slow loops over the documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.core.randomness import key, sample_keys
from cpt.data import corpus
from cpt.data.corpora import Corpora, SharedDocuments, find_shared
from cpt.data.corpus import SPLITS, assign, read_documents
from cpt.data.sources.base import TextOptions
from tests.support.data_fixtures import HELD_OUT, TEXT_SOURCE, make_prose


class Given:
    """A source of documents in memory that counts how often it is read."""

    names, orders, score_on, class_limit = ["a", "b"], None, "test", None
    encoding, isolated, text_packing, text_options = None, False, "concat", TextOptions()
    form, members = staticmethod(TEXT_SOURCE["form"]), staticmethod(TEXT_SOURCE["members"])

    def __init__(self, documents, *, held_out=HELD_OUT):
        self.documents, self.held_out, self.reads = documents, held_out, 0
        self.skipped = {}

    def read(self, name):
        self.reads += 1
        for document in self.documents:
            if document is KeyboardInterrupt:
                raise KeyboardInterrupt
            yield document

    def fingerprint(self, name):
        return [[each for each in self.documents if each is not KeyboardInterrupt], name]


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
    hashes, told = found
    held_out = {"valid": 0.1, "test": 0.2, "seed": 3, "max_documents": most}
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


def test_copies_are_left_out_and_counted_and_text_that_is_no_unicode_is_mended(tmp_path):
    given = {"train": ["a", "b", "a"], "valid": ["b", "v", "v"], "test": ["a", "v", "t"]}
    documents = [(split, text) for split in reversed(SPLITS) for text in given[split]]
    kept = {"train": ["a", "b"], "valid": ["v"], "test": ["t"]}
    alike = ["half \ud800 a pair", "nul \x00 byte", "🙂", "One.", "one.", "Öne.", "O\u0308ne."]
    kept["train"] += ["half ? a pair", *alike[1:]]
    found = made(tmp_path, documents + as_train(alike))
    assert split_up(found) == kept
    assert (found.facts["duplicates"], found.facts["held_out_copies"]) == (1, 4)
    assert found.facts["documents"] == {split: len(each) for split, each in kept.items()}
    sizes = {split: sum(len(text.encode()) for text in each) for split, each in kept.items()}
    assert found.facts["bytes"] == sizes
    # White space makes no other document.
    plain = [*as_train(["a b", "c d", "e f", "g h"]), ("test", "i j"), ("test", "k l")]
    copies = [("test", "a  b\n"), ("train", "c\u00a0d"), ("train", "\te f "), ("valid", "i\nj")]
    assert read_documents(Given(plain + copies), "x").splits.tolist() == [0, 0, 0, 0, -1, 2, -1, -1, -1, 1]


def test_too_few_documents_are_refused_and_nothing_is_left(tmp_path):
    for documents in ([], as_train("bcbc"), [("valid", "b"), ("test", "c")]):
        with pytest.raises(ValueError, match="domain a has"):
            made(tmp_path, documents)
    assert not list((tmp_path / "corpora").glob("a-*[0-9a-f]"))
    found = made(tmp_path, as_train(["b", "c", "d"]))  # the fewest
    assert found.facts["documents"] == {"train": 1, "valid": 1, "test": 1}


def test_a_source_is_read_once_and_again_where_it_or_the_split_changes(tmp_path):
    source = Given(as_train(make_prose(20)))
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


def test_held_out_documents_in_the_training_text_of_another_domain_are_told(tmp_path, caplog):
    words = make_prose(60)
    splits = {"a": words[:30], "b": words[25:50], "general": words[50:]}  # the last five of a are b's first
    source = Given([])
    source.fingerprint = lambda name: name
    source.read = lambda name: [
        ("test" if name == "a" and at >= 25 else "valid" if at < 1 else "train", text)
        for at, text in enumerate(splits[name])
    ]
    texts = Corpora.read(source, ["a", "b"], cache=tmp_path)
    assert find_shared(texts.by_name) == [
        SharedDocuments("a", "b", 4)
    ]  # one of the five is held out of b, too
    assert "bias the losses: 4 of a in b" in caplog.text


def test_the_digest_is_that_of_the_text_and_its_splits_and_a_killed_reader_changes_nothing(tmp_path):
    texts = make_prose(20)
    documents = [*as_train(texts[2:]), ("valid", texts[0]), ("test", texts[1])]
    others = [[("valid", documents[0][1])], [("train", documents[0][1] + " ")]]
    cases = [documents, documents[::-1], documents[1:], *(each + documents[1:] for each in others)]
    digests = [made(tmp_path / "first", case).facts["digest"] for case in cases]
    assert len(set(digests)) == len(cases)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "second", [*documents[:15], KeyboardInterrupt, *documents[15:]])
    again = made(tmp_path / "second", documents)
    assert again.facts["digest"] == digests[0] and split_up(again)["train"] == texts[2:]
