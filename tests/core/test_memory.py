"""Memory that the system takes back, and what tells how much there is."""

import ctypes
import subprocess
import sys

import psutil
import pytest
import torch

from cpt.core.memory import forget_peak, give_back, peak

PIECE, PIECES = 2**16, 2000  # floats take four times that; a piece is small enough for the heap
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")


def test_what_is_free_below_something_that_lives_is_given_back():
    pieces = [torch.ones(PIECE // 4) for _ in range(PIECES)]
    last = pieces.pop()
    pieces.clear()  # the heap ends where the last one lies: nothing is given back by itself
    held = psutil.Process().memory_info().rss
    give_back()
    assert held - psutil.Process().memory_info().rss > PIECE * PIECES / 2
    assert last.sum() == PIECE // 4


def test_the_peak_is_that_of_what_comes():
    forget_peak(torch.device("cpu"))
    low = peak(torch.device("cpu"))
    block = torch.ones(50_000_000)
    assert peak(torch.device("cpu")) >= low + 190_000_000
    del block
    give_back()
    assert peak(torch.device("cpu")) >= low + 190_000_000
    forget_peak(torch.device("cpu"))
    assert peak(torch.device("cpu")) < low + 100_000_000


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


def test_what_a_step_frees_is_there_for_the_next_one():
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("the C library does not let its heap be adjusted")
    faults = {
        how: int(subprocess.run([sys.executable, "-c", KEEPING, how], capture_output=True, check=True).stdout)
        for how in ("keep", "leave")
    }
    assert faults["keep"] < 100 < faults["leave"]
