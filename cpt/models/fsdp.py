"""A model sharded by FSDP2 (torch.distributed.fsdp.fully_shard; Zhao et al., VLDB 2023), block by block.

Each forward pass of a sharded model is a collective: all processes must make it, with the same weights."""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from cpt.core.distributed import is_sharded, shard_like
from cpt.core.tensors import NamedTensors
from cpt.models.units import find_blocks, list_needed_blocks


class GradientReduction:
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


@dataclass(frozen=True)
class Sharding:
    """The processes among which weights are sharded; with `reshard`, the weights of a block are freed between
    its forward and its backward pass."""

    mesh: DeviceMesh
    reshard: bool


def leave_as_is(name: str, module: nn.Module) -> None:
    """Prepares nothing of a module before it is sharded."""


def list_sharded_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks whose weights are gathered one after another. Raises ValueError for a model without
    blocks."""
    return list_needed_blocks(model, key="strategy", value="fsdp", allowed="single, ddp")


def shard_model(
    model: PreTrainedModel,
    sharding: Sharding,
    *,
    ignored: AbstractSet[nn.Parameter] = frozenset(),
    prepare: Callable[[str, nn.Module], None] = leave_as_is,
) -> None:
    """Shards the weights of a model in place, except those ignored: each block, and what is in none, by name
    "". `prepare` is called with the name of each just before. Raises ValueError for a model without
    blocks, which `list_sharded_blocks` reports before."""
    model.reduction = GradientReduction()
    for name, module in [*find_blocks(model), ("", model)]:
        prepare(name, module)
        fully_shard(
            module,
            mesh=sharding.mesh,
            reshard_after_forward=sharding.reshard,
            ignored_params=set(ignored),
        )
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
    """The parameters of a model by name; in a sharded model the rows of this process."""
    reshard(model)
    return dict(model.named_parameters())


@contextmanager
def raised_gradients(model: nn.Module, power: int, *, weight: float) -> Iterator[None]:
    """Backward passes inside the context add sum_r c_r |g_r|^p over processes r to the gradients,
    in place of the usual reduction. `weight` is c_r of this process; the context ends with None: off."""
    reduction = cast(GradientReduction, model.reduction)
    reduction.power = power
    reduction.weight = weight
    try:
        yield
    finally:
        reduction.weight = None


def follow_sharding(module: nn.Module, model: nn.Module) -> None:
    """Shards what a `module` keeps of the weights of its sharded `model`: copies and importances like the
    weight. States that are loaded into it hold whole tensors, of which each process takes its rows."""
    sharded_weights = {}
    for name, weight in named_weights(model).items():
        if is_sharded(weight):
            sharded_weights[name] = weight
    for submodule in module.modules():
        if isinstance(submodule, NamedTensors):
            submodule.shard(sharded_weights)
    module.register_load_state_dict_pre_hook(shard_loaded_state)


def shard_loaded_state(module: nn.Module, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """A hook on a module that a state dict is loaded into: replaces the tensors of parameters in the state by
    the rows of this process."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if prefix + name in state:
            state[prefix + name] = shard_like(state[prefix + name], parameter)
