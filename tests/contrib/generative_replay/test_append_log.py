"""Append-only files resume at the last commit; files that do not fit its record restart."""

import json
import os

import pytest

from cpt.contrib.generative_replay.writer import PLACE, Growing

NAMES = ("rows", "counts")
PARTS = [(b"first ", b"1"), (b"second ", b""), (b"third ", b"3")]


def append(files, commits, first=0):
    for number, parts in enumerate(PARTS[first:], start=first + 1):
        for name, part in zip(NAMES, parts, strict=True):
            files.append(name, part)
        if number <= commits:
            files.commit({"number": number, "waiting": [[1], [2]]})


def killed(folder, *, commits=2, form=1):
    """Files of which so many parts are committed and the others are written."""
    files = Growing(folder, NAMES, form=form)
    assert files.place is None
    append(files, commits)
    files.close()


@pytest.mark.parametrize("commits", [0, 1, 2, 3])
def test_it_resumes_at_the_last_commit(tmp_path, commits):
    killed(tmp_path, commits=commits)
    for _ in range(2):  # a commit of what another process has appended
        files = Growing(tmp_path, NAMES, form=1)
        assert files.place == ({"number": commits, "waiting": [[1], [2]]} if commits else None)
        files.commit(files.place)
        files.close()
    files = Growing(tmp_path, NAMES, form=1)
    append(files, 3, first=commits)
    files.finish()
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {"rows": b"first second third ", "counts": b"13"}


DAMAGE = {
    "a truncated place": lambda folder: os.truncate(folder / PLACE, 40),
    "an empty place": lambda folder: os.truncate(folder / PLACE, 0),
    "a place that is no mapping": lambda folder: (folder / PLACE).write_text("[]"),
    "a size that is none": lambda folder: (folder / PLACE).write_text(
        json.dumps({"form": 1, "sizes": dict.fromkeys(NAMES, "x"), "place": 1})
    ),
    "a file that is gone": lambda folder: (folder / "counts").unlink(),
    "a file that is too short": lambda folder: os.truncate(folder / "rows", 5),
    "another form": lambda folder: (folder / PLACE).write_text(
        (folder / PLACE).read_text().replace('"form": 1', '"form": 2')
    ),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_what_does_not_fit_its_record_restarts(tmp_path, caplog, harm):
    killed(tmp_path)
    DAMAGE[harm](tmp_path)
    files = Growing(tmp_path, NAMES, form=1)
    assert files.place is None and (tmp_path / "rows").stat().st_size == 0
    files.append("rows", b"anew")
    files.commit(7)
    files.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"Restarting {tmp_path}, which cannot be continued (")
    files = Growing(tmp_path, NAMES, form=1)
    assert files.place == 7
    files.close()


def test_a_commit_is_on_the_disk_before_its_record_is_renamed(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (done.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("renamed"), replace(*paths)))
    files = Growing(tmp_path, NAMES, form=1)
    files.append("rows", b"12345")
    files.append("counts", b"12345")
    files.commit(1)
    files.close()
    before = done[: done.index("renamed")]
    assert sorted(before) == sorted(str(tmp_path / name) for name in (*NAMES, f"{PLACE}.partial"))
