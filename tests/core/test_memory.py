"""Memory that the system takes back, and its peak."""

import sys

import psutil
import pytest
import torch

from cpt.core.memory import forget_peak, give_back, peak


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_free_memory_is_given_back_and_the_peak_is_of_what_comes():
    pieces = [torch.ones(2**14) for _ in range(2000)]  # of 64 KiB each, small enough for the heap
    del pieces[:-1]  # the heap ends where the last one lies: nothing is given back by itself
    resident_bytes = psutil.Process().memory_info().rss
    give_back()
    assert resident_bytes - psutil.Process().memory_info().rss > 2**26

    cpu = torch.device("cpu")
    forget_peak(cpu)
    first_peak = peak(cpu)
    torch.ones(50_000_000)
    assert peak(cpu) >= first_peak + 190_000_000
    give_back()  # a run in this process has set that large blocks are kept
    forget_peak(cpu)
    assert peak(cpu) < first_peak + 100_000_000
