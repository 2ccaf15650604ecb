"""Artifacts are made once, also by processes that start together, and never loaded damaged or half made."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from cpt.core import cache
from cpt.core.cache import full_check, make_once
from cpt.core.files import CHECKSUMS

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


def test_processes_that_start_together_make_one(tmp_path):
    folder, log = tmp_path / "thing", tmp_path / "log"
    processes = [started(folder, log, 0.2) for _ in range(3)]
    (tmp_path / "go").touch()
    assert [process.communicate(timeout=30)[0] for process in processes] == ["whole\n"] * 3
    assert log.read_text() == "made\n"


def test_a_killed_maker_leaves_nothing_that_is_loaded(tmp_path):
    folder, log = tmp_path / "thing", tmp_path / "log"
    (tmp_path / "go").touch()
    killed = started(folder, log, 60)
    deadline = time.monotonic() + 30
    while not (tmp_path / "thing.partial" / "first").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert (tmp_path / "thing.partial" / "first").exists() and not folder.exists()
    assert started(folder, log, 0).communicate(timeout=30)[0] == "whole\n"
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


def test_a_process_that_waits_says_so_and_makes_nothing(thing, tmp_path, caplog):
    caplog.set_level("INFO")
    opened, made = thing
    other, held = opened().rename(tmp_path / "other"), threading.Event()

    def hold():
        with FileLock(tmp_path / "thing.lock"):
            held.set()
            time.sleep(0.8)
            other.rename(tmp_path / "thing")

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(timeout=30)
    assert opened() == tmp_path / "thing" and len(made) == 1
    holder.join()
    assert [record.getMessage() for record in caplog.records if record.name == "cpt.core.cache"] == [
        "Waiting for another run that is making thing"
    ]


DAMAGE = {
    "a bit": (lambda folder: flip(folder / "first", 500), "first differs from its checksum"),
    "a bit of a deep file": (lambda folder: flip(folder / "deep" / "second"), "deep/second differs from"),
    "a bit of a checksum": (lambda folder: flip(folder / CHECKSUMS, -10), "first differs from its checksum"),
    "half the checksums": (lambda folder: os.truncate(folder / CHECKSUMS, 50), "checksums.json is damaged"),
    "truncated": (lambda folder: os.truncate(folder / "first", 10), "first has 10 bytes, not 1000"),
    "a file": (lambda folder: (folder / "first").unlink(), "first is gone"),
    "the checksums": (lambda folder: (folder / CHECKSUMS).unlink(), "checksums.json is gone"),
    "all": (lambda folder: [shutil.rmtree(folder), folder.write_text("")], "checksums.json is damaged"),
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
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{folder} is damaged ({message}") and line.endswith("making it again")
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
