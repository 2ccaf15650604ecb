"""Jobs of a sweep as processes of their own: what each gets of the machine and of the command line, and what
is told of how it ended."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from cpt.cli import check_choices, leave_to_jobs
from cpt.core.heartbeat import Heartbeat, utc_now
from cpt.core.preemption import GO_ON
from cpt.sweeps.jobs import Job, divide_machine, summarize_jobs, visible_gpus
from cpt.sweeps.launcher import ProcessLauncher, describe_progress, run_all
from tests.conftest import ROOT
from tests.support.processes import is_there

APP = """
import json, os, sys
from pathlib import Path
import hydra
import cpt.sweeps.launcher
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    folder = Path(HydraConfig.get().runtime.output_dir)
    if cfg.kind == "raise":
        raise RuntimeError("boom")
    seen = {"argv": sys.argv, "env": dict(os.environ), "order": OmegaConf.to_container(cfg.order)}
    (folder / "seen.json").write_text(json.dumps(seen | {"name": cfg.name}))
    (folder / "scores.json").write_text('{"run": {"finished": true}}')

main()
"""
CONFIG = """
defaults: [_self_, {override hydra/launcher: processes}]
kind: done
order: [a]
name: given
hydra:
  run: {dir: "outputs/${hydra:job.name}/${kind}-${order}"}
  sweep: {dir: outputs}
  hydra_logging: {formatters: {simple: {format: "%(message)s"}}}
"""


@pytest.fixture
def swept(tmp_path):
    """Sweeps with a Hydra program that has this launcher's own YAML; gives what it said and what jobs saw."""
    copytree(ROOT / "conf/hydra/launcher", tmp_path / "conf/hydra/launcher")
    (tmp_path / "conf/config.yaml").write_text(CONFIG)
    (tmp_path / "more").mkdir()
    (tmp_path / "more/other.yaml").write_text(CONFIG + "\nonly_here: 1\n")
    (tmp_path / "app.py").write_text(APP)

    def sweep(*arguments, program=("app.py",), **variables):
        hidden = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "HYDRA_FULL_ERROR")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        env = kept | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | variables
        command = [sys.executable, *program, "-m", *arguments]
        ended = subprocess.run(command, cwd=tmp_path, env=env, timeout=120, capture_output=True, text=True)
        seen = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("outputs/app/*/seen.json"))]
        return ended, seen

    return sweep


@pytest.mark.slow
def test_overrides_flags_and_threads_of_the_user_reach_the_jobs_and_failures_stop_no_other(swept):
    """Of a program that is started as a module, whose jobs are as well."""
    given = ["-cd", "more", "--config-name=other", "order=[b,'a c'],[c]", "name='a b, \"c\"'"]
    given += ["+extra={k: [1, 2]}", "kind=done,raise", "hydra.launcher.jobs=2"]
    ended, seen = swept(*given, program=("-m", "app"), OMP_NUM_THREADS="7", PYTHONWARNINGS="error")
    assert [job["order"] for job in seen] == [["b", "a c"], ["c"]]
    assert {job["name"] for job in seen} == {'a b, "c"'}
    assert {job["env"]["OMP_NUM_THREADS"] for job in seen} == {"7"}
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("cpt: 2 of 4 jobs failed: #1 order=[b,'a c'] kind=raise, #3 ")
    assert ended.stdout.count("failed (exit 1): RuntimeError: boom (outputs/app/") == 2
    assert ended.stdout.splitlines()[-1] == "compare: python -m cpt.report outputs/app"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), [("slurm_local", "submitit"), ("ray_jobs", "ray")])
def test_other_launchers_on_this_machine(swept, name, package):
    pytest.importorskip(f"hydra_plugins.hydra_{package}_launcher", reason="of an extra")
    ended, (job,) = swept(f"hydra/launcher={name}", "kind=raise,done")
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1] == "cpt: 1 of 2 jobs failed: #0 kind=raise"
    assert job["argv"][1:] == [f"hydra/launcher={name}", "kind=done", "hydra.mode=RUN"]


PROGRAM = """
import os, signal, sys, time
number = int(sys.argv[1][2:])
if "QUIET" not in os.environ:
    print("begun", number)
if number == 0:
    raise RuntimeError("boom")
if number == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.time()
time.sleep(0.3)
open(f"{number}/scores.json", "w").write('{"run": {"finished": true}}')
open(f"{number}/times", "w").write(f"{began} {time.time()}")
"""


def made_job(number, **ended):
    made = Job(number, (f"x={number}",), f"x={number}", OmegaConf.create(), Path(str(number)))
    made.folder.mkdir()
    for key, value in ended.items():
        setattr(made, key, value)
    return made


@pytest.mark.slow
def test_failed_jobs_stop_no_other_and_no_more_run_at_once_than_there_are_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs, command = [made_job(number) for number in range(5)], [sys.executable, "-S", "-c", PROGRAM]
    run_all(jobs, command=command, places=[{}, {}], grace=1)
    assert [job.state for job in jobs] == ["failed"] * 2 + ["finished"] * 3
    raised, killed = "failed (exit 1): RuntimeError: boom", "failed (signal 9, Killed; perhaps for want of "
    assert jobs[0].failure() == raised and jobs[1].failure() == f"{killed}memory): begun 1"
    beats = [Heartbeat.load(job.folder) for job in jobs[:2]]
    assert [f"{beat.state} {beat.why}" for beat in beats] == [job.failure() for job in jobs[:2]]
    times = [tuple(map(float, (job.folder / "times").read_text().split())) for job in jobs[2:]]
    one, two, three = sorted(times)
    assert two[0] < one[1] and three[0] >= min(one[1], two[1])
    jobs += [made_job(5, before=True), made_job(6, lost="cancelled"), made_job(7, code=GO_ON)]
    jobs[7].console.write_text("cpt: no\n")
    assert summarize_jobs(jobs) == [
        "8 jobs: 3 finished, 1 finished before, 1 preempted, 3 failed",
        f"#0 x=0: {raised} (0/console.log)",
        f"#1 x=1: {killed}memory): begun 1 (1/console.log)",
        "#6 x=6: failed (lost): cancelled (6/console.log)",
        "#7 x=7: preempted (exit 75): cpt: no (7/console.log)",
        "compare: python -m cpt.report .",
    ]
    run_all(jobs[1:2], command=command, places=[{"QUIET": "1"}], grace=1)  # appended to the same console
    assert jobs[1].failure() == f"{killed}memory): (no output)" and jobs[1].console.read_text() == "begun 1\n"


SWEEP = """
import sys
from pathlib import Path
from omegaconf import OmegaConf
from cpt.sweeps.jobs import Job
from cpt.sweeps.launcher import run_all
jobs = [Job(n, (f"x={n}",), "", OmegaConf.create(), Path(str(n))) for n in range(2)]
run_all(jobs, command=[sys.executable, "-c", sys.argv[1]], places=[{}, {}], grace=5)
"""
WAITING = """
import os, signal, subprocess, sys, time
from cpt.core.processes import die_with_parent
die_with_parent()
folder = sys.argv[1][2:]
def left(number, _):
    open(folder + "/got", "w").write(str(number))
    sys.exit(75)
signal.signal(signal.SIGTERM, left)
signal.signal(signal.SIGINT, left)
helper = subprocess.Popen(["sleep", "60"])
open(folder + "/pids.part", "w").write(f"{os.getpid()} {helper.pid}")
os.rename(folder + "/pids.part", folder + "/pids")
time.sleep(60)
"""


def wait_until(condition, *, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc, prctl")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_jobs_end_with_their_sweep(number, tmp_path, monkeypatch):
    """With their helpers, where the sweep could do something about it, and by the signal that it got."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with subprocess.Popen([sys.executable, "-c", SWEEP, WAITING], cwd=tmp_path) as process:
        assert wait_until(lambda: len(list(tmp_path.glob("*/pids"))) == 2)
        process.send_signal(number)
    told = [list(map(int, path.read_text().split())) for path in tmp_path.glob("*/pids")]
    pids, helpers = zip(*told, strict=True)
    if number == signal.SIGKILL:
        for helper in helpers:
            os.kill(helper, signal.SIGKILL)
        assert wait_until(lambda: not any(map(is_there, pids)))
    else:
        assert process.returncode == GO_ON and not any(map(is_there, pids + helpers))
        assert [path.read_text() for path in tmp_path.glob("*/got")] == [str(int(number))] * 2


def test_wrong_numbers_are_refused_in_one_line(capsys):
    for name, value in (("jobs", 0), ("threads", True)):
        with pytest.raises(SystemExit, match="^1$"):
            ProcessLauncher(**{"jobs": None, "threads": None, name: value}).setup(
                hydra_context=None, task_function=None, config=None
            )
        said = capsys.readouterr().err
        assert said.startswith(f"cpt: hydra.launcher.{name}={value}; allowed: ") and said.count("\n") == 1


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Eight cores, and four GPUs where there is this tool."""
    monkeypatch.setattr("cpt.sweeps.jobs.cores", lambda: 8)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "nvidia-smi"


def divided(name, number, *, jobs=None, threads=None, waiting=None, **trainer):
    """What of this name each place on the machine has, where so many jobs are to run."""
    plans = [OmegaConf.create({"trainer": trainer})] * number
    return [each.get(name) for each in divide_machine(plans, jobs=jobs, threads=threads, waiting=waiting)]


def test_gpus_are_divided(machine, monkeypatch):
    machine.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: X (UUID: GPU-{i})'\n" for i in range(4)))
    machine.chmod(0o755)
    share = partial(divided, "CUDA_VISIBLE_DEVICES", 9)
    assert share(devices=1) == ["0", "1", "2", "3"] and share(devices=2) == ["0,1", "2,3"]
    assert share(devices=3) == ["0,1,2"]
    assert share() == share(devices="auto") == share(devices=[1, 2]) == ["0,1,2,3"]
    assert share(devices=1, jobs=5) == ["0", "1", "2", "3", "0"]
    assert share(devices=1, accelerator="cpu") == [None] * 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")  # only these are used
    assert share(devices=1) == ["3", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []


def test_cores_are_divided_and_threads_that_the_user_has_set_stay(machine, monkeypatch):
    machine.write_text("#!/bin/sh\n")
    machine.chmod(0o755)
    share = partial(divided, "OMP_NUM_THREADS")
    assert share(9, devices=1) == ["1"] * 8 and share(3, devices=1) == ["2"] * 3
    assert share(9, devices=2) == ["1"] * 4
    assert share(9, devices=1, jobs=2) == share(9, devices="auto", jobs=2) == ["4"] * 2
    for waiting, count in ((9, 4), (3, 3), (1, 1)):  # what goes on later has what it would have had
        assert share(9, devices=1, jobs=4, waiting=waiting) == ["2"] * count
    assert divided("CUDA_VISIBLE_DEVICES", 2, devices=1) == [None] * 2
    assert divided("OMP_WAIT_POLICY", 2, devices=1) == ["PASSIVE"] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert share(1) == [None] and share(9, devices=1, jobs=1, threads=3) == ["3"]


# The command line, and the line of a sweep


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("-m method=lora,olora method.rate=1", "-m method=lora,olora method.rate=choice(1)"),
        ("--multirun method=lora,olora method.t=[a]", "--multirun method=lora,olora method.t=choice([a])"),
        ("-m method=choice(lora,olora) method.rate=1", "-m method=choice(lora,olora) method.rate=choice(1)"),
        ("method=lora method.rate=1", None),
        ("-m method=lora method.rate=1", None),
        ("-m method=lora,olora seed=1 trainer.steps=2 +method.mine=1 ~method.rate", None),
        ("-m method=lora,olora method.rate= method.=( method.x=1,3", None),
    ],
)
def test_options_of_a_swept_group_are_left_to_the_jobs_and_all_else_stays(given, taken):
    assert leave_to_jobs(given.split()) == (taken or given).split()


def test_a_choice_that_is_no_name_is_refused_and_all_others_are_left_to_hydra():
    for given in [
        "optim=[null]",
        "optim=5",
        "experiment=null",
        "mask=true",
        "mask=[migu,5]",
        "schedule=[{}]",
    ]:
        with pytest.raises(ValueError, match=rf"{re.escape(given)}; allowed: a choice of conf/\w+"):
            check_choices(["seed=1", given])
    check_choices(
        ["mask=[migu,mofo]", "order=[law]", "-m", "a=(", "optim=adamw", "~experiment", "optim={lr:1}"]
    )


def test_the_time_is_the_runs_or_as_far_as_it_is_known(tmp_path):
    def told(**given):
        job = SimpleNamespace(number=3, folder=tmp_path, began=utc_now())
        Heartbeat(**{"state": "running", "began": utc_now(), **given}).write(tmp_path)
        return describe_progress(job)

    at = {"phase": "learning law", "stage": 1, "stages": 3, "step": 3, "steps": 10, "phase_eta_s": 7.0}
    assert told(**at, run_eta_s=61.0) == "#3 learning law 1:01"
    assert told(**at, run_eta_s=61.0, untimed=["probes"]).endswith(" 1:01+")
    assert told(**at).endswith(" 0:07+")
    assert told(state="waiting", phase="x", why="x") == "#3 waiting"
    assert told(state="preempted") == "#3 starting"
