"""Made once: also by processes that start together, and after one that was killed."""

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from cpt.cache import made_once
from cpt.checksums import seal

MAKER = """
import sys, time
from pathlib import Path
from cpt.cache import made_once

folder, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def make(partial):
    with log.open("a") as lines:
        lines.write("made\\n")
    (partial / "first").write_text("half")
    time.sleep(seconds)
    (partial / "second").write_text("whole")

while not (log.parent / "go").exists():
    time.sleep(0.005)
print((made_once(folder, make=make) / "second").read_text())
"""


def started(folder, log, seconds):
    arguments = [sys.executable, "-c", MAKER, str(folder), str(log), str(seconds)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)


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
        assert made_once(folder, make=make) == folder
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
        made_once(tmp_path / "thing", make=fails)
    assert not (tmp_path / "thing").exists()
    folder = made_once(tmp_path / "thing", make=goes_on)
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
    assert made_once(folder, make=lambda partial: pytest.fail("made twice")) == folder
    holder.join()
    assert [record.getMessage() for record in caplog.records if record.name == "cpt.cache"] == [
        "waiting for another run that is making thing"
    ]
