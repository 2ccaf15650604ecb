"""Near-duplicates against an exact comparison of all pairs of documents."""

import doctest
import random
import tracemalloc
from types import SimpleNamespace

import pytest

from cpt.data import corpora, near_duplicates
from cpt.data.corpora import Corpora
from cpt.data.near_duplicates import MIN_SIMILARITY, SPAN, count_near_duplicates, normalize_to_bytes
from cpt.data.sources.base import TextOptions
from tests.support.data_fixtures import HELD_OUT, TEXT_SOURCE, make_prose


def list_spans(text):
    raw = normalize_to_bytes(text)
    return {raw[begin : begin + SPAN] for begin in range(len(raw) - SPAN + 1)}


def compute_similarity(first, second):
    first_spans = list_spans(first)
    second_spans = list_spans(second)
    return len(first_spans & second_spans) / max(1, len(first_spans | second_spans))


def has_near_duplicate(text, training):
    return max(compute_similarity(text, document) for document in training) >= MIN_SIMILARITY


def change_words(text, number, generator):
    words = text.split()
    for position in generator.sample(range(len(words)), number):
        words[position] = f"changed{generator.randrange(10**6)}"
    return " ".join(words)


def count(held_out, training, *, train_bytes=None):
    return count_near_duplicates(
        held_out,
        training,
        name="a",
        num_training=len(training),
        train_bytes=train_bytes or sum(map(len, training)),
    )


def test_they_are_those_of_an_exact_comparison_and_one_changed_word_is_found(monkeypatch):
    generator = random.Random(1)
    training = make_prose(300, words=(12, 40))
    # With 3 changed words the similarity is near the threshold.
    for num_changed, low, high, tolerance in ((1, 38, 40, 2), (3, 10, 38, 10), (20, 0, 0, 2)):
        held_out = []
        for text in training[:40]:
            held_out.append(change_words(text, min(num_changed, len(text.split())), generator))
        expected = len([text for text in held_out if has_near_duplicate(text, training)])
        num_found = count(held_out, training).found
        assert low <= num_found <= high and abs(num_found - expected) <= tolerance
    assert count(make_prose(40, seed=5, words=(12, 40)), training).found == 0

    # Whole documents are compared: a sentence of a long text is no near-duplicate of it.
    assert count(training[:5], [" ".join(training)]).found == 0

    # Case and white space make no difference, nor do the sizes of batches, and other scripts have no words.
    upper_case = [text.upper().replace(" ", "\n ") for text in training[:7]]
    chinese = []
    for _ in range(9):
        letters = [chr(0x4E00 + generator.randrange(2000)) for _ in range(40)]
        chinese.append("".join(letters))
    changed = [text[:20] + "改" + text[21:] for text in chinese]
    for size in (1, 7, 2000):
        monkeypatch.setattr(near_duplicates, "BATCH_DOCUMENTS", size)
        assert count([*upper_case, *changed], training + chinese).found == 16


def test_near_identical_documents_are_compared_in_bounded_memory(monkeypatch):
    (sentence,) = make_prose(1, words=(40, 40))
    documents = [f"{sentence} {number}" for number in range(250)]
    peaks = {}  # bytes, by limit
    for limit in (1 << 60, 10_000):
        monkeypatch.setattr(near_duplicates, "MAX_PAIRS", limit)
        tracemalloc.start()
        assert count(documents, documents).found == 250
        _, peaks[limit] = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peaks[10_000] < peaks[1 << 60] / 2


@pytest.mark.parametrize("texts", [["short"], ["", "a", "1234567"], ["12345678"]])
def test_texts_that_are_shorter_than_a_span_are_not_compared(texts):
    counts = count(texts, texts)
    assert counts.compared == counts.found == len([text for text in texts if len(text) >= SPAN])


def test_much_training_text_is_sampled_and_repetitive_text_ends_the_comparison(monkeypatch):
    training = make_prose(400, words=(12, 20))
    monkeypatch.setattr(near_duplicates, "BATCH_DOCUMENTS", 10)
    sampled = count(training, training, train_bytes=near_duplicates.MAX_TRAIN_BYTES * 4)
    assert sampled.train_share == 0.25 and sampled.found == 100
    monkeypatch.setattr(near_duplicates, "MAX_MATCHES", 100)
    stopped = count(training, training)
    assert 0 < stopped.train_share < 0.1


def test_the_share_is_in_the_log_and_the_facts_of_a_text(tmp_path, caplog):
    generator = random.Random(2)
    training = make_prose(60, words=(12, 40))
    changed = [change_words(text, 1, generator) for text in training[:10]]
    domain = [("train", text) for text in training]
    domain += [("test", text) for text in changed + make_prose(10, seed=9, words=(12, 40))]
    domain.append(("valid", "One only."))
    # The same training text as general text, without near-duplicates in its test text.
    general = [("train", text) for text in training]
    general += [("test", text) for text in make_prose(5, seed=8)]
    general.append(("valid", "One only."))
    documents = {"a": domain, "general": general}

    source = SimpleNamespace(
        **TEXT_SOURCE,
        held_out=HELD_OUT,
        fingerprint=lambda name: name,
        encoding=None,
        isolated=False,
        text_options=TextOptions(),
        read=lambda name: documents[name],
    )
    read_corpora = Corpora.read(source, ["a"], cache=tmp_path)
    assert read_corpora.by_name["a"].facts["near_duplicates"] == {
        "found": 10,
        "compared": 21,
        "train_share": 1.0,
    }
    assert read_corpora.general.facts["near_duplicates"]["found"] == 0
    assert "with a near-duplicate in their domain's training text bias the losses: 10 of 21" in caplog.text
    assert doctest.testmod(corpora).failed == 0
    # The line is also that of text which was read before.
    caplog.clear()
    Corpora.read(source, ["a"], cache=tmp_path)
    assert "10 of 21" in caplog.text
