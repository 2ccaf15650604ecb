"""progress.json: what the heartbeat reads from phase and bar; processes that have ended."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psutil
import pytest

from cpt.core import heartbeat
from cpt.core.heartbeat import HEARTBEAT, Heartbeat, Phase, ProcessId, progress_bar, set_phase, start_time
from cpt.core.processes import PARENT
from tests.conftest import ROOT

CHILD = "from cpt.core.processes import die_with_parent; die_with_parent(); print('here', flush=True)"
PROGRAM = f"""
import subprocess, sys, time
from cpt.core.processes import die_with_parent
die_with_parent()
waiting = {CHILD!r} + "; import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def earlier(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def gone() -> ProcessId:
    with subprocess.Popen(["true"]) as process:
        started = start_time(process.pid)
    return replace(ProcessId.current(), pid=process.pid, start_time=started)


def here(program: str, **variables: str) -> subprocess.Popen:
    kept = {name: value for name, value in os.environ.items() if name not in (PARENT, "LOCAL_RANK")}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, cwd=ROOT, env=kept | variables, stdout=subprocess.PIPE, text=True)


def wait_while(condition) -> None:
    deadline = time.monotonic() + 10
    while condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_process_is_told_from_another_with_its_pid_and_from_a_zombie():
    own = ProcessId.current()
    assert own.is_alive() and replace(own, start_time=own.start_time + 2).is_alive()  # the clock was set
    assert replace(own, start_time=own.start_time - 100).is_alive() is False
    assert replace(own, host="away").is_alive() is replace(own, namespace="container").is_alive() is None
    assert gone().is_alive() is replace(own, pid=-1).is_alive() is replace(own, pid=2**80).is_alive() is False
    with subprocess.Popen(["true"]) as process:  # a zombie until it is waited for
        zombie = replace(own, pid=process.pid, start_time=start_time(process.pid))
        wait_while(zombie.is_alive)
        assert zombie.is_alive() is False


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_killed_process_takes_its_children_with_it_and_a_rank_ends_without_its_first():
    with here(PROGRAM) as process:
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
    wait_while(lambda: child.is_running() and child.status() != "zombie")
    assert not child.is_running() or child.status() == "zombie"
    for rank, code, words in (("1", 128 + signal.SIGKILL, ""), (None, 0, "here")):
        with here(CHILD, **{PARENT: str(gone().pid)} | ({"LOCAL_RANK": rank} if rank else {})) as process:
            said, _ = process.communicate(timeout=60)
        assert (process.returncode, said.strip()) == (code, words)


def test_the_heartbeat_reads_phase_and_innermost_bar(tmp_path):
    with heartbeat.heartbeat(tmp_path):
        with progress_bar("tokenising law", total=10, hidden=False, initial=4) as bar:
            bar.smoothing, bar.start_t, bar.n = 0, bar._time() - 3, 6
            assert HEARTBEAT.read().phase_eta_s == pytest.approx(6.0, abs=0.5)  # (10 - 6) / ((6 - 4) / 3)
        phase = Phase(
            name="training law",
            stage=1,
            stages=3,
            trains=True,
            earlier_steps=20,
            total_steps=100,
            remaining_s=14.0,
            remaining_steps=60,
        )
        set_phase(phase)
        with progress_bar("law (1/3)", total=10, hidden=False) as bar:
            assert HEARTBEAT.read().phase_eta_s is HEARTBEAT.read().run_eta_s is None  # no step yet
            bar.start_t, bar.n = bar._time() - 10, 5
            beat = HEARTBEAT.read()
            assert (beat.phase, beat.stage, beat.done) == ("training law", 1, 0.25)
            assert beat.run_eta_s == pytest.approx(beat.phase_eta_s + 14 + 120, abs=2)
        assert HEARTBEAT.read().done == 0.25  # between the last step and the next phase
    ended = Heartbeat.load(tmp_path)
    assert (ended.state, ended.done, ended.run_eta_s) == ("finished", 1.0, None)
