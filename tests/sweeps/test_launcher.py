"""Jobs of a sweep as processes of their own, what each gets of the machine, and what is told of them."""

import importlib.util
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
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from cpt.core.preemption import GO_ON
from cpt.status import read_statuses
from cpt.sweeps.jobs import divide_machine, visible_gpus
from cpt.sweeps.launcher import ProcessLauncher, stop_jobs
from tests.conftest import ROOT
from tests.support.processes import is_there

pytestmark = pytest.mark.slow

CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()

APP = """
import atexit, json, os, signal, subprocess, sys, time
from pathlib import Path
import hydra
import cpt.sweeps.launcher
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # after Plugins, which loads it once more
from omegaconf import OmegaConf

class Searcher(BasicSweeper):
    def sweep(self, arguments):
        batch = [[f"x={x}", f"kind={'refuse' if x == 3 else 'done'}", *arguments] for x in (1, 2, 1, 3)]
        returns = self.launcher.launch(batch, initial_job_idx=0)
        Path("returns.json").write_text(json.dumps([(r.status.name, str(r._return_value)) for r in returns]))

Plugins.instance().class_name_to_class["hydra_plugins.app.Searcher"] = Searcher

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    folder = Path(HydraConfig.get().runtime.output_dir)
    seen = {"pid": os.getpid(), "argv": sys.argv, "env": dict(os.environ), "begun": time.time(),
            "order": OmegaConf.to_container(cfg.order), "name": cfg.name}
    if "QUIET" not in os.environ:
        print("before the end, kind", cfg.kind)
    atexit.register(print, "last line of all")
    if cfg.kind == "raise":
        raise RuntimeError("boom")
    if cfg.kind in ("refuse", "kill"):
        sys.exit("cpt: no") if cfg.kind == "refuse" else os.kill(os.getpid(), signal.SIGKILL)
    if cfg.kind == "wait":
        seen["helper"] = subprocess.Popen(["sleep", "60"]).pid
        (folder / "seen.json").write_text(json.dumps(seen))
        time.sleep(60)
    time.sleep(0.3)
    (folder / "seen.json").write_text(json.dumps(seen | {"done": time.time()}))
    scores = {"run": {"finished": cfg.kind != "partial"}, **({"objective": cfg.x / 2} if cfg.x else {})}
    (folder / "scores.json").write_text(json.dumps(scores))

main()
"""
CONFIG = """
defaults: [_self_, {override hydra/launcher: processes}]
kind: done
order: [a]
name: given
x: 0
hydra:
  run: {dir: "outputs/${hydra:job.name}/${choices:${hydra.overrides.task},m,${x},0}"}
  sweep: {dir: outputs}
  hydra_logging: {formatters: {simple: {format: "%(message)s"}}}
"""


@pytest.fixture
def app(tmp_path):
    """A Hydra program with this launcher's own YAML; without torch, a job takes half a second."""
    copytree(ROOT / "conf/hydra/launcher", tmp_path / "conf/hydra/launcher")
    (tmp_path / "conf/hydra/sweeper").mkdir()
    searcher = "{_target_: hydra_plugins.app.Searcher, max_batch_size: null, params: null}"
    (tmp_path / "conf/hydra/sweeper/searcher.yaml").write_text(searcher)
    (tmp_path / "conf/config.yaml").write_text(CONFIG)
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def environment(**variables) -> dict[str, str]:
    hidden = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "HYDRA_FULL_ERROR")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "CUDA_VISIBLE_DEVICES": ""} | variables


def sweep(app: Path, *arguments: str, program=("app.py",), **variables: str) -> CompletedProcess[str]:
    command, options = [sys.executable, *program, "-m", *arguments], {"capture_output": True, "text": True}
    return subprocess.run(command, cwd=app, env=environment(**variables), timeout=120, **options)


def seen(app: Path) -> list[dict]:
    """What the finished jobs saw, in the order of their folders."""
    return [json.loads(path.read_text()) for path in sorted(app.glob("outputs/app/*/seen.json"))]


def test_failures_stop_no_other_job_and_all_is_told(app):
    """Four jobs, two at once; the first raises and the third is killed."""
    process = sweep(app, "kind=raise,done,kill,other", "hydra.launcher.jobs=2")
    assert process.returncode == 1
    assert process.stderr.splitlines() == ["cpt: 2 of 4 jobs failed: #0 kind=raise, #2 kind=kill"]
    total, *failed, compare = process.stdout.splitlines()[-4:]
    assert (total, compare) == ("4 jobs: 2 finished, 2 failed", "compare: python -m cpt.report outputs/app")
    boom, last = "(exit 1): RuntimeError: boom", "before the end, kind kill"
    killed = rf"(signal 9, Killed; perhaps for want of memory): {last}"
    assert failed[0].startswith(f"#0 kind=raise: failed {boom} (outputs/app/")
    assert failed[1].startswith(f"#2 kind=kill: failed {killed} (outputs/app/")
    assert re.search(r"^#1 kind=done: started, outputs/app/.*/console.log$", process.stdout, re.MULTILINE)
    assert re.search(r"^#1 kind=done: finished in \d+ s$", process.stdout, re.MULTILINE)
    found = {each.run.rpartition("kind-")[2]: each for each in read_statuses([app / "outputs"])}
    assert (found["raise"].state, found["raise"].why) == ("failed", boom)
    assert (found["kill"].state, found["kill"].why) == ("failed", killed)
    (queue,) = app.glob("outputs/sweep.json")
    assert len(json.loads(queue.read_text())["runs"]) == 4
    jobs = seen(app)
    assert len({job["pid"] for job in jobs}) == 2
    assert [job["argv"][1:] for job in jobs] == [
        ["hydra.launcher.jobs=2", f"kind={kind}", "hydra.mode=RUN"] for kind in ("done", "other")
    ]
    env, half = jobs[0]["env"], str(max(1, CORES // 2))
    assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"], env["OMP_WAIT_POLICY"]) == (half, half, "PASSIVE")


def test_jobs_overlap_but_no_more_at_once_than_asked(app):
    assert sweep(app, "x=1,2,3", "hydra.launcher.jobs=2").returncode == 0
    one, two, three = sorted((job["begun"], job["done"]) for job in seen(app))
    assert two[0] < one[1] and three[0] >= min(one[1], two[1])


def test_overrides_flags_and_threads_of_the_user_reach_the_jobs(app):
    """Of a program that is started as a module, whose jobs are as well."""
    (app / "more").mkdir()
    (app / "more/other.yaml").write_text(CONFIG + "\nonly_here: 1\n")
    arguments = ["-cd", "more", "--config-name=other", "order=[b,'a c'],[c]", "name='a b, \"c\"'"]
    arguments += ["+extra={k: [1, 2]}", "hydra.run.dir='outputs/app/${order}'"]
    process = sweep(app, *arguments, program=("-m", "app"), OMP_NUM_THREADS="7")
    assert process.returncode == 0, process.stderr
    jobs = seen(app)
    assert [job["order"] for job in jobs] == [["b", "a c"], ["c"]]
    assert {job["name"] for job in jobs} == {'a b, "c"'}
    assert {job["env"]["OMP_NUM_THREADS"] for job in jobs} == {"7"}


def test_a_searching_sweeper_gets_objectives_and_failures(app):
    """Equal jobs are run once."""
    assert sweep(app, "hydra/sweeper=searcher").returncode == 0
    *fine, failed = json.loads((app / "returns.json").read_text())
    assert fine == [["COMPLETED", "0.5"], ["COMPLETED", "1.0"], ["COMPLETED", "0.5"]]
    assert failed[0] == "FAILED" and "x=3 kind=refuse: failed (exit 1): cpt: no" in failed[1]
    assert len(seen(app)) == 2


def test_console_is_appended_and_last_words_are_of_this_start(app):
    for variables, words in ({}, "before the end, kind kill"), ({"QUIET": "1"}, "(no output)"):
        process = sweep(app, "kind=kill", **variables)
        assert f"Killed; perhaps for want of memory): {words} (outputs/" in process.stdout
    (console,) = app.glob("outputs/app/*/console.log")
    assert console.read_text() == "before the end, kind kill\n"


def test_jobs_that_share_a_folder_are_refused(app):
    process = sweep(app, "x=1,2", "hydra.run.dir=outputs/one")
    assert process.returncode == 1
    assert process.stderr.startswith("cpt: '#0 x=1' and '#1 x=2' have one hydra.run.dir, outputs/one")
    assert process.stderr.count("\n") == 1


def importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(
    ("name", "package"), [("slurm_local", "hydra_submitit_launcher"), ("ray_jobs", "hydra_ray_launcher")]
)
def test_other_launchers_on_this_machine(app, name, package):
    if not importable(f"hydra_plugins.{package}"):
        pytest.skip(f"needs {package.replace('_', '-')}, an extra")
    arguments = (f"hydra/launcher={name}", "kind=raise,done", "x=3")
    process = sweep(app, *arguments, PYTHONWARNINGS="default")
    assert process.returncode == 1, process.stderr
    assert process.stderr.splitlines()[-1] == "cpt: 1 of 2 jobs failed: #0 kind=raise"
    (job,) = seen(app)
    assert job["argv"][1:] == [arguments[0], "kind=done", "x=3", "hydra.mode=RUN"]
    assert "RuntimeError: boom (outputs/app/" in process.stdout


def wait_until(condition, *, seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc, prctl")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.campaign), signal.SIGTERM, signal.SIGKILL]
)
def test_jobs_end_with_their_sweep(app, number):
    """With their helpers, where the sweep could do something about it."""
    command = [sys.executable, "app.py", "-m", "x=1,2", "kind=wait", "hydra.launcher.jobs=2"]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job is deaf to it
    options = {"cwd": app, "env": environment(), "stdout": subprocess.DEVNULL, "preexec_fn": heed}
    with subprocess.Popen(command, **options) as process:
        assert wait_until(lambda: len(list(app.glob("outputs/app/*/seen.json"))) == 2)
        time.sleep(0.2)
        process.send_signal(number)
    jobs = seen(app)
    helpers, pids = ([job[key] for job in jobs] for key in ("helper", "pid"))
    assert len(pids) == 2
    if number == signal.SIGKILL:
        for helper in helpers:
            os.kill(helper, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert wait_until(lambda: not any(map(is_there, pids)))
    else:
        assert process.returncode == GO_ON and not any(map(is_there, pids + helpers))


def test_jobs_get_the_signal_that_their_sweep_got():
    """What a job says of its end is then what happened: stopped by SIGINT, not SIGTERM."""
    for received, first in (([signal.SIGINT], signal.SIGINT), ([], signal.SIGTERM)):
        told = []
        process = SimpleNamespace(poll=lambda: 0, wait=lambda: 0)
        stop_jobs([SimpleNamespace(kill=told.append, process=process)], grace=1, received=received)
        assert told == [first, signal.SIGKILL]


@pytest.mark.parametrize("wrong", [{"jobs": 0}, {"threads": 1.5}, {"jobs": "two"}, {"jobs": True}])
def test_wrong_numbers_are_refused_in_one_line(wrong, capsys):
    ((name, value),) = wrong.items()
    launcher = ProcessLauncher(**{"jobs": None, "threads": None, **wrong})
    with pytest.raises(SystemExit, match="^1$"):
        launcher.setup(hydra_context=None, task_function=None, config=None)
    said = capsys.readouterr().err
    assert said.startswith(f"cpt: hydra.launcher.{name}={value}; allowed: ") and said.count("\n") == 1


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Eight cores, and as many GPUs as the test says."""

    def equip(gpus: int) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: X (UUID: GPU-{i})'\n" for i in range(gpus)))
        tool.chmod(0o755)

    monkeypatch.setattr("cpt.sweeps.jobs.cores", lambda: 8)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    equip(0)
    return equip


def divided(name: str, number: int, *, jobs=None, threads=None, waiting=None, **trainer) -> list:
    """What of this name each place on the machine has, where so many jobs are to run."""
    plans = [OmegaConf.create({"trainer": trainer})] * number
    given = {} if waiting is None else {"waiting": waiting}
    return [each.get(name) for each in divide_machine(plans, jobs=jobs, threads=threads, **given)]


def test_gpus_are_divided(machine, monkeypatch):
    machine(4)
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
    share = partial(divided, "OMP_NUM_THREADS")
    assert share(9, devices=1) == ["1"] * 8 and share(3, devices=1) == ["2"] * 3
    assert share(9, devices=2) == ["1"] * 4
    assert share(9, devices=1, jobs=2) == share(9, devices="auto", jobs=2) == ["4"] * 2
    for waiting, count in ((9, 4), (3, 3), (1, 1)):  # what goes on later has what it would have had
        assert share(9, devices=1, jobs=4, waiting=waiting) == ["2"] * count
    assert divided("CUDA_VISIBLE_DEVICES", 2, devices=1) == [None] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert divide_machine([OmegaConf.create({"trainer": {}})], jobs=None, threads=None) == [{}]
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # those given to the launcher win
        assert divided(name, 9, devices=1, jobs=1, threads=3) == ["3"]
    assert divided("OMP_WAIT_POLICY", 9, devices=1, jobs=1, threads=3) == [None]
