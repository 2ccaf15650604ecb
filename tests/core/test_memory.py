"""Memory that the system takes back, and how threads wait."""

import sys

import psutil
import pytest
import torch

from cpt.core.memory import forget_peak, give_back, peak

PIECE, PIECES = 2**16, 2000  # bytes of a piece, small enough for the heap


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_what_is_free_below_something_that_lives_is_given_back_and_the_peak_is_of_what_comes():
    pieces = [torch.ones(PIECE // 4) for _ in range(PIECES)]
    last = pieces.pop()
    pieces.clear()  # the heap ends where the last one lies: nothing is given back by itself
    held = psutil.Process().memory_info().rss
    give_back()
    assert held - psutil.Process().memory_info().rss > PIECE * PIECES / 2
    del last
    cpu = torch.device("cpu")
    forget_peak(cpu)
    low = peak(cpu)
    torch.ones(50_000_000)
    assert peak(cpu) >= low + 190_000_000
    forget_peak(cpu)
    assert peak(cpu) < low + 100_000_000
