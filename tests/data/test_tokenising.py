"""Tokenised in pieces: the same rows whoever makes them, and whenever it was killed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from cpt.core import growing
from cpt.core.growing import PLACE
from cpt.data import corpus, packing, processes, tokenising
from cpt.data.corpora import tokenizer_digest
from cpt.data.tokenising import (
    FastEncoder,
    Piece,
    SlowEncoder,
    choose_encoder,
    count_workers,
    pieces,
    read_piece,
)
from tests.data.test_packing import STYLES, TRICKY
from tests.support import data_fixtures as made
from tests.support.data_fixtures import prose, written
from tests.support.killing import KilledError
from tests.support.processes import heeds_signals

LENGTH = 16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """A few documents each; every piece is committed."""
    monkeypatch.setattr(corpus, "BATCH", 5)
    monkeypatch.setattr(tokenising, "PIECE", 600)
    monkeypatch.setattr(tokenising, "WORTH", 600)
    monkeypatch.setattr(growing, "COMMIT", 1)


@pytest.fixture(scope="module")
def tokenizer():
    return made.framed()


def packed(folder, texts, tokenizer, *, workers=1, length=LENGTH):
    return packing.pack(
        *(written(folder, texts), "train"),
        **{"tokenizer": tokenizer, "length": length, "name": "a", "cache": folder, "workers": workers},
        tokenizer_digest=tokenizer_digest(tokenizer),
    )


def digest_of(folder):
    (path,) = (folder / "packed").glob("*/rows.arrow")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Rows that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BATCH", 5)
        patch.setattr(tokenising, "PIECE", 600)
        packed(folder, prose(80), made.framed())
    return digest_of(folder)


@pytest.mark.parametrize("style", STYLES)
def test_a_tokenizer_without_transformers_gives_the_same_ids(style):
    tokenizer, texts = getattr(made, style)(), [*prose(30), *TRICKY]
    light = choose_encoder(tokenizer, size=10**9)
    expected = SlowEncoder(tokenizer)(texts)
    assert light(texts) == expected
    tokenizer(texts[:3], truncation=True, max_length=3)  # leaves its settings in the backend
    assert choose_encoder(tokenizer, size=10**9)(texts) == expected == SlowEncoder(tokenizer)(texts)


def test_a_tokenizer_with_code_of_its_own_is_called():
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *arguments, **options):
            return super()._encode_plus(*arguments, **options)

    assert isinstance(
        choose_encoder(Own(tokenizer_object=made.framed().backend_tokenizer), size=10**9), SlowEncoder
    )
    assert isinstance(choose_encoder(made.framed(), size=10**9), FastEncoder)


@pytest.mark.parametrize("split", range(3))
def test_pieces_are_the_documents_of_a_split_in_their_order(tmp_path, monkeypatch, split):
    monkeypatch.setattr(tokenising, "PIECE", 900)
    texts = [*prose(60), "x" * 3000, *prose(20, seed=1)]
    found = written(tmp_path, texts, split=corpus.SPLITS[split])
    parts = list(pieces(found.folder, split))
    assert len(parts) > 5 and parts[-1].bytes < 800  # what is left over, too
    assert [part.first for part in parts[1:]] == [part.behind for part in parts[:-1]]
    assert [part.begin for part in parts[1:]] == [part.end for part in parts[:-1]]
    read = [[text for few in read_piece(found.folder, split, part) for text in few] for part in parts]
    assert sum(read, []) == texts
    assert [part.bytes for part in parts] == [sum(len(text.encode()) for text in each) for each in read]
    later = parts[3]
    assert list(pieces(found.folder, split, begin=later.begin, first=later.first)) == parts[3:]


def test_a_process_for_each_core_unless_the_text_is_small(monkeypatch):
    monkeypatch.setattr(tokenising, "WORTH", 100)
    monkeypatch.setattr(tokenising, "cores", lambda: 8)
    assert [count_workers(None, size=size) for size in (0, 199, 200, 750, 10_000)] == [1, 1, 2, 7, 8]
    assert [count_workers(3, size=size) for size in (0, 200, 10_000)] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_rows_do_not_depend_on_how_many_make_them(tmp_path, tokenizer, whole, workers):
    found = packed(tmp_path, prose(80), tokenizer, workers=workers)
    assert digest_of(tmp_path) == whole
    assert len(found) > 100


def test_what_is_made_out_of_turn_is_taken_in_turn(monkeypatch):
    """Later pieces are ready long before earlier ones."""

    class Pool:
        def __init__(self, *arguments, **options):
            self.asked = []

        def submit(self, work, piece):
            future = processes.Future()
            self.asked.append((future, piece))
            if len(self.asked) == 3:
                for late, own in reversed(self.asked):
                    late.set_result(own.first)
                self.asked = []
            return future

        def shutdown(self, **options):
            for late, own in reversed(self.asked):
                late.set_result(own.first)

    monkeypatch.setattr(processes, "ProcessPoolExecutor", Pool)
    parts = [Piece(0, 0, number, number + 1, 1) for number in range(9)]
    found = list(processes.in_order(lambda piece: None, iter(parts), 2, told=""))
    assert found == [(part, part.first) for part in parts]


@pytest.mark.parametrize("kind", ["called", "quick"])
@pytest.mark.parametrize("at", [0, 1, 7, 11])
def test_packing_goes_on_where_it_was_killed(tmp_path, tokenizer, whole, monkeypatch, at, kind):
    real, asked = tokenising.tokenise_piece, []
    if kind == "called":
        monkeypatch.setattr(tokenising, "WORTH", 1 << 30)

    def dies(piece, **options):
        asked.append(piece)
        if len(asked) == at + 1:
            raise KilledError
        return real(piece, **options)

    monkeypatch.setattr(tokenising, "tokenise_piece", dies)
    with pytest.raises(KilledError):
        packed(tmp_path, prose(80), tokenizer)
    done = asked[:at]
    asked.clear()
    monkeypatch.setattr(
        tokenising,
        "tokenise_piece",
        lambda piece, **options: (asked.append(piece), real(piece, **options))[1],
    )
    found = packed(tmp_path, prose(80), tokenizer)
    assert digest_of(tmp_path) == whole
    assert not set(asked) & set(done) and len(asked) + len(done) > 11
    assert sorted(path.name for path in Path(found.rows.cache_files[0]["filename"]).parent.iterdir()) == [
        "checksums.json",
        "rows.arrow",
    ]


def test_where_one_process_is_killed_the_others_are_not_waited_for():
    before = set(active_children())

    def left():
        return set(active_children()) - before

    made_in_order = processes.in_order(time.sleep, iter([0.0] + [60.0] * 9), 2, told=tokenising.ENDED)
    assert next(made_in_order)[0] == 0.0
    while not all(heeds_signals(each.pid) for each in left()):  # one that is at work ignores a first SIGTERM
        time.sleep(0.05)
    at_last = threading.Timer(15, lambda: [each.kill() for each in left()])
    at_last.start()
    left().pop().kill()  # as the kernel does where memory does not suffice
    began = time.monotonic()
    with pytest.raises(ValueError, match="a process that tokenises was ended, perhaps for want of memory"):
        next(made_in_order)
    at_last.cancel()
    assert time.monotonic() - began < 10 and not left()


LOST = {
    "a truncated place": lambda folder: os.truncate(folder / PLACE, 30),
    "no place": lambda folder: (folder / PLACE).unlink(),
    "rows that are gone": lambda folder: (folder / "rows.arrow").unlink(),
    "truncated rows": lambda folder: os.truncate(folder / "rows.arrow", 900),
}


@pytest.mark.parametrize("harm", LOST)
def test_what_a_kill_left_damaged_is_made_anew(tmp_path, tokenizer, whole, monkeypatch, harm):
    def dies(piece, *, real=tokenising.tokenise_piece, **options):
        if piece.first > 40:
            raise KilledError
        return real(piece, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tokenising, "tokenise_piece", dies)
        with pytest.raises(KilledError):
            packed(tmp_path, prose(80), tokenizer)
    (left,) = (tmp_path / "packed").glob("*.partial")
    LOST[harm](left)
    packed(tmp_path, prose(80), tokenizer)
    assert digest_of(tmp_path) == whole


def test_a_corpus_that_lacks_documents_is_not_packed(tmp_path, tokenizer):
    found = written(tmp_path, prose(80))
    facts = {**found.facts, "documents": {**found.facts["documents"], "train": 81}}
    options = {"tokenizer": tokenizer, "length": 8, "name": "a", "cache": tmp_path, "tokenizer_digest": ""}
    with pytest.raises(ValueError, match="is damaged: 80 documents in train, not 81; delete it"):
        packing.pack(corpus.Corpus(found.folder, facts), "train", **options)
    assert not list((tmp_path / "packed").glob("*[0-9a-f]"))


PACKER = """
import sys
from pathlib import Path
from cpt.core import growing
from cpt.data import corpus, packing, tokenising
from tests.support import data_fixtures as made

if __name__ == "__main__":
    corpus.BATCH, tokenising.PIECE, tokenising.WORTH, growing.COMMIT = 5, 600, 600, 1
    folder, texts = Path(sys.argv[1]), made.prose(int(sys.argv[2]))
    tokenizer = made.framed()
    packing.pack(
        made.written(folder, texts), "train", tokenizer=tokenizer, length=16, name="a", cache=folder,
        tokenizer_digest=made.tokenizer_digest(tokenizer), workers=2,
    )
"""


def children_of(number):
    found = [
        int(each)
        for path in Path(f"/proc/{number}/task").glob("*/children")
        for each in path.read_text().split()
    ]
    return found + [below for each in found for below in children_of(each)]


def is_alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.campaign
@pytest.mark.slow
def test_a_process_that_is_killed_leaves_no_others_and_is_gone_on_with(tmp_path, tokenizer):
    script, root = tmp_path / "packer.py", Path(__file__).parents[2]
    script.write_text(PACKER)
    arguments = [sys.executable, str(script), str(tmp_path / "cache"), "12000"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.DEVNULL)
    place = None
    for _ in range(6000):
        place = next((tmp_path / "cache" / "packed").glob(f"*.partial/{PLACE}"), None)
        if place is not None or process.poll() is not None:
            break
        time.sleep(0.01)
    others = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and place is not None and len(others) >= 2
    assert json.loads(place.read_text())["place"]["first"] > 0
    for _ in range(1000):
        if not any(map(is_alive, others)):
            break
        time.sleep(0.01)
    assert not any(map(is_alive, others))
    subprocess.run(arguments, env=environment, check=True, stderr=subprocess.DEVNULL)
    packed(tmp_path / "alone", prose(12000), tokenizer)
    assert digest_of(tmp_path / "cache") == digest_of(tmp_path / "alone")


def test_ids_are_whole_numbers_of_four_bytes(tmp_path, tokenizer):
    found = written(tmp_path, prose(20))
    part = next(pieces(found.folder, 0))
    ids, sizes = tokenising.tokenise_piece(
        part, folder=found.folder, split=0, encode=SlowEncoder(tokenizer), ending=[7]
    )
    assert ids.dtype == sizes.dtype == np.int32 and sizes.sum() == len(ids)
    assert (ids[np.cumsum(sizes) - 1] == 7).all()


@pytest.mark.parametrize(("size", "kind"), [(0, SlowEncoder), (499, SlowEncoder), (500, FastEncoder)])
def test_a_small_text_is_tokenised_by_transformers(tokenizer, monkeypatch, size, kind):
    monkeypatch.setattr(tokenising, "WORTH", 500)
    assert isinstance(choose_encoder(tokenizer, size=size), kind)
    monkeypatch.setattr(tokenising, "WORTH", 10**9)  # the vocabulary decides
    least = tokenizer.vocab_size * tokenising.WORTH_OF_ENTRY
    assert isinstance(choose_encoder(tokenizer, size=least - 500 + size), kind)
