"""A run's scores, row by row: what a row costs, what is seen meanwhile, and what a kill leaves."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from cpt import status
from cpt.evaluation.journal import journal_file
from cpt.evaluation.scores import Scores
from cpt.trainer.evaluators import SHARE, ScoreJournal
from tests.support.killing import KilledError

FILE = "scores.json"


def empty(domains):
    texts = [*(f"d{number:04d}" for number in range(domains)), "general"]
    run = dict.fromkeys(("name", "method", "mask", "replay", "variant", "model"), "x")
    run |= {"objective": "mlm", "order": texts[:-1], "seed": 0, "finished": False}
    sizes = {"tokens": [100] * len(texts), "bytes": [400] * len(texts), "scored": [10] * len(texts)}
    facts = {"texts": {text: {"hash": text} for text in texts}, "config_hash": "c", "versions": {}}
    return Scores(domains=texts, run=run, **sizes, **facts)


def learn(scores, number):
    """Adds the row after so many stages: the base's of all texts, a stage's of its own, near and general."""
    name = scores.domains[number - 1] if number else "base"
    drawn = np.random.default_rng(number).uniform(1, 5, len(scores.domains)).tolist()
    near = {*range(max(0, number - 3), number), len(scores.domains) - 1}
    nll = [value if number == 0 or place in near else None for place, value in enumerate(drawn)]
    scores.phases["learn"] |= {name: 1.0 + number / 7} if number else {}
    scores.phases["score"][name] = 0.1 * number
    scores.monitor |= (
        {name: {"steps": [number], "nll": {}, "rise": {}, "ended": "", "kept": None}} if number % 2 else {}
    )
    parts = {"general": {"base": 0.5, name: 0.5}}
    scores.append(name, nll=nll, modules=parts, seen=100 + number, rates=[1.0, 2.0, number / 3], skipped=1)


def finish(scores):
    scores.run["finished"] = len(scores.rows) == len(scores.domains)
    scores.measure()


def go_on(path, rows, *, domains):
    """A start of the run in a folder up to so many rows; what is there is gone on with."""
    scores = Scores.load(path) if path.exists() else empty(domains)
    keeps = ScoreJournal(scores, path, digests={})
    for number in range(len(scores.rows), rows):
        learn(scores, number)
        keeps.keep_row(number)
    if rows == domains + 1:
        finish(scores)
        keeps.keep()
    return path


def as_a_whole(rows, path, *, domains):
    """The file of so many rows, written at once."""
    scores = empty(domains)
    for number in range(rows):
        learn(scores, number)
    finish(scores)
    scores.sum_seconds()
    scores.save(path)
    return path.read_bytes()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The disk is not waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_what_is_read_of_a_run_at_work_is_all_that_it_has_and_few_rows_write_the_whole(tmp_path, monkeypatch):
    scores, path, measured, measure = empty(100), tmp_path / FILE, [], Scores.measure
    keeps = ScoreJournal(scores, path, digests={})
    for number in range(75):
        learn(scores, number)
        with monkeypatch.context() as patched:
            patched.setattr(Scores, "measure", lambda self, at=number: measured.append(at) or measure(self))
            keeps.keep_row(number)
        if number % 3 and number > 8:
            continue
        Scores.load(path).save(tmp_path / "seen.json")
        expected = as_a_whole(number + 1, tmp_path / "whole.json", domains=100)
        assert (tmp_path / "seen.json").read_bytes() == expected
        assert status.peek_scores(tmp_path) == (False, number / 100, "")
        behind = number + 1 - len(json.loads(path.read_text())["rows"])
        assert behind <= (number + 1) // SHARE
    assert len(measured) < 55
    assert go_on(path, 101, domains=100).read_bytes() == as_a_whole(101, tmp_path / "whole", domains=100)


class Disk:
    """Dies before a write of a number, or in the middle of it."""

    def __init__(self, monkeypatch, *, at):
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
    (tmp_path / "begun").mkdir()
    go_on(tmp_path / "begun" / FILE, 62, domains=70)
    whole, seen = as_a_whole(71, tmp_path / "whole.json", domains=70), set()
    for at in range(1, 100):
        folder = shutil.copytree(tmp_path / "begun", tmp_path / str(at))
        with monkeypatch.context() as patched:
            Disk(patched, at=at)
            try:
                go_on(folder / FILE, 68, domains=70)
            except KilledError:
                pass
            else:
                break
        seen.add(len(Scores.load(folder / FILE).rows))
        assert go_on(folder / FILE, 71, domains=70).read_bytes() == whole
        assert {each.name for each in folder.iterdir() if not each.name.endswith(".tmp")} == {FILE}
    assert 15 < at < 99 and seen == set(range(62, 69))


@pytest.fixture
def begun(tmp_path):
    """The scores of a run with two lines beside them, and those."""
    path = go_on(tmp_path / FILE, 68, domains=80)
    return path, journal_file(path).read_text().splitlines()


def test_a_line_counts_when_its_end_is_there_and_a_damaged_one_is_told(begun):
    path, (line, after) = begun
    for size in (40, None):  # the half, all but its end
        journal_file(path).write_text(f"{line}\n{after[:size]}")
        assert Scores.load(path).rows[-1] == json.loads(line)["name"]
    harms = [*({"row": row} for row in ("66", 70, -1, 3)), {"nll": {"law": 1.0}}, {"phases": {"sleep": 1.0}}]
    damaged = [json.dumps(json.loads(line) | harm) for harm in [*harms, {"rates": 3}]]
    for text in ["{", "[]", '{"row": 66}', *damaged]:
        journal_file(path).write_text(f"{text}\n{after}\n")
        with pytest.raises(ValueError, match=r"scores\.json: damaged or foreign") as told:
            Scores.load(path)
        assert "\n" not in str(told.value), text
