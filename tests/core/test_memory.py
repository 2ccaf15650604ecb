"""Memory that the system takes back, what tells how much there is, and how threads wait."""

import ctypes
import subprocess
import sys

import psutil
import pytest
import torch

from cpt.core import processes
from cpt.core.memory import forget_peak, give_back, peak
from cpt.core.processes import SLEEPING, SPINNING, choose_spins

PIECE, PIECES = 2**16, 2000  # floats take four times that; a piece is small enough for the heap
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")


@linux
def test_what_is_free_below_something_that_lives_is_given_back():
    pieces = [torch.ones(PIECE // 4) for _ in range(PIECES)]
    last = pieces.pop()
    pieces.clear()  # the heap ends where the last one lies: nothing is given back by itself
    held = psutil.Process().memory_info().rss
    give_back()
    assert held - psutil.Process().memory_info().rss > PIECE * PIECES / 2
    assert last.sum() == PIECE // 4


@linux
def test_the_peak_is_that_of_what_comes():
    cpu = torch.device("cpu")
    forget_peak(cpu)
    low = peak(cpu)
    block = torch.ones(50_000_000)
    assert peak(cpu) >= low + 190_000_000
    del block
    give_back()
    assert peak(cpu) >= low + 190_000_000
    forget_peak(cpu)
    assert peak(cpu) < low + 100_000_000


KEEPING = """
import resource, sys, torch
from cpt.core.memory import keep_free
if sys.argv[1] == "keep":
    keep_free()
for step in range(12):
    tensors = [torch.ones(9_000_000) for _ in range(4)]
    del tensors
    if step == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@linux
@pytest.mark.slow
def test_what_a_step_frees_is_there_for_the_next_one():
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("the C library does not let its heap be adjusted")
    command = [sys.executable, "-c", KEEPING]
    keep, leave = (
        int(subprocess.run([*command, how], capture_output=True, check=True).stdout)
        for how in ("keep", "leave")
    )
    assert keep < 100 < leave


@pytest.mark.parametrize(
    ("running", "given", "spins"),
    [
        *((1, "", SPINNING), (3, "", SPINNING), (4, "", SLEEPING), (9, "", SLEEPING)),
        *((4, "1", SPINNING), (4, "2", SLEEPING), (4, "many", SLEEPING), (None, "", SLEEPING)),
    ],
)
def test_threads_spin_where_each_has_a_core(running, given, spins, monkeypatch, tmp_path):
    """On a machine of four cores, of which the process may use two, with this many running threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(processes, "cores", lambda: 2)
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(processes, "LOAD", tmp_path / "loadavg")
    if running is not None:
        processes.LOAD.write_text(f"0.20 0.18 0.12 {running}/80 11206\n")
    assert choose_spins() == spins
