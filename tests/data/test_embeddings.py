"""Texts as vectors: samples of documents that need no memory, words that weigh by rarity."""

import math
import sys

import numpy as np
import pytest

from cpt.data.example import Example, write_example
from cpt.data.orders import (
    BUCKETS,
    bucket_of,
    embed_by_words,
)
from cpt.trainer.similarity import CHARACTERS_READ, sample_documents, static_encoder
from tests.support.data_fixtures import written


def sampled(folder, texts, *, most, form="text", name="a"):
    return list(sample_documents(written(folder, texts), name, form=form, most=most))


def flat(batches):
    return [document for batch in batches for document in batch]


def test_a_sample_is_drawn_by_key_from_the_training_documents(tmp_path):
    texts = [f"document {number}" for number in range(200)]
    few, again = (flat(sampled(tmp_path, texts, most=30)) for _ in range(2))
    assert few == again and len(set(few)) == 30 and set(few) < set(texts)
    assert few != texts[:30] and few != flat(sampled(tmp_path, texts, most=30, name="b"))
    assert sorted(flat(sampled(tmp_path, texts, most=1000))) == sorted(texts)


def test_long_documents_come_a_few_at_a_time_and_are_cut(tmp_path):
    texts = [f"{number} " + "word " * 20_000 for number in range(20)]
    batches = sampled(tmp_path, texts, most=20)
    assert len(batches) > 1 and all(len(each) == CHARACTERS_READ for each in flat(batches))


def test_of_examples_what_is_asked_is_embedded(tmp_path):
    texts = [write_example(Example(str(n), f"question {n}", f"answer {n}", "task")) for n in range(3)]
    assert sorted(flat(sampled(tmp_path, texts, most=9, form="examples"))) == [
        f"question {n}" for n in range(3)
    ]


def slow_means(texts):
    """The definition, in words: no hashes."""
    documents = [document for each in texts.values() for document in each]
    words = sorted({word for document in documents for word in document.split()})
    having = {word: sum(word in document.split() for document in documents) for word in words}
    means = {}
    for name, each in texts.items():
        vectors = []
        for document in each:
            counts = {word: document.split().count(word) for word in set(document.split())}
            weights = {word: 1 + math.log(count) for word, count in counts.items()}
            length = math.sqrt(sum(weight**2 for weight in weights.values()))
            vectors.append({word: weight / length for word, weight in weights.items()})
        means[name] = {
            word: (math.log((1 + len(documents)) / (1 + having[word])) + 1)
            * sum(vector.get(word, 0) for vector in vectors)
            / len(vectors)
            for word in words
        }
    return means


def test_words_weigh_by_their_counts_and_by_how_few_documents_have_them():
    texts = {"law": ["the court court rules", "the act"], "food": ["the warm bread", "bread basil bread the"]}
    found = embed_by_words({name: [each] for name, each in texts.items()})
    for name, weights in slow_means(texts).items():
        assert {word: found[name][bucket_of(word)] for word in weights} == pytest.approx(weights)
        assert np.count_nonzero(found[name]) == sum(weight > 0 for weight in weights.values())
    assert found["law"][bucket_of("court")] > found["law"][bucket_of("the")] / 2 > 0


def test_words_are_letters_of_any_alphabet_whatever_their_case():
    found = embed_by_words({"a": [["Straße STRASSE x 42 суд"]], "b": [["nothing"]]})
    assert set(np.flatnonzero(found["a"])) == {bucket_of(word) for word in ("straße", "strasse", "суд")}


def test_a_text_without_words_is_nowhere():
    found = embed_by_words({"a": [["42 !"]], "b": []})
    assert not found["a"].any() and not found["b"].any() and found["a"].shape == (BUCKETS,)


@pytest.fixture
def wordllama(tmp_path, monkeypatch):
    """A package laid out as the published one: a table of half-precision numbers, and a tokenizer."""
    from safetensors.numpy import save_file

    from tests.support.data_fixtures import framed

    place = tmp_path / "wordllama"
    for folder in ("weights", "tokenizers"):
        (place / folder).mkdir(parents=True)
    (place / "__init__.py").write_text("raise RuntimeError('never imported')\n")
    tokenizer = framed().backend_tokenizer
    table = np.arange(4 * tokenizer.get_vocab_size()).reshape(-1, 4).astype(np.float16)
    save_file({"embedding.weight": table}, place / "weights" / "l2_supercat_256.safetensors")
    tokenizer.save(str(place / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return table, tokenizer


def test_static_means_rows_of_a_table_without_importing_the_package(wordllama):
    table, tokenizer = wordllama
    vectors = static_encoder()(["lo mi", ""])
    ids = tokenizer.encode("lo mi", add_special_tokens=False).ids
    assert len(ids) > 0 and vectors.shape == (2, 4)
    assert vectors[0] == pytest.approx(table[ids].astype(float).mean(0)) and not vectors[1].any()
    assert "wordllama" not in sys.modules
