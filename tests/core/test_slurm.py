"""Which process is a task of SLURM, by the variables that a real scheduler (22.05) sets in a batch script,
in a task of srun, in the shell of salloc and in that of `srun --pty bash`."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cpt.core import slurm
from cpt.core.processes import JOB, PARENT, is_one_of_several
from cpt.trainer.options import count_devices
from tests.conftest import ROOT

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "wrap",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"}
TWO = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
ONE = {"SLURM_NTASKS": "1"}
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "4", "SLURM_NNODES": "1"}
SHELL = BATCH | STEP | ONE | {"SLURM_JOB_NAME": "bash"}


@pytest.fixture
def environment(monkeypatch):
    def replace(variables):
        for name in (*slurm.TASK, *STEP, *BATCH, "TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return replace


@pytest.mark.parametrize(
    ("variables", "is_task", "is_of_several"),
    [
        ({}, False, False),
        (BATCH | TWO, False, False),
        (BATCH | TWO | STEP, True, True),
        (BATCH | ONE | STEP, True, False),
        (SALLOC, False, False),
        (SALLOC | STEP, True, True),  # srun in the shell of salloc
        (SHELL, False, False),
        (BATCH | TWO | STEP | {"TORCHELASTIC_RUN_ID": "x"}, False, False),
    ],
)
def test_a_task_is_what_srun_started(environment, variables, is_task, is_of_several):
    environment(variables)
    assert (slurm.is_slurm_task(), is_one_of_several()) == (is_task, is_of_several)
    is_counted = is_of_several and "SLURM_NTASKS_PER_NODE" in variables
    assert slurm.count_tasks_per_node(5) == (2 if is_counted else 5)
    assert slurm.step_nodes() == 1


@pytest.mark.parametrize(
    ("variables", "devices", "nodes", "message"),
    [
        ({}, 2, 1, ""),
        (BATCH | TWO, 2, 1, "SLURM_NTASKS=2 is invalid without srun"),
        (BATCH | TWO, None, 1, "SLURM_NTASKS=2 is invalid without srun"),
        (
            BATCH | ONE,
            2,
            1,
            "trainer.devices=2 trainer.num_nodes=1 is invalid: SLURM_NTASKS=1. .*--ntasks-per-node=2",
        ),
        (BATCH | ONE | STEP, 2, 1, "SLURM_NTASKS=1"),
        (BATCH | ONE | STEP, 1, 2, "srun with --nodes=2 --ntasks-per-node=1"),
        (BATCH | TWO | STEP, 1, 1, "the devices of 2 tasks"),
        (BATCH | TWO | STEP, 2, 1, ""),
        (BATCH | TWO | STEP, 1, 2, ""),
        (BATCH | TWO | STEP, None, 1, ""),
        (BATCH | ONE, 1, 1, ""),
        (BATCH, 2, 1, ""),  # sbatch without --ntasks: Lightning starts both processes
        (SALLOC, 2, 1, ""),
        (SHELL, 2, 1, ""),
        (SALLOC | STEP, 2, 1, "SLURM_NTASKS=4"),
        (BATCH | TWO | STEP | {"TORCHELASTIC_RUN_ID": "x"}, 8, 2, ""),
    ],
)
def test_tasks_that_are_not_the_processes_of_a_run_are_refused(
    environment, variables, devices, nodes, message
):
    environment(variables)
    if message:
        with pytest.raises(ValueError, match=message):
            slurm.check_launch(devices, nodes)
    else:
        slurm.check_launch(devices, nodes)


def test_a_run_is_refused_before_its_folder_exists_and_a_job_of_a_local_sweep_is_no_task(
    environment, small, start, tmp_path
):
    environment(BATCH | TWO)
    with pytest.raises(ValueError, match="SLURM_NTASKS=2 is invalid without srun"):
        start(small(), tmp_path / "run")
    environment(BATCH | ONE)
    with pytest.raises(ValueError, match="--ntasks-per-node=3"):
        start(small("strategy=ddp", "trainer.devices=3", "trainer.batch_size=6"), tmp_path / "run")
    assert not (tmp_path / "run").exists()

    variables_of_job = slurm.remove_task_variables(BATCH | TWO | STEP | {"PATH": "/bin"})
    assert variables_of_job == {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "wrap", "PATH": "/bin"}


def test_devices_and_nodes_follow_srun(environment, composed):
    environment(BATCH | TWO | STEP | {"SLURM_NNODES": "3", "SLURM_NTASKS": "6"})
    for strategy in ("ddp", "fsdp"):
        trainer = composed(f"strategy={strategy}").trainer
        assert (trainer.devices, trainer.num_nodes) == (2, 3)
    environment({"LOCAL_WORLD_SIZE": "4"} | BATCH | TWO)
    assert composed("strategy=ddp").trainer.devices == 4
    environment(BATCH | TWO)  # a batch script: the tasks are not started yet
    assert (composed("strategy=ddp").trainer.devices, composed("strategy=ddp").trainer.num_nodes) == (4, 1)


def test_devices_are_counted():
    for devices, count in [(3, 3), ("2", 2), ("0,1", 2), ([0, 2], 2), ((1,), 1)]:
        assert count_devices(devices) == count
    for devices in ("auto", -1, "-1"):  # only Lightning knows how many these are
        assert count_devices(devices) is None


SIGNALED = """
import os, signal, sys, time
from cpt.core.processes import die_with_parent
die_with_parent()
from cpt.core.preemption import check_signals, defer_signals, handle_signals
with handle_signals(), defer_signals():
    print("ready", flush=True)
    time.sleep(3)
    check_signals("after step 3")
"""


@pytest.mark.parametrize(("variables", "code"), [({JOB: "1"}, 75), ({}, 128 + 15)])
def test_signals_of_scheduler_and_launcher_are_one_to_a_job(variables, code):
    """SLURM signals every process of a job, its launcher once more; elsewhere a second one ends at once."""
    environment = {name: value for name, value in os.environ.items() if name != PARENT} | variables
    with subprocess.Popen(
        [sys.executable, "-c", SIGNALED],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR2)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert ("stopped by SIGUSR2 after step 3" in errors) is bool(variables)


# The object is freed in the interpreter's teardown, after the handlers of signals have been taken away.
TEARDOWN = """
import os, time
from cpt.core.preemption import handle_signals, handle_signals_in_imports
handle_signals_in_imports()
class SlowToFree:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"teardown\\n")
        sleep(1)
with handle_signals():
    slow = SlowToFree()
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_process_that_has_done_its_part_is_not_killed_in_its_teardown(number):
    with subprocess.Popen([sys.executable, "-c", TEARDOWN], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"teardown\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == 0


# A signal that comes while an object is freed: Python drops what its handler raises there.
FREED = """
import os, signal, time
from cpt.core.preemption import handle_signals
class Freed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
with handle_signals():
    freed = Freed()
    del freed
    time.sleep(300)  # is interrupted
"""


def test_a_signal_while_an_object_is_freed_acts_soon_and_without_a_traceback():
    command = [sys.executable, "-c", FREED]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    message = "cpt: stopped by SIGTERM; run the same command again to continue\n"
    assert (process.returncode, process.stderr) == (75, message)
