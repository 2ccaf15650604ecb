"""The line of a sweep on a terminal: what its running jobs are at, as wide as the terminal is."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpt.core.signs import Holder, Sign, now
from cpt.sweeps import line
from cpt.sweeps.line import SweepLine, fit, tell_job

LAW = ("#3 learning law (1/3) 20 %", " 1:02:03")
BASE = ("#4 starting", "")


def test_all_is_told_where_there_is_room():
    assert fit([LAW, BASE], 60) == "#3 learning law (1/3) 20 % 1:02:03 | #4 starting"
    assert fit([], 60) == ""


@pytest.mark.parametrize("count", [1, 2, 5, 30])
def test_it_is_never_wider_than_the_terminal_and_times_are_whole(count):
    for room in range(0, 120):
        text = fit([LAW, BASE][:count] if count < 3 else [LAW] * count, room)
        assert len(text) <= room
        if room >= 40 and count != 2:
            shown = [part for part in text.split(line.BETWEEN) if part.startswith("#3")]
            assert all(part.endswith("1:02:03") for part in shown)
            assert len(shown) == count or text.endswith(f"+{count - len(shown)}")


def test_what_a_short_one_leaves_is_for_the_long_ones():
    assert fit([LAW, BASE], 40) == "#3 learning law (… 1:02:03 | #4 starting"


def job(folder: Path, **given):
    """A job that has begun just now, with a sign in its folder."""
    made, began = SimpleNamespace(number=3, folder=folder, began=now()), now()
    times = {"began": began, "moved": began, "written": began}
    Sign(**{"state": "running", "holder": Holder.own(), **times, **given}).write(folder)
    return made


def test_the_time_is_the_run_s_or_as_far_as_it_is_known(tmp_path):
    at = {"phase": "learning law", "stage": 1, "stages": 3, "step": 3, "steps": 10, "phase_eta_s": 7.0}
    what = "#3 learning law (1/3) 30 %"
    assert tell_job(job(tmp_path, **at, run_eta_s=61.0)) == (what, " 1:01")
    assert tell_job(job(tmp_path, **at, run_eta_s=61.0, untimed=["probes"])) == (what, " 1:01+")
    assert tell_job(job(tmp_path, **at)) == (what, " 0:07+")
    assert tell_job(job(tmp_path, phase="starting")) == ("#3 starting", "")
    assert tell_job(job(tmp_path, state="waiting", phase="making the base", why="x")) == ("#3 waiting", "")
    assert tell_job(job(tmp_path, state="finished")) == ("#3 ending", "")
    assert tell_job(job(tmp_path, state="preempted", written="2026-01-01T00:00:00Z")) == ("#3 starting", "")
    (tmp_path / "progress.json").write_text("{")
    assert tell_job(job(tmp_path)) and tell_job(SimpleNamespace(number=4, folder=tmp_path / "no")) == BASE


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_the_line_and_a_file_nothing(tmp_path, monkeypatch):
    running = [job(tmp_path, phase="learning law", stage=1, stages=3, step=3, steps=10, run_eta_s=61.0)]
    written = {}
    for kind in (Terminal, io.StringIO):
        monkeypatch.setattr(sys, "stderr", written.setdefault(kind, kind()))
        told = SweepLine(4)
        told.refresh(running)
        told.bar.update()
        running[0].folder = tmp_path / "moved"  # is looked at again after a while only
        told.refresh(running)
        monkeypatch.setattr(line, "EVERY_S", 0.0)
        told.refresh(running)
        told.bar.close()
        monkeypatch.undo()
        running[0].folder = tmp_path
    assert written[io.StringIO].getvalue() == ""
    lines = [each.strip() for each in written[Terminal].getvalue().split("\r") if "#3" in each]
    assert lines[0] == "0/4 jobs [00:00<?], #3 learning law (1/3) 30 % 1:01"
    assert "#3 learning law" in lines[-3] and "#3 starting" in lines[-1]
