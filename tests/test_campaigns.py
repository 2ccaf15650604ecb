"""Fault-injection tests: their frame, and a few seeded trials of each (docs/studies/fault-tolerance.md)."""

import json
import os
import sys

import pytest

from tests.campaigns import concurrency, faults, frame, kills, nonfinite, preemption

TRIALS = {
    "a killed run": (kills.trial, 0),
    "a number that is none": (nonfinite.trial, 0),
    "a damaged file": (faults.trial, 2),
    "a second start": (concurrency.trial, 7),
    "a signal": (preemption.trial, 0),
    "a killed sweep": (kills.trial, 4),
    "a signal to two tasks of SLURM": (preemption.trial, 4),
    "two processes, one of which has the number": (nonfinite.trial, 1),
    "a stale lock": (concurrency.trial, 1),
    "a sweep twice": (concurrency.trial, 2),
    "a second start on a slow server": (concurrency.trial, 11),
    "a full disk": (faults.trial, 1),
    "a disk that fills up": (faults.trial, 3),
}
QUICK = ("a killed run",)


def test_a_trial_is_a_function_of_its_number_and_the_seed(tmp_path):
    def drawn(place, number, draw):
        return {"fine": True, "drew": draw.random()}

    one, other = (list(frame.run_trials(drawn, tmp_path, each, seed=0)) for each in ((0, 1, 2), (2,)))
    assert one[2]["drew"] == other[0]["drew"] != one[1]["drew"]


@pytest.mark.parametrize(("bad", "code"), [((), 0), ((1,), 1)])
def test_a_campaign_ends_with_1_where_a_promise_was_not_kept(bad, code, tmp_path, monkeypatch):
    def trial(place, number, draw):
        if number in bad:
            raise RuntimeError("no")
        return {"fine": True}

    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["x", "--trials", "3", "--out", str(out)])
    assert frame.conduct(trial, name="some", about="", trials=9) == code
    told = json.loads(out.read_text())
    assert (told["asked"], told["made"], told["fine"]) == (3, 3, 3 - len(bad))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("campaign")


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=[pytest.mark.campaign] * (name not in QUICK)) for name in TRIALS]
)
def test_a_trial_of_each_campaign_is_fine(what, place):
    if "disk" in what and os.geteuid() != 0:
        pytest.skip("a file system of one's own needs root")
    trial, number = TRIALS[what]
    (found,) = frame.run_trials(trial, place, [number], seed=0)
    assert found["fine"], found
