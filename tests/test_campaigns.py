"""Fault-injection tests: their frame, and a few seeded trials of each (docs/studies/fault-tolerance.md)."""

import os

import pytest

from tests.campaigns import concurrency, faults, frame, kills, nonfinite, preemption, slurm

TRIALS = {
    "a killed run": (kills.trial, 0),
    "a number that is none": (nonfinite.trial, 0),
    "a damaged file": (faults.trial, 2),
    "a second start": (concurrency.trial, 4),
    "a signal": (preemption.trial, 0),
    "a killed sweep": (kills.trial, 4),
    "a signal to two tasks of SLURM": (preemption.trial, 4),
    "two processes, one of which has the number": (nonfinite.trial, 1),
    "a stale lock": (concurrency.trial, 1),
    "a sweep twice": (concurrency.trial, 2),
    "a full disk": (faults.trial, 1),
    "a disk that fills up": (faults.trial, 3),
    "a preempted job of SLURM": (slurm.trial, 0),
    "a sweep on SLURM with a cancelled job": (slurm.trial, 8),
}
QUICK = ("a killed run",)


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
    if "SLURM" in what and TRIALS[what][0] is slurm.trial and slurm.missing():
        pytest.skip(slurm.missing())
    trial, number = TRIALS[what]
    (found,) = frame.run_trials(trial, place, [number], seed=0)
    assert found["fine"], found
