"""Jobs of a sweep as processes of their own: what each gets of the machine and of the command line, and what
is told of how it ended."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from shutil import copytree

import pytest
from omegaconf import OmegaConf

from cpt.cli import to_hydra
from cpt.core.heartbeat import Heartbeat
from cpt.core.preemption import GO_ON
from cpt.sweeps.jobs import Job, divide_machine, summarize_jobs, visible_gpus
from cpt.sweeps.launcher import run_all
from tests.conftest import ROOT
from tests.support.processes import is_there

APP = """
import json, os
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
    seen = {"threads": os.environ["OMP_NUM_THREADS"], "order": OmegaConf.to_container(cfg.order)}
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


@pytest.mark.slow
def test_overrides_flags_and_threads_of_the_user_reach_the_jobs_and_failures_stop_no_other(tmp_path):
    """Of a program with this launcher's own YAML that is started as a module, whose jobs are as well."""
    copytree(ROOT / "conf/hydra/launcher", tmp_path / "conf/hydra/launcher")
    (tmp_path / "more").mkdir()
    texts = {"conf/config.yaml": CONFIG, "more/other.yaml": CONFIG + "\nonly_here: 1\n", "app.py": APP}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    hidden = ("MKL_NUM_THREADS", "OMP_WAIT_POLICY", "HYDRA_FULL_ERROR")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "7", "PYTHONWARNINGS": "error"}
    given = ["-m", "-cd", "more", "--config-name=other", "order=[b,'a c'],[c]", "name='a b, \"c\"'"]
    given += ["+extra={k: [1, 2]}", "kind=done,raise", "hydra.launcher.jobs=2"]
    command = [sys.executable, "-m", "app", *given]
    ended = subprocess.run(command, cwd=tmp_path, env=env, timeout=120, capture_output=True, text=True)
    seen = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("outputs/app/*/seen.json"))]
    assert [job["order"] for job in seen] == [["b", "a c"], ["c"]]
    assert {job["name"] for job in seen} == {'a b, "c"'}
    assert {job["threads"] for job in seen} == {"7"}
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("cpt: 2 of 4 jobs failed: #1 order=[b,'a c'] kind=raise, #3 ")


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


def made_job(number):
    made = Job(number, (f"x={number}",), f"x={number}", OmegaConf.create(), Path(str(number)))
    made.folder.mkdir()
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
    jobs[3].before, jobs[0].code = True, GO_ON
    assert summarize_jobs(jobs)[0] == "5 jobs: 2 finished, 1 finished before, 1 preempted, 1 failed"
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
    assert share() == share(devices=-1) == share(devices=[1, 2]) == ["0,1,2,3"]
    assert divided("CUDA_VISIBLE_DEVICES", 2, devices="auto") == ["0,1", "2,3"]
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
    assert share(9, devices=2) == ["1"] * 4 and share(9, devices=1, jobs=2) == ["4"] * 2
    for waiting, count in ((9, 4), (3, 3), (1, 1)):  # what goes on later has what it would have had
        assert share(9, devices=1, jobs=4, waiting=waiting) == ["2"] * count
    assert divided("OMP_WAIT_POLICY", 2, devices=1) == ["PASSIVE"] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert share(1) == [None] and share(9, devices=1, jobs=1, threads=3) == ["3"]


def test_options_of_a_swept_group_are_left_to_the_jobs_and_all_else_stays():
    swept, one = ["-m", "method=lora,olora", "method.t=[a]"], ["-m", "method=lora", "method.t=1"]
    assert to_hydra(swept) == [*swept[:2], "method.t=choice([a])"]
    assert to_hydra(one) == one
