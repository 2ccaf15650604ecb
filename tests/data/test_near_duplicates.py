"""Near-duplicates against an exact comparison of all pairs of documents."""

import random
import tracemalloc
from types import SimpleNamespace

import pytest

from cpt.data import near_duplicates
from cpt.data.corpora import Corpora
from cpt.data.near_duplicates import MIN_SIMILARITY, SPAN, count_near_duplicates, normalized_bytes
from cpt.data.sources.base import TextOptions
from tests.support.data_fixtures import HELD_OUT, TEXT_SOURCE, make_prose


def spans(text):
    raw = normalized_bytes(text)
    return {raw[begin : begin + SPAN] for begin in range(len(raw) - SPAN + 1)}


def similarity(first, second):
    a, b = spans(first), spans(second)
    return len(a & b) / max(1, len(a | b))


def change_words(text, number, draw):
    words = text.split()
    for place in draw.sample(range(len(words)), number):
        words[place] = f"changed{draw.randrange(10**6)}"
    return " ".join(words)


def count(held_out, training, **options):
    given = {"name": "a", "num_training": len(training), "train_bytes": sum(map(len, training)), **options}
    return count_near_duplicates(held_out, training, **given)


def test_they_are_those_of_an_exact_comparison_and_one_changed_word_is_found(monkeypatch):
    draw = random.Random(1)
    training = make_prose(300, words=(12, 40))
    for number, (low, high) in {1: (38, 40), 3: (10, 38), 20: (0, 0)}.items():
        held_out = [change_words(text, min(number, len(text.split())), draw) for text in training[:40]]
        exact = sum(max(similarity(each, one) for one in training) >= MIN_SIMILARITY for each in held_out)
        found = count(held_out, training).found
        assert low <= found <= high and abs(found - exact) <= (
            10 if number == 3 else 2
        )  # of 3, at the threshold
    assert count(make_prose(40, seed=5, words=(12, 40)), training).found == 0
    # Whole documents are compared: a sentence of a long text is no near-duplicate of it.
    assert count(training[:5], [" ".join(training)]).found == 0
    # Case and white space make no difference, nor do the sizes of batches, and other scripts have no words.
    others = [text.upper().replace(" ", "\n ") for text in training[:7]]
    chinese = ["".join(chr(0x4E00 + draw.randrange(2000)) for _ in range(40)) for _ in range(9)]
    changed = [text[:20] + "改" + text[21:] for text in chinese]
    for size in (1, 7, 2000):
        monkeypatch.setattr(near_duplicates, "BATCH_DOCUMENTS", size)
        assert count([*others, *changed], training + chinese).found == 16


def test_documents_that_are_all_alike_are_compared_in_bounded_memory(monkeypatch):
    sentence = make_prose(1, words=(40, 40))[0]
    alike = [f"{sentence} {number}" for number in range(250)]
    peaks = {}
    for limit in (1 << 60, 10_000):
        monkeypatch.setattr(near_duplicates, "MAX_PAIRS", limit)
        tracemalloc.start()
        assert count(alike, alike).found == 250
        peaks[limit] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[10_000] < peaks[1 << 60] / 2


@pytest.mark.parametrize("texts", [["short"], ["", "a", "1234567"], ["12345678"]])
def test_texts_that_are_shorter_than_a_span_are_not_compared(texts):
    found = count(texts, texts)
    assert found.compared == found.found == sum(len(text) >= SPAN for text in texts)


def test_much_training_text_is_sampled_and_repetitive_text_ends_the_comparison(monkeypatch):
    training = make_prose(400, words=(12, 20))
    monkeypatch.setattr(near_duplicates, "BATCH_DOCUMENTS", 10)
    sampled = count(training, training, train_bytes=near_duplicates.MAX_TRAIN_BYTES * 4)
    assert sampled.train_share == 0.25 and sampled.found == 100
    monkeypatch.setattr(near_duplicates, "MAX_MATCHES", 100)
    ended = count(training, training)
    assert 0 < ended.train_share < 0.1


def test_the_share_is_in_the_log_and_the_facts_of_a_text(tmp_path, caplog):
    draw, training = random.Random(2), make_prose(60, words=(12, 40))
    near = [change_words(text, 1, draw) for text in training[:10]]
    splits = {
        "train": training,
        "test": [*near, *make_prose(10, seed=9, words=(12, 40))],
        "valid": ["One only."],
    }
    rows = {"a": splits, "general": {**splits, "test": make_prose(5, seed=8)}}
    source = SimpleNamespace(
        **{**TEXT_SOURCE, "held_out": HELD_OUT, "fingerprint": lambda name: name},
        encoding=None,
        isolated=False,
        text_options=TextOptions(),
        read=lambda name: [(split, text) for split, texts in rows[name].items() for text in texts],
    )
    corpora = Corpora.read(source, ["a"], cache=tmp_path)
    assert corpora.by_name["a"].facts["near_duplicates"] == {"found": 10, "compared": 21, "train_share": 1.0}
    assert corpora.general.facts["near_duplicates"]["found"] == 0
    assert "with a near-duplicate in their domain's training text bias the losses: 10 of 21" in caplog.text
    caplog.clear()
    Corpora.read(source, ["a"], cache=tmp_path)
    assert "10 of 21" in caplog.text  # also of text that was read before
