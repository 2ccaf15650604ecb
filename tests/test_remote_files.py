"""What the campaigns' slow server is: what others do is seen late, what is one's own at once."""

import json
import time

from tests.conftest import ROOT
from tests.support.processes import ended, started
from tests.support.remote_files import remote

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
