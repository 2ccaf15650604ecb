"""What a fused step of an optimizer asks of memory. It goes through a parameter, its gradient and moments as
they lie there, one entry after another, and compares no strides: of a matrix that lies column by column and a
gradient that lies row by row, `torch._fused_adamw_` of torch 2.13 takes other entries' gradients, and says
nothing. And it takes either shared out tensors or whole ones, not both."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from cpt.core.sharding import is_sharded


def lie_as(values: Tensor, like: Tensor) -> Tensor:
    """The same values in memory as another tensor of their shape lies there."""
    if is_sharded(like) or values.shape != like.shape or values.stride() == like.stride():
        return values
    return torch.empty_like(like, dtype=values.dtype, device=values.device).copy_(values)


def lay_out_moments(optimizer: Optimizer) -> None:
    """Has what an optimizer knows of each parameter lie as that does: what comes from a file lies row after
    row."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = lie_as(value, parameter)


def unfuse_mixed(optimizer: Optimizer) -> None:
    """Steps of a group with shared out and whole parameters are not fused."""
    for group in optimizer.param_groups:
        if group.get("fused") and len({is_sharded(parameter) for parameter in group["params"]}) > 1:
            group["fused"] = False
