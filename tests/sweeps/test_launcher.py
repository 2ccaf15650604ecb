import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from cpt.core.preemption import GO_ON
from cpt.status import read_statuses
from cpt.sweeps.jobs import divide_machine, visible_gpus
from cpt.sweeps.launcher import ProcessLauncher, stop_jobs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc, prctl")

APP = """
import atexit, json, os, signal, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
import hydra
import cpt.sweeps.launcher
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # after Plugins, which loads it once more
from omegaconf import OmegaConf

class Searcher(BasicSweeper):
    def sweep(self, arguments):
        batch = [[f"x={x}", *arguments] for x in (1, 2, 1)]
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
    if cfg.kind == "refuse":
        sys.exit("cpt: no")
    if cfg.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
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
SEARCHER = "{_target_: hydra_plugins.app.Searcher, max_batch_size: null, params: null}"


def write_app(folder: Path) -> Path:
    """A Hydra program with this launcher's own YAML; without torch, a job takes half a second."""
    copytree(ROOT / "conf/hydra/launcher", folder / "conf/hydra/launcher")
    (folder / "conf/hydra/sweeper").mkdir()
    (folder / "conf/hydra/sweeper/searcher.yaml").write_text(SEARCHER)
    (folder / "conf/config.yaml").write_text(CONFIG)
    (folder / "app.py").write_text(APP)
    return folder


@pytest.fixture
def app(tmp_path):
    return write_app(tmp_path)


def environment(**variables) -> dict[str, str]:
    hidden = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "HYDRA_FULL_ERROR")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "CUDA_VISIBLE_DEVICES": ""} | variables


def sweep(app: Path, *arguments: str, seconds: float = 30, **variables: str) -> CompletedProcess[str]:
    command = [sys.executable, "app.py", "-m", *arguments]
    return subprocess.run(
        command, cwd=app, env=environment(**variables), capture_output=True, text=True, timeout=seconds
    )


def seen(app: Path) -> list[dict]:
    """What the finished jobs saw, in the order of their folders."""
    return [json.loads(path.read_text()) for path in sorted(app.glob("outputs/app/*/seen.json"))]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four jobs, two at once; the first raises and the third is killed."""
    app = write_app(tmp_path_factory.mktemp("four"))
    return app, sweep(app, "kind=raise,done,kill,other", "hydra.launcher.jobs=2")


def test_failures_stop_no_other_job(four):
    app, process = four
    assert process.returncode == 1
    assert len(seen(app)) == 2
    assert process.stderr.splitlines() == ["cpt: 2 of 4 jobs failed: #0 kind=raise, #2 kind=kill"]


def test_it_ends_with_how_many_jobs_ended_how_and_why_they_failed(four):
    _, process = four
    assert re.fullmatch(
        r"4 jobs: 2 finished, 2 failed\n"
        r"#0 kind=raise: failed \(exit 1\): RuntimeError: boom \(outputs/app/\S*kind-raise/console.log\)\n"
        r"#2 kind=kill: failed \(signal 9, Killed; perhaps for want of memory\): before the end, kind kill "
        r"\(outputs/\S*/console.log\)\n"
        r"compare: python -m cpt.report outputs/app",
        "\n".join(process.stdout.splitlines()[-4:]),
    )


def test_the_folders_of_a_sweep_say_how_their_jobs_ended(four):
    app, _ = four
    found = {
        each.run.rpartition("kind-")[2]: (each.state, each.why) for each in read_statuses([app / "outputs"])
    }
    assert found["raise"] == ("failed", "(exit 1): RuntimeError: boom")
    assert found["kill"] == (
        "failed",
        "(signal 9, Killed; perhaps for want of memory): before the end, kind kill",
    )
    (queue,) = app.glob("outputs/sweep.json")
    assert len(json.loads(queue.read_text())["runs"]) == 4


def test_start_and_end_are_reported(four):
    _, process = four
    assert re.search(r"^#1 kind=done: started, outputs/app/.*/console.log$", process.stdout, re.MULTILINE)
    assert re.search(r"^#1 kind=done: finished in \d+ s$", process.stdout, re.MULTILINE)


def test_jobs_are_processes_without_the_sweep(four):
    app, _ = four
    jobs = seen(app)
    assert len({job["pid"] for job in jobs}) == 2
    assert [job["argv"][1:] for job in jobs] == [
        ["hydra.launcher.jobs=2", f"kind={kind}", "hydra.mode=RUN"] for kind in ("done", "other")
    ]


def test_threads_are_divided(four):
    app, _ = four
    env = seen(app)[0]["env"]
    half = str(max(1, CORES // 2))
    assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"], env["OMP_WAIT_POLICY"]) == (half, half, "PASSIVE")


def test_no_more_jobs_at_once_than_asked(app):
    assert sweep(app, "x=1,2,3", "hydra.launcher.jobs=1").returncode == 0
    spans = sorted((job["begun"], job["done"]) for job in seen(app))
    assert len(spans) == 3
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_jobs_overlap(app):
    assert sweep(app, "x=1,2", "hydra.launcher.jobs=2").returncode == 0
    first, second = seen(app)
    assert max(first["begun"], second["begun"]) < min(first["done"], second["done"])


def test_overrides_survive_and_user_threads_stay(app):
    arguments = (
        "order=[b,'a c'],[c]",
        "name='a b, \"c\"'",
        "+extra={k: [1, 2]}",
        "hydra.run.dir='outputs/app/${order}'",
    )
    assert sweep(app, *arguments, OMP_NUM_THREADS="7").returncode == 0
    jobs = seen(app)
    assert [job["order"] for job in jobs] == [["b", "a c"], ["c"]]
    assert {job["name"] for job in jobs} == {'a b, "c"'}
    assert {job["env"]["OMP_NUM_THREADS"] for job in jobs} == {"7"}


def test_flags_and_hydra_overrides_reach_the_jobs(app):
    (app / "more").mkdir()
    (app / "more/other.yaml").write_text(CONFIG + "\nonly_here: 1\n")
    process = sweep(app, "-cd", "more", "--config-name=other", "hydra.run.dir=outputs/app/${x}", "x=1,2")
    assert process.returncode == 0, process.stderr
    assert sorted(path.name for path in app.glob("outputs/app/*")) == ["1", "2"]
    assert len(seen(app)) == 2


def test_a_searching_sweeper_gets_objectives_and_failures(app):
    """Equal jobs are run once."""
    assert sweep(app, "hydra/sweeper=searcher").returncode == 0
    assert json.loads((app / "returns.json").read_text()) == [
        ["COMPLETED", "0.5"],
        ["COMPLETED", "1.0"],
        ["COMPLETED", "0.5"],
    ]
    assert len(seen(app)) == 2
    assert sweep(app, "hydra/sweeper=searcher", "kind=refuse").returncode == 0
    failures = json.loads((app / "returns.json").read_text())
    assert failures[0] == ["FAILED", "#0 x=1: failed (exit 1): cpt: no"]


def test_console_is_appended_and_last_words_are_of_this_start(app):
    for variables, words in ({}, "before the end, kind kill"), ({"QUIET": "1"}, "(no output)"):
        process = sweep(app, "kind=kill", **variables)
        assert f"Killed; perhaps for want of memory): {words} (outputs/" in process.stdout
    (console,) = app.glob("outputs/app/*/console.log")
    assert console.read_text() == "before the end, kind kill\n"


def test_a_module_starts_its_jobs_as_a_module(app):
    command = [sys.executable, "-m", "app", "-m", "x=1"]
    assert subprocess.run(command, cwd=app, env=environment(), stdout=subprocess.DEVNULL).returncode == 0
    assert len(seen(app)) == 1


def test_jobs_that_share_a_folder_are_refused(app):
    process = sweep(app, "x=1,2", "hydra.run.dir=outputs/one")
    assert process.returncode == 1
    assert re.fullmatch(
        r"cpt: '#0 x=1' and '#1 x=2' have one hydra.run.dir, outputs/one; allowed: one each\n", process.stderr
    )


@pytest.mark.parametrize(
    ("name", "package"), [("slurm_local", "hydra_submitit_launcher"), ("ray_jobs", "hydra_ray_launcher")]
)
def test_other_launchers_on_this_machine(app, name, package):
    if not importable(f"hydra_plugins.{package}"):
        pytest.skip(f"needs {package.replace('_', '-')}, an extra")
    arguments = (f"hydra/launcher={name}", "kind=raise,done", "x=3")
    process = sweep(app, *arguments, PYTHONWARNINGS="default", seconds=120)
    assert process.returncode == 1, process.stderr
    assert process.stderr.splitlines()[-1] == "cpt: 1 of 2 jobs failed: #0 kind=raise"
    (job,) = seen(app)
    assert job["argv"][1:] == [arguments[0], "kind=done", "x=3", "hydra.mode=RUN"]
    assert "RuntimeError: boom (outputs/app/" in process.stdout


def importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def running(pid: int) -> bool:
    """Whether a process exists and is not a zombie that nobody has waited for."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, *, seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def started_and_sent(app: Path, number: int) -> tuple[int, list[dict]]:
    """The exit code of a sweep of two waiting jobs that got a signal, and the jobs."""
    command = [sys.executable, "app.py", "-m", "x=1,2", "kind=wait", "hydra.launcher.jobs=2"]
    heed = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a shell's background job inherits a deaf ear
    options = {"cwd": app, "env": environment(), "stdout": subprocess.DEVNULL, "preexec_fn": heed}
    with subprocess.Popen(command, **options) as process:
        assert wait_until(lambda: len(list(app.glob("outputs/app/*/seen.json"))) == 2)
        time.sleep(0.2)
        process.send_signal(number)
    return process.returncode, seen(app)


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_jobs_and_their_helpers(app, number):
    code, jobs = started_and_sent(app, number)
    assert code == GO_ON
    pids = [job[key] for job in jobs for key in ("pid", "helper")]
    assert len(pids) == 4
    assert not any(map(running, pids))


def test_jobs_get_the_signal_that_their_sweep_got():
    """What a job says of its end is then what happened: stopped by SIGINT, not SIGTERM."""
    for received, first in (([signal.SIGINT], signal.SIGINT), ([], signal.SIGTERM)):
        told = []
        process = SimpleNamespace(poll=lambda: 0, wait=lambda: 0)
        stop_jobs([SimpleNamespace(kill=told.append, process=process)], grace=1, received=received)
        assert told == [first, signal.SIGKILL]


@linux
def test_jobs_end_with_a_killed_sweep(app):
    code, jobs = started_and_sent(app, signal.SIGKILL)
    for job in jobs:
        os.kill(job["helper"], signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert wait_until(lambda: not any(running(job["pid"]) for job in jobs))


@pytest.mark.parametrize(
    "wrong", [{"jobs": 0}, {"jobs": -1}, {"threads": 0}, {"jobs": "two"}, {"threads": 1.5}, {"jobs": True}]
)
def test_wrong_numbers_are_refused_in_one_line(wrong, capsys):
    ((name, value),) = wrong.items()
    launcher = ProcessLauncher(**{"jobs": None, "threads": None, **wrong})
    with pytest.raises(SystemExit) as end:
        launcher.setup(hydra_context=None, task_function=None, config=None)
    assert end.value.code == 1
    assert capsys.readouterr().err == f"cpt: hydra.launcher.{name}={value}; allowed: null, 1, 2, …\n"


def test_it_is_registered_where_hydra_looks():
    target = OmegaConf.load(ROOT / "conf/hydra/launcher/processes.yaml")._target_
    assert Plugins.instance().class_name_to_class[target] is ProcessLauncher


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


def plans(number: int, **trainer) -> list:
    return [OmegaConf.create({"trainer": trainer})] * number


@pytest.mark.parametrize(
    ("trainer", "jobs", "gpus"),
    [
        ({"devices": 1}, None, ["0", "1", "2", "3"]),
        ({"devices": 2}, None, ["0,1", "2,3"]),
        ({"devices": 3}, None, ["0,1,2"]),
        ({"devices": "auto"}, None, ["0,1,2,3"]),
        ({}, None, ["0,1,2,3"]),
        ({"devices": [1, 2]}, None, ["0,1,2,3"]),
        ({"devices": 1}, 5, ["0", "1", "2", "3", "0"]),
    ],
)
def test_gpus_are_divided(machine, trainer, jobs, gpus):
    machine(4)
    assert [
        place["CUDA_VISIBLE_DEVICES"]
        for place in divide_machine(plans(9, **trainer), jobs=jobs, threads=None)
    ] == gpus


def test_only_given_gpus_are_used(machine, monkeypatch):
    machine(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    places = divide_machine(plans(9, devices=1), jobs=None, threads=None)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["3", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("number", "trainer", "jobs", "count", "threads"),
    [
        (9, {"devices": 1}, None, 8, "1"),
        (3, {"devices": 1}, None, 3, "2"),
        (9, {"devices": 1}, 2, 2, "4"),
        (9, {"devices": 2}, None, 4, "1"),
        (9, {"devices": "auto"}, 2, 2, "4"),
    ],
)
def test_cores_are_divided(machine, number, trainer, jobs, count, threads):
    places = divide_machine(plans(number, **trainer), jobs=jobs, threads=None)
    assert [place["OMP_NUM_THREADS"] for place in places] == [threads] * count
    assert all("CUDA_VISIBLE_DEVICES" not in place for place in places)


@pytest.mark.parametrize(("waiting", "count"), [(9, 4), (3, 3), (1, 1)])
def test_what_goes_on_later_has_the_threads_that_it_would_have_had(machine, waiting, count):
    places = divide_machine(plans(9, devices=1), jobs=4, threads=None, waiting=waiting)
    assert [place["OMP_NUM_THREADS"] for place in places] == ["2"] * count


def test_threads_that_the_user_has_set_stay(machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert divide_machine(plans(1), jobs=None, threads=None) == [{}]


def test_jobs_on_the_cpu_leave_gpus_alone(machine):
    machine(1)
    assert len(divide_machine(plans(9, devices=1, accelerator="cpu"), jobs=None, threads=None)) == 8


def test_given_threads_win_and_one_process_may_spin(machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    (place,) = divide_machine(plans(9, devices=1), jobs=1, threads=3)
    assert place == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
