"""The gradient of some rows of a linear map's weight alone.

While the map is computed its weight is lent: a copy that needs no gradient stands in its place, so that the
map's own backward pass gives what its input needs and no more. What the weight needs is computed beside it,
where the rows are known by then: of 2 N n m operations those of the other rows fall away."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

Rows = Callable[[], Tensor]  # places of output features, asked for in the backward pass


class _RowGradient(torch.autograd.Function):
    """Hands a map's output on as it is; its backward pass gives the weight the gradient of some rows, 0 in
    the others."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, given: Tensor, weight: Tensor, axis: int, rows: Rows) -> Tensor:
        ctx.save_for_backward(given)
        ctx.like, ctx.axis, ctx.rows = weight, axis, rows
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        [given] = ctx.saved_tensors
        rows = ctx.rows()
        chosen = gradient.flatten(0, -2).index_select(1, rows)  # [N, chosen]
        tokens = given.flatten(0, -2).to(gradient.dtype)  # [N, inputs]
        part = chosen.T @ tokens if ctx.axis == 0 else tokens.T @ chosen
        found = torch.zeros_like(ctx.like).index_copy_(ctx.axis, rows, part.to(ctx.like.dtype))
        return gradient, None, found, None, None


class RowGradients:
    """Has a linear map compute the gradient of some rows of its weight only, whenever `wanted`; `axis` is the
    weight's over output features."""

    def __init__(self, module: nn.Module, *, axis: int, rows: Rows, wanted: Callable[[], bool]) -> None:
        self.axis, self.rows, self.wanted = axis, rows, wanted
        self.lent: nn.Parameter | None = None
        self.hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(self.lend),
            module.register_forward_hook(self.take_back, always_call=True),
        ]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def lend(self, module: nn.Module, args: Any) -> None:
        weight = module.weight
        if self.wanted() and weight.requires_grad and torch.is_grad_enabled():
            self.lent = weight
            module._parameters["weight"] = nn.Parameter(weight.detach(), requires_grad=False)

    def take_back(self, module: nn.Module, args: Any, output: Tensor | None) -> Tensor | None:
        if self.lent is None:
            return None
        weight, self.lent = self.lent, None
        module._parameters["weight"] = weight
        if output is None:  # the map has failed
            return None
        found: Tensor = _RowGradient.apply(output, args[0].to(output.dtype), weight, self.axis, self.rows)
        return found
