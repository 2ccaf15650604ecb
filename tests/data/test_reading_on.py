"""A reading that was killed: it goes on where the source tells places, and ends with the same bytes."""

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Features, IterableDataset
from datasets.arrow_writer import ArrowWriter

from cpt.core import growing
from cpt.data import arrow, corpus
from cpt.data.sources.base import Followed, Reading, read_members
from cpt.data.sources.hub import Hub
from cpt.data.sources.texts import Texts
from cpt.data.splitting import Counting
from tests.data.test_corpus import Given, as_train
from tests.support.data_fixtures import HELD_OUT, prose
from tests.support.killing import KilledError

SHARED = {"orders": None, "held_out": HELD_OUT, "score_on": "test"}
SPLITS = {"train": 40, "validation": 9, "test": 7}


@pytest.fixture(autouse=True)
def committed_often(monkeypatch):
    monkeypatch.setattr(corpus, "BATCH", 4)
    monkeypatch.setattr(growing, "COMMIT", 1)


class Marked(Given, Followed):
    """A source in memory that tells places, and dies after so many documents."""

    most = None

    def read_on(self, name, place=None):
        at = [place or 0]
        self.begun = at[0]

        def documents():
            while at[0] < len(self.documents):
                if at[0] == self.most:
                    raise KilledError
                at[0] += 1
                yield self.documents[at[0] - 1]

        return Reading(documents(), lambda: at[0])


def files_of(found):
    return {path.name: path.read_bytes() for path in found.folder.iterdir()}


@pytest.mark.parametrize("most", [0, 3, 4, 21, 59])
def test_reading_goes_on_where_it_was_killed(tmp_path, most):
    documents = as_train([*prose(60), *prose(8)])
    whole = corpus.make_corpus(Marked(documents), "a", cache=tmp_path / "whole")
    source = Marked(documents)
    source.most = most
    with pytest.raises(KilledError):
        corpus.make_corpus(source, "a", cache=tmp_path)
    source.most = None
    found = corpus.make_corpus(source, "a", cache=tmp_path)
    assert source.begun == most // 4 * 4
    assert files_of(found) == files_of(whole)
    assert sorted(files_of(found)) == ["checksums.json", "documents.arrow", "facts.json", "splits.npy"]


def test_a_source_that_tells_no_place_is_read_anew(tmp_path):
    class Killed(Given):
        def read(self, name):
            yield from self.documents[:30]
            raise KilledError

    documents = as_train(prose(40))
    with pytest.raises(KilledError):
        corpus.make_corpus(Killed(documents), "a", cache=tmp_path)
    whole = corpus.make_corpus(Given(documents), "a", cache=tmp_path / "whole")
    assert files_of(corpus.make_corpus(Given(documents), "a", cache=tmp_path)) == files_of(whole)


def test_the_file_is_what_the_writer_of_datasets_makes(tmp_path, monkeypatch):
    """Cached texts of earlier versions are as good as new ones."""
    monkeypatch.setattr(corpus, "BATCH", 1000)
    monkeypatch.setattr(corpus, "CHARACTERS", 700)
    texts = prose(80)
    found = corpus.make_corpus(Given(as_train(texts)), "a", cache=tmp_path)
    path, waiting = tmp_path / "theirs.arrow", 0
    with ArrowWriter(path=str(path), features=Features(corpus.COLUMNS)) as writer:
        for text in texts:
            writer.write({"text": text})
            waiting += len(text.encode())
            if waiting >= 700:
                writer.write_examples_on_file()
                waiting = 0
        writer.finalize()
    theirs = list(arrow.read_batches(path))
    ours = list(arrow.read_batches(found.folder / "documents.arrow"))
    assert [(end, batch.to_pydict()) for end, batch in ours] == [
        (end, batch.to_pydict()) for end, batch in theirs
    ]
    assert (found.folder / "documents.arrow").read_bytes() == path.read_bytes()


def test_what_is_held_of_a_document_is_small():
    counting = Counting("text")
    for number, text in enumerate(prose(1000)):
        counting.add("train", f"{number} {text}".encode())
    assert sum(column.itemsize for column in counting.columns.values()) == 25
    assert counting.counted().answers is None


@pytest.fixture
def folders(tmp_path):
    """A folder of text files of all kinds in two domains, which one coarse domain joins."""
    for name in ("cs.AI", "cs.LG"):
        place = tmp_path / "root" / name
        place.mkdir(parents=True)
        (place / "train.txt").write_text("\n".join(prose(9)))
        rows = [json.dumps({"text": text}) for text in ("", *prose(7, seed=1), " ")]
        (place / "more.jsonl").write_text("\n".join(rows))
        pq.write_table(pa.table({"text": prose(5, seed=2)}), place / "valid.parquet")
    return tmp_path / "root"


def texts(root, **options):
    given = {"folder": ".", "column": "text", "document": "line", "general": "general"} | options
    return Texts(root=str(root), **given, **SHARED)


def places_of(open_reading):
    """What each place tells of the rest."""
    reading, rests = open_reading(None), []
    found = []
    for document in reading:
        found.append(document)
        rests.append(json.loads(json.dumps(reading.place())))
    return found, rests


@pytest.mark.parametrize("name", ["cs.AI", "cs"])
def test_files_are_gone_on_with_from_any_document(folders, name):
    source = texts(folders, by="coarse" if name == "cs" else None)
    found, places = places_of(lambda place: read_members(source, name, place))
    assert len(found) == (42 if name == "cs" else 21)
    assert found[:21] == list(texts(folders).read("cs.AI"))
    for number, place in enumerate(places, start=1):
        assert list(read_members(source, name, place)) == found[number:]


def test_files_that_are_read_are_not_read_again(folders):
    source = texts(folders)
    found, places = places_of(lambda place: source.read_on("cs.AI", place))
    (folders / "cs.AI" / "more.jsonl").write_text("no JSON")  # the first of the three
    assert list(source.read_on("cs.AI", places[8])) == found[9:]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A function that makes a local data set of three splits, the first in four files."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def make(kind, sizes=SPLITS, files=4):
        for split, rows in sizes.items():
            number = files if split == "train" else 1
            for part in range(number):
                lines = [f"{split} {part} {row}" for row in range(rows // number)] + [""]
                path = tmp_path / kind / f"{split}-{part:05d}-of-{number:05d}.{kind}"
                path.parent.mkdir(exist_ok=True)
                if kind == "parquet":
                    pq.write_table(pa.table({"text": lines}), path, row_group_size=len(lines) // 3)
                else:
                    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        return tmp_path / kind

    return make


def hub(folder, **options):
    return Hub(catalogue={"news": {"path": str(folder)}}, column="text", general=None, **options, **SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_is_gone_on_with_from_any_row(dataset, kind, streaming):
    source = hub(dataset(kind), streaming=streaming)
    found, places = places_of(lambda place: source.read_on("news", place))
    assert len(found) == sum(SPLITS.values()) == len(set(found))
    for number in (1, 3, 10, 11, 25, 40, 41, 49, 50, 55, 56):
        assert list(source.read_on("news", places[number - 1])) == found[number:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_stream_is_gone_on_with_without_its_earlier_files(dataset, kind, monkeypatch):
    """What a file gives is counted where `datasets` reads it."""
    from datasets.packaged_modules.json.json import Json
    from datasets.packaged_modules.parquet.parquet import Parquet

    sizes = {"train": 11_000, "validation": 9, "test": 7}
    source, read = hub(dataset(kind, sizes, files=10), streaming=True), []
    builder = Parquet if kind == "parquet" else Json
    real = builder._generate_tables

    def watched(self, *arguments, **options):
        for table in real(self, *arguments, **options):
            read.append(table)
            yield table

    monkeypatch.setattr(builder, "_generate_tables", watched)
    found, places = places_of(lambda place: source.read_on("news", place))
    assert len(read) >= 12
    for at in (10_500, 11_010):
        read.clear()
        assert next(source.read_on("news", places[at])) == found[at + 1]
        assert 0 < len(read) <= 4  # of its file, of the one before, and of the first, for the columns' types


def test_a_stream_that_was_killed_is_the_same_corpus(dataset, tmp_path):
    folder = dataset("parquet")
    whole = corpus.make_corpus(hub(folder, streaming=True), "news", cache=tmp_path / "whole")
    source = hub(folder, streaming=True)
    real, begun = Hub.read_on, []

    def dying(self, name, place=None):
        reading = real(self, name, place)
        begun.append(place)

        def documents():
            for number, document in enumerate(reading):
                if len(begun) == 1 and number == 30:
                    raise KilledError
                yield document

        return Reading(documents(), reading.place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hub, "read_on", dying)
        with pytest.raises(KilledError):
            corpus.make_corpus(source, "news", cache=tmp_path)
        found = corpus.make_corpus(source, "news", cache=tmp_path)
    assert begun[0] is None and begun[1][1]["rows"] > 20
    assert files_of(found) == files_of(whole)


def test_a_stream_that_tells_no_place_says_so_once(dataset, monkeypatch, caplog):
    caplog.set_level(logging.INFO)

    def refuses(self):
        raise NotImplementedError

    monkeypatch.setattr(IterableDataset, "state_dict", refuses)
    found, places = places_of(lambda place: hub(dataset("jsonl"), streaming=True).read_on("news", place))
    assert len(found) == sum(SPLITS.values()) and set(places) == {None}
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("cpt")]
    assert line == "this data set tells no place in its rows: a reading of it that is killed begins anew"
