"""Runs that are killed or told to leave, by SIGKILL and by signals in every loop: exit code 75 and one line,
nothing learned is lost, and the same command ends with the same bits; what a run says of itself meanwhile."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from cpt import status
from cpt.core.preemption import GO_ON, Preempted, joining_others, notice
from cpt.trainer import lightning
from tests.conftest import ROOT, SMALL
from tests.runs.reading import command, read_scores, start_and_kill
from tests.support.campaign import run_few
from tests.support.forked_scripts import send_signal, start_script, wait_for, wait_for_exit

pytestmark = pytest.mark.slow

DDP = ["strategy=ddp", "trainer.accelerator=cpu"]
SAID = re.compile(r"cpt: stopped by (SIG\w+)(?: (.*))?; run the same command again to continue")


def begin(words, folder, *, condition, twin=False):
    process = start_script(ROOT / "run.py", *words, cwd=folder, log=folder / "log", twin=twin)
    wait_for(lambda: condition() or not process.is_alive())
    assert process.is_alive(), (folder / "log").read_text()
    return process


def start_and_stop(words, folder, *, condition, number, rank=0, twin=False):
    """Starts a run, sends it a signal as soon as `condition()`; gives its exit code and what it said."""
    process = begin(words, folder, condition=condition, twin=twin)
    send_signal(process, number, rank=rank)
    code = wait_for_exit(process, seconds=60)
    lines = [match for match in map(SAID.search, (folder / "log").read_text().splitlines()) if match]
    return code, lines


def start_and_finish(words, folder, *, twin=False):
    process = start_script(ROOT / "run.py", *words, cwd=folder, log=folder / "log", twin=twin)
    assert wait_for_exit(process, seconds=120) == 0, (folder / "log").read_text()[-2000:]
    scores = read_scores(run_folder(folder))
    return [scores["nll"], scores["metrics"]], load_file(run_folder(folder) / "model" / "model.safetensors")


def run_folder(folder):
    (run,) = (folder / "outputs" / "default").iterdir()
    return run


def log_says(folder, words):
    return lambda: (folder / "log").exists() and words in (folder / "log").read_text()


@pytest.fixture(scope="module")
def run_command(corpora, cache):
    return command(corpora, cache, *SMALL, "trainer.steps=50", "trainer.checkpoint_every_n_steps=20")


@pytest.fixture(scope="module")
def undisturbed(run_command, tmp_path_factory):
    return start_and_finish(run_command, tmp_path_factory.mktemp("whole"))


def test_a_run_that_is_signalled_logs_it_and_loses_nothing(undisturbed, run_command, tmp_path):
    process = begin(run_command, tmp_path, condition=lambda: any(tmp_path.glob("outputs/*/*/checkpoints/*")))
    running = status.read_status(run_folder(tmp_path))
    process.kill()
    process.join()
    killed = status.read_status(run_folder(tmp_path))
    assert (running.state, running.process.pid, killed.state) == ("running", process.pid, "killed")

    code, lines = start_and_stop(
        run_command, tmp_path, condition=log_says(tmp_path, "food (2/2)"), number=signal.SIGINT
    )
    assert (code, [line[1] for line in lines]) == (GO_ON, ["SIGINT"])
    run_status = status.read_status(run_folder(tmp_path))
    step_match = re.fullmatch(r"after step (\d+) of 50 of food", lines[0][2])
    assert (run_status.state, run_status.why) == ("preempted", f"stopped by SIGINT {lines[0][2]}")
    assert run_status.done == pytest.approx((50 + int(step_match[1])) / 100, abs=1e-4)
    (checkpoint,) = run_folder(tmp_path).glob("checkpoints/*-food.ckpt")
    assert (
        torch.load(checkpoint, weights_only=True)["global_step"]
        == run_status.heartbeat.step
        == int(step_match[1])
    )

    scores, weights = start_and_finish(run_command, tmp_path)
    expected, expected_weights = undisturbed
    assert scores == expected and all(
        torch.equal(weights[name], value) for name, value in expected_weights.items()
    )


@pytest.mark.parametrize("rank", run_few([0, 1], [1]))
def test_all_processes_leave_and_continue_together(rank, undisturbed, run_command, tmp_path):
    start = [*run_command, *DDP]
    condition = log_says(tmp_path, "law (1/2)")
    code, lines = start_and_stop(
        start, tmp_path, condition=condition, number=signal.SIGTERM, rank=rank, twin=True
    )
    assert code == GO_ON
    assert len(lines) == 1 and re.fullmatch(r"after step \d+ of 50 of law", lines[0][2])
    (nll, _), _ = start_and_finish(start, tmp_path, twin=True)
    assert all(
        row == pytest.approx(expected_row, rel=1e-3)
        for row, expected_row in zip(nll, undisturbed[0][0], strict=True)
    )


# Processes without a run
WAITING = """
import ctypes
from cpt.core.preemption import defer_signals, handle_signals
with handle_signals(), defer_signals():
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)  # for ever, and Python's handlers have no turn
"""
IMPORTS = """
import os, signal, sys
from cpt.core.preemption import handle_signals_in_imports, handle_signals, notice
if sys.argv[1] == "before":
    handle_signals_in_imports()
    os.kill(os.getpid(), signal.SIGTERM)
import types
sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")  # as far as it is read in so far
with handle_signals():
    os.kill(os.getpid(), signal.SIGTERM)
"""
LIBRARIES = """
import os, signal, sys, types
from cpt.core.errors import readable_errors
from cpt.core.preemption import handle_signals
from cpt.core.sections import load_target, find_class_options

class Finder:
    \"\"\"Imports the module `compiled` as a compiled one whose initialization a signal stops.\"\"\"

    def find_spec(name, path, target=None):
        if name == "compiled":
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except BaseException as error:
                raise ImportError("initialization failed") from error
            raise ImportError("initialization failed")  # a second time

sys.meta_path.insert(0, Finder)
with handle_signals(), readable_errors():
    exec(sys.argv[1])
"""
LATE = """
import os, signal
from cpt.core.preemption import handle_signals

def late(number, handler, restore=signal.signal):
    if number == signal.SIGTERM:
        os.kill(os.getpid(), number)
    restore(number, handler)

with handle_signals():
    signal.signal = late
"""


def test_a_signal_after_the_end_of_a_run_changes_nothing():
    completed = subprocess.run([sys.executable, "-c", LATE], cwd=ROOT, capture_output=True, text=True)
    assert (completed.returncode, completed.stderr) == (0, "")


def test_a_second_signal_ends_at_once_and_what_is_ignored_stays_ignored():
    with subprocess.Popen(
        [sys.executable, "-c", WAITING],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        for _ in range(2):  # by its group and by its launcher: one signal
            process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
        for _ in range(20):  # on a slow machine two that follow at once may be one to it
            process.send_signal(signal.SIGINT)
            time.sleep(0.7)
            if process.poll() is not None:
                break
        process.kill()
    assert process.returncode == 128 + signal.SIGINT


def signal_while_joining(*, waiting_s, variables):
    """A process with these environment variables that waits for others and has a signal; its exit code, and
    what it said."""
    joining = WAITING.replace("defer_signals", "joining_others")
    joining = f"from cpt.core import preemption\npreemption.JOINING_S = 0.5\n{joining}"
    with subprocess.Popen(
        [sys.executable, "-c", joining],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(waiting_s)
        process.kill()
        message = process.stderr.read()
    return process.returncode, message


@pytest.mark.parametrize("variables", [{}, {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "1"}])
def test_a_process_that_waits_for_the_others_at_the_start_leaves_on_a_signal(variables):
    code, message = signal_while_joining(waiting_s=20, variables=variables)
    assert code == GO_ON
    assert message == "cpt: stopped by SIGTERM; run the same command again to continue\n"


def test_a_rank_that_lightning_started_joins_the_others_before_it_leaves():
    code, message = signal_while_joining(waiting_s=3, variables={"LOCAL_RANK": "1"})
    assert (code, message) == (-signal.SIGKILL, "")


def test_a_signal_whose_exception_a_library_dropped_acts_before_the_others_are_joined(monkeypatch):
    monkeypatch.setattr(notice, "number", signal.SIGTERM)
    with pytest.raises(Preempted), joining_others():
        pytest.fail("it waits for others")
    monkeypatch.setenv("LOCAL_RANK", "1")  # Lightning would kill the others
    with joining_others():
        assert notice.is_joining


def test_the_process_group_is_joined_where_signals_are_heeded(monkeypatch):
    is_joining = []
    strategy = SimpleNamespace(
        cluster_environment=SimpleNamespace(world_size=lambda: 2),
        launcher=None,
        setup_environment=lambda: is_joining.append(notice.is_joining),
        world_size=1,
    )
    monkeypatch.setattr(
        lightning, "make_trainer", lambda *args, **options: SimpleNamespace(strategy=strategy)
    )
    lightning.join_processes({})
    lightning.join_for_shards({})
    assert is_joining == [True, True] and not notice.is_joining


@pytest.mark.parametrize("mode", ["before", "within"])
def test_a_signal_while_libraries_are_read_in(mode):
    completed = subprocess.run(
        [sys.executable, "-c", IMPORTS, mode], cwd=ROOT, capture_output=True, text=True
    )
    message = "cpt: stopped by SIGTERM; run the same command again to continue\n"
    assert (completed.returncode, completed.stderr) == (GO_ON, message)


@pytest.mark.parametrize(
    "statement",
    [
        "import compiled",
        "try: import compiled\nexcept ImportError: raise RuntimeError('install compiled')",
        "load_target('compiled.Mine')",
        "find_class_options('compiled.Mine', section='method')",
    ],
)
def test_a_signal_while_a_compiled_library_is_initialized_is_no_error_of_an_option(statement):
    completed = subprocess.run(
        [sys.executable, "-c", LIBRARIES, statement], cwd=ROOT, capture_output=True, text=True
    )
    message = "cpt: stopped by SIGTERM; run the same command again to continue\n"
    assert (completed.returncode, completed.stderr) == (GO_ON, message)


def test_the_batch_script_ends_with_the_code_of_the_run_and_requeues_at_75_alone(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text()
    (script,) = re.findall(r"^(#!/bin/bash\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    for stub, line in {"srun": "exit $CODE", "scontrol": 'echo "$@" >> told; exit 3'}.items():
        (tmp_path / stub).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / stub).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for code in (0, 1, 137, GO_ON):
        environment = {"PATH": path, "CODE": str(code), "SLURM_JOB_ID": "7"}
        assert subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment).returncode == code
        assert (tmp_path / "told").exists() == (code == GO_ON)
    assert (tmp_path / "told").read_text() == "requeue 7\n"


def test_a_run_keeps_the_threads_that_it_began_with(small, start, killing, tmp_path, monkeypatch):
    """With others the last bits of a sum differ: a sweep's job goes on alone."""
    cfg = small("order=[law]", "trainer.steps=4")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    try:
        start_and_kill(start, killing, cfg, tmp_path, step=3, domain="law")
        torch.set_num_threads(1)
        start(cfg, tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
