"""Earlier weights of a model: put back, mixed in, run in place of the present ones, or pulled towards."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot(nn.Module):
    """A copy of a model's parameters that goes where the model goes; at first of those at construction.

    `persistent` says whether it is part of the state_dict; what construction always gives again need not
    be."""

    def __init__(self, model: nn.Module, *, persistent: bool) -> None:
        super().__init__()
        for number, parameter in enumerate(model.parameters()):
            self.register_buffer(str(number), parameter.detach().clone(), persistent=persistent)

    @torch.no_grad()
    def take(self, model: nn.Module, *, share: float = 1.0) -> None:
        """Copies the model's parameters as they are now, or moves the copy by a share of the way to them."""
        for parameter, copy in zip(model.parameters(), self.buffers(), strict=True):
            # Exact at both ends: a share of 1 gives the model's bits.
            copy.copy_(torch.lerp(copy, parameter.to(copy), share))

    @torch.no_grad()
    def restore(self, model: nn.Module, *, share: float = 1.0) -> None:
        """Puts the copy back, in place, or moves the parameters by a share of the way to it."""
        for parameter, copy in zip(model.parameters(), self.buffers(), strict=True):
            parameter.copy_(torch.lerp(parameter, copy.to(parameter), share))

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """The copy by the names of the model's parameters, for torch.func.functional_call."""
        names = [name for name, _ in model.named_parameters()]
        return dict(zip(names, self.buffers(), strict=True))


class _Pull(torch.autograd.Function):
    """The quadratic pull with its gradient in closed form: autograd would keep and cross the parameters
    several times."""

    @staticmethod
    def forward(ctx: Any, anchors: list[Tensor], weights: list[Tensor] | None, *parameters: Tensor) -> Tensor:
        apart = torch._foreach_sub(parameters, anchors)
        gradients = apart if weights is None else torch._foreach_mul(apart, weights)
        ctx.save_for_backward(*gradients)
        return sum(torch.dot(a.flatten(), g.flatten()) for a, g in zip(apart, gradients, strict=True)) / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *torch._foreach_mul(ctx.saved_tensors, gradient)


def pull(
    parameters: Sequence[Tensor], anchors: Sequence[Tensor], weights: Sequence[Tensor] | None = None
) -> Tensor:
    """1/2 sum_i w_i (p_i - a_i)^2, a scalar, with w = 1 where no weights are given; the sequences have the
    same shapes."""
    return _Pull.apply(list(anchors), None if weights is None else list(weights), *parameters)
