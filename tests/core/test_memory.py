"""Memory that the system takes back, and what tells how much there is."""

import sys

import pytest
import torch

from cpt.core.memory import forget_peak, give_back, peak, resident

PIECE, PIECES = 2**16, 2000  # floats take four times that; a piece is small enough for the heap
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")


def test_what_is_free_below_something_that_lives_is_given_back():
    pieces = [torch.ones(PIECE // 4) for _ in range(PIECES)]
    last = pieces.pop()
    pieces.clear()  # the heap ends where the last one lies: nothing is given back by itself
    held = resident()
    give_back()
    assert held - resident() > PIECE * PIECES / 2
    assert last.sum() == PIECE // 4


def test_the_peak_is_that_of_what_comes():
    forget_peak(torch.device("cpu"))
    low = peak(torch.device("cpu"))
    block = torch.ones(50_000_000)
    assert peak(torch.device("cpu")) >= low + 190_000_000
    del block
    assert peak(torch.device("cpu")) >= low + 190_000_000
    forget_peak(torch.device("cpu"))
    assert peak(torch.device("cpu")) < low + 100_000_000
