"""The campaigns' frame, and a few seeded trials of each; the rest is run by hand: docs/studies/fault-tolerance.md."""

import json
import os
import sys

import pytest

from tests.campaigns import concurrency, faults, frame, inputs, kills, memory, nonfinite, preemption, runs


def tried(trial, place, *numbers):
    """What the trials of these numbers give."""
    return list(frame.run_trials(trial, place, numbers, seed=0))


def test_a_trial_is_a_function_of_its_number_and_the_seed(tmp_path):
    def drawn(place, number, draw):
        return {"fine": True, "drew": draw.random()}

    one, other = tried(drawn, tmp_path, 0, 1, 2), tried(drawn, tmp_path, 2)
    assert one[2]["drew"] == other[0]["drew"] != one[1]["drew"]


@pytest.mark.parametrize(("bad", "code"), [((), 0), ((1,), 1)])
def test_a_campaign_ends_with_1_where_a_promise_was_not_kept(bad, code, tmp_path, monkeypatch, capsys):
    def trial(place, number, draw):
        if number in bad:
            raise RuntimeError("no")
        return {"fine": True}

    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["x", "--trials", "3", "--out", str(out)])
    assert frame.conduct(trial, name="some", about="", trials=9) == code
    told = json.loads(out.read_text())
    assert (told["asked"], told["made"], told["fine"]) == (3, 3, 3 - len(bad))
    assert f"some: {3 - len(bad)} of 3 fine" in capsys.readouterr().out


def test_every_round_has_all_methods():
    some = ("a", "b", "c", "d")
    assert {runs.shuffled(some, number) for number in range(4, 8)} == {*some}


def test_one_line_is_one():
    assert runs.one_line("bar\rcpt: no\n") == "cpt: no"
    assert runs.one_line("cpt: no\ncpt: no\n") is None and runs.one_line("Traceback\ncpt: no\n") is None


needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="a file system of one's own needs root")
TRIALS = {
    "a wrong option": (inputs.trial, 3),
    "a damaged file": (faults.trial, 2),
    "wrong values of an option": (inputs.trial, len(inputs.CASES) + 40),
    "a second start": (concurrency.trial, 7),
    "a number that is none": (nonfinite.trial, 0),
    "a killed run": (kills.trial, 0),
    "a signal": (preemption.trial, 0),
}
MORE = {
    "too little memory": (memory.trial, 2),
    "a killed sweep": (kills.trial, 4),
    "a signal to a job of submitit": (preemption.trial, 5),
    "two processes, one of which has the number": (nonfinite.trial, 1),
    "a stale lock": (concurrency.trial, 1),
    "a sweep twice": (concurrency.trial, 2),
    "a second start on a slow server": (concurrency.trial, 11),
    "a tokenising process is killed": (memory.trial, 3),
    "the larger of two is killed": (memory.trial, 4),
    "a sweep's largest job is killed": (memory.trial, 5),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("campaign")


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [*TRIALS, *(pytest.param(name, marks=pytest.mark.campaign) for name in MORE)]
)
def test_a_trial_of_each_campaign_is_fine(what, place):
    trial, number = (TRIALS | MORE)[what]
    (found,) = tried(trial, place, number)
    assert found["fine"], found


@needs_mount
@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("number", [1, 3])
def test_a_full_disk_is_one_line(number, place):
    (found,) = tried(faults.trial, place, number)
    assert found["fine"], found
