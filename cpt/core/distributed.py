"""Several processes on one run: collectives, which every process has to call in the same order, and tensors
whose rows are sharded among processes (DTensors, as FSDP2 makes them of a model's weights).

A process on its own keeps what it has, and plain tensors are left as they are. Of n rows and w processes,
process r has ceil(n / w) rows from r ceil(n / w) on, or what is left of them. What works on each entry alone
works on the local rows (`to_local`); what needs all of them asks for the `full_tensor`. NCCL sends from a GPU
alone, and Lightning moves a module to the CPU after a fit and after an evaluation."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from cpt.core.errors import reason
from cpt.core.preemption import check_signals, children, leave_all, notice
from cpt.core.processes import is_distributed, rank_and_world

T = TypeVar("T")
# Where processes that work alone tell of a signal, and of an error; how often they look
STORE_KEY, FAILED_KEY, STORE_S = "cpt/preempted", "cpt/failed", 0.5


def all_reduce_sum(*tensors: Tensor) -> None:
    """Sums each tensor in place; each has to be where the backend sends from."""
    if is_distributed():
        for tensor in tensors:
            whole = tensor.contiguous()  # NCCL takes no others; lora_B lies column after column
            distributed.all_reduce(whole)
            if whole is not tensor:
                tensor.copy_(whole)


def sum_on_cpu(values: Tensor) -> Tensor:
    """Values on the CPU, summed over the processes."""
    if not is_distributed():
        return values
    shared = values.to(sending_device(values))
    distributed.all_reduce(shared)
    return shared.cpu()


def all_reduce_max(number: int) -> int:
    """The largest of the processes' numbers."""
    if not is_distributed():
        return number
    largest = torch.tensor(number, device=sending_device(torch.empty(0)))
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return int(largest)


def gather_rows(vectors: Tensor) -> tuple[Tensor, int]:
    """The rows [N, ...] of all processes, one process after another, and how many stand before the own
    ones; gradients go back to whose row it is."""
    if not is_distributed():
        return vectors, 0
    rank, world = rank_and_world()
    sizes = [torch.zeros((), dtype=torch.long, device=vectors.device) for _ in range(world)]
    distributed.all_gather(sizes, torch.tensor(len(vectors), device=vectors.device))
    missing = max(sizes) - len(vectors)  # processes may differ by a row, gathered tensors may not
    padded = functional.pad(vectors, [0, 0] * (vectors.ndim - 1) + [0, int(missing)])
    parts = [part[:size] for part, size in zip(all_gather(padded), sizes, strict=True)]
    return torch.cat(parts), int(sum(sizes[:rank]))


def gather_objects(value: T) -> list[T]:
    """The value of each process, by rank."""
    if not is_distributed():
        return [value]
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, value)
    return every


def gather_shards(buffer: Tensor) -> None:
    """Fills every process's rows of a buffer, of which process r of w holds those at r, r + w, r + 2w, …"""
    _, world = rank_and_world()
    for rank in range(world) if world > 1 else ():
        shard = buffer[rank::world].to(sending_device(buffer)).contiguous()
        distributed.broadcast(shard.view(torch.uint8), src=rank)
        buffer[rank::world] = shard.to(buffer.device)


def barrier() -> None:
    """Waits until every process is here."""
    if is_distributed():
        distributed.barrier()


@contextmanager
def telling_errors() -> Iterator[None]:
    """Tells those that `wait_for_all` of an error inside the context: SLURM leaves them waiting."""
    try:
        yield
    except Exception as error:
        if is_distributed():
            told = f"process {distributed.get_rank()} has failed: {reason(error)}"
            distributed.distributed_c10d._get_default_store().set(FAILED_KEY, told)
        raise


def wait_for_all(place: str) -> None:
    """Waits until every process has come to a place, which has another name each time, however long that
    takes: collectives have a time limit. Raises ValueError where one has failed on the way."""
    if is_distributed():
        store = distributed.distributed_c10d._get_default_store()
        store.add(place, 1)
        while store.add(place, 0) < distributed.get_world_size():
            if store.check([FAILED_KEY]):
                raise ValueError(store.get(FAILED_KEY).decode())
            time.sleep(STORE_S)


def leave_together(where: str = "") -> None:
    """Leaves if a signal has come to any process; called by all of them."""
    if number := all_reduce_max(notice.number):
        leave_all(number, where)


def fail_together(message: str) -> NoReturn:
    """Raises ValueError, in all processes alike: the others may end on their own."""
    children(release=True)
    raise ValueError(message)


def check_all_signals() -> None:
    """Leaves if a signal has come to any process, while each works on its own: they tell each other by the
    store that the process group was made with."""
    if is_distributed():
        store = distributed.distributed_c10d._get_default_store()
        if notice.number:
            store.set(STORE_KEY, str(notice.number))
        elif time.monotonic() - notice.asked > STORE_S:
            notice.asked = time.monotonic()
            if store.check([STORE_KEY]):
                notice.number = int(store.get(STORE_KEY))
    check_signals()


def sending_device(tensor: Tensor) -> torch.device:
    """The device from which the backend sends a tensor."""
    return torch.device("cuda") if distributed.get_backend() == "nccl" else tensor.device


def is_sharded(tensor: Tensor | None) -> bool:
    return isinstance(tensor, DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """The local rows of a tensor, in its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All rows of a tensor. Every process has to ask for it, in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor
    there: DTensor = tensor.detach().to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    return there.full_tensor()


def local_rows(values: Tensor, like: Tensor) -> Tensor:
    """Of values that are broadcastable to a tensor those that belong to its local rows."""
    if not isinstance(like, DTensor) or values.ndim < like.ndim:
        return values
    if values.shape[0] == 1 != like.shape[0]:
        return values
    rank, world = like.device_mesh.get_local_rank(), like.device_mesh.size()
    start = min(rank * math.ceil(like.shape[0] / world), like.shape[0])
    return values[start : start + len(like.to_local())]


def shard_like(values: Tensor, like: Tensor, *, device: torch.device | None = None) -> Tensor:
    """Full values sharded as a tensor of their shape is, in their own type, on a device or its own."""
    if not isinstance(like, DTensor) or isinstance(values, DTensor):
        return values
    return shard_as(local_rows(values.detach(), like).to(device or like.to_local().device, copy=True), like)


def with_rows(own: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Local rows as tensors that are sharded as others are."""
    pairs = zip(own, likes, strict=True)
    return [shard_as(rows, like) if isinstance(like, DTensor) else rows for rows, like in pairs]


def shard_as(own: Tensor, like: DTensor) -> DTensor:
    """Local rows as the tensor that they are of."""
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def dot(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """sum_i a_i b_i over all entries of pairs of tensors, a scalar."""
    pairs = zip(ones, others, strict=True)
    return add_up([torch.dot(to_local(a).flatten(), to_local(b).flatten()) for a, b in pairs], ones)


def add_up(terms: Sequence[Tensor], likes: Sequence[Tensor]) -> Tensor:
    """The sum of scalars, each of the local rows of a tensor, over all rows."""
    sums: dict[bool, list[Tensor]] = {False: [], True: []}
    for term, like in zip(terms, likes, strict=True):
        sums[is_sharded(like)].append(term)
    plain, shared = (torch.stack(each).sum() if each else None for each in (sums[False], sums[True]))
    if shared is None:
        assert plain is not None
        return plain
    distributed.all_reduce(shared)
    return shared if plain is None else plain + shared


def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all entries of all tensors, a scalar, alike in all processes; `norm_type` is 2 or inf."""
    every = list(tensors)
    shards = [each.to_local() for each in every if isinstance(each, DTensor)]
    plain = [each for each in every if not isinstance(each, DTensor)]
    if not shards:
        return get_total_norm(plain, norm_type)
    filled = [each for each in shards if each.numel()]
    own = get_total_norm(filled, norm_type) if filled else shards[0].new_zeros(())
    own = own.to(next(each.device_mesh.device_type for each in every if isinstance(each, DTensor)))
    parts = [get_total_norm(plain, norm_type).to(own)] if plain else []
    if norm_type == math.inf:
        own = torch.where(own.isnan(), math.inf, own)  # of NaN and a number a backend may take the number
        distributed.all_reduce(own, op=distributed.ReduceOp.MAX)
        return torch.stack([own, *parts]).max()
    squares = own.square()
    distributed.all_reduce(squares)
    return torch.stack([squares, *(each.square() for each in parts)]).sum().sqrt()


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], most: float, norm: Tensor) -> None:
    """Scales all gradients so that their norm, which is given, is at most `most`."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not any(map(is_sharded, gradients)):
        clip_grads_with_norm_(parameters, most, norm)
        return
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        to_local(gradient).mul_(factor.to(to_local(gradient).device))


@torch.no_grad()
def average_gradients(module: nn.Module) -> None:
    """Averages over the processes the gradients of a sharded module's parameters that are not sharded, as
    FSDP2 does those of the sharded ones; 0 counts where only other processes have one."""
    parameters = [each for each in module.parameters() if each.requires_grad]
    own = [each for each in parameters if not is_sharded(each)]
    if not is_distributed() or not own or not any(map(is_sharded, module.parameters())):
        return
    there = torch.tensor([each.grad is not None for each in own], dtype=torch.int32, device=own[0].device)
    distributed.all_reduce(there)
    chosen = [each for each, count in zip(own, there.tolist(), strict=True) if count]
    for dtype in dict.fromkeys(each.dtype for each in chosen):
        alike = [each for each in chosen if each.dtype == dtype]
        joint = torch.cat([(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in alike])
        distributed.all_reduce(joint)
        joint /= distributed.get_world_size()
        for each, mean in zip(alike, joint.split([p.numel() for p in alike]), strict=True):
            each.grad = torch.empty_like(each).copy_(mean.view_as(each))  # as it lies: see cpt.optim.state
