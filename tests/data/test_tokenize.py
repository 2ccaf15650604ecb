"""Tokenized in shards: the same rows whoever makes them, and whenever it was killed."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import active_children
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from cpt.data import corpus, packing, tokenize
from cpt.data.corpora import tokenizer_digest
from cpt.data.tokenize import TokenizeBatch, to_json, tokenize_corpus
from tests.data.test_packing import STYLES, TRICKY
from tests.support import data_fixtures as made
from tests.support.data_fixtures import prose, written
from tests.support.killing import KilledError
from tests.support.processes import heeds_signals


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """A few documents each."""
    monkeypatch.setattr(tokenize, "SHARD", 900)
    monkeypatch.setattr(tokenize, "BATCH", 500)


@pytest.fixture(scope="module")
def tokenizer():
    return made.framed()


def packed(folder, texts, tokenizer, *, workers=1):
    return packing.pack(
        *(written(folder, texts), "train"),
        **{"tokenizer": tokenizer, "length": 16, "name": "a", "cache": folder, "workers": workers},
        tokenizer_digest=tokenizer_digest(tokenizer),
    )


def digest_of(folder):
    (path,) = (folder / "packed").glob("*/rows.arrow")
    return hashlib.sha256(repr(Dataset.from_file(str(path)).to_dict()).encode()).hexdigest()


@pytest.fixture
def whole(tmp_path, tokenizer):
    """Rows that nothing has disturbed."""
    packed(tmp_path / "whole", prose(80), tokenizer)
    return digest_of(tmp_path / "whole")


@pytest.mark.parametrize("style", STYLES)
def test_the_json_of_a_tokenizer_gives_the_same_ids(style):
    tokenizer, table = getattr(made, style)(), pa.table({"text": [*prose(30), *TRICKY]})
    expected = TokenizeBatch(tokenizer, (7,))(table)
    by_hand = tokenizer(table["text"].to_pylist(), split_special_tokens=True)["input_ids"]
    assert expected["ids"].to_pylist() == [[*ids, 7] for ids in by_hand]
    tokenizer(TRICKY, truncation=True, max_length=3)  # leaves its settings in the backend
    assert TokenizeBatch(to_json(tokenizer), (7,))(table) == expected == TokenizeBatch(tokenizer, (7,))(table)


def test_a_tokenizer_with_code_of_its_own_has_no_json():
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *arguments, **options):
            return super()._encode_plus(*arguments, **options)

    assert to_json(Own(tokenizer_object=made.framed().backend_tokenizer)) is None
    assert to_json(made.framed())


@pytest.mark.parametrize("split", corpus.SPLITS)
def test_shards_are_the_documents_of_a_split_in_their_order(tmp_path, split):
    texts = [*prose(60), "x" * 3000, *prose(20, seed=1)]
    found = written(tmp_path, texts, split=split)
    for shards in (1, 7, 81):
        read = [list(found.documents(split, number, shards)["text"]) for number in range(shards)]
        assert sum(read, []) == texts and all(read)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_rows_do_not_depend_on_how_many_make_them(tmp_path, tokenizer, whole, count):
    packed(tmp_path, prose(80), tokenizer, workers=count)
    assert digest_of(tmp_path) == whole


@pytest.mark.parametrize("at", [0, 1, 5])
def test_tokenizing_continues_where_it_was_killed(tmp_path, tokenizer, whole, monkeypatch, at):
    real, asked = TokenizeBatch.__call__, []

    def counted(self, documents, *, most):
        asked.append(documents["text"].to_pylist())
        if len(asked) > most:
            raise KilledError
        return real(self, documents)

    monkeypatch.setattr(TokenizeBatch, "__call__", lambda *given: counted(*given, most=at))
    with pytest.raises(KilledError):
        packed(tmp_path, prose(80), tokenizer)
    done = list(tmp_path.glob("packed/*.partial/tokens/*-of-*.arrow"))
    asked.clear()
    monkeypatch.setattr(TokenizeBatch, "__call__", lambda *given: counted(*given, most=10**6))
    found = packed(tmp_path, prose(80), tokenizer)
    assert digest_of(tmp_path) == whole
    again = sum(map(len, asked))
    assert (
        (again < 80 and done) if at == 5 else again == 80
    )  # the shards that were complete are not made again
    assert sorted(path.name for path in Path(found.rows.cache_files[0]["filename"]).parent.iterdir()) == [
        "checksums.json",
        "rows.arrow",
    ]


def test_a_corpus_that_lacks_documents_is_not_packed(tmp_path, tokenizer):
    found = written(tmp_path, prose(80))
    facts = {**found.facts, "documents": {**found.facts["documents"], "train": 81}}
    options = {"tokenizer": tokenizer, "length": 8, "name": "a", "cache": tmp_path, "tokenizer_digest": ""}
    with pytest.raises(ValueError, match="is damaged: 80 documents in train, not 81; delete it"):
        packing.pack(corpus.Corpus(found.folder, facts), "train", **options)
    assert not list((tmp_path / "packed").glob("*[0-9a-f]"))


@pytest.mark.slow
def test_where_one_process_is_killed_the_others_are_not_waited_for():
    before = set(active_children())

    def left():
        return set(active_children()) - before

    found = tokenize.map_in_processes(time.sleep, [0.0] + [60.0] * 9, 2)
    assert next(found) is None
    while not all(heeds_signals(each.pid) for each in left()):  # one that is at work ignores a first SIGTERM
        time.sleep(0.05)
    at_last = threading.Timer(15, lambda: [each.kill() for each in left()])
    at_last.start()
    left().pop().kill()  # as the kernel does where memory does not suffice
    began = time.monotonic()
    with pytest.raises(ValueError, match="a process that tokenises was ended, perhaps for want of memory"):
        next(found)
    at_last.cancel()
    assert time.monotonic() - began < 10 and not left()


PACKER = """
import sys
from pathlib import Path
from cpt.data import packing, tokenize
from tests.support import data_fixtures as made

if __name__ == "__main__":
    tokenize.SHARD = 20_000
    folder, texts = Path(sys.argv[1]), made.prose(int(sys.argv[2]))
    tokenizer = made.framed()
    packing.pack(
        made.written(folder, texts), "train", tokenizer=tokenizer, length=16, name="a", cache=folder,
        tokenizer_digest=made.tokenizer_digest(tokenizer), workers=2,
    )
"""


def children_of(number):
    paths = Path(f"/proc/{number}/task").glob("*/children")
    found = [int(each) for path in paths for each in path.read_text().split()]
    return found + [below for each in found for below in children_of(each)]


def is_alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.campaign
@pytest.mark.slow
def test_a_process_that_is_killed_leaves_no_others_and_is_continued(tmp_path, tokenizer):
    script, root = tmp_path / "packer.py", Path(__file__).parents[2]
    script.write_text(PACKER)
    arguments = [sys.executable, str(script), str(tmp_path / "cache"), "12000"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.DEVNULL)
    done = []
    for _ in range(6000):
        done = list((tmp_path / "cache" / "packed").glob("*.partial/tokens/*-of-*.arrow"))
        if done or process.poll() is not None:
            break
        time.sleep(0.01)
    others = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and done and len(others) >= 2
    for _ in range(1000):
        if not any(map(is_alive, others)):
            break
        time.sleep(0.01)
    assert not any(map(is_alive, others))
    subprocess.run(arguments, env=environment, check=True, stderr=subprocess.DEVNULL)
    packed(tmp_path / "alone", prose(12000), tokenizer)
    assert digest_of(tmp_path / "cache") == digest_of(tmp_path / "alone")


def test_a_slow_tokenizer_is_called_in_this_process(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenize, "to_json", lambda tokenizer: None)
    monkeypatch.setattr(tokenize, "map_in_processes", None)
    found = written(tmp_path, prose(80))
    how = {"tokenizer": tokenizer, "ending": [7], "name": "a", "folder": tmp_path / "tokens", "workers": 4}
    batches = list(tokenize_corpus(found, "train", **how))
    assert sum(len(sizes) for _, sizes in batches) == 80
    assert all(ids[sizes.cumsum() - 1].tolist() == [7] * len(sizes) for ids, sizes in batches)
