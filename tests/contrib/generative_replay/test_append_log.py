"""Append-only files resume at the last commit; files that do not fit its record restart."""

import os

import pytest

from cpt.contrib.generative_replay.writer import PLACE, Growing

NAMES = ("rows", "counts")
PARTS = [(b"first ", b"1"), (b"second ", b""), (b"third ", b"3")]


def append(folder, *, commits, first=0):
    """Files to which the parts are appended, so many of them with a commit."""
    files = Growing(folder, NAMES, form=1)
    for number, parts in enumerate(PARTS[first:], start=first + 1):
        for name, part in zip(NAMES, parts, strict=True):
            files.append(name, part)
        if number <= commits:
            files.commit({"number": number, "waiting": [[1], [2]]})
    return files


def test_it_resumes_at_the_last_commit(tmp_path):
    for commits in range(4):
        folder = tmp_path / str(commits)
        folder.mkdir()
        append(folder, commits=commits).close()
        for _ in range(2):  # a commit of what another process has appended
            files = Growing(folder, NAMES, form=1)
            assert files.place == ({"number": commits, "waiting": [[1], [2]]} if commits else None)
            files.commit(files.place)
            files.close()
        append(folder, commits=3, first=commits).finish()
        found = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert found == {"rows": b"first second third ", "counts": b"13"}


DAMAGE = {
    "a truncated place": lambda folder: os.truncate(folder / PLACE, 40),
    "a file that is gone": lambda folder: (folder / "counts").unlink(),
    "a file that is too short": lambda folder: os.truncate(folder / "rows", 5),
    "another form": lambda folder: (folder / PLACE).write_text('{"form": 2, "sizes": {}, "place": 1}'),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_what_does_not_fit_its_record_restarts(tmp_path, caplog, harm):
    append(tmp_path, commits=2).close()
    DAMAGE[harm](tmp_path)
    files = Growing(tmp_path, NAMES, form=1)
    assert files.place is None and (tmp_path / "rows").stat().st_size == 0
    files.commit(7)
    files.close()
    assert "which cannot be continued (" in caplog.text
    files = Growing(tmp_path, NAMES, form=1)
    assert files.place == 7
    files.close()
