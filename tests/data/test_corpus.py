"""What of a source's documents stays, and in which split: against slow loops over the documents."""

import logging
import random
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from cpt.data import corpus
from cpt.data.corpora import Corpora
from cpt.data.corpus import Corpus, in_batches
from tests.support.data_fixtures import HELD_OUT, OF_TEXT, prose

SPLITS = ("train", "valid", "test")


class Given:
    """A source of documents in memory that counts how often it is read."""

    names, orders, score_on = ["a", "b"], None, "test"
    encoding, class_limit, isolated, form = None, None, False, staticmethod(OF_TEXT["form"])
    members, text_packing = staticmethod(OF_TEXT["members"]), "concat"

    def __init__(self, documents, *, held_out=HELD_OUT):
        self.documents, self.held_out, self.reads = list(documents), held_out, 0

    def read(self, name):
        self.reads += 1
        yield from self.documents

    def fingerprint(self, name):
        return [self.documents, name]


def made(folder, documents, **options):
    return corpus.make_corpus(Given(documents, **options), "a", cache=folder)


def split_up(found):
    return {split: list(found.documents(split)["text"]) for split in SPLITS}


def as_train(texts):
    return [("train", text) for text in texts]


def test_documents_without_splits_are_split_by_document(tmp_path):
    texts = prose(103)
    found = split_up(made(tmp_path, as_train(texts)))
    assert sorted(sum(found.values(), [])) == sorted(texts)
    assert {split: len(each) for split, each in found.items()} == {"train": 72, "valid": 10, "test": 21}
    for each in found.values():
        assert [texts.index(text) for text in each] == sorted(texts.index(text) for text in each)


def test_the_split_is_the_documents_own(tmp_path):
    texts = prose(200)
    first = split_up(made(tmp_path, as_train(texts)))
    shuffled = random.Random(1).sample(texts, len(texts))
    again = split_up(made(tmp_path, as_train([*shuffled, *texts[:50]])))
    assert {split: set(each) for split, each in again.items()} == {s: set(each) for s, each in first.items()}
    more = split_up(made(tmp_path, as_train([*texts, "one more"])))
    assert len(set(more["test"]) ^ set(first["test"])) <= 2
    other = split_up(made(tmp_path, as_train(texts), held_out={**HELD_OUT, "seed": 1}))
    assert len(set(other["test"]) & set(first["test"])) < 20
    assert len(other["test"]) == len(first["test"]) == 40


def test_valid_and_test_documents_are_no_neighbours(tmp_path):
    """A cut in the order of the source, or one share inside another, would be no random choice."""
    texts = prose(1000)
    found = split_up(made(tmp_path, as_train(texts)))
    places = [texts.index(text) for text in found["test"]]
    assert 400 < np.mean(places) < 600
    assert np.mean(np.diff(places) == 1) < 0.3


def expected(documents):
    """Of equal documents one stays: the first, in train rather than in valid rather than in test."""
    kept = {split: [] for split in SPLITS}
    copies = {"duplicates": 0, "held_out_copies": 0}
    for number, (split, text) in enumerate(documents):
        better = SPLITS[: SPLITS.index(split)]
        if (split, text) in documents[:number] or any((other, text) in documents for other in better):
            copies["duplicates" if split == "train" else "held_out_copies"] += 1
        else:
            kept[split].append(text)
    return kept, copies


@pytest.mark.parametrize("seed", range(5))
def test_copies_are_left_out_and_counted(tmp_path, caplog, seed):
    caplog.set_level(logging.INFO)
    draw = random.Random(seed)
    documents = [(split, f"{split} only") for split in SPLITS]
    documents += [(draw.choice(SPLITS), f"ä{draw.randint(0, 15)}") for _ in range(60)]
    draw.shuffle(documents)
    found = made(tmp_path, documents)
    kept, copies = expected(documents)
    assert split_up(found) == kept
    assert {name: found.facts[name] for name in copies} == copies
    assert min(copies.values()) > 0
    assert found.facts["documents"] == {split: len(each) for split, each in kept.items()}
    sizes = {split: sum(len(text.encode()) for text in each) for split, each in kept.items()}
    assert found.facts["bytes"] == sizes
    assert (
        f"left out: {copies['duplicates']} duplicates and {copies['held_out_copies']} valid or" in caplog.text
    )
    assert f"{len(kept['train'])} train, {len(kept['valid'])} valid, {len(kept['test'])} test" in caplog.text


@pytest.mark.parametrize("given, counts", [("valid", (32, 2, 8)), ("test", (36, 4, 2))])
def test_what_the_source_does_not_split_is_taken_from_train(tmp_path, given, counts):
    texts = prose(40)
    found = split_up(made(tmp_path, [*as_train(texts), (given, "b"), (given, "c"), (given, texts[3])]))
    assert tuple(len(found[split]) for split in SPLITS) == counts
    assert found[given] == ["b", "c"]
    assert sorted(sum(found.values(), [])) == sorted([*texts, "b", "c"])


def test_nearly_equal_documents_stay_unless_they_differ_in_white_space_only(tmp_path):
    texts = ["One.", "One. ", "one.", "One.\n", "Öne.", "O\u0308ne."]
    found = split_up(made(tmp_path, as_train(texts)))
    assert sorted(sum(found.values(), [])) == sorted(text for text in texts if text == text.strip())


def test_text_that_is_no_unicode_is_mended(tmp_path):
    texts = ["half \ud800 a pair", "nul \x00 byte", "🙂"]
    documents = [*as_train(texts), ("valid", "v"), ("test", "t")]
    found = made(tmp_path, documents)
    assert split_up(found)["train"] == ["half ? a pair", "nul \x00 byte", "🙂"]
    assert found.facts["bytes"]["train"] == 13 + 10 + 4


@pytest.mark.parametrize(
    "documents, message",
    [
        ([], "domain a has no text"),
        (as_train(["b"]), r"domain a has 1 documents, too few .* \(0 train, 1 valid, 0 test\)"),
        (
            as_train(["b", "c"]),
            r"\(0 train, 1 valid, 1 test\); allowed: at least one for each, all different",
        ),
        (as_train(["b", "c", "b", "c"]), r"domain a has 4 documents, .* \(0 train, 1 valid, 1 test\)"),
        ([*as_train(["b"]), ("valid", "b"), ("test", "c")], r"\(1 train, 0 valid, 1 test\)"),
        ([("valid", "b"), ("test", "c")], r"\(0 train, 1 valid, 1 test\)"),
    ],
)
def test_too_few_documents(tmp_path, documents, message):
    with pytest.raises(ValueError, match=message) as error:
        made(tmp_path, documents)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "corpora").glob("a-*[0-9a-f]"))


def test_the_fewest_documents(tmp_path):
    documents = [("train", "b"), ("valid", "c"), ("test", "d")]
    assert split_up(made(tmp_path, documents)) == {"train": ["b"], "valid": ["c"], "test": ["d"]}
    found = made(tmp_path, as_train(["b", "c", "d"]))
    assert found.facts["documents"] == {"train": 1, "valid": 1, "test": 1}


def test_a_source_is_read_once(tmp_path):
    source = Given(as_train(prose(20)))
    first = corpus.make_corpus(source, "a", cache=tmp_path)
    assert corpus.make_corpus(source, "a", cache=tmp_path) == first
    assert source.reads == 1
    for change in ({"seed": 1}, {"valid": 0.3}):
        source.held_out = {**HELD_OUT, **change}
        assert corpus.make_corpus(source, "a", cache=tmp_path).folder != first.folder
    source.held_out = HELD_OUT
    corpus.make_corpus(source, "b", cache=tmp_path)
    source.documents = [*source.documents, ("train", "another")]
    assert corpus.make_corpus(source, "a", cache=tmp_path).facts["documents"]["train"] == 15
    assert source.reads == 5


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
    found = split_up(made(tmp_path, as_train(texts)))
    assert sorted(sum(found.values(), [])) == sorted(texts)
    assert found == split_up(made(tmp_path / "other", as_train(texts)))


def test_memory_does_not_grow_with_the_text(tmp_path):
    """Documents of 100 kB, 30 MB in all; what Arrow holds at once is counted by its own pool."""
    text = " ".join(prose(1000))[:100_000]
    documents = ((split, f"{number} {text}") for number in range(300) for split in ("train",))
    source = SimpleNamespace(
        **OF_TEXT, held_out=HELD_OUT, fingerprint=lambda name: 0, read=lambda name: documents
    )
    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        found = corpus.make_corpus(source, "a", cache=tmp_path)
        written_peak = pool.max_memory()
        held = pool.bytes_allocated()
        read = sum(len(each) for batch in in_batches(found.documents("train")) for each in batch)
        read_peak = pool.max_memory()
    finally:
        pa.set_memory_pool(usual)
    assert read > 20e6
    assert 1e5 < written_peak < 3e6
    assert held < 1e5
    assert read_peak < 3e6


def test_the_texts_of_a_run(tmp_path):
    source = Given(as_train(prose(20)))
    texts = Corpora.read(source, ["b", "a"], cache=tmp_path)
    assert list(texts.by_name) == ["b", "a", "general"]
    assert texts.general is texts.by_name["general"]
    assert all(isinstance(each, Corpus) for each in texts.by_name.values())
    assert len({each.folder for each in texts.by_name.values()}) == 3


@pytest.mark.parametrize("given", [False, True])
def test_no_more_held_out_documents_than_asked_for(tmp_path, given):
    texts = [f"text number {number}" for number in range(60)]
    documents = [
        (("train", "valid", "test")[n % 3] if given else "train", text) for n, text in enumerate(texts)
    ]
    half = {**HELD_OUT, "valid": 0.2, "test": 0.2}
    whole = split_up(made(tmp_path / "whole", documents, held_out=half))
    few = made(tmp_path / "few", documents, held_out={**half, "most": 4})
    found = split_up(few)
    assert found["train"] == whole["train"]
    for split in ("valid", "test"):
        assert len(found[split]) == 4 and set(found[split]) < set(whole[split])
    assert few.facts["documents"] == {"train": len(whole["train"]), "valid": 4, "test": 4}
    assert few.facts["duplicates"] == few.facts["held_out_copies"] == 0
    again = made(tmp_path / "again", documents, held_out=half)
    assert few.facts["digest"] != again.facts["digest"]
    assert few.facts["train_digest"] == again.facts["train_digest"]  # so the base model is the same
    more = made(tmp_path / "more", [*documents, ("train", "one more")], held_out=half)
    assert more.facts["train_digest"] != again.facts["train_digest"]
    other = split_up(made(tmp_path / "other", documents, held_out={**half, "most": 4, "seed": 1}))
    assert not given or other["test"] != found["test"]
