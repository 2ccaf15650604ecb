"""What the campaigns' slow server is: what others do is seen late, what is one's own at once."""

import errno
import json
import os
import time

import pytest

from tests.conftest import ROOT
from tests.support.processes import ended, started
from tests.support.remote_files import LONGEST_S, Client, remote

LOOK = """
import json, os, sys, time
sys.path[:0] = [{root!r}]
from tests.support.remote_files import install
install()
from pathlib import Path
home, told = Path({home!r}), {{}}
told["before"] = (home / "theirs").exists()
(home / "asked").write_text("")
while "theirs" not in os.popen(f"ls {{home}}").read():
    time.sleep(0.01)
told["at once"] = (home / "theirs").exists()
told["opened"] = open(home / "theirs").read()
time.sleep(0.7)
told["late"] = (home / "theirs").exists()
(home / "sub").mkdir()
(home / "sub" / "own").write_text("x")
told["own"] = (home / "sub" / "own").exists()
os.replace(home / "sub" / "own", home / "sub" / "moved")
told["moved"] = [(home / "sub" / name).exists() for name in ("own", "moved")]
Path({out!r}).write_text(json.dumps(told))
"""


def test_what_others_do_is_seen_late_and_what_is_ones_own_at_once(tmp_path):
    home, out, script = tmp_path / "home", tmp_path / "out.json", tmp_path / "look.py"
    home.mkdir()
    script.write_text(LOOK.format(root=str(ROOT), home=str(home), out=str(out)))
    with remote(home, seed="1", late=0.6):
        process = started(script, cwd=tmp_path, log=tmp_path / "log")
    while not (home / "asked").exists() and process.is_alive():
        time.sleep(0.01)
    (home / "theirs").write_text("new")
    assert ended(process) == 0, (tmp_path / "log").read_text()
    told = json.loads(out.read_text())
    assert told["before"] is False and told["late"] is True
    assert told["opened"] == "new" and told["own"] is True and told["moved"] == [False, True]


def test_a_seed_says_how_long_calls_wait_and_a_file_that_cannot_be_read_names_itself(monkeypatch, tmp_path):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def waits(seed):
        slept.clear()
        client = Client("/nowhere", seed=seed, late=1)
        for _ in range(2000):
            client.wait()
        return list(slept)

    one = waits("a")
    assert one == waits("a") != waits("b")
    assert 40 < len(one) < 140 and max(one) > 1 and min(one) < LONGEST_S
    (tmp_path / "file").write_text("x")
    client = Client(str(tmp_path), seed="a", late=1, unreadable=1)
    with pytest.raises(OSError) as raised:
        client.opens(str(tmp_path / "file"), writes=False)
    assert raised.value.errno in (errno.ESTALE, errno.EIO)
    assert raised.value.filename == os.fspath(tmp_path / "file")
