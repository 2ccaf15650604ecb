"""Earlier weights of a model: put back, mixed in, run in place of the present ones, or pulled towards."""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from cpt.data.objectives import Batch
from cpt.models.forward import in_mode, outputs_at


class PerParameter(nn.Module):
    """A tensor for each of a model's parameters, in their order, that goes where the model goes.

    `persistent` says whether it is part of the state_dict; what construction always gives again need not
    be."""

    def __init__(self, tensors: Iterable[Tensor], *, persistent: bool) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            self.register_buffer(str(number), tensor, persistent=persistent)


class Snapshot(PerParameter):
    """A copy of a model's parameters; at first of those at construction."""

    def __init__(self, model: nn.Module, *, persistent: bool) -> None:
        super().__init__((p.detach().clone() for p in model.parameters()), persistent=persistent)

    @torch.no_grad()
    def take(self, model: nn.Module, *, share: float = 1.0) -> None:
        """Copies the model's parameters as they are now, or moves the copy by a share of the way to them."""
        move(list(self.buffers()), list(model.parameters()), share)

    @torch.no_grad()
    def restore(self, model: nn.Module, *, share: float = 1.0) -> None:
        """Puts the copy back, in place, or moves the parameters by a share of the way to it."""
        move(list(model.parameters()), list(self.buffers()), share)

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """The copy by the names of the model's parameters, for torch.func.functional_call."""
        names = [name for name, _ in model.named_parameters()]
        return dict(zip(names, self.buffers(), strict=True))

    @torch.no_grad()
    def outputs_at(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """cpt.models.forward.outputs_at with the copy's weights, in eval mode and without gradients; the
        model is left as it was."""
        with in_mode(model, training=False):
            return outputs_at(model, batch, weights=self.named(model))


def move(tensors: Sequence[Tensor], towards: Sequence[Tensor], share: float) -> None:
    """Moves tensors in place by a share of the way to others of their shapes."""
    # lerp is exact at both ends: a share of 1 gives the others' bits and a share of 0 leaves the own.
    others = [other.to(own) for own, other in zip(tensors, towards, strict=True)]
    torch._foreach_lerp_(tensors, others, share)


class _Pull(torch.autograd.Function):
    """The quadratic pull with its gradient in closed form: autograd would keep and cross the parameters
    several times."""

    @staticmethod
    def forward(ctx: Any, anchors: list[Tensor], weights: list[Tensor] | None, *parameters: Tensor) -> Tensor:
        apart = torch._foreach_sub(parameters, anchors)
        ctx.gradients = apart if weights is None else torch._foreach_mul(apart, weights)
        pairs = zip(apart, ctx.gradients, strict=True)
        return torch.stack([torch.dot(a.flatten(), g.flatten()) for a, g in pairs]).sum() / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        del ctx.gradients  # they are scaled in place: one backward pass is all that they are good for
        torch._foreach_mul_(gradients, gradient)
        return None, None, *gradients


def pull(
    parameters: Iterable[Tensor], anchors: Iterable[Tensor], weights: Iterable[Tensor] | None = None
) -> Tensor:
    """1/2 sum_i w_i (p_i - a_i)^2 over the parameters that are trained, a scalar, with w = 1 where no weights
    are given; for one backward pass. There are as many of each, of the same shapes."""
    parameters = list(parameters)
    trained = [p.requires_grad for p in parameters]
    anchors = list(compress(anchors, trained))
    weights = None if weights is None else list(compress(weights, trained))
    return _Pull.apply(anchors, weights, *compress(parameters, trained))
