"""What a sweep says of its runs: which there are to be, and how those ended that could not say so."""

import json
import os
from pathlib import Path

from cpt import status
from cpt.core import queues
from cpt.core.queues import Queue, list_runs
from cpt.core.signs import note_end
from tests.test_status import earlier, gone, make_run, sign


def test_a_sweep_knows_what_it_has_not_begun(tmp_path):
    make_run(tmp_path / "first" / "a", sign("failed"))
    make_run(tmp_path / "elsewhere", sign("failed"))
    runs = [tmp_path / "first" / "a", tmp_path / "first" / "b", tmp_path / "elsewhere"]
    list_runs(tmp_path / "first", runs)
    found = status.look_at([tmp_path / "first"])
    assert [(Path(each.run).name, each.state) for each in found] == [
        *(("elsewhere", "failed"), ("a", "failed"), ("b", "queued")),
    ]
    assert found[2].pid == os.getpid()
    list_runs(tmp_path / "first", [tmp_path / "first" / "c"])  # a further batch of a sweep that is at work
    assert Queue.load(tmp_path / "first").runs == ["a", "b", "../elsewhere", "c"]
    path = tmp_path / "first" / queues.FILE
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"holder": told["holder"] | {"born": 1}}))
    assert [each.state for each in status.look_at([tmp_path])] == ["failed", "failed", "unbegun", "unbegun"]
    list_runs(tmp_path / "first", [tmp_path / "first" / "d"])
    assert Queue.load(tmp_path / "first").runs == ["d"]
    path.write_text('{"version": 1, "runs": [3]}')
    assert [each.state for each in status.look_at([tmp_path])] == ["failed", "failed"]


def test_an_end_is_noted_for_who_could_not_say_it(tmp_path):
    began = earlier(10)
    run = make_run(tmp_path / "killed", sign(holder=gone(), learned=0.3, run_eta_s=5.0))
    note_end(run, "failed", "signal 9\nKilled", began=began)
    seen = status.look(run)
    assert (seen.state, seen.why, seen.learned, seen.run_eta_s) == ("failed", "signal 9 Killed", 0.3, None)
    for kept in sign("failed", why="its own words"), sign(why="at work"):
        kept.write(run)
        note_end(run, "failed", "exit 1", began=began)
        assert status.look(run).why == kept.why
    sign("preempted", written=earlier(20)).write(run)  # by an earlier start
    note_end(run, "failed", "x" * 1000, began=began)
    assert (status.look(run).state, len(status.look(run).why)) == ("failed", 400)
