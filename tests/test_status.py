"""`python -m cpt.status`: the state of runs by their files alone, whatever these contain."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cpt import status
from cpt.core.heartbeat import STALE_S, Heartbeat, ProcessId, start_time, utc_now
from cpt.evaluation.row_files import row_file
from cpt.reporting.load_runs import find_runs
from tests.core.test_heartbeat import earlier, ended_process
from tests.support.example_runs import save_scores

AWAY = ProcessId(host="away", pid=7, start_time=1.0)


def beat(state="running", **fields) -> Heartbeat:
    return Heartbeat(state=state, began=utc_now(), **fields)


def make_run(folder, heartbeat=None, *, finished=None, rows=2) -> Path:
    """A run folder; with `finished`, its scores.json is cut off behind what status reads."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: x\n")
    if heartbeat is not None:
        heartbeat.write(folder)
    if finished is not None:
        run = json.dumps({"order": ["law", "food", "space", "art"], "finished": finished})
        names = json.dumps(["base", "law", "food", "space", "art"][:rows])
        text = f'{{\n"version": 3,\n"rows": {names},\n"run": {run},\n"nll": [[1'
        (folder / "scores.json").write_text(text)
    return folder


STATES = {  # fields of the heartbeat, whether the scores are finished, the state and its reason
    "here": ({}, None, "running", ""),
    "silent": ({"process": AWAY, "written": earlier(STALE_S + 1)}, None, "silent", ""),
    "killed": ({"process": ended_process(), "run_eta_s": 3.0, "phase_eta_s": 3.0}, None, "killed", ""),
    "finished": ({"state": "finished"}, True, "finished", ""),
    "failed later": ({"state": "failed", "why": "no"}, True, "finished", "its last start: failed, no"),
    "lost": ({"state": "finished"}, None, "unfinished", "scores.json is not that of a finished run"),
}


@pytest.mark.parametrize("case", STATES)
def test_states(case, tmp_path):
    fields, finished, state, reason = STATES[case]
    make_run(tmp_path / "run", beat(phase="training law", done=0.4, **fields), finished=finished)
    (run_status,) = status.read_statuses([tmp_path])
    assert (run_status.state, run_status.why, run_status.done) == (state, reason, 0.4)
    line = status.format_status(run_status)
    assert ("training law" in line) == (state != "finished") and "0:03" not in line


def test_without_a_heartbeat_the_scores_tell(tmp_path):
    for name, finished, rows in ("a", None, 2), ("b", False, 3), ("c", True, 5):
        make_run(tmp_path / name, finished=finished, rows=rows)
    new_row = row_file(make_run(tmp_path / "d", finished=False, rows=3), 3)  # which scores.json does not have
    new_row.parent.mkdir()
    new_row.write_text("{}")
    states = [(run_status.state, run_status.done) for run_status in status.read_statuses([tmp_path])]
    assert states == [("unfinished", None), ("unfinished", 0.5), ("finished", 1.0), ("unfinished", 0.75)]


def test_a_run_with_all_domains_in_one_stage_is_done_with_its_row(tmp_path):
    run = make_run(tmp_path / "run", finished=False, rows=2)
    text = (run / "scores.json").read_text()
    (run / "scores.json").write_text(text.replace('["base", "law"]', '["base", "joint"]'))
    (run_status,) = status.read_statuses([tmp_path])
    assert (run_status.state, run_status.done) == ("unfinished", 1.0)


def test_scores_of_another_programs_form_are_read_as_a_report_reads_them(tmp_path):
    forms = {
        "one line": (True, None),
        "indented": (True, 2),
        "wrapped": (True, 0),
        "unfinished": (False, None),
    }
    for name, (finished, indent) in forms.items():
        scores = save_scores(tmp_path / name, finished=finished)
        text = json.loads((tmp_path / name / "scores.json").read_text())
        (tmp_path / name / "scores.json").write_text(json.dumps(text, indent=indent))
    save_scores(tmp_path / "foreign")
    (tmp_path / "foreign" / "scores.json").write_text(
        '{"rows": ["base"], "run": {"order": [], "finished": true}}'
    )

    statuses = {Path(run_status.run).name: run_status for run_status in status.read_statuses([tmp_path])}
    for name, (finished, _) in forms.items():
        assert statuses[name].state == ("finished" if finished else "unfinished"), name
    assert statuses["one line"].done == (len(scores.rows) - 1) / len(scores.run["order"]) == 1
    assert statuses["foreign"].state == "unknown" and len(find_runs([tmp_path]).damaged) == 1


def test_the_table_and_json(tmp_path, capsys):
    progress = {"phase": "training law", "stage": 2, "stages": 4, "step": 30, "steps": 120}
    remaining = {"done": 0.319, "phase_eta_s": 12.4, "run_eta_s": 3723.0}
    make_run(tmp_path / "a", beat(**progress, **remaining, written=earlier(130)))
    make_run(tmp_path / "b", beat("failed", why="no"))

    assert status.main([str(tmp_path)]) == 0
    _, line, _, total = capsys.readouterr().out.splitlines()
    process = f"{ProcessId.current().host}:{os.getpid()}"
    words = f"running 31 % 1:02:03 2 min {process} {tmp_path / 'a'} training law (2/4) 25 %, 0:12"
    assert line.split() == words.split() and total == "2 runs: 1 running, 1 failed"

    assert status.main(["--json", str(tmp_path)]) == 0
    output = json.loads(capsys.readouterr().out)
    running, failed = output["runs"]
    assert output["counts"] == {"running": 1, "failed": 1}
    assert running == running | {"run": str(tmp_path / "a"), "state": "running", "done": 0.319}
    assert running["heartbeat"] == running["heartbeat"] | progress | remaining
    assert (failed["state"], failed["why"], failed["process"]["pid"]) == ("failed", "no", os.getpid())


def test_a_process_that_is_stopped_is_shown_as_stopped(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        pid = process.pid
        process_id = replace(ProcessId.current(), pid=pid, start_time=start_time(pid))
        make_run(tmp_path / "run", beat(process=process_id, phase="training law"))
        (run_status,) = status.read_statuses([tmp_path])
        assert run_status.state == "running"

        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        (run_status,) = status.read_statuses([tmp_path])
        assert (run_status.state, run_status.why) == ("stopped", f"kill -CONT {pid} continues it")
        assert f":{pid}" in status.format_status(run_status)
        process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.wait()
