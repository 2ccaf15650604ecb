"""Memory that the system takes back, and its peak."""

import subprocess
import sys

import psutil
import pytest
import torch

from cpt.core import memory
from cpt.core.memory import (
    ANY_SIZE,
    SMALL,
    read_peak_bytes,
    reset_peak_bytes,
    return_large_in_backward,
    trim_heap,
)
from tests.conftest import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_free_memory_is_given_back_and_the_peak_is_of_what_comes():
    pieces = [torch.ones(2**14) for _ in range(2000)]  # of 64 KiB each, small enough for the heap
    del pieces[:-1]  # the heap ends where the last one lies: nothing is given back by itself
    resident_bytes = psutil.Process().memory_info().rss
    trim_heap()
    assert resident_bytes - psutil.Process().memory_info().rss > 2**26

    cpu = torch.device("cpu")
    reset_peak_bytes(cpu)
    first_peak = read_peak_bytes(cpu)
    torch.ones(50_000_000)
    assert read_peak_bytes(cpu) >= first_peak + 190_000_000
    trim_heap()  # a run in this process has set that large blocks are kept
    reset_peak_bytes(cpu)
    assert read_peak_bytes(cpu) < first_peak + 100_000_000


# In a process of its own, whose heap has no holes yet: every second tensor of 2 MiB is freed.
SCRIPT = """
import psutil, sys, torch
from cpt.core.memory import keep_freed_blocks, return_large

keep_freed_blocks(up_to=int(sys.argv[1]))
with return_large():
    tensors = [torch.ones(2**19) for _ in range(64)]
resident_bytes = psutil.Process().memory_info().rss
del tensors[::2]
print(resident_bytes - psutil.Process().memory_info().rss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_tensors_leave_no_holes_where_small_blocks_alone_are_kept():
    freed_bytes = {}
    for size in (ANY_SIZE, SMALL):
        command = [sys.executable, "-c", SCRIPT, str(size)]
        freed_bytes[size] = int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    assert freed_bytes[ANY_SIZE] < 2**24 and freed_bytes[SMALL] > 2**25


def test_blocks_are_returned_from_the_output_of_a_backward_pass_to_its_inputs(monkeypatch):
    changes = []
    monkeypatch.setattr(memory, "set_returns_large", changes.append)
    weight = torch.ones(3, requires_grad=True)
    inputs = 2 * weight
    outputs = inputs**2
    return_large_in_backward(outputs, inputs)
    assert changes == []
    outputs.sum().backward()
    assert changes == [True, False]

    return_large_in_backward(weight.sum(), torch.ones(3))  # without a gradient, nothing would end it
    weight.sum().backward()
    assert changes == [True, False]
