"""Made once: also by processes that start together, and after one that was killed."""

import logging
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
from cpt.core.cache import make_once
from cpt.core.checksums import FILE, seal

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


def wait_for(path):
    for _ in range(2000):
        if path.exists():
            return True
        time.sleep(0.005)
    return False


def test_it_is_made_once(tmp_path):
    made = []

    def make(partial):
        made.append(partial)
        assert not (tmp_path / "deep" / "thing").exists()
        (partial / "file").write_text("text")

    folder = tmp_path / "deep" / "thing"
    for _ in range(2):
        assert make_once(folder, make=make) == folder
    assert len(made) == 1
    assert (folder / "file").read_text() == "text"
    assert not made[0].exists()


def test_one_that_failed_is_made_again_from_what_it_left(tmp_path):
    def fails(partial):
        (partial / "kept").write_text("half")
        raise ValueError("no text")

    def goes_on(partial):
        (partial / "file").write_text((partial / "kept").read_text() + " and half")

    with pytest.raises(ValueError, match="no text"):
        make_once(tmp_path / "thing", make=fails)
    assert not (tmp_path / "thing").exists()
    folder = make_once(tmp_path / "thing", make=goes_on)
    assert (folder / "file").read_text() == "half and half"


def test_processes_that_start_together_make_one(tmp_path):
    folder, log = tmp_path / "thing", tmp_path / "log"
    processes = [started(folder, log, 0.2) for _ in range(3)]
    (tmp_path / "go").touch()
    assert [process.communicate(timeout=30)[0] for process in processes] == ["whole\n"] * 3
    assert [process.returncode for process in processes] == [0] * 3
    assert log.read_text() == "made\n"


def test_a_killed_maker_leaves_nothing_wrong(tmp_path):
    folder, log = tmp_path / "thing", tmp_path / "log"
    (tmp_path / "go").touch()
    killed = started(folder, log, 60)
    assert wait_for(tmp_path / "thing.partial" / "first")
    assert not folder.exists()
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert not folder.exists()
    heir = started(folder, log, 0)
    assert heir.communicate(timeout=30)[0] == "whole\n"
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", "first", "second"]
    assert log.read_text() == "made\nmade\n"


def test_a_process_that_waits_says_so_and_makes_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder, held, free = tmp_path / "thing", threading.Event(), threading.Event()

    def hold():
        with FileLock(tmp_path / "thing.lock"):
            held.set()
            free.wait(timeout=30)
            folder.mkdir()
            seal(folder)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(timeout=30)
    threading.Timer(0.7, free.set).start()
    assert make_once(folder, make=lambda partial: pytest.fail("made twice")) == folder
    holder.join()
    assert [record.getMessage() for record in caplog.records if record.name == "cpt.core.cache"] == [
        "waiting for another run that is making thing"
    ]


@pytest.fixture
def thing(tmp_path):
    """A function that opens a folder of two files, and a list of how often it was made."""
    made = []

    def make(partial):
        made.append(partial)
        (partial / "deep").mkdir(exist_ok=True)
        (partial / "first").write_bytes(b"x" * 1000)
        (partial / "deep" / "second").write_text("whole")

    return lambda: make_once(tmp_path / "thing", make=make), made


def flip(path, place=-1):
    """Changes one bit and keeps the time."""
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


DAMAGE = {
    "a bit": (lambda folder: flip(folder / "first", 500), "first differs from its checksum"),
    "a bit of a deep file": (lambda folder: flip(folder / "deep" / "second"), "deep/second differs from"),
    "a bit of the checksums": (lambda folder: flip(folder / FILE, 40), "checksums.json is"),
    "truncated": (lambda folder: os.truncate(folder / "first", 10), "first has 10 bytes, not 1000"),
    "a file": (lambda folder: (folder / "first").unlink(), "first is gone"),
    "the checksums": (lambda folder: (folder / FILE).unlink(), "checksums.json is gone"),
    "all": (lambda folder: [shutil.rmtree(folder), folder.write_text("a file")], "checksums.json is gone"),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_what_is_damaged_is_told_and_made_again(thing, tmp_path, caplog, harm):
    opened, made = thing
    folder = opened()
    damage, message = DAMAGE[harm]
    damage(folder)
    assert opened() == folder
    assert len(made) == 2
    assert (folder / "deep" / "second").read_text() == "whole"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{folder} is damaged ({message}") and line.endswith("and is made again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing.lock"]
    opened()
    assert len(made) == 2


def test_a_large_folder_is_read_behind_the_run(thing, monkeypatch):
    monkeypatch.setattr(cache, "LARGE", 0)
    opened, made = thing
    folder = opened()
    opened()
    assert cache.WATCH.damage() == []
    flip(folder / "first")
    assert opened() == folder and len(made) == 1  # nobody waits for it
    assert cache.WATCH.damage() == [f"{folder} was damaged (first differs from its checksum)"]
    assert cache.WATCH.damage() == [] and not folder.exists()
    opened()
    assert len(made) == 2 and cache.WATCH.damage() == []
    os.truncate(folder / "first", 10)  # sizes are looked at on opening all the same
    opened()
    assert len(made) == 3


def test_one_that_another_process_made_again_meanwhile_is_not_trusted(thing, monkeypatch):
    monkeypatch.setattr(cache, "LARGE", 0)
    opened, made = thing
    folder, late = opened(), threading.Event()
    work = cache.Watch.work
    monkeypatch.setattr(cache.Watch, "work", lambda self: (late.wait(30), work(self)))
    opened()
    cache.take_out(folder)
    opened()
    late.set()
    found = cache.WATCH.damage()
    assert found == [f"{folder} was damaged (another process made it again while this one read it)"]
    assert folder.exists() and len(made) == 2


def test_a_disk_that_cannot_be_read_is_told_and_nobody_hangs(thing, monkeypatch):
    monkeypatch.setattr(cache, "LARGE", 0)
    opened, _ = thing
    opened()
    monkeypatch.setattr("cpt.core.checksums.checksum", lambda path: path.with_name("no such").read_bytes())
    opened()
    (line,) = cache.WATCH.damage()
    assert "differs from its checksum" in line


def test_only_one_process_of_a_machine_reads_behind_the_run(thing, monkeypatch):
    monkeypatch.setattr(cache, "LARGE", 0)
    opened, _ = thing
    flip(opened() / "first")
    monkeypatch.setenv("LOCAL_RANK", "1")
    opened()
    assert cache.WATCH.damage() == []


def test_all_is_on_the_disk_before_it_has_its_name(thing, tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (done.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("renamed"), replace(*paths)))
    opened, _ = thing
    opened()
    partial = str(tmp_path / "thing.partial")
    before, after = done[: done.index("renamed")], done[done.index("renamed") + 1 :]
    names = ("", "/first", "/deep", "/deep/second", "/checksums.json")
    assert sorted(before) == sorted(partial + name for name in names)
    assert before[-1] == partial and after == [str(tmp_path)]


def test_what_the_dead_left_long_ago_is_removed_and_the_living_keep_theirs(thing, tmp_path):
    opened, _ = thing
    names = ("dead.partial", "living.partial", "fresh.partial", "dead.damaged", "thing.partial")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
        if name != "fresh.partial":
            for path in (tmp_path / name / "half", tmp_path / name):
                os.utime(path, (1, 1))
    (tmp_path / "thing.partial" / "base.ckpt.partial").write_text("half a file")
    with FileLock(tmp_path / "living.lock"):
        folder = opened()
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == [
        "fresh.partial",
        "living.partial",
        "thing",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", "deep", "first", "half"]
