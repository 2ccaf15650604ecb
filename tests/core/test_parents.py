"""Processes that must not outlive the one that has started them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cpt.core import parents
from cpt.core.parents import PARENT, RANK
from tests.conftest import ROOT
from tests.support.processes import is_there

CHILD = "from cpt.core.parents import end_with_parent; end_with_parent(); print('here', flush=True)"
PROGRAM = """
import os, subprocess, sys, time
from cpt.core.parents import end_with_parent
end_with_parent()
waiting = {child!r} + "; import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def here(program: str, **variables: str) -> subprocess.Popen:
    kept = {name: value for name, value in os.environ.items() if name not in (PARENT, RANK)}
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=kept | variables, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells of a parent's end")
def test_a_killed_process_takes_those_with_it_that_it_has_started():
    with here(PROGRAM.format(child=CHILD)) as process:
        child = int(process.stdout.readline())
        assert is_there(child)
        process.kill()
    deadline = time.monotonic() + 10
    while is_there(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_there(child)


@pytest.mark.parametrize(("rank", "code"), [("1", 128 + signal.SIGKILL), (None, 0)])
def test_a_rank_whose_first_process_is_gone_ends_before_it_waits_for_it(rank, code):
    with here("") as gone:
        pass
    with here(CHILD, **{PARENT: str(gone.pid)}, **({} if rank is None else {RANK: rank})) as process:
        said, _ = process.communicate(timeout=60)
    assert (process.returncode, said.strip()) == (code, "here" if rank is None else "")


def test_a_process_that_nobody_has_waited_for_is_not_there():
    with here("") as process:
        deadline = time.monotonic() + 30
        while parents.is_there(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.returncode is None  # it is a zombie
        assert not parents.is_there(process.pid)
