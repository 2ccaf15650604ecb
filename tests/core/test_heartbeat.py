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
from cpt.core.heartbeat import (
    HEARTBEAT,
    Heartbeat,
    Phase,
    ProcessId,
    make_progress_bar,
    set_phase,
    start_time,
)
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


def ended_process() -> ProcessId:
    """A process that has ended and been waited for."""
    with subprocess.Popen(["true"]) as process:
        start = start_time(process.pid)
    return replace(ProcessId.current(), pid=process.pid, start_time=start)


def start_program(program: str, **variables: str) -> subprocess.Popen:
    """Starts a Python program that is no rank and has no parent to follow, but by these variables."""
    inherited = {name: value for name, value in os.environ.items() if name not in (PARENT, "LOCAL_RANK")}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, cwd=ROOT, env=inherited | variables, stdout=subprocess.PIPE, text=True)


def wait_while(condition) -> None:
    deadline = time.monotonic() + 10
    while condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_process_is_distinguished_from_a_later_one_with_its_pid_and_from_a_zombie():
    current = ProcessId.current()
    assert current.is_alive()
    assert replace(current, start_time=current.start_time + 2).is_alive()  # the clock was set
    assert replace(current, start_time=current.start_time - 100).is_alive() is False
    for missing in (ended_process(), replace(current, pid=-1), replace(current, pid=2**80)):
        assert missing.is_alive() is False
    for unknown in (replace(current, host="away"), replace(current, namespace="container")):
        assert unknown.is_alive() is None

    with subprocess.Popen(["true"]) as process:  # a zombie until it is waited for
        zombie = replace(current, pid=process.pid, start_time=start_time(process.pid))
        wait_while(zombie.is_alive)
        assert zombie.is_alive() is False


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_killed_process_takes_its_children_with_it_and_a_rank_ends_without_its_first():
    with start_program(PROGRAM) as process:
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
    wait_while(lambda: child.is_running() and child.status() != "zombie")
    assert not child.is_running() or child.status() == "zombie"

    # A rank ends when its parent is gone; a process that is no rank may have inherited the variable.
    variables = {PARENT: str(ended_process().pid)}
    with start_program(CHILD, LOCAL_RANK="1", **variables) as process:
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.strip()) == (128 + signal.SIGKILL, "")
    with start_program(CHILD, **variables) as process:
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.strip()) == (0, "here")


def test_the_heartbeat_reads_phase_and_innermost_bar(tmp_path):
    with heartbeat.heartbeat(tmp_path):
        with make_progress_bar("tokenizing law", total=10, hidden=False, initial=4) as bar:
            bar.smoothing = 0
            bar.start_t = bar._time() - 3
            bar.n = 6
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
        with make_progress_bar("law (1/3)", total=10, hidden=False) as bar:
            assert HEARTBEAT.read().phase_eta_s is HEARTBEAT.read().run_eta_s is None  # no step yet
            bar.start_t = bar._time() - 10
            bar.n = 5
            beat = HEARTBEAT.read()
            assert (beat.phase, beat.stage, beat.done) == ("training law", 1, 0.25)
            assert beat.run_eta_s == pytest.approx(beat.phase_eta_s + 14 + 120, abs=2)
        assert HEARTBEAT.read().done == 0.25  # between the last step and the next phase

    stored = Heartbeat.load(tmp_path)
    assert (stored.state, stored.done, stored.run_eta_s) == ("finished", 1.0, None)
