"""What becomes of a run whose loader processes end, or cannot send what they have made."""

import os
import subprocess
import sys
import textwrap

import pytest

from cpt.core.errors import describe_lost_loader
from tests.conftest import ROOT

PROGRAM = """
import os, signal, sys, tempfile
import torch
from torch.utils.data import Dataset
from cpt.core.errors import readable_errors
from cpt.data.loader_processes import WatchedLoader, prepare_loader_processes, start_loader_process

class Unpicklable(torch.Tensor):
    def __reduce_ex__(self, protocol):
        raise RuntimeError("no descriptors left")

class Items(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        if index == 5:
            {fault}
        return torch.full((3,), index)

if __name__ == "__main__":
    with readable_errors():
        {before}
        loader = WatchedLoader(Items(), batch_size=None, num_workers=2, worker_init_fn=start_loader_process,
                               multiprocessing_context="{context}")
        print(sum(int(item[0]) for item in loader))
"""


def load(tmp_path, *, fault="pass", before="prepare_loader_processes()", context="fork", **environment):
    """The finished process of a program that adds up 20 items from two loader processes."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM).format(fault=fault, before=before, context=context))
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, str(program)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "context"),
    [("os._exit(0)", "fork"), ("os._exit(3)", "spawn"), ("os.kill(os.getpid(), signal.SIGSEGV)", "fork")],
)
def test_a_loader_process_that_ends_is_reported_in_a_line(tmp_path, fault, context):
    process = load(tmp_path, fault=fault, context=context)
    assert process.returncode == 1
    assert "cpt: a loader process ended (DataLoader worker" in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr


@pytest.mark.slow
def test_a_killed_loader_process_is_reported_as_want_of_memory(tmp_path):
    process = load(tmp_path, fault="os.kill(os.getpid(), signal.SIGKILL)")
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("cpt: out of memory (DataLoader")


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_batch_that_cannot_be_sent_ends_the_run_instead_of_being_waited_for(tmp_path, context):
    fault = "return torch.ones(3).as_subclass(Unpicklable)"
    process = load(tmp_path, fault=fault, context=context)
    assert process.returncode == 1
    expected = "cpt: a loader process cannot send a batch: no descriptors left (trainer.num_workers)"
    assert process.stderr.splitlines()[-1] == expected


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_processes_work_below_a_long_temporary_folder(tmp_path, context):
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    process = load(tmp_path, context=context, TMPDIR=str(folder))
    assert (process.returncode, process.stdout.strip()) == (0, str(sum(range(20)))), process.stderr


@pytest.mark.slow
def test_without_a_short_folder_the_error_of_the_socket_is_reported(tmp_path):
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    process = load(tmp_path, before="pass", TMPDIR=str(folder))
    assert process.returncode == 1 and "AF_UNIX path too long" in process.stderr.splitlines()[-1]


def test_other_errors_of_the_program_are_not_taken_for_a_lost_loader_process():
    assert describe_lost_loader(RuntimeError("shapes differ")) == ""
    assert describe_lost_loader(ValueError("DataLoader worker (pid 3) exited unexpectedly")) == ""
    cause = RuntimeError("DataLoader worker (pid(s) 3, 4) exited unexpectedly")
    wrapped = RuntimeError("in the loop")
    wrapped.__cause__ = cause
    assert "pid(s) 3, 4" in describe_lost_loader(wrapped)
