"""What Hydra is given of a sweep's arguments, and the terminal line of a sweep."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpt.core.heartbeat import Heartbeat, utc_now
from cpt.sweeps.arguments import check_choices, leave_to_jobs
from cpt.sweeps.launcher import fit_jobs, job_progress


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("-m method=lora,olora method.rate=1", "-m method=lora,olora method.rate=choice(1)"),
        (
            "--multirun method=lora,olora method.t=[a]",
            "--multirun method=lora,olora method.t=choice([a])",
        ),
        ("-m method=choice(lora,olora) method.rate=1", "-m method=choice(lora,olora) method.rate=choice(1)"),
        ("-m mask=migu,mofo mask.migu.threshold=0.5", "-m mask=migu,mofo mask.migu.threshold=choice(0.5)"),
        ("method=lora method.rate=1", None),
        ("-m method=lora method.rate=1", None),
        ("-m method=lora,olora seed=1 trainer.steps=2 +method.mine=1 ~method.rate", None),
        ("-m method=lora,olora method.rate=1,3", None),
        ("-m method=lora,olora method.rate= method.=(", None),
        ("-m seed=0,1 method.rate=1", None),
    ],
)
def test_options_of_a_swept_group_are_left_to_the_jobs_and_all_else_stays(given, taken):
    assert leave_to_jobs(given.split()) == (taken or given).split()


WRONG = "optim=[null] optim=5 experiment=null mask=true mask=[migu,5] +schedule=[[linear]] schedule=[{}]"
FINE = "mask=[migu,mofo] order=[law] order=[1,2] -m a=( optim=adamw ~experiment optim={lr:1} mask=migu,mofo"


def test_a_choice_that_is_no_name_is_refused_and_all_others_are_left_to_hydra():
    for given in WRONG.split():
        with pytest.raises(ValueError, match=rf"{re.escape(given)}; allowed: a choice of conf/\w+"):
            check_choices(["seed=1", given])
    check_choices(FINE.split())


LAW = ("#3 learning law (1/3) 20 %", " 1:02:03")
BASE = ("#4 starting", "")


@pytest.mark.parametrize("count", [0, 1, 2, 5, 30])
def test_it_is_never_wider_than_the_terminal_and_times_are_whole(count):
    for room in range(-3, 120):
        text = fit_jobs([LAW] * count, room)
        assert len(text) <= max(0, room)
        if count and room >= 19 * count:
            assert text.count("1:02:03") == count
    assert fit_jobs([LAW, BASE], 60) == "#3 learning law (1/3) 20 % 1:02:03 | #4 starting"
    assert fit_jobs([LAW, BASE], 40) == "#3 learni… 1:02:03 | #4 starting"


def job(folder: Path, **given):
    """A job that has just begun, with a heartbeat in its folder."""
    made = SimpleNamespace(number=3, folder=folder, began=utc_now())
    Heartbeat(**{"state": "running", "began": utc_now(), **given}).write(folder)
    return made


def test_the_time_is_the_run_s_or_as_far_as_it_is_known(tmp_path):
    at = {"phase": "learning law", "stage": 1, "stages": 3, "step": 3, "steps": 10, "phase_eta_s": 7.0}
    what = "#3 learning law (1/3) 30 %"
    assert job_progress(job(tmp_path, **at, run_eta_s=61.0)) == (what, " 1:01")
    assert job_progress(job(tmp_path, **at, run_eta_s=61.0, untimed=["probes"])) == (what, " 1:01+")
    assert job_progress(job(tmp_path, **at)) == (what, " 0:07+")
    assert job_progress(job(tmp_path, state="waiting", phase="x", why="x")) == ("#3 waiting", "")
    assert job_progress(job(tmp_path, state="finished")) == ("#3 ending", "")
    earlier = job(tmp_path, state="preempted", written="2026-01-01T00:00:00Z")
    assert job_progress(earlier) == ("#3 starting", "")
    (tmp_path / "progress.json").write_text("{")
    assert job_progress(earlier) == ("#3 starting", "")
