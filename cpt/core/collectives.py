"""What the processes of a run tell each other: every process has to call each of these, in the same order.

A process on its own keeps what it has. Whatever comes and goes stays on its device, but NCCL sends from a GPU
alone, and Lightning moves a module to the CPU after a fit and after an evaluation."""

from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.nn.functional import all_gather
from torch.nn import functional

from cpt.core.processes import in_company, rank_and_world

T = TypeVar("T")


def sum_in_place(*tensors: Tensor) -> None:
    """Sums each tensor over the processes; each has to be where the backend sends from."""
    if in_company():
        for tensor in tensors:
            distributed.all_reduce(tensor)


def sum_on_cpu(values: Tensor) -> Tensor:
    """Values on the CPU, summed over the processes."""
    if not in_company():
        return values
    shared = values.to(sending_device(values))
    distributed.all_reduce(shared)
    return shared.cpu()


def maximise_in_place(tensor: Tensor) -> None:
    """Makes each entry the largest of those of all processes."""
    if in_company():
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)


def agree(number: int) -> int:
    """The largest of the processes' numbers."""
    if not in_company():
        return number
    largest = torch.tensor(number)
    largest = largest.to(sending_device(largest))
    maximise_in_place(largest)
    return int(largest)


def gather_rows(vectors: Tensor) -> tuple[Tensor, int]:
    """The rows [N, ...] of all processes, one process after another, and how many stand before the own
    ones; gradients go back to whose row it is."""
    if not in_company():
        return vectors, 0
    rank, world = rank_and_world()
    sizes = [torch.zeros((), dtype=torch.long, device=vectors.device) for _ in range(world)]
    distributed.all_gather(sizes, torch.tensor(len(vectors), device=vectors.device))
    missing = max(sizes) - len(vectors)  # processes may differ by a row, gathered tensors may not
    padded = functional.pad(vectors, [0, 0] * (vectors.ndim - 1) + [0, int(missing)])
    parts = [part[:size] for part, size in zip(all_gather(padded), sizes, strict=True)]
    return torch.cat(parts), int(sum(sizes[:rank]))


def gather_objects(value: T) -> list[T]:
    """What each process gives here, by rank."""
    if not in_company():
        return [value]
    _, world = rank_and_world()
    every: list[Any] = [None] * world
    distributed.all_gather_object(every, value)
    return every


def gather_shards(buffer: Tensor) -> None:
    """Fills every process's rows of a buffer, of which process r of w holds those at r, r + w, r + 2w, …"""
    _, world = rank_and_world()
    for rank in range(world) if world > 1 else ():
        shard = buffer[rank::world].to(sending_device(buffer)).contiguous()
        distributed.broadcast(shard.view(torch.uint8), src=rank)
        buffer[rank::world] = shard.to(buffer.device)


def wait_for_others() -> None:
    """Waits until every process is here."""
    if in_company():
        distributed.barrier()


def sending_device(tensor: Tensor) -> torch.device:
    """The device from which the backend sends a tensor."""
    return torch.device("cuda") if distributed.get_backend() == "nccl" else tensor.device
