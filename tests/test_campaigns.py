"""Fault-injection tests: their frame, and a few seeded trials of each (docs/studies/fault-tolerance.md)."""

import os

import pytest

from tests.campaigns import concurrency, faults, frame, kills, nonfinite, preemption, runs, slurm

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


OTHER = [pytest.param(name, marks=pytest.mark.campaign) for name in TRIALS if name not in QUICK]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("campaign")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*QUICK, *OTHER])
def test_a_trial_of_each_campaign_is_fine(fault, folder):
    trial, number = TRIALS[fault]
    if "disk" in fault and os.geteuid() != 0:
        pytest.skip("a file system of one's own needs root")
    if trial is slurm.trial and slurm.find_missing_programs():
        pytest.skip(slurm.find_missing_programs())
    (outcome,) = frame.run_trials(trial, folder, [number], seed=0)
    assert outcome["fine"], outcome


@pytest.mark.slow
def test_the_log_says_when_each_loop_begins_to_which_a_signal_is_sent(tmp_path):
    run = tmp_path / "run"
    options = [*runs.options_of(tmp_path, "ncl"), *preemption.STEPS]
    assert runs.complete(runs.command(tmp_path, run, *options), run) == 0

    log = runs.read_log(run)
    beginnings = {loop: pattern.search(log) for loop, pattern in preemption.LOOPS.items()}
    assert all(beginnings.values())
    assert log.count("Evaluated after") == 3  # base, law, food
    # The end tasks are those of the last stage, whose log also has the first one's scores.
    assert log[: beginnings["end tasks"].end()].count("Evaluated after") == 3


def test_a_campaign_whose_programs_are_missing_is_skipped(monkeypatch, capsys):
    monkeypatch.setattr(slurm, "find_missing_programs", lambda: "no slurmctld here")
    monkeypatch.setattr("sys.argv", ["campaigns", "slurm"])
    assert frame.main() == 0
    assert capsys.readouterr().out == "slurm: skipped, no slurmctld here\n"


def test_a_report_has_no_path_of_the_machine(tmp_path):
    report = frame.Report(tmp_path / "report.json", {"campaign": "kills", "asked": 1, "seed": 0})
    work_folder = tmp_path / "work"
    error = f'File "{frame.ROOT}/tests/campaigns/kills.py", line 1: {work_folder}/run is not finished'
    report.add({"number": 0, "fine": False, "seconds": 1, "error": error}, work_folder=work_folder)
    assert report.path.read_text().count("tests/campaigns/kills.py") == 1
    assert str(frame.ROOT) not in report.path.read_text() and str(tmp_path) not in report.path.read_text()
