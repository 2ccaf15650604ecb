"""Memory that the system takes back, and how threads wait."""

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
def test_what_is_free_below_something_that_lives_is_given_back_and_the_peak_is_of_what_comes():
    pieces = [torch.ones(PIECE // 4) for _ in range(PIECES)]
    last = pieces.pop()
    pieces.clear()  # the heap ends where the last one lies: nothing is given back by itself
    held = psutil.Process().memory_info().rss
    give_back()
    assert held - psutil.Process().memory_info().rss > PIECE * PIECES / 2
    assert last.sum() == PIECE // 4
    cpu = torch.device("cpu")
    forget_peak(cpu)
    low = peak(cpu)
    torch.ones(50_000_000)
    assert peak(cpu) >= low + 190_000_000
    give_back()
    assert peak(cpu) >= low + 190_000_000
    forget_peak(cpu)
    assert peak(cpu) < low + 100_000_000


KEEPING = """
import resource, sys, torch
from cpt.core.memory import keep_free
def faults():
    tensors = [torch.ones(9_000_000) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
told = []
for _ in range(2):
    before = [faults() for _ in range(4)][-1]
    told.append([faults() for _ in range(4)][-1] - before)
    keep_free()
print(*told)
"""


@linux
@pytest.mark.slow
def test_what_a_step_frees_is_there_for_the_next_one():
    said = subprocess.run([sys.executable, "-c", KEEPING], capture_output=True, check=True).stdout
    leave, keep = map(int, said.split())
    assert keep < 100 < leave


@pytest.mark.parametrize(
    ("running", "given", "spins"),
    [(3, "", SPINNING), (4, "", SLEEPING), (4, "1", SPINNING), (4, "2", SLEEPING), (4, "many", SLEEPING)]
    + [(None, "", SLEEPING)],
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
