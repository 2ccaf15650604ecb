"""Artifacts are made once, also by processes that start together, and never loaded damaged or half made."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cpt.core import cache
from cpt.core.cache import check_all, make_once
from cpt.core.files import CHECKSUMS, check_archive
from cpt.evaluation.scores import documents_file, load_documents
from tests.conftest import ROOT

MAKER = """
import sys, time
from pathlib import Path
from cpt.core.cache import make_once
folder, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def make(partial):
    with log.open("a") as lines:
        lines.write("made\\n")
    (partial / "first").write_text("half")
    time.sleep(seconds)
    (partial / "second").write_text("whole")

while not (log.parent / "go").exists():
    time.sleep(0.005)
print((make_once(folder, make=make) / "second").read_text())
"""


def flip(path):
    stat, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture
def thing(tmp_path):
    """A function that opens an artifact of two files, and a list of how often it was made."""
    made = []

    def make(partial):
        made.append(partial)
        assert not (tmp_path / "thing").exists()
        (partial / "deep").mkdir(exist_ok=True)
        (partial / "first").write_bytes(b"x" * 1000)
        (partial / "deep" / "second").write_text("whole")

    return lambda: make_once(tmp_path / "thing", make=make), made


def test_the_first_process_of_a_run_makes_what_is_missing_and_without_it_another(
    thing, tmp_path, monkeypatch
):
    """Only the first logs and shows bars: a second that comes first waits for it."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    opened, made = thing

    def first():
        time.sleep(0.1)
        with cache.FileLock(tmp_path / "thing.lock"):
            (tmp_path / "partial").mkdir()
            (tmp_path / "partial" / "first").write_text("by the first")
            cache.finish_artifact(tmp_path / "partial", tmp_path / "thing")

    monkeypatch.setattr(cache, "HEAD_START", 60)
    with ThreadPoolExecutor() as threads:
        began = threads.submit(first)
        assert (opened() / "first").read_text() == "by the first" and not made
        began.result()
    monkeypatch.setattr(cache, "HEAD_START", 0.05)
    cache.discard(tmp_path / "thing")
    assert (opened() / "first").read_text() == "x" * 1000 and len(made) == 1


@pytest.mark.slow
def test_a_killed_maker_leaves_nothing_that_is_loaded_and_those_that_start_together_make_one(tmp_path):
    folder, log, go = tmp_path / "thing", tmp_path / "log", tmp_path / "go"

    def started(seconds):
        command = [sys.executable, "-c", MAKER, str(folder), str(log), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    go.touch()
    killed, deadline = started(60), time.monotonic() + 30
    while not (tmp_path / "thing.partial" / "first").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.kill()
    killed.communicate(timeout=30)
    assert (tmp_path / "thing.partial" / "first").exists() and not folder.exists()
    go.unlink()
    processes = [started(0.2) for _ in range(2)]
    go.touch()
    assert [process.communicate(timeout=30)[0] for process in processes] == ["whole\n"] * 2
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", "first", "second"]
    assert log.read_text() == "made\nmade\n"


DAMAGE = {
    "a bit": (lambda folder: flip(folder / "first"), "first"),
    "a bit of a deep file": (lambda folder: flip(folder / "deep" / "second"), "deep/second"),
    "half the checksums": (lambda folder: os.truncate(folder / CHECKSUMS, 50), CHECKSUMS),
    "truncated": (lambda folder: os.truncate(folder / "first", 10), "first has 10 bytes, not 1000"),
    "a file": (lambda folder: (folder / "first").unlink(), "first is missing"),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_a_damaged_artifact_is_made_again(thing, tmp_path, caplog, harm):
    opened, made = thing
    folder = opened()
    assert opened() == folder and len(made) == 1
    damage, message = DAMAGE[harm]
    damage(folder)
    assert opened() == folder and len(made) == 2
    assert (folder / "deep" / "second").read_text() == "whole"
    (told,) = caplog.messages
    assert told.startswith(f"Rebuilding {folder}, which is damaged ({message}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing.lock"]


def test_a_large_artifact_is_checked_by_size_and_in_full_if_wanted(thing, monkeypatch):
    monkeypatch.setattr(cache, "SMALL", 0)
    opened, made = thing
    folder = opened()
    flip(folder / "first")
    for full, count in ((False, 1), (True, 2)):
        check_all.set(full)
        assert opened() == folder and len(made) == count
    check_all.set(False)


def test_a_full_disk_is_told_with_the_path(tmp_path):
    def fill(partial):
        with open("/dev/full", "wb", buffering=0) as file:  # whose write knows no name
            file.write(b"a")

    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/thing"):
        make_once(tmp_path / "thing", make=fill)


def test_all_is_on_the_disk_before_it_has_its_name(thing, tmp_path, monkeypatch):
    done, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda number: done.append(os.readlink(f"/proc/self/fd/{number}")))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append(paths[1]), replace(*paths)))
    folder, partial = thing[0](), tmp_path / "thing.partial"
    checksums, renamed = done.index(partial / CHECKSUMS), done.index(folder)
    names = ("first", "deep", "deep/second", f"{CHECKSUMS}.partial")
    assert {*done[:checksums]} == {str(partial), *(str(partial / name) for name in names)}
    assert done[checksums + 1 : renamed] == [str(partial)] and done[renamed + 1 :] == [str(tmp_path)]


def test_an_archive_of_losses_by_document_with_any_byte_changed_is_told_in_a_line(tmp_path):
    archive = documents_file(tmp_path, 0)
    archive.parent.mkdir()
    np.savez(archive, law=np.ones((2, 3)))
    whole, refused = archive.read_bytes(), 0
    for place in range(len(whole)):
        archive.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            check_archive(archive, instead="do this")
        except ValueError as error:
            assert str(error).endswith("; do this")
            refused += 1
    assert refused > len(whole) / 2
    archive.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="000.npz is truncated or damaged"):
        load_documents(tmp_path, [0])
