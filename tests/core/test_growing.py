"""Files that grow: what is committed is gone on with, what came later is cut off, damage begins anew."""

import json
import logging
import os

import pytest

from cpt.core import growing
from cpt.core.growing import PLACE, Growing

NAMES = ("rows", "counts")
PARTS = [(b"first ", b"1"), (b"second ", b"2"), (b"third ", b"3")]


def killed(folder, *, commits=2, form=1):
    """Files of which so many parts are committed and one more is written."""
    files = Growing(folder, NAMES, form=form)
    assert files.place is None
    for number, parts in enumerate(PARTS, start=1):
        for name, part in zip(NAMES, parts, strict=True):
            files.append(name, part)
        if number <= commits:
            files.commit({"number": number, "waiting": [[1], [2]]})
    files.close()


def contents(folder):
    return {name: (folder / name).read_bytes() for name in NAMES}


@pytest.mark.parametrize("commits", [0, 1, 2, 3])
def test_it_goes_on_from_the_last_commit(tmp_path, commits):
    killed(tmp_path, commits=commits)
    files = Growing(tmp_path, NAMES, form=1)
    assert files.place == ({"number": commits, "waiting": [[1], [2]]} if commits else None)
    for number, parts in enumerate(PARTS[commits:], start=commits + 1):
        for name, part in zip(NAMES, parts, strict=True):
            files.append(name, part)
        files.commit({"number": number})
    files.finish()
    assert contents(tmp_path) == {"rows": b"first second third ", "counts": b"123"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counts", "rows"]


def test_what_is_gone_on_with_twice_is_still_checked(tmp_path):
    killed(tmp_path)
    for _ in range(2):
        files = Growing(tmp_path, NAMES, form=1)
        assert files.place["number"] == 2
        files.append("rows", b"more")
        files.commit(files.place)
        files.close()
    assert contents(tmp_path) == {"rows": b"first second moremore", "counts": b"12"}


def rewrite(path, change):
    told = json.loads(path.read_text())
    change(told["told"])
    path.write_text(json.dumps(told))


DAMAGE = {
    "a truncated place": lambda folder: os.truncate(folder / PLACE, 40),
    "an empty place": lambda folder: os.truncate(folder / PLACE, 0),
    "a place that was changed": lambda folder: rewrite(
        folder / PLACE, lambda told: told["place"].update(number=1)
    ),
    "a file that is gone": lambda folder: (folder / "counts").unlink(),
    "a file that is too short": lambda folder: os.truncate(folder / "rows", 5),
    "a bit": lambda folder: (folder / "rows").write_bytes(b"fi\x00st second third "),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_what_is_damaged_is_told_and_begun_anew(tmp_path, caplog, harm):
    killed(tmp_path)
    DAMAGE[harm](tmp_path)
    files = Growing(tmp_path, NAMES, form=1)
    assert files.place is None
    files.append("rows", b"anew")
    files.commit(7)
    files.close()
    assert contents(tmp_path) == {"rows": b"anew", "counts": b""}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{tmp_path} is begun anew: what is there cannot be gone on with (")
    files = Growing(tmp_path, NAMES, form=1)
    assert files.place == 7
    files.close()


def test_what_was_made_otherwise_begins_anew(tmp_path, caplog):
    killed(tmp_path, form=[1, 128])
    files = Growing(tmp_path, NAMES, form=[1, 64])
    assert files.place is None
    files.close()
    assert "of another form" in caplog.text


def test_much_that_remembers_no_place_is_told(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(growing, "COMMIT", 10)
    killed(tmp_path, commits=0)
    files = Growing(tmp_path, NAMES, form=1)
    assert files.place is None
    files.close()
    assert "is begun anew: what is there remembers no place to go on from" in caplog.text


def test_a_commit_is_due_after_so_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "COMMIT", 10)
    files = Growing(tmp_path, NAMES, form=1)
    files.append("rows", b"12345")
    assert not files.due
    files.append("counts", b"12345")
    assert files.due
    files.commit(1)
    assert not files.due
    files.close()


def test_all_is_on_the_disk_before_it_is_remembered(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (done.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("renamed"), replace(*paths)))
    killed(tmp_path, commits=1)
    before = done[: done.index("renamed")]
    assert sorted(before) == sorted(str(tmp_path / name) for name in (*NAMES, f"{PLACE}.partial"))
