"""A model whose weights are shared out among processes by FSDP2 (torch.distributed.fsdp.fully_shard; Zhao et
al., VLDB 2023): block by block, a block's weights are whole only while it computes.

Every pass of such a model is a collective: all processes have to make it, with the same weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from cpt.models.units import blocks

T = TypeVar("T")
scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)  # of torch 2.13


class Reduction:
    """How the gradients g_r of the processes come together: as FSDP2 asks for it, or while there is a
    `weight` c_r as sum_r c_r |g_r|^p, by entry."""

    weight: float | None = None
    power = 2

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **how: Any) -> Any:
        if self.weight is not None:
            (input_tensor.square_() if self.power == 2 else input_tensor.abs_()).mul_(self.weight)
            op = distributed.ReduceOp.SUM
        return scatter(output_tensor, input_tensor, op=op, group=group, **how)


def shard_model(
    model: PreTrainedModel, mesh: DeviceMesh, *, ignored: set[nn.Parameter], reshard: bool
) -> None:
    """Shares out the weights of a model in place, but for those ignored: of each block, and of what is in
    none. With `reshard` a block is whole again only when its gradients are computed. Raises ValueError for a
    model without transformer blocks."""
    reduction = Reduction()
    for part in (*(block for _, block in blocks(model)), model):
        # The root too: its weights are read, and exchanged, between passes.
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, ignored_params=ignored)
        part.set_custom_reduce_scatter(reduction)
    model.reduction = reduction
    model.run_part = MethodType(lambda self, function, *args, **named: function(*args, **named), model)
    register_fsdp_forward_method(model, "run_part")


def call_within(model: nn.Module, function: Callable[..., T], *args: Any, **named: Any) -> T:
    """What a function gives that runs parts of a model, which a sharded model has to be told of."""
    if not isinstance(model, FSDPModule):
        return function(*args, **named)
    return model.run_part(function, *args, **named)


def rest(model: nn.Module) -> None:
    """Leaves each process with its own rows of a sharded model: what is read and written are these."""
    if isinstance(model, FSDPModule):
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by name, of a sharded one the rows of this process."""
    rest(model)
    return dict(model.named_parameters())


@contextmanager
def raised_gradients(model: nn.Module, power: int, *, weight: float) -> Iterator[None]:
    """While it lasts, each backward pass of a sharded model adds sum_r c_r |g_r|^p to its gradients, with the
    gradient g_r and the weight c_r of each process; p is 1 or 2."""
    model.reduction.power, model.reduction.weight = power, weight
    try:
        yield
    finally:
        model.reduction.weight = None
