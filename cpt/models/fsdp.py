"""A model sharded by FSDP2 (torch.distributed.fsdp.fully_shard; Zhao et al., VLDB 2023), block by block.

Each forward pass of a sharded model is a collective: all processes must make it, with the same weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from cpt.models.units import find_blocks


class Reduction:
    """The reduce-scatter of the gradients g_r: FSDP2's own, or with a `weight` c_r the sum of c_r |g_r|^p."""

    weight: float | None = None
    power = 2

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **options: Any
    ) -> Any:
        # The powers are of each process's gradient, so they are taken before the sum over processes.
        if self.weight is not None:
            powers = input_tensor.square_() if self.power == 2 else input_tensor.abs_()
            powers.mul_(self.weight)
            op = distributed.ReduceOp.SUM
        # torch 2.13 has another name for it.
        reduce = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
        return reduce(output_tensor, input_tensor, op=op, group=group, **options)


def shard_model(
    model: PreTrainedModel, mesh: DeviceMesh, *, ignored: set[nn.Parameter], reshard: bool
) -> None:
    """Shards the weights of a model in place, except those ignored: each block, and what is in none. With
    `reshard`, they are resharded after forward. Raises ValueError for a model without blocks."""
    model.reduction = Reduction()
    modules = [block for _, block in find_blocks(model)]
    modules.append(model)
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, ignored_params=ignored)
        cast(FSDPModule, module).set_custom_reduce_scatter(model.reduction)
    # FSDP gathers weights for forward methods alone: by this one parts of the model are run as well.
    model.run_part = MethodType(lambda self, function, *args, **named: function(*args, **named), model)
    register_fsdp_forward_method(model, "run_part")


def call_within(model: nn.Module, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The result of a function that runs parts of a model, whose weights FSDP gathers for it."""
    if isinstance(model, FSDPModule):
        return cast(Callable[..., Any], model.run_part)(function, *args, **named)
    return function(*args, **named)


def reshard(model: nn.Module) -> None:
    """Frees the gathered weights of a sharded model: parameters are the rows of this process."""
    if not isinstance(model, FSDPModule):
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by name; of a sharded one the rows of this process."""
    reshard(model)
    return dict(model.named_parameters())


@contextmanager
def raised_gradients(model: nn.Module, power: int, *, weight: float) -> Iterator[None]:
    """Backward passes inside the context add sum_r c_r |g_r|^p over processes r to the gradients,
    in place of the usual reduction. `weight` is c_r of this process; the context ends with None: off."""
    reduction = cast(Reduction, model.reduction)
    reduction.power = power
    reduction.weight = weight
    try:
        yield
    finally:
        reduction.weight = None
