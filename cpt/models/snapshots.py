"""Earlier weights of a model: put back, mixed in, run in place of the present ones, or pulled towards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cpt.core.sharding import add_up, local, with_rows
from cpt.core.tensors import NamedTensors
from cpt.models.forward import in_mode
from cpt.models.sharding import named_weights
from cpt.models.swapping import swap_weights


class Snapshot(NamedTensors):
    """A copy of a model's parameters by name; at first of those at construction. A parameter that came into
    the model later has no copy before the next `take`, and stays as it is until then."""

    def __init__(self, model: nn.Module, *, persistent: bool) -> None:
        super().__init__(dict(model.named_parameters()), persistent=persistent)

    @torch.no_grad()
    def take(self, model: nn.Module, *, share: float = 1.0) -> None:
        """Copies the model's parameters as they are now, or moves the copy by a share of the way to them."""
        present, copies = named_weights(model), self.named()
        both = shared_names(present, copies)
        self.move([copies[name] for name in both], [present[name] for name in both], share)
        self.update({name: parameter for name, parameter in present.items() if name not in both})

    @torch.no_grad()
    def restore(self, model: nn.Module, *, share: float = 1.0) -> None:
        """Puts the copy back, in place, or moves the parameters by a share of the way to it."""
        present, copies = named_weights(model), self.named()
        both = shared_names(present, copies)
        self.move([present[name] for name in both], [copies[name] for name in both], share)

    def move(self, tensors: Sequence[Tensor], towards: Sequence[Tensor], share: float) -> None:
        """Moves tensors in place by a share of the way to others of their shapes."""
        if self.offloaded:
            move_each(tensors, towards, share, device=self.device)
        else:
            move(tensors, towards, share)

    @contextmanager
    def teaching(self, model: nn.Module) -> Iterator[None]:
        """The model with the copy's weights, in eval mode and without gradients, while it lasts."""
        with torch.no_grad(), in_mode(model, training=False), swap_weights(model, self.named()):
            yield


def shared_names(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """The names that both have with one shape, in the first's order."""
    return [name for name, value in one.items() if name in other and other[name].shape == value.shape]


def move(tensors: Sequence[Tensor], towards: Sequence[Tensor], share: float) -> None:
    """Moves tensors in place by a share of the way to others of their shapes."""
    # lerp is exact at both ends: a share of 1 gives the others' bits and a share of 0 leaves the own.
    own = [local(each) for each in tensors]
    others = [local(other).to(each) for each, other in zip(own, towards, strict=True)]
    torch._foreach_lerp_(own, others, share)


def move_each(
    tensors: Sequence[Tensor], towards: Sequence[Tensor], share: float, *, device: torch.device
) -> None:
    """The same of tensors on several devices, one after another, computed on one of them."""
    for tensor, other in zip(tensors, towards, strict=True):
        own = local(tensor)
        moved = own.to(device)
        moved.lerp_(local(other).to(moved), share)
        if moved is not own:
            own.copy_(moved)


class _Pull(torch.autograd.Function):
    """The quadratic pull with its gradient in closed form: autograd would keep and cross the parameters
    several times. `elsewhere` says that anchors and weights are elsewhere, and come one after another."""

    @staticmethod
    def forward(
        ctx: Any, elsewhere: bool, anchors: list[Tensor], weights: list[Tensor] | None, *parameters: Tensor
    ) -> Tensor:
        own, to = [local(each) for each in parameters], [local(each) for each in anchors]
        factors = None if weights is None else [local(each) for each in weights]
        terms, scaled = (pull_each if elsewhere else pull_all)(own, to, factors)
        ctx.gradients = with_rows(scaled, parameters)
        return add_up(terms, parameters) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        del ctx.gradients  # they are scaled in place: one backward pass is all that they are good for
        torch._foreach_mul_([local(each) for each in gradients], gradient)
        return None, None, None, *gradients


Pulls = tuple[list[Tensor], list[Tensor]]  # (p - a)^T w (p - a) by parameter, and w (p - a)


def pull_all(own: list[Tensor], anchors: list[Tensor], weights: list[Tensor] | None) -> Pulls:
    """The terms of the pull and their gradients, of all parameters at once."""
    apart = torch._foreach_sub(own, anchors)
    scaled = apart if weights is None else torch._foreach_mul(apart, weights)
    return [products(*each) for each in zip(apart, scaled, strict=True)], list(scaled)


def pull_each(own: list[Tensor], anchors: list[Tensor], weights: list[Tensor] | None) -> Pulls:
    """The same of one parameter after another, with its anchor and its weight brought to where it is."""
    terms, gradients = [], []
    for place, (parameter, anchor) in enumerate(zip(own, anchors, strict=True)):
        apart = parameter - anchor.to(parameter.device)
        scaled = apart if weights is None else apart * weights[place].to(parameter.device)
        terms.append(products(apart, scaled))
        gradients.append(scaled)
    return terms, gradients


def products(one: Tensor, other: Tensor) -> Tensor:
    """sum_i a_i b_i, a scalar."""
    return torch.dot(one.flatten(), other.flatten())


def pull(
    model: nn.Module,
    anchors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
    *,
    elsewhere: bool = False,
) -> Tensor:
    """1/2 sum_i w_i (p_i - a_i)^2 over the model's trained parameters that have an anchor and a weight, by
    name, a scalar, with w = 1 where no weights are given; for one backward pass. Anchors and weights that are
    `elsewhere` than the model are brought there one after another."""
    trained = {name: p for name, p in named_weights(model).items() if p.requires_grad}
    names = shared_names(
        trained, anchors if weights is None else {k: anchors[k] for k in shared_names(anchors, weights)}
    )
    factors = None if weights is None else [weights[name] for name in names]
    towards = [anchors[name] for name in names]
    return _Pull.apply(elsewhere, towards, factors, *[trained[name] for name in names])
