"""Artifacts are made once, also by processes that start together, and never loaded damaged or half made;
files are written as a whole, and their damage is told in a line."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError

from cpt.core import cache
from cpt.core.cache import full_check, make_once
from cpt.core.files import CHECKSUMS, check_archive, find_damage, hash_files, writing
from cpt.core.tensors import check_state, save_state
from cpt.evaluation.scores import documents_file, load_documents

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


def started(folder, log, seconds):
    arguments = [sys.executable, "-c", MAKER, str(folder), str(log), str(seconds)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def flip(path, place=-1):
    """Changes one bit and keeps the time."""
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
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


def test_a_killed_maker_leaves_nothing_that_is_loaded_and_those_that_start_together_make_one(tmp_path):
    folder, log = tmp_path / "thing", tmp_path / "log"
    (tmp_path / "go").touch()
    killed = started(folder, log, 60)
    deadline = time.monotonic() + 30
    while not (tmp_path / "thing.partial" / "first").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert (tmp_path / "thing.partial" / "first").exists() and not folder.exists()
    (tmp_path / "go").unlink()
    processes = [started(folder, log, 0.2) for _ in range(2)]
    (tmp_path / "go").touch()
    assert [process.communicate(timeout=30)[0] for process in processes] == ["whole\n"] * 2
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", "first", "second"]
    assert log.read_text() == "made\nmade\n"


def test_a_build_that_failed_is_continued(tmp_path):
    def fails(partial):
        (partial / "kept").write_text("half")
        (partial / "base.ckpt.partial").write_text("half a file")
        raise ValueError("no text")

    def continues(partial):
        (partial / "file").write_text((partial / "kept").read_text() + " and half")

    with pytest.raises(ValueError, match="no text"):
        make_once(tmp_path / "thing", make=fails)
    assert not (tmp_path / "thing").exists()
    folder = make_once(tmp_path / "thing", make=continues)
    assert (folder / "file").read_text() == "half and half"
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", "file", "kept"]


DAMAGE = {
    "a bit": (lambda folder: flip(folder / "first", 500), "first"),
    "a bit of a deep file": (lambda folder: flip(folder / "deep" / "second"), "deep/second"),
    "a bit of a checksum": (lambda folder: flip(folder / CHECKSUMS, -10), "first"),
    "half the checksums": (lambda folder: os.truncate(folder / CHECKSUMS, 50), CHECKSUMS),
    "truncated": (lambda folder: os.truncate(folder / "first", 10), "first has 10 bytes, not 1000"),
    "a file": (lambda folder: (folder / "first").unlink(), "first is gone"),
    "the checksums": (lambda folder: (folder / CHECKSUMS).unlink(), f"{CHECKSUMS} is gone"),
    "all": (lambda folder: [shutil.rmtree(folder), folder.write_text("")], CHECKSUMS),
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
    assert caplog.messages[0].startswith(f"{folder} is damaged ({message}") and len(caplog.messages) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing.lock"]
    assert opened() == folder and len(made) == 2


def test_a_large_artifact_is_checked_by_size_and_in_full_if_wanted(thing, monkeypatch):
    monkeypatch.setattr(cache, "SMALL", 0)
    opened, made = thing
    folder = opened()
    flip(folder / "first")
    with full_check(False):
        assert opened() == folder and len(made) == 1
    with full_check(True):
        assert opened() == folder and len(made) == 2
    os.truncate(folder / "first", 10)
    assert opened() == folder and len(made) == 3


def test_all_is_on_the_disk_before_it_has_its_name(thing, tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (done.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append(paths[1]), replace(*paths)))
    opened, _ = thing
    folder, partial = opened(), tmp_path / "thing.partial"
    checksums, renamed = done.index(partial / CHECKSUMS), done.index(folder)
    names = ("first", "deep", "deep/second", f"{CHECKSUMS}.partial")
    assert {*done[:checksums]} == {str(partial), *(str(partial / name) for name in names)}
    assert done[checksums + 1 : renamed] == [str(partial)] and done[renamed + 1 :] == [str(tmp_path)]


def test_what_the_dead_left_long_ago_is_removed_and_the_living_keep_theirs(thing, tmp_path):
    opened, _ = thing
    for name in ("dead", "living", "fresh", "thing"):
        (tmp_path / f"{name}.partial").mkdir()
        (tmp_path / f"{name}.partial" / "half").write_text("")
        if name != "fresh":
            for path in (tmp_path / f"{name}.partial" / "half", tmp_path / f"{name}.partial"):
                os.utime(path, (1, 1))
    with FileLock(tmp_path / "living.lock"):
        folder = opened()
    left = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock")
    assert left == ["fresh.partial", "living.partial", "thing"]
    assert (folder / "half").exists()  # its own is continued


# Files


def test_an_archive_of_losses_by_document_with_any_byte_changed_is_told_in_a_line(tmp_path):
    """A version that zipfile does not know was an error of another kind."""
    archive = documents_file(tmp_path, 0)
    archive.parent.mkdir()
    np.savez(archive, law=np.ones((2, 3)))
    assert load_documents(tmp_path, [0])[0]["law"].shape == (2, 3)
    whole, refused = archive.read_bytes(), 0
    for value in (0, 255):
        for place in range(len(whole)):
            archive.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                check_archive(archive, instead="do this")
            except ValueError as error:
                assert str(error).endswith("; do this")
                refused += 1
    assert refused > len(whole)
    archive.write_bytes(whole[:-9])
    for row, said in ((0, "000.npz is truncated or damaged"), (1, "001.npz is gone")):
        with pytest.raises(ValueError, match=said):
            load_documents(tmp_path, [row])


def failing(error):
    def fails(*given):
        raise error

    return fails


def flip_weight(path):
    """A bit of a value, which torch.load does not notice."""
    data = path.read_bytes()
    place = data.index(np.ones(64, np.float32).tobytes())
    path.write_bytes(data[:place] + b"\x01" + data[place + 1 :])
    assert not torch.load(path, weights_only=True)["weight"].eq(1).all()


@pytest.mark.parametrize("harm", [flip_weight, lambda path: os.truncate(path, 900), os.unlink])
def test_a_damaged_state_is_refused_before_it_is_used(tmp_path, harm):
    path = tmp_path / "001.pt"
    save_state({"weight": torch.ones(64)}, path)
    check_state(path, instead="do this")
    harm(path)
    with pytest.raises(ValueError, match=r"001.pt is (truncated or damaged|gone).*; do this$"):
        check_state(path, instead="do this")


def test_a_file_that_the_disk_cannot_read_is_damaged(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")
    table = hash_files(tmp_path, [tmp_path / "file"])

    monkeypatch.setattr("cpt.core.files.file_hash", failing(OSError(5, "Input/output error")))
    assert list(find_damage(tmp_path, table, full=True)) == ["file cannot be read (Input/output error)"]


@pytest.mark.parametrize("message", ["[enforce fail at inline_container.cc:672]", "PytorchStreamWriter"])
def test_a_full_disk_under_torch_names_the_file(message, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", failing(RuntimeError(f"{message}\nmore")))
    (tmp_path / "001.pt").write_bytes(b"before")
    with pytest.raises(OSError, match=rf"{tmp_path}/001.pt cannot be written"):
        save_state({}, tmp_path / "001.pt")
    assert (tmp_path / "001.pt").read_bytes() == b"before"


@pytest.mark.parametrize("kind", [SafetensorError, Exception])  # of safetensors, of tokenizers
def test_a_full_disk_under_an_artifact_names_its_folder(kind, tmp_path):
    make = failing(kind("I/O error: No space left on device (os error 28)"))
    with pytest.raises(OSError, match=r"thing.partial cannot be written \(.*No space left on device"):
        make_once(tmp_path / "thing", make=make)
    with pytest.raises(RuntimeError, match="of no kind"), writing(tmp_path / "model"):
        raise RuntimeError("a tensor of no kind")  # no failed write
