"""Signals in every loop of a run: it leaves with exit code 75 and one line, nothing learned is lost, and the
same command ends with the same bits."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cpt.core.preemption import GO_ON
from cpt.methods.ncl import NCL
from tests.conftest import ROOT
from tests.runs.test_kill import command, finished, whole  # noqa: F401  (a fixture)
from tests.support.campaign import run_few
from tests.support.endtask_fixtures import QUICK, write_task
from tests.support.processes import ended, sent, started

pytestmark = pytest.mark.slow

DDP = ["strategy=ddp", "trainer.accelerator=cpu"]
SAID = re.compile(r"cpt: stopped by (SIG\w+)(?: (.*))?; the same command goes on from here")
FEW_CHECKPOINTS = "trainer.checkpoint_every=1000"


def stopped(command, folder, *, seen, number, rank=0, twin=False, seconds=60):
    """Starts a run, sends it a signal as soon as `seen()`; gives its exit code and what it said."""
    process = started(ROOT / "run.py", *command, cwd=folder, log=folder / "log", twin=twin)
    deadline = time.monotonic() + 120
    while not seen() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.is_alive(), (folder / "log").read_text()
    sent(process, number, rank=rank)
    code = ended(process, seconds=seconds)
    lines = [match for match in map(SAID.search, (folder / "log").read_text().splitlines()) if match]
    return code, lines


def run_folder(folder):
    (run,) = (folder / "outputs" / "default").iterdir()
    return run


def log_says(folder, words):
    return lambda: words in (folder / "log").read_text() if (folder / "log").exists() else False


MOMENTS = {
    "in the base": ("pre-training the base", signal.SIGTERM),
    "in a domain": ("law (1/2)", signal.SIGINT),
    "in the last domain": ("food (2/2)", signal.SIGUSR1),
    "scoring": ("scoring after law", signal.SIGHUP),
    "at the end": ("after food, perplexity", signal.SIGTERM),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_loses_nothing(moment, whole, corpora, cache, tmp_path):  # noqa: F811
    words, number = MOMENTS[moment]
    own = tmp_path / "cache" if "base" in moment else cache
    start = [*command(corpora, own), FEW_CHECKPOINTS, *(["model.base.steps=6"] if "base" in moment else [])]
    code, lines = stopped(start, tmp_path, seen=log_says(tmp_path, words), number=number)
    assert code == GO_ON, (tmp_path / "log").read_text()[-2000:]
    assert [line[1] for line in lines] == [signal.Signals(number).name]
    told = re.fullmatch(r"after step (\d+) of 40 of (law|food)", lines[0][2] or "")
    if told:
        (checkpoint,) = run_folder(tmp_path).glob(f"checkpoints/*-{told[2]}.ckpt")
        assert torch.load(checkpoint, weights_only=True)["global_step"] == int(told[1])
    assert told or "domain" not in moment
    scores, weights = finished(start, tmp_path)
    assert scores == whole[0]
    assert all((weights[name] == value).all() for name, value in whole[1].items())
    assert {path.name for path in tmp_path.iterdir()} <= {"log", "outputs", "cache"}


def by_two(command, folder):
    """The state at the end of a run by two processes."""
    process = started(ROOT / "run.py", *command, cwd=folder, log=folder / "log", twin=True)
    assert ended(process) == 0, (folder / "log").read_text()[-2000:]
    return torch.load(run_folder(folder) / "stages" / "002.pt", weights_only=True)


@pytest.fixture(scope="module")
def whole_by_two(corpora, cache, tmp_path_factory):
    return by_two([*command(corpora, cache), *DDP], tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("rank", run_few([0, 1], [1]))
def test_all_processes_leave_and_go_on_together(rank, whole_by_two, corpora, cache, tmp_path):
    start = [*command(corpora, cache), FEW_CHECKPOINTS, *DDP]
    seen = log_says(tmp_path, "law (1/2)")
    code, lines = stopped(start, tmp_path, seen=seen, number=signal.SIGTERM, rank=rank, twin=True)
    assert code == GO_ON
    assert len(lines) == 1 and re.fullmatch(r"after step \d+ of 40 of law", lines[0][2])
    found, expected = by_two(start, tmp_path), whole_by_two
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_end_tasks_are_left_and_what_was_measured_stays(corpora, cache, tmp_path):
    for domain in ("law", "food"):
        write_task(tmp_path / "tasks", domain)
    quick = QUICK | {"root": tmp_path / "tasks", "when": "each", "seeds": "[1,2]", "epochs": 30}
    options = [f"endtask.{name}={value}" for name, value in quick.items()]
    start = [*command(corpora, cache), "trainer.steps=4", "endtask=texts", *options]
    seen = lambda: any(tmp_path.glob("outputs/default/*/endtasks/*/*.parquet"))  # noqa: E731
    code, lines = stopped(start, tmp_path, seen=seen, number=signal.SIGTERM)
    assert (code, len(lines)) == (GO_ON, 1)
    measured = {path: path.read_bytes() for path in run_folder(tmp_path).glob("endtasks/*/*.parquet")}
    finished(start, tmp_path)
    assert all(path.read_bytes() == before for path, before in measured.items())


def test_what_lightning_would_do_on_slurm_is_not_done(corpora, cache, tmp_path, monkeypatch):
    for name, value in {"NTASKS": 1, "JOB_ID": 7, "PROCID": 0, "LOCALID": 0, "NODELIST": "localhost"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    (tmp_path / "hpc_ckpt_1.ckpt").write_text("not a checkpoint: whoever loads it fails")
    start = [*command(corpora, cache), FEW_CHECKPOINTS]
    seen = log_says(tmp_path, "after base, perplexity")
    code, lines = stopped(start, tmp_path, seen=seen, number=signal.SIGUSR1)
    assert (code, len(lines)) == (GO_ON, 1)
    finished(start, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"log", "outputs", "hpc_ckpt_1.ckpt"}


NOTES = """
import os, signal, sys, time
from cpt.core.preemption import defer_signals, heed_signals
with heed_signals(), defer_signals():
    print("ready", flush=True)
    time.sleep(30)
"""


def noting(*, ignored: bool = False) -> subprocess.Popen:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": ignore}
    process = subprocess.Popen([sys.executable, "-c", NOTES], **options)
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_second_signal_ends_at_once():
    with noting() as process:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # by its group and by its launcher: one signal
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
        assert asked_again(process, signal.SIGINT) == 128 + signal.SIGINT


def asked_again(process, number):
    """The code of a process after a second signal; on a machine that is slow to tell it of the first the two
    may be one to it, and a third is needed."""
    try:
        for _ in range(20):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(0.7)
            process.send_signal(number)
        return process.wait(5)
    finally:
        process.kill()  # lest it is waited for for ever


def test_what_is_ignored_stays_ignored():
    with noting(ignored=True) as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.7)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
        process.kill()


def test_a_run_keeps_the_threads_that_it_began_with(small, start, tmp_path, monkeypatch, caplog):
    """With others the last bits of a sum differ: a sweep's job goes on alone."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    cfg, used = small("order=[law]", "trainer.steps=4"), []

    class KilledError(BaseException):
        pass

    def noted(self):
        if self.domain.name != "general":
            used.append(torch.get_num_threads())
        if len(used) == 3:
            raise KilledError

    monkeypatch.setattr(NCL, "after_update", noted)
    caplog.set_level("INFO")
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
    assert "computing with 2 threads, as this run began, not with 1" in caplog.messages


def group_stopped(command, folder, *, seen, wait):
    """A start in processes of its own, a signal to all of them as a terminal and SLURM send it, some seconds
    after `seen(pid)`; what the run said."""
    program = [sys.executable, str(ROOT / "run.py"), *command]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(program, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 120
    while not seen(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(wait)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == GO_ON, (folder / "log").read_text()
    text = (folder / "log").read_text()
    assert "Traceback" not in text
    (said,) = filter(None, map(SAID.search, text.splitlines()))
    return said


def test_processes_that_prepare_data_leave_with_their_run(corpora, cache, tmp_path):
    start = [*command(corpora, cache), "trainer.steps=200", "trainer.workers=2", FEW_CHECKPOINTS]
    seen = log_says(tmp_path, "law (1/2)")
    said = group_stopped(start, tmp_path, seen=lambda pid: seen(), wait=0.5)
    assert re.fullmatch(r"after step \d+ of 200 of law", said[2])


@pytest.mark.campaign
def test_a_signal_while_the_second_process_starts_ends_both(corpora, cache, tmp_path):
    """The first one waits for it in a library, and Lightning would kill it if the second one left alone."""
    start = [*command(corpora, cache), *DDP]

    def second(pid):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    assert group_stopped(start, tmp_path, seen=second, wait=1.0)[1] == "SIGTERM"


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


@pytest.mark.parametrize("mode", ["before", "within"])
def test_a_signal_while_libraries_are_read_in(mode):
    done = subprocess.run([sys.executable, "-c", IMPORTS, mode], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        GO_ON,
        "cpt: stopped by SIGTERM; the same command goes on from here\n",
    )


BLOCKED = """
import ctypes
from cpt.core.preemption import heed_signals
with heed_signals():
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)  # for ever, and Python's handlers have no turn
"""


def test_a_second_signal_ends_also_what_waits_in_a_library():
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BLOCKED], **options) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert asked_again(process, signal.SIGINT) == 128 + signal.SIGINT


def test_slurm_is_no_more_than_an_environment(monkeypatch, composed):
    """Lightning's own order stays: torchrun within a SLURM job is torchrun."""
    from lightning.pytorch.utilities import rank_zero_only

    from cpt.trainer.lightning import make_trainer
    from cpt.trainer.plan import read_sections

    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which a Trainer sets for the whole process
    slurm = {"NTASKS": 2, "JOB_ID": 7, "PROCID": 0, "LOCALID": 0, "NODELIST": "localhost"}
    torchrun = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    torchrun |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    for name, value in ({f"SLURM_{key}": value for key, value in slurm.items()} | torchrun).items():
        monkeypatch.setenv(name, str(value))
    options = read_sections(composed("strategy=ddp", "trainer.accelerator=cpu")).trainer
    made = make_trainer(options.lightning, label="")
    assert type(made.strategy.cluster_environment).__name__ == "TorchElasticEnvironment"
    assert made.global_rank == 1
