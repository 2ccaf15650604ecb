"""Memory that this process holds: the most so far, and what it no longer needs."""

import ctypes
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor

LINUX = sys.platform == "linux"
# Parameters of mallopt(3) and their values, bytes.
M_TRIM_THRESHOLD = (-1, (1 << 31) - 1)
M_MMAP_THRESHOLD = -3
ANY_SIZE = 1 << 30
LARGE = 1 << 25
SMALL = 1 << 20
kept_size: int | None = None  # bytes up to which blocks are kept, once `keep_freed_blocks` was called
returns_large = False  # whether blocks of LARGE bytes are returned for now


def keep_freed_blocks(*, up_to: int = ANY_SIZE) -> None:
    """Has the C heap keep the blocks of less than `up_to` bytes that a step frees, until `trim_heap`, where
    its library can (glibc). Else it maps each large tensor again and returns it at once, and the system fills
    every page with zeros again: a tenth of a small model's step (`benchmarks/throughput.py --shape given`).

    With SMALL, tensors are returned at once and leave no holes on the heap: with activation checkpointing,
    holes take several times as much as what is in use (`benchmarks/costs/frozen_base.py`)."""
    global kept_size
    if LINUX:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(*M_TRIM_THRESHOLD)
            mallopt(M_MMAP_THRESHOLD, up_to)
            kept_size = up_to


def keep_blocks_for_run(*, is_checkpointed: bool) -> None:
    """Calls `keep_freed_blocks` as a run needs it: for blocks of any size, with activation checkpointing for
    small ones alone."""
    keep_freed_blocks(up_to=SMALL if is_checkpointed else ANY_SIZE)


@contextmanager
def return_large() -> Iterator[None]:
    """What takes 32 MiB or more and is allocated inside the context is not kept when it is freed, and does
    not leave holes on the C heap: its aligned blocks do not fit into holes of their own size, so that tensors
    of a few shapes in turns make it several times as large as what is in use."""
    returned_before = returns_large
    set_returns_large(True)
    try:
        yield
    finally:
        set_returns_large(returned_before)


def return_large_in_backward(output: Tensor, inputs: Tensor) -> None:
    """The same as `return_large` for the backward pass from an output to the inputs that it was computed of.
    Without a gradient of the inputs nothing would end it, and nothing changes."""
    if output.requires_grad and inputs.requires_grad:
        output.register_hook(lambda gradient: set_returns_large(True))
        inputs.register_hook(lambda gradient: set_returns_large(False))


def set_returns_large(is_returned: bool) -> None:
    """From now on, blocks of LARGE bytes or more are returned when they are freed, or kept as
    `keep_freed_blocks` said."""
    global returns_large
    if kept_size is not None and kept_size > LARGE:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE if is_returned else kept_size)
        returns_large = is_returned


def trim_heap() -> None:
    """Returns what is free on the C heap to the system, where its library can (glibc): the holes between what
    lives long add up from stage to stage (`benchmarks/costs/flat.py` shows it)."""
    if LINUX:
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)


def find_total_memory() -> int:
    """The bytes of main memory that this process may use: those of the machine, or the lower limit of a
    control group of Linux (a container, a job of SLURM)."""
    limits = [psutil.virtual_memory().total]
    for path in list_limit_files(Path("/proc/self/cgroup"), root=Path("/sys/fs/cgroup")):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():  # else `max`: no limit
            limits.append(int(text))
    return min(limits)


def list_limit_files(groups: Path, *, root: Path) -> list[Path]:
    """The files with the memory limits of a process: those of its own control group and of all groups above
    it. `groups` has a line NUMBER:CONTROLLERS:PATH for each hierarchy; that of version 2 names no
    controllers, and one of version 1 is in a folder of its name."""
    paths: list[Path] = []
    if not groups.is_file():
        return paths
    for line in groups.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        folder = root / controllers
        file_name = "memory.limit_in_bytes" if controllers else "memory.max"
        own_folder = folder / group.strip("/")
        for parent in [own_folder, *own_folder.parents]:
            if parent.is_relative_to(folder):
                paths.append(parent / file_name)
    return paths


def reset_peak_bytes(device: torch.device) -> None:
    """Resets the peak that `read_peak_bytes` reads."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif LINUX:
        Path("/proc/self/clear_refs").write_text("5")


def read_peak_bytes(device: torch.device) -> int:
    """The most bytes since `reset_peak_bytes`: allocated on a GPU, or held by the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if LINUX:
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
