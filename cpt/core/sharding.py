"""Tensors whose rows are shared out among processes (DTensors, as FSDP2 makes them of a model's weights): the
one place that knows how they are laid out.

Of n rows and w processes, process r has ceil(n / w) rows from r ceil(n / w) on, or what is left of them. What
works on each entry alone works on the own rows (`local`); what needs all of them asks for the `whole`. All
functions take plain tensors too, and leave those as they are."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from cpt.core.processes import in_company


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether this process has only some rows of a tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The own rows of a tensor, in its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor. Every process has to ask for it, in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor
    there: DTensor = tensor.detach().to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    return there.full_tensor()


def rows_of(values: Tensor, like: Tensor) -> Tensor:
    """Of values that are broadcastable to a tensor those that belong to the own rows of it."""
    if not isinstance(like, DTensor) or values.ndim < like.ndim:
        return values
    if values.shape[0] == 1 != like.shape[0]:
        return values
    rank, world = like.device_mesh.get_local_rank(), like.device_mesh.size()
    start = min(rank * math.ceil(like.shape[0] / world), like.shape[0])
    return values[start : start + len(like.to_local())]


def shard_like(values: Tensor, like: Tensor, *, device: torch.device | None = None) -> Tensor:
    """Whole values shared out as a tensor of their shape is, in their own type and memory of its own, on a
    device or where that tensor is."""
    if not isinstance(like, DTensor) or isinstance(values, DTensor):
        return values
    return lay_out(rows_of(values.detach(), like).to(device or like.to_local().device, copy=True), like)


def with_rows(own: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Own rows as tensors that are laid out as others are."""
    pairs = zip(own, likes, strict=True)
    return [lay_out(rows, like) if isinstance(like, DTensor) else rows for rows, like in pairs]


def lay_out(own: Tensor, like: DTensor) -> DTensor:
    """Own rows as the tensor that they are of."""
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def dot(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """sum_i a_i b_i over all entries of pairs of tensors, a scalar."""
    pairs = zip(ones, others, strict=True)
    return add_up([torch.dot(local(one).flatten(), local(other).flatten()) for one, other in pairs], ones)


def add_up(terms: Sequence[Tensor], likes: Sequence[Tensor]) -> Tensor:
    """The sum of scalars, each of the own rows of a tensor, over all rows."""
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
        distributed.all_reduce(own, op=distributed.ReduceOp.MAX)
        return torch.stack([own, *parts]).max()
    squares = own.square()
    distributed.all_reduce(squares)
    return torch.stack([squares, *(each.square() for each in parts)]).sum().sqrt()


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], most: float, norm: Tensor) -> None:
    """Scales all gradients so that their norm, which is given, is at most so much."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not any(map(is_sharded, gradients)):
        clip_grads_with_norm_(parameters, most, norm)
        return
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        local(gradient).mul_(factor.to(local(gradient).device))


@torch.no_grad()
def average_gradients(module: nn.Module) -> None:
    """Makes gradients of what is whole in each process of a sharded module their mean over the processes, as
    those of sharded weights are already; 0 counts where only other processes have one."""
    if not in_company():
        return
    parameters = [each for each in module.parameters() if each.requires_grad]
    own = [each for each in parameters if not is_sharded(each)]
    if not own or not any(map(is_sharded, module.parameters())):
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
