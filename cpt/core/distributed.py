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

from cpt.core.errors import find_reason
from cpt.core.preemption import check_signals, leave_all, list_child_processes, notice
from cpt.core.processes import is_distributed, rank_and_world

T = TypeVar("T")
# Keys of the process group's store, for processes that work on their own.
STORE_KEY = "cpt/preempted"  # a signal that one has received
FAILED_KEY = "cpt/failed"  # the error of one
STORE_INTERVAL = 0.5  # seconds between two reads of the store


def all_reduce_sum(*tensors: Tensor) -> None:
    """Sums each tensor over the processes, in place. A tensor has to be on the device from which the process
    group's backend sends: a GPU for NCCL (`choose_sending_device`)."""
    if not is_distributed():
        return
    for tensor in tensors:
        # NCCL sums contiguous tensors only. Others, like lora_B, which is stored column after column, are
        # summed in a copy.
        contiguous = tensor.contiguous()
        distributed.all_reduce(contiguous)
        if contiguous is not tensor:
            tensor.copy_(contiguous)


def sum_on_cpu(values: Tensor) -> Tensor:
    """The sums over the processes of a tensor on the CPU, as a tensor on the CPU."""
    if not is_distributed():
        return values
    sums = values.to(choose_sending_device(values))
    distributed.all_reduce(sums)
    return sums.cpu()


def all_reduce_max(number: int) -> int:
    """The largest of the processes' numbers."""
    if not is_distributed():
        return number
    largest = torch.tensor(number, device=choose_sending_device(torch.empty(0)))
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return int(largest)


def gather_rows(vectors: Tensor) -> tuple[Tensor, int]:
    """The rows [N, ...] of all processes in the order of their ranks, and the index of the first row of this
    process. The gradient of a row is sent back to the process that it came from."""
    if not is_distributed():
        return vectors, 0
    rank, world = rank_and_world()

    sizes = [torch.zeros((), dtype=torch.long, device=vectors.device) for _ in range(world)]
    distributed.all_gather(sizes, torch.tensor(len(vectors), device=vectors.device))

    # Processes may differ by a row; gathered tensors may not.
    num_missing = int(max(sizes) - len(vectors))
    padding = [0, 0] * (vectors.ndim - 1) + [0, num_missing]
    gathered = all_gather(functional.pad(vectors, padding))
    rows = [padded[:size] for padded, size in zip(gathered, sizes, strict=True)]
    index_of_first_row = int(sum(sizes[:rank]))
    return torch.cat(rows), index_of_first_row


def gather_objects(value: T) -> list[T]:
    """The value of each process, by rank."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def gather_shards(buffer: Tensor) -> None:
    """Fills every process's rows of a buffer, of which process r of w holds those at r, r + w, r + 2w, …"""
    _, world = rank_and_world()
    if world == 1:
        return
    for rank in range(world):
        shard = buffer[rank::world].to(choose_sending_device(buffer)).contiguous()
        distributed.broadcast(shard.view(torch.uint8), src=rank)
        buffer[rank::world] = shard.to(buffer.device)


def barrier() -> None:
    """Waits until every process is here."""
    if is_distributed():
        distributed.barrier()


@contextmanager
def sharing_errors() -> Iterator[None]:
    """Shares an error inside the context with the processes that `wait_for_all`, so that they end too. SLURM
    would leave them waiting."""
    try:
        yield
    except Exception as error:
        if is_distributed():
            message = f"process {distributed.get_rank()} has failed: {find_reason(error)}"
            get_process_store().set(FAILED_KEY, message)
        raise


def get_process_store() -> Any:
    """The store that the process group was made with."""
    return distributed.distributed_c10d._get_default_store()


def wait_for_all(key: str) -> None:
    """Waits until every process has called this with `key`: a barrier without the time limit of a collective.
    Each wait needs a new key, whose counter in the store is the number of processes that have come.

    Raises ValueError if a process has failed within `sharing_errors`."""
    if not is_distributed():
        return
    store = get_process_store()
    world_size = distributed.get_world_size()

    num_arrived = store.add(key, 1)
    while num_arrived < world_size:
        if store.check([FAILED_KEY]):
            raise ValueError(store.get(FAILED_KEY).decode())
        time.sleep(STORE_INTERVAL)
        num_arrived = store.add(key, 0)  # reads the counter


def leave_together(where: str = "") -> None:
    """Leaves if a signal has come to any process; called by all of them."""
    number = all_reduce_max(notice.number)
    if number:
        leave_all(number, where)


def fail_together(message: str) -> NoReturn:
    """Raises ValueError; every process calls this with the message."""
    # Else Lightning would kill this process as soon as one that it started has ended, before the message.
    list_child_processes(release=True)
    raise ValueError(message)


def check_all_signals() -> None:
    """Leaves if a signal has come to any process. For work that each process does on its own, where no
    collective can be called: a process writes its signal into the process group's store, and reads the store
    for the signals of others at most every STORE_INTERVAL seconds."""
    if is_distributed():
        store = get_process_store()
        if notice.number:
            store.set(STORE_KEY, str(notice.number))
        elif time.monotonic() - notice.last_read > STORE_INTERVAL:
            notice.last_read = time.monotonic()
            if store.check([STORE_KEY]):
                notice.number = int(store.get(STORE_KEY))
    check_signals()


def choose_sending_device(tensor: Tensor) -> torch.device:
    """The device on which a tensor has to be for a collective: a GPU for NCCL, else its own device."""
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
    on_mesh: DTensor = tensor.detach().to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    return on_mesh.full_tensor()


def select_local_rows(values: Tensor, like: Tensor) -> Tensor:
    """The part of `values`, which are broadcastable to the tensor `like`, that belongs to its local rows. All
    of them, if `like` is not sharded or if all of its rows share the values."""
    if not isinstance(like, DTensor) or values.ndim < like.ndim:
        return values
    is_broadcast = values.shape[0] == 1 and like.shape[0] != 1
    if is_broadcast:
        return values
    rank = like.device_mesh.get_local_rank()
    rows_per_process = math.ceil(like.shape[0] / like.device_mesh.size())
    start = min(rank * rows_per_process, like.shape[0])
    return values[start : start + len(like.to_local())]


def shard_like(values: Tensor, like: Tensor, *, device: torch.device | None = None) -> Tensor:
    """`values` sharded as the tensor `like`, which has their shape; their dtype stays. Its local rows are on
    `device`, by default the device of the local rows of `like`. Values that are sharded already, or belong to
    a tensor that is not, are returned as they are."""
    if not isinstance(like, DTensor) or isinstance(values, DTensor):
        return values
    target_device = device or like.to_local().device
    rows = select_local_rows(values.detach(), like).to(target_device, copy=True)
    return shard_as(rows, like)


def shard_rows(rows: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Tensors from their local rows, each sharded as the tensor of `likes` at its index. Where that tensor is
    not sharded, the rows are the whole tensor."""
    tensors = []
    for local, like in zip(rows, likes, strict=True):
        tensors.append(shard_as(local, like) if isinstance(like, DTensor) else local)
    return tensors


def shard_as(rows: Tensor, like: DTensor) -> DTensor:
    """The sharded tensor whose local rows are `rows`, with the shape and the sharding of `like`."""
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def dot(firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> Tensor:
    """sum_i a_i b_i over all entries of pairs of tensors, a scalar."""
    products = []
    for first, second in zip(firsts, seconds, strict=True):
        products.append(torch.dot(to_local(first).flatten(), to_local(second).flatten()))
    return sum_over_processes(products, firsts)


def sum_over_processes(terms: Sequence[Tensor], likes: Sequence[Tensor]) -> Tensor:
    """The sum of scalars over all processes; term i is computed from the local rows of `likes[i]`. A term of
    a tensor that is not sharded is equal in all processes, and counts once."""
    plain_terms: list[Tensor] = []
    sharded_terms: list[Tensor] = []
    for term, like in zip(terms, likes, strict=True):
        if is_sharded(like):
            sharded_terms.append(term)
        else:
            plain_terms.append(term)

    if not sharded_terms:
        return torch.stack(plain_terms).sum()
    plain_sum = torch.stack(plain_terms).sum() if plain_terms else None
    sharded_sum = torch.stack(sharded_terms).sum()
    distributed.all_reduce(sharded_sum)
    return sharded_sum if plain_sum is None else plain_sum + sharded_sum


def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all entries of all tensors, a scalar that is equal in all processes; `norm_type` is 2 or
    inf."""
    sharded: list[DTensor] = []
    plain: list[Tensor] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            sharded.append(tensor)
        else:
            plain.append(tensor)
    if not sharded:
        return get_total_norm(plain, norm_type)

    # The norm of the local rows. A process may have none, of which torch takes no norm of type inf.
    shards = [tensor.to_local() for tensor in sharded]
    filled = [shard for shard in shards if shard.numel()]
    norm = get_total_norm(filled, norm_type) if filled else shards[0].new_zeros(())
    norm = norm.to(sharded[0].device_mesh.device_type)
    plain_norms = [get_total_norm(plain, norm_type).to(norm)] if plain else []

    if norm_type == math.inf:
        norm = torch.where(norm.isnan(), math.inf, norm)  # of NaN and a number a backend may take the number
        distributed.all_reduce(norm, op=distributed.ReduceOp.MAX)
        return torch.stack([norm, *plain_norms]).max()
    square = norm.square()
    distributed.all_reduce(square)
    plain_squares = [plain_norm.square() for plain_norm in plain_norms]
    return torch.stack([square, *plain_squares]).sum().sqrt()


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales all gradients so that their norm is at most `max_norm`; `norm` is their `total_norm`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not any(map(is_sharded, gradients)):
        clip_grads_with_norm_(parameters, max_norm, norm)
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        to_local(gradient).mul_(factor.to(to_local(gradient).device))


@torch.no_grad()
def average_gradients(module: nn.Module) -> None:
    """Averages over the processes the gradients of those parameters of a sharded module that are not sharded
    themselves; FSDP2 averages the gradients of the others. A process without a gradient, of a parameter for
    which another process has one, contributes 0."""
    if not is_distributed():  # first, so that other runs do not visit all parameters in each step
        return
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    plain = [parameter for parameter in parameters if not is_sharded(parameter)]
    has_sharded = any(map(is_sharded, module.parameters()))
    if not plain or not has_sharded:
        return

    # In how many processes each parameter has a gradient.
    has_gradient = [parameter.grad is not None for parameter in plain]
    counts = torch.tensor(has_gradient, dtype=torch.int32, device=plain[0].device)
    distributed.all_reduce(counts)
    averaged = [parameter for parameter, count in zip(plain, counts.tolist(), strict=True) if count]

    # A collective takes numbers of one dtype. The order of dtypes has to be that of the other processes, and
    # is: the list of averaged parameters is equal in all of them.
    for dtype in dict.fromkeys(parameter.dtype for parameter in averaged):
        average_together([parameter for parameter in averaged if parameter.dtype == dtype])


def average_together(parameters: Sequence[nn.Parameter]) -> None:
    """Averages the gradients of parameters of one type, in one collective."""
    gradients = []
    for parameter in parameters:
        gradient = parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad
        gradients.append(gradient.flatten())
    joined = torch.cat(gradients)
    distributed.all_reduce(joined)
    joined /= distributed.get_world_size()

    means = joined.split([parameter.numel() for parameter in parameters])
    for parameter, mean in zip(parameters, means, strict=True):
        # In the parameter's memory format: see cpt.optim.state.
        parameter.grad = torch.empty_like(parameter).copy_(mean.view_as(parameter))
