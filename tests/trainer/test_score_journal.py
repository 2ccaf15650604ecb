"""A run's scores, row by row: what a row costs, what is seen meanwhile, and what a kill leaves."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cpt import status
from cpt.evaluation.journal import journal_file
from cpt.evaluation.scores import Scores
from cpt.trainer.run_dir import RunDir
from cpt.trainer.score import SHARE, ScoreJournal
from tests.support.killing import KilledError

FILE = "scores.json"


def empty(domains: int) -> Scores:
    """Scores of a run of so many domains and general text that has not begun."""
    texts = [*(f"d{number:04d}" for number in range(domains)), "general"]
    keys = dict.fromkeys(("name", "method", "mask", "replay", "variant", "model"), "x")
    sizes = {"tokens": [100] * len(texts), "bytes": [400] * len(texts), "scored": [10] * len(texts)}
    return Scores(
        domains=texts,
        **sizes,
        run={**keys, "objective": "mlm", "order": texts[:-1], "seed": 0, "finished": False},
        texts={text: {"digest": text} for text in texts},
        config_digest="c",
        versions={},
    )


def learn(scores: Scores, number: int) -> None:
    """Adds the row after so many stages: the base's of all texts, a stage's of its own, near and general."""
    name = scores.domains[number - 1] if number else "base"
    drawn = np.random.default_rng(number).uniform(1, 5, len(scores.domains)).tolist()
    near = {*range(max(0, number - 3), number), len(scores.domains) - 1}
    nll = [value if number == 0 or place in near else None for place, value in enumerate(drawn)]
    scores.phases["learn"] |= {name: 1.0 + number / 7} if number else {}
    scores.phases["score"][name] = 0.1 * number
    scores.monitor |= {name: {"steps": [number]}} if number % 2 else {}
    parts = {"general": {"base": 0.5, name: 0.5}}
    scores.append(name, nll=nll, parts=parts, seen=100 + number, rates=[1.0, 2.0, number / 3], skipped=1)


def keeper(scores: Scores, path: Path) -> ScoreJournal:
    return ScoreJournal(scores, path, digests={"probes": "p"})


def go_on(path: Path, rows: int, *, domains: int) -> Scores:
    """A start of the run in a folder up to so many rows; what is there is gone on with."""
    scores = Scores.load(path) if path.exists() else empty(domains)
    keeps = keeper(scores, path)
    for number in range(len(scores.rows), rows):
        learn(scores, number)
        keeps.keep_row(number)
    if rows == domains + 1:
        scores.run["finished"] = True
        scores.measure()
        keeps.keep()
    return scores


def as_a_whole(rows: int, path: Path, *, domains: int) -> bytes:
    """The file of so many rows, written at once."""
    scores = empty(domains)
    for number in range(rows):
        learn(scores, number)
    scores.run["finished"] = rows == domains + 1
    scores.measure()
    scores.sum_seconds()
    scores.save(path)
    return path.read_bytes()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The disk is not waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_what_is_read_of_a_run_at_work_is_all_that_it_has(tmp_path):
    """Whole scores, and the share of the stages that status tells, after each row; and in the end the file that
    is written at once."""
    scores, path, in_lines = empty(100), tmp_path / FILE, 0
    keeps = keeper(scores, path)
    for number in range(75):
        learn(scores, number)
        keeps.keep_row(number)
        Scores.load(path).save(tmp_path / "seen.json")
        assert (tmp_path / "seen.json").read_bytes() == as_a_whole(
            number + 1, tmp_path / "w.json", domains=100
        )
        assert status.peek_scores(tmp_path) == (False, number / 100, "")
        behind = number + 1 - len(json.loads(path.read_text())["rows"])
        assert behind <= (number + 1) // SHARE
        in_lines += behind > 0
    assert in_lines > 20
    go_on(path, 101, domains=100)
    assert path.read_bytes() == as_a_whole(101, tmp_path / "w.json", domains=100)


class Disk:
    """Counts what is written to the disk, and dies before the write of a number, or in the middle of it."""

    def __init__(self, monkeypatch, *, at: int) -> None:
        self.at, self.count = at, 0
        for place, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "open")):
            monkeypatch.setattr(place, name, self.counted(getattr(place, name), name))

    def counted(self, write, name):
        def counting(*given, **options):
            if name == "open" and (given[1:] or ("r",))[0] != "a":
                return write(*given, **options)
            self.count += 1
            if self.count == self.at and name == "open":
                with write(*given, **options) as file:
                    file.write('{"row": 64, "name": "d00')
            if self.count >= self.at:
                raise KilledError
            return write(*given, **options)

        return counting


def test_killed_between_any_two_writes_a_run_goes_on(tmp_path, monkeypatch):
    begun, rows, domains = tmp_path / "begun", 70, 70
    begun.mkdir()
    go_on(begun / FILE, 62, domains=domains)
    whole = as_a_whole(rows + 1, tmp_path / "whole.json", domains=domains)
    seen = set()
    for at in range(1, 100):
        folder = tmp_path / str(at)
        shutil.copytree(begun, folder)
        with monkeypatch.context() as patched:
            disk = Disk(patched, at=at)
            try:
                go_on(folder / FILE, 68, domains=domains)
            except KilledError:
                pass
            else:
                break
        there = Scores.load(folder / FILE)
        seen.add(len(there.rows))
        assert 62 <= len(there.rows) <= 68
        go_on(folder / FILE, rows + 1, domains=domains)
        assert (folder / FILE).read_bytes() == whole
        left = {each.name for each in folder.iterdir() if not each.name.endswith(".tmp")}
        assert left == {FILE}
    assert disk.count < at and at > 15
    assert seen == set(range(62, 69))


def begun(folder: Path) -> tuple[Path, list[str]]:
    """The scores of a run with a line or two beside them, and those."""
    path = folder / FILE
    go_on(path, 68, domains=80)
    added = journal_file(path).read_text().splitlines()
    assert len(added) == 2
    return path, added


def test_a_line_counts_when_its_end_is_there(tmp_path):
    path, added = begun(tmp_path)
    for size in (1, 40, None):  # a sign, the half, all but its end
        journal_file(path).write_text(f"{added[0]}\n{added[1][:size]}")
        assert Scores.load(path).rows[-1] == json.loads(added[0])["name"]


DAMAGED = (
    "{",
    "[]",
    '{"row": 66}',
    {"row": "66"},
    {"row": 70},
    {"row": -1},
    {"row": 3},
    {"nll": {"law": 1.0}},
)
DAMAGED += ({"phases": {"sleep": 1.0}}, {"rates": 3})


def test_a_damaged_line_is_told_in_a_line(tmp_path):
    path, (line, after) = begun(tmp_path)
    for damage in DAMAGED:
        text = damage if isinstance(damage, str) else json.dumps(json.loads(line) | damage)
        journal_file(path).write_text(f"{text}\n{after}\n")
        with pytest.raises(ValueError, match=r"scores\.json: damaged, foreign or of another") as told:
            Scores.load(path)
        assert "\n" not in str(told.value), damage


def test_lines_that_a_file_has_by_now_change_nothing(tmp_path):
    """Killed when the scores were written and the lines not yet removed; seconds and cells have grown."""
    path, added = begun(tmp_path)
    scores = Scores.load(path)
    scores.fill(67, {"d0001": 1.5}, {})
    scores.phases["score"]["d0066"] += 5.0
    scores.measure()
    scores.sum_seconds()
    scores.save(path)
    whole = path.read_bytes()
    journal_file(path).write_text("".join(f"{line}\n" for line in added))
    Scores.load(path).save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == whole


def test_a_finished_run_has_no_lines_and_one_that_begins_anew_forgets_them(tmp_path):
    """Its intervals are not measured anew for some that lie there."""
    path, added = begun(tmp_path)
    scores = Scores.load(path)
    scores.run["finished"], scores.metrics["LC"]["interval"] = True, {"nats": [1.0, 2.0]}
    scores.save(path)
    journal_file(path).write_text(f"{added[1]}\n")
    assert Scores.load(path).metrics["LC"]["interval"] == {"nats": [1.0, 2.0]}
    RunDir(tmp_path).clean()
    assert journal_file(path).exists()
    path.unlink()
    RunDir(tmp_path).clean()
    assert not journal_file(path).exists()


def test_a_line_says_all_of_a_row(tmp_path):
    """Cells that are added later, what is no number, and what an older file did not note."""
    scores, path = empty(80), tmp_path / FILE
    for number in range(70):
        learn(scores, number)
    scores.spikes = []
    keeps = keeper(scores, path)
    keeps.keep_row(69)
    scores.fill(5, {"d0033": 2.5, "d0034": float("nan")}, {"d0033": {"base": 1.0}})
    scores.phases["endtasks"]["d0004"] = 7.0
    keeps.keep_row(5)
    back = Scores.load(path)
    assert journal_file(path).exists() and back.spikes == []
    assert back.measured(5) == [text for text in scores.measured(5) if text != "d0034"]
    assert back.nll[5][33] == 2.5 and back.parts[5] == scores.parts[5]
    assert back.phases == scores.phases and back.monitor == scores.monitor


def test_what_is_measured_beside_the_losses_is_taken_over_with_the_whole(tmp_path):
    """Its files are read once for each time that the scores are written, not after each stage."""
    scores, asked = empty(200), []
    probe = SimpleNamespace(KIND="probes", results=lambda rows: asked.append(rows) or told(rows))

    def told(rows):
        return {"harness": "1", "when": "each", "seconds": float(rows), "tasks": {}}

    keeps = keeper(scores, tmp_path / FILE)
    for number in range(140):
        learn(scores, number)
        keeps.keep_row(number)
        keeps.note(probe, number)
    assert asked[:3] == [1, 2, 3] and len([rows for rows in asked if rows > 128]) <= 5
    keeps.keep_rows()
    assert asked[-1] == 140
    assert Scores.load(tmp_path / FILE).probes == {**told(140), "digest": "p"}


def test_a_row_costs_what_it_has_measured_however_many_there_are(tmp_path, monkeypatch):
    """Counted in cells that are looked at or written, by row, an average over a time."""
    work = dict.fromkeys(range(601), 0)
    scores = empty(600)

    def note(cells: int) -> None:
        work[len(scores.rows) - 1] += cells

    def cells(self):
        note(len(self.rows) * len(self.domains))

    def add(path, line):
        note(len(json.loads(line)["nll"]))

    monkeypatch.setattr(Scores, "measure", cells)
    monkeypatch.setattr(Scores, "save", lambda self, path: cells(self))
    monkeypatch.setattr("cpt.trainer.score.append_row", add)
    keeps = keeper(scores, tmp_path / FILE)
    for number in range(601):
        learn(scores, number)
        keeps.keep_row(number)
    early, late = (np.mean([work[row] for row in span]) for span in (range(100, 300), range(400, 600)))
    assert early > 0 and late < 1.15 * early
    assert np.median([work[row] for row in range(400, 600)]) <= 5


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_reader_may_meet_the_moment_at_which_the_scores_are_written(tmp_path, monkeypatch, when):
    """The lines that it has read are then in the file, and those of the next rows are not yet known."""
    path, _ = begun(tmp_path)
    rows, own, gone_on = Scores.load(path).rows, Path.read_text, []

    def read(self, **how):
        old = own(self, **how)
        if self == path and not gone_on:
            gone_on.append(True)
            go_on(path, 73, domains=80)
            assert journal_file(path).exists()
        return old if when == "after" else own(self, **how)

    monkeypatch.setattr(Path, "read_text", read)
    found = Scores.load(path).rows
    assert gone_on and found[: len(rows)] == rows
    assert (len(found) > len(rows)) == (when == "before")
