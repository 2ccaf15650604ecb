"""`python -m cpt.status`: what is told of a folder by its files alone, in any state and after any damage."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cpt import status
from cpt.core.signs import FRESH_S, Holder, Sign, now
from tests.conftest import ROOT

AWAY = Holder(host="away", pid=7, born=1, machine="away another")


def earlier(seconds: float) -> str:
    """So long ago."""
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def sign(state="running", **given) -> Sign:
    times = dict.fromkeys(("began", "moved", "written"), now())
    return Sign(**{"state": state, "holder": Holder.own(), **times, **given})


def make_run(folder: Path, made: Sign | None = None, *, finished: bool | None = None, rows: int = 2) -> Path:
    """A run folder with a sign and, unless None, with scores that say whether it is finished."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: x\n")
    if made is not None:
        made.write(folder)
    if finished is not None:
        about = json.dumps({"order": ["law", "food", "space", "art"], "finished": finished})
        names = json.dumps(["base", "law", "food", "space", "art"][:rows])
        (folder / "scores.json").write_text(
            f'{{\n"version": 3,\n"rows": {names},\n"run": {about},\n"nll": [[1'
        )
    return folder


def gone() -> Holder:
    """A process that is not there any more."""
    with subprocess.Popen(["true"]) as process:
        born = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    return replace(Holder.own(), pid=process.pid, born=born)


def called(*arguments, cwd=ROOT, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "cpt.status", *map(str, arguments)]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, **options)


STATES = {
    "here": ({}, None, "running", ""),
    "waits": ({"state": "waiting", "why": "another run"}, None, "waiting", "another run"),
    "away": ({"holder": AWAY}, None, "running", ""),
    "its clock is ahead": ({"holder": AWAY, "written": earlier(-86_400)}, None, "running", ""),
    "silent": ({"holder": AWAY, "written": earlier(FRESH_S + 1)}, None, "silent", ""),
    "here and slow": ({"written": earlier(FRESH_S + 1)}, None, "running", ""),
    "a container of this name": (
        {"holder": replace(Holder.own(), machine="its own", pid=2**22 + 1)},
        None,
        "running",
        "",
    ),
    "number given again": ({"holder": replace(Holder.own(), born=1)}, None, "killed", ""),
    "adds end tasks": ({}, True, "running", ""),
    "preempted": ({"state": "preempted", "why": "by SIGTERM"}, False, "preempted", "by SIGTERM"),
    "failed": ({"state": "failed", "why": "no disk"}, False, "failed", "no disk"),
    "failed away long ago": (
        {"state": "failed", "written": earlier(1e6), "holder": AWAY},
        None,
        "failed",
        "",
    ),
    "finished": ({"state": "finished"}, True, "finished", ""),
    "failed later": ({"state": "failed", "why": "no"}, True, "finished", "its last start: failed, no"),
    "lost": ({"state": "finished"}, None, "unfinished", "scores.json is not that of a finished run"),
}


@pytest.mark.parametrize("case", STATES)
def test_states(case, tmp_path):
    given, finished, state, why = STATES[case]
    make_run(tmp_path / "run", sign(**given), finished=finished)
    (seen,) = status.look_at([tmp_path])
    assert (seen.state, seen.why) == (state, why)
    assert status.look_at([tmp_path / "run"]) == [
        replace(seen, seen_s=pytest.approx(seen.seen_s, abs=2), moved_s=pytest.approx(seen.moved_s, abs=2))
    ]


def test_a_process_that_is_gone_was_killed(tmp_path):
    make_run(tmp_path / "half", sign(holder=gone(), phase="learning law", learned=0.4))
    make_run(tmp_path / "whole", sign(holder=gone()), finished=True)
    half, whole = status.look_at([tmp_path])
    assert (half.state, half.phase, half.learned, half.run_eta_s) == ("killed", "learning law", 0.4, None)
    assert (whole.state, whole.why) == ("finished", "its last start: killed")
    with subprocess.Popen(["true"]) as process:  # a zombie until it is waited for
        zombie = replace(Holder.own(), pid=process.pid, born=0)
        deadline = time.monotonic() + 10
        while zombie.lives() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert zombie.lives() is False


def test_without_a_sign_the_scores_tell(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", finished=False, rows=3)
    make_run(tmp_path / "c", finished=True, rows=5)
    found = status.look_at([tmp_path])
    assert [each.state for each in found] == ["unfinished", "unfinished", "finished"]
    assert [each.learned for each in found] == [None, 0.5, 1.0]
    assert all(0 <= each.seen_s < 60 for each in found)


DAMAGES = {
    "empty": "",
    "half": '{"version": 1, "state": "run',
    "another form": "[]",
    "another version": '{"version": 2}',
    "deep": "[" * 100_000,
    "bytes": b"\xff\xfe\x00",
    "no holder": {"holder": None},
    "no time": {"written": "yesterday"},
    "no zone": {"written": "2026-01-01T00:00:00"},
    "no state": {"state": "dancing"},
    "a text for a number": {"step": "x"},
    "a list": {"phase": []},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_sign_is_told_in_a_line(damage, tmp_path, capsys):
    for name, finished in ("half", False), ("whole", True):
        run = make_run(tmp_path / name, sign(), finished=finished)
        content, path = DAMAGES[damage], run / "progress.json"
        if isinstance(content, dict):
            content = json.dumps(json.loads(path.read_text()) | content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert status.main([str(tmp_path)]) == 0
    half, whole, total = capsys.readouterr().out.splitlines()[1:]
    assert half.startswith("unknown") and "progress.json cannot be read: " in half
    assert whole.startswith("finished") and "progress.json cannot be read: " in whole
    assert total == "2 runs: 1 finished, 1 unknown"


def test_scores_that_cannot_be_read_are_told(tmp_path):
    for number, text in enumerate(("", "[]", "\0", '"run": 3\n"rows": []', '{"run": {}}')):
        (make_run(tmp_path / f"a{number}") / "scores.json").write_text(text)
        (make_run(tmp_path / f"b{number}", sign("failed", why="no")) / "scores.json").write_text(text)
    found = status.look_at([tmp_path])
    assert [each.state for each in found] == ["unknown"] * 5 + ["failed"] * 5
    assert found[0].why == "scores.json cannot be read" and found[5].why == "no; scores.json cannot be read"


def test_a_later_version_may_add_to_a_sign(tmp_path):
    run = make_run(tmp_path / "run", sign(phase="learning law"))
    told = json.loads((run / "progress.json").read_text())
    told["holder"]["rank"] = told["watts"] = 3
    (run / "progress.json").write_text(json.dumps(told))
    assert status.look(run).phase == "learning law"


def test_a_line_says_where_it_is_and_how_long_that_takes(tmp_path, capsys):
    where = {"phase": "learning law", "stage": 2, "stages": 4, "step": 30, "steps": 120, "unit": "it"}
    how = {"learned": 0.319, "phase_eta_s": 12.4, "run_eta_s": 3723.0, "untimed": ["endtasks"]}
    make_run(tmp_path / "run", sign(**where, **how, written=earlier(130)))
    assert status.main([str(tmp_path)]) == 0
    head, line, total = capsys.readouterr().out.splitlines()
    by = f"{Holder.own().host}:{os.getpid()}"
    assert line.split() == [
        *("running", "31", "%", "1:02:03+", "2", "min", by),
        *(str(tmp_path / "run"), "learning", "law", "(2/4)", "25", "%,", "0:12"),
    ]
    assert head.split() == [*status.HEAD] and total == "1 run: 1 running"


def test_times_are_short():
    assert [status.clock(s) for s in (0, 59.6, 61, 3600, 90000)] == [
        "0:00",
        "1:00",
        "1:01",
        "1:00:00",
        "1 d 1 h",
    ]
    assert [status.ago(s) for s in (0, 59, 60, 7200, 2e5)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]


def test_names_of_any_kind_stay_on_their_line(tmp_path):
    names = [b"new\nline", b"\x1b[31mred", b"no text \xff", "Übung = [a b]".encode(), b"-f"]
    for name in names:
        make_run(tmp_path / os.fsdecode(name), sign("failed", why="what\nhappened\x1b[0m"))
    ended = called(tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert len(lines) == len(names) + 2 and "\x1b" not in ended.stdout
    for said in ("new\\nline", "\\x1b[31mred", "no text \\udcff", "Übung = [a b]"):
        assert sum(said in line for line in lines) == 1
    told = json.loads(called("--json", tmp_path).stdout)
    assert {os.fsencode(Path(run["run"]).name) for run in told["runs"]} == set(names)


def test_json_for_programs(tmp_path):
    make_run(tmp_path / "a", sign(phase="learning law", run_eta_s=3.5, untimed=["probes"]))
    make_run(tmp_path / "b", sign("failed", why="no"))
    ended = called("--json", tmp_path)
    told = json.loads(ended.stdout)
    assert (ended.returncode, told["counts"]) == (0, {"running": 1, "failed": 1})
    first, second = told["runs"]
    assert (first["run"], first["run_eta_s"], first["untimed"]) == (str(tmp_path / "a"), 3.5, ["probes"])
    assert (second["state"], second["why"], second["pid"]) == ("failed", "no", os.getpid())


def test_what_is_no_run_is_refused_in_a_line(tmp_path):
    (tmp_path / "empty" / ".hydra").mkdir(parents=True)
    (tmp_path / "empty" / ".hydra" / "config.yaml").write_text("")
    for given, said in (
        (["empty"], "cpt: no run in empty\n"),
        (["--json", "empty"], "cpt: no run in empty\n"),
        ([], "cpt: no folder outputs; allowed: run folders, and folders that hold them\n"),
        (["--watch", "0", "empty"], "cpt: --watch=0.0; allowed: seconds, more than 0\n"),
        (["--watch", "nan", "empty"], "cpt: --watch=nan; allowed: seconds, more than 0\n"),
    ):
        ended = called(*given, cwd=tmp_path)
        assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", said)


def test_watching_goes_on_until_it_is_interrupted(tmp_path):
    run = make_run(tmp_path / "run", sign("failed", why="first"))
    command = [sys.executable, "-m", "cpt.status", "--watch", "0.05", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert any("first" in process.stdout.readline() for _ in range(3))
        sign("failed", why="second").write(run)
        assert any("second" in process.stdout.readline() for _ in range(600))
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 0


QUICK = """
import sys, time
from pathlib import Path
began = time.perf_counter()
from cpt import status
status.main([sys.argv[1]])
heavy = {"torch", "numpy", "hydra", "omegaconf", "lightning", "pandas"} & set(sys.modules)
print(time.perf_counter() - began, *heavy, file=sys.stderr)
"""


def test_two_hundred_runs_are_told_in_less_than_a_second(tmp_path):
    matrix = '\n"nll": [' + "[0.123456789], " * 20_000
    for number in range(200):
        run = make_run(tmp_path / f"run {number:03d}", sign(learned=0.5), finished=False)
        with (run / "scores.json").open("a") as file:
            file.write(matrix)
        (run / "stages" / "deep").mkdir(parents=True)
    took = []
    for _ in range(3):  # a machine that is busy is slow once
        ended = subprocess.run(
            [sys.executable, "-c", QUICK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
        )
        assert ended.stdout.splitlines()[-1] == "200 runs: 200 running"
        seconds, *heavy = ended.stderr.split()
        assert heavy == []
        took.append(float(seconds))
    assert min(took) < 1
