"""Runs that are killed or told to leave, by SIGKILL and by signals in every loop: exit code 75 and one line,
nothing learned is lost, and the same command ends with the same bits; what a run says of itself meanwhile."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_only
from safetensors.torch import load_file

from cpt import status
from cpt.core import heartbeat
from cpt.core.cache import make_once
from cpt.core.heartbeat import Heartbeat, ProcessId
from cpt.core.preemption import GO_ON
from cpt.methods.ncl import NCL
from cpt.trainer.lightning import make_trainer
from cpt.trainer.plan import read_sections
from tests.conftest import ROOT, SMALL
from tests.runs.reading import told_by
from tests.support.campaign import run_few
from tests.support.killing import KilledError
from tests.support.processes import ended, sent, started

pytestmark = pytest.mark.slow

DDP = ["strategy=ddp", "trainer.accelerator=cpu"]
SAID = re.compile(r"cpt: stopped by (SIG\w+)(?: (.*))?; the same command goes on from here")
STEPS = ["trainer.steps=80", "trainer.checkpoint_every=20"]


def command(corpora: Path, cache: Path, *overrides: str) -> list[str]:
    places = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law,food]"]
    return [*places, *SMALL, "trainer.steps=40", *overrides]


def begun(command, folder, *, seen, twin=False):
    """A run in a process of its own, as soon as `seen()`."""
    process = started(ROOT / "run.py", *command, cwd=folder, log=folder / "log", twin=twin)
    deadline = time.monotonic() + 120
    while not seen() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.is_alive(), (folder / "log").read_text()
    return process


def stopped(command, folder, *, seen, number, rank=0, twin=False):
    """Starts a run, sends it a signal as soon as `seen()`; gives its exit code and what it said."""
    process = begun(command, folder, seen=seen, twin=twin)
    sent(process, number, rank=rank)
    code = ended(process, seconds=60)
    lines = [match for match in map(SAID.search, (folder / "log").read_text().splitlines()) if match]
    return code, lines


def finished(command, folder, *, twin=False):
    """Runs to the end; the matrix and the weights."""
    process = started(ROOT / "run.py", *command, cwd=folder, log=folder / "log", twin=twin)
    assert ended(process, seconds=120) == 0, (folder / "log").read_text()[-2000:]
    scores = told_by(run_folder(folder))
    return [scores["nll"], scores["metrics"]], load_file(run_folder(folder) / "model" / "model.safetensors")


def in_slurm(monkeypatch, *, tasks=1):
    slurm = {"NTASKS": tasks, "JOB_ID": 7, "PROCID": 0, "LOCALID": 0, "NODELIST": "localhost"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def run_folder(folder):
    (run,) = (folder / "outputs" / "default").iterdir()
    return run


def log_says(folder, words, *, name="log"):
    return lambda: (folder / name).exists() and words in (folder / name).read_text()


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert all((found[1][name] == value).all() for name, value in expected[1].items())


@pytest.fixture(scope="module")
def whole(corpora, cache, tmp_path_factory):
    return finished(command(corpora, cache, *STEPS), tmp_path_factory.mktemp("whole"))


def test_killed_and_told_to_leave_a_run_says_so_and_loses_nothing(whole, corpora, cache, tmp_path):
    """SIGKILL within the first domain, SIGINT within the second, each asked by `cpt.status` from outside."""
    start, seen = command(corpora, cache, *STEPS), lambda: any(tmp_path.glob("outputs/*/*/checkpoints/*"))
    process = begun(start, tmp_path, seen=seen)
    running = status.read_status(run_folder(tmp_path))
    process.kill()
    process.join()
    killed = status.read_status(run_folder(tmp_path))
    assert (running.state, running.host, running.pid) == ("running", ProcessId.current().host, process.pid)
    assert (killed.state, killed.run_eta_s) == ("killed", None)
    code, lines = stopped(start, tmp_path, seen=log_says(tmp_path, "food (2/2)"), number=signal.SIGINT)
    assert (code, [line[1] for line in lines]) == (GO_ON, ["SIGINT"])
    left = status.read_status(run_folder(tmp_path))
    told = re.fullmatch(r"after step (\d+) of 80 of food", lines[0][2])
    assert (left.state, left.why) == ("preempted", f"stopped by SIGINT {lines[0][2]}")
    assert left.learned == pytest.approx((80 + left.step) / 160, abs=1e-4) and left.step == int(told[1])
    (checkpoint,) = run_folder(tmp_path).glob("checkpoints/*-food.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == left.step
    assert not list(run_folder(tmp_path).glob("*.partial"))
    assert_same(finished(start, tmp_path), whole)
    assert {path.name for path in tmp_path.iterdir()} == {"log", "outputs"}


MOMENTS = {
    "in the base": ("pre-training the base", signal.SIGTERM),
    "scoring, within a SLURM job": ("scoring after law", signal.SIGHUP),
    "in the last domain": ("food (2/2)", signal.SIGUSR1),
    "at the end": ("after food, perplexity", signal.SIGTERM),
    "killed after a stage": ("outputs/default/*/stages/001.pt", signal.SIGKILL),
    "killed while committing": ("outputs/default/*/documents/001.npz", signal.SIGKILL),
    "killed while exporting": ("outputs/default/*/model", signal.SIGKILL),
}


@pytest.mark.campaign
@pytest.mark.parametrize("moment", MOMENTS)
def test_no_moment_loses_anything(moment, whole, corpora, cache, tmp_path, monkeypatch):
    """Within a SLURM job what Lightning would do is not done."""
    what, number = MOMENTS[moment]
    if "SLURM" in moment:
        in_slurm(monkeypatch)
        (tmp_path / "hpc_ckpt_1.ckpt").write_text("not a checkpoint: whoever loads it fails")
    start = command(corpora, tmp_path / "cache" if "base" in moment else cache, *STEPS)
    seen = (lambda: any(tmp_path.glob(what))) if "*" in what else log_says(tmp_path, what)
    code, lines = stopped(start, tmp_path, seen=seen, number=number)
    assert code == (-number if number == signal.SIGKILL else GO_ON)
    assert len(lines) == (number != signal.SIGKILL)
    assert_same(finished(start, tmp_path), whole)


@pytest.mark.parametrize("rank", run_few([0, 1], [1]))
def test_all_processes_leave_and_go_on_together(rank, whole, corpora, cache, tmp_path):
    start, seen = [*command(corpora, cache, *STEPS), *DDP], log_says(tmp_path, "law (1/2)")
    code, lines = stopped(start, tmp_path, seen=seen, number=signal.SIGTERM, rank=rank, twin=True)
    assert code == GO_ON
    assert len(lines) == 1 and re.fullmatch(r"after step \d+ of 80 of law", lines[0][2])
    (nll, _), _ = finished(start, tmp_path, twin=True)
    assert all(row == pytest.approx(own, rel=1e-3) for row, own in zip(nll, whole[0][0], strict=True))


def test_slurm_is_no_more_than_an_environment(monkeypatch, composed):
    """Lightning's own order stays: torchrun within a SLURM job is torchrun."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which a Trainer sets for the whole process
    in_slurm(monkeypatch, tasks=2)
    torchrun = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    torchrun |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    options = read_sections(composed(*DDP)).trainer
    made = make_trainer(options.lightning, label="")
    assert type(made.strategy.cluster_environment).__name__ == "TorchElasticEnvironment"
    assert made.global_rank == 1


# Processes without a run

PROGRAMS = {
    "busy": """
import time
from cpt.core.preemption import defer_signals, heed_signals
with heed_signals(), defer_signals():
    print("ready", flush=True)
    time.sleep(30)
""",
    "waits in a library": """
import ctypes
from cpt.core.preemption import heed_signals
with heed_signals():
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)  # for ever, and Python's handlers have no turn
""",
}
IMPORTS = """
import os, signal, sys
from cpt.core.preemption import heed_imports, heed_signals, notice
mode = sys.argv[1]
if mode == "before":
    heed_imports()
    os.kill(os.getpid(), signal.SIGTERM)
import types
sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")  # as far as it is read in so far
with heed_signals():
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_second_signal_ends_at_once_and_what_is_ignored_stays_ignored(kind):
    how = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    how["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with subprocess.Popen([sys.executable, "-c", PROGRAMS[kind]], **how) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        for _ in range(2):  # by its group and by its launcher: one signal
            process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
        try:
            for _ in range(20):  # on a slow machine two that follow at once may be one to it
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    assert process.wait(0.7) == 128 + signal.SIGINT
                    break
            else:
                pytest.fail("it has not ended")
        finally:
            process.kill()


@pytest.mark.parametrize("mode", ["before", "within"])
def test_a_signal_while_libraries_are_read_in(mode):
    done = subprocess.run([sys.executable, "-c", IMPORTS, mode], cwd=ROOT, capture_output=True, text=True)
    said = "cpt: stopped by SIGTERM; the same command goes on from here\n"
    assert (done.returncode, done.stderr) == (GO_ON, said)


GROUPS = {"workers": ["trainer.steps=200", "trainer.workers=2"], "second process": DDP}


@pytest.mark.campaign
@pytest.mark.parametrize("kind", GROUPS)
def test_a_signal_to_all_processes_ends_all_in_a_line(kind, corpora, cache, tmp_path):
    """As a terminal and SLURM send it: to those that prepare data; and while the first one waits for the
    second in a library, where Lightning would kill it if the second one left alone."""
    program = [sys.executable, str(ROOT / "run.py"), *command(corpora, cache), *GROUPS[kind]]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(program, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    seen = log_says(tmp_path, "law (1/2)") if kind == "workers" else lambda: children.read_text().split()
    deadline = time.monotonic() + 120
    while not seen() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5 if kind == "workers" else 1.0)
    os.killpg(process.pid, signal.SIGTERM)
    text = (tmp_path / "log").read_text
    assert process.wait(60) == GO_ON, text()
    assert len(SAID.findall(text())) == 1 and "Traceback" not in text()


# What a run says and keeps of itself


def test_a_run_keeps_the_threads_that_it_began_with(small, start, tmp_path, monkeypatch):
    """With others the last bits of a sum differ: a sweep's job goes on alone."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    cfg, used = small("order=[law]", "trainer.steps=4"), []

    def noted(self):
        used.extend([torch.get_num_threads()] * (self.domain.name != "general"))
        if len(used) == 3:
            raise KilledError

    monkeypatch.setattr(NCL, "after_update", noted)
    try:
        torch.set_num_threads(2)
        with pytest.raises(KilledError):
            start(cfg, tmp_path)
        torch.set_num_threads(1)
        monkeypatch.delenv("OMP_NUM_THREADS")
        start(cfg, tmp_path)
    finally:
        torch.set_num_threads(1)
    assert set(used) == {2} and len(used) > 4


def test_a_failed_run_leaves_its_message_and_a_second_start_the_heartbeat_of_the_first(
    small, start, tmp_path, monkeypatch
):
    cfg, run = small("order=[law]"), tmp_path / "run"

    def fail(self):
        if self.domain.name == "law":
            raise RuntimeError("the disk\nis full")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(NCL, "after_update", fail)
        start(cfg, run)
    seen = status.read_status(run)
    assert (seen.state, seen.why, seen.phase) == ("failed", "RuntimeError: the disk is full", "learning law")
    assert not [each for each in threading.enumerate() if each.name == "heartbeat"]
    start(cfg, run)
    assert status.read_status(run).state == "finished"
    before = (run / "progress.json").read_bytes()
    with pytest.raises(ValueError, match="does not go on to 7"):
        start(small("order=[law]", "trainer.steps=7"), run)
    assert (run / "progress.json").read_bytes() == before
    with FileLock(run / ".lock"), heartbeat.heartbeat(run):
        began = json.loads((run / "progress.json").read_text())["began"]
        with pytest.raises(ValueError, match="another process is at work"):
            start(cfg, run)
        assert status.read_status(run).state == "running" and Heartbeat.load(run).began == began


def test_a_refused_run_leaves_a_message_where_its_folder_stays_and_else_no_folder(small, start, tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "console.log").write_text("")
    for name in ("alone", "job"):
        with pytest.raises(ValueError):
            start(small("order=[nowhere]"), tmp_path / name)
    assert not (tmp_path / "alone").exists()
    seen = status.read_status(tmp_path / "job")
    assert seen.state == "failed" and "nowhere" in seen.why


def test_waiting_for_another_run_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "TICK_S", 0.02)
    (tmp_path / "run").mkdir()
    maker = threading.Thread(target=make_once, args=[tmp_path / "base"], kwargs={"make": lambda at: None})
    with heartbeat.heartbeat(tmp_path / "run"):
        with FileLock(tmp_path / "base.lock", thread_local=False):
            maker.start()
            deadline = time.monotonic() + 60
            while (seen := status.read_status(tmp_path / "run")).state != "waiting":
                assert time.monotonic() < deadline
                time.sleep(0.02)
        maker.join()
    assert seen.why == "another run that is making base"
