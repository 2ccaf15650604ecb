"""What a run says of itself while it runs and when it ends, asked by `python -m cpt.status` from outside."""

import json
import signal
import threading
import time

import pytest
from filelock import FileLock

from cpt import status
from cpt.core import heartbeat
from cpt.core.cache import make_once
from cpt.core.heartbeat import Heartbeat, ProcessId
from cpt.core.preemption import GO_ON
from cpt.methods.ncl import NCL
from tests.conftest import ROOT
from tests.runs.test_kill import command
from tests.support.processes import ended, sent, started

pytestmark = pytest.mark.slow


def only_run(folder):
    """What is seen of the only run below a folder; None as long as there is none."""
    found = status.read_statuses([folder / "outputs"]) if (folder / "outputs").exists() else []
    return found[0] if found else None


def seen_at(process, folder, phase):
    """The first look at a run in which it is at a step of a phase, and how long the run is left."""
    deadline = time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline:
        seen = only_run(folder)
        if seen and seen.phase == phase and seen.step and seen.run_eta_s is not None:
            return seen
        time.sleep(0.05)
    raise AssertionError((folder / "log").read_text()[-2000:])


def test_running_killed_and_preempted(corpora, cache, tmp_path):
    start = [*command(corpora, cache), "trainer.steps=300", "trainer.checkpoint_every=1000"]

    def again():
        return started(ROOT / "run.py", *start, cwd=tmp_path, log=tmp_path / "log")

    process = again()
    seen = seen_at(process, tmp_path, "learning law")
    assert (seen.state, seen.host, seen.pid) == ("running", ProcessId.current().host, process.pid)
    assert (seen.stage, seen.stages, seen.steps) == (1, 2, 300)
    assert seen.learned == pytest.approx(seen.step / 600, abs=1e-4)
    assert seen.run_eta_s > 1.5 * seen.phase_eta_s > 0 and seen.untimed == []
    assert seen.seen_s < 60 and seen.moved_s < 60
    process.kill()
    process.join()
    killed = only_run(tmp_path)
    assert (killed.state, killed.phase, killed.run_eta_s) == ("killed", "learning law", None)
    assert killed.learned >= seen.learned > 0

    process = again()
    seen_at(process, tmp_path, "learning law")
    sent(process, signal.SIGTERM)
    assert ended(process) == GO_ON
    left = only_run(tmp_path)
    assert (left.state, left.phase) == ("preempted", "learning law")
    assert left.why == f"stopped by SIGTERM after step {left.step} of 300 of law"
    assert left.learned == pytest.approx(left.step / 600, abs=1e-4)
    (run,) = (tmp_path / "outputs" / "default").iterdir()
    assert not list(run.glob("*.partial"))


def test_a_failed_run_leaves_its_message(small, start, tmp_path, monkeypatch):
    cfg = small("order=[law]")

    def fail(self):
        if self.domain.name == "law":
            raise RuntimeError("the disk\nis full")

    with monkeypatch.context() as patched:
        patched.setattr(NCL, "after_update", fail)
        with pytest.raises(RuntimeError):
            start(cfg, tmp_path / "run")
    seen = status.read_status(tmp_path / "run")
    assert (seen.state, seen.why, seen.phase) == ("failed", "RuntimeError: the disk is full", "learning law")
    assert not [each for each in threading.enumerate() if each.name == "heartbeat"]
    start(cfg, tmp_path / "run")
    assert status.read_status(tmp_path / "run").state == "finished"
    before = (tmp_path / "run" / "progress.json").read_bytes()
    with pytest.raises(ValueError, match="does not go on to 7"):
        start(small("order=[law]", "trainer.steps=7"), tmp_path / "run")
    assert (tmp_path / "run" / "progress.json").read_bytes() == before


def test_a_refused_run_leaves_a_message_where_its_folder_stays_and_else_no_folder(small, start, tmp_path):
    cfg = small("order=[nowhere]")
    with pytest.raises(ValueError):
        start(cfg, tmp_path / "alone")
    assert not (tmp_path / "alone").exists()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "console.log").write_text("")
    with pytest.raises(ValueError):
        start(cfg, tmp_path / "job")
    seen = status.read_status(tmp_path / "job")
    assert seen.state == "failed" and "nowhere" in seen.why


def test_a_second_start_leaves_the_heartbeat_of_the_first(small, start, tmp_path):
    cfg, run = small("order=[law]"), tmp_path / "run"
    start(cfg, run)
    with FileLock(run / ".lock"), heartbeat.heartbeat(run):
        before = (run / "progress.json").read_bytes()
        with pytest.raises(ValueError, match="another process is at work"):
            start(cfg, run)
        assert status.read_status(run).state == "running"
        assert Heartbeat.load(run).began == json.loads(before)["began"]


def test_waiting_for_another_run_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "TICK_S", 0.02)
    cache, run = tmp_path / "cache", tmp_path / "run"
    run.mkdir()
    cache.mkdir()
    lock = FileLock(cache / "base.lock", thread_local=False)
    with heartbeat.heartbeat(run):
        lock.acquire()
        threading.Timer(1.5, lock.release).start()
        maker = threading.Thread(target=make_once, args=[cache / "base"], kwargs={"make": lambda at: None})
        maker.start()
        states = []
        deadline = time.monotonic() + 60
        while maker.is_alive() and time.monotonic() < deadline:
            states.append(status.read_status(run))
            time.sleep(0.05)
    waited = [each for each in states if each.state == "waiting"]
    assert waited and waited[0].why == "another run that is making base"
