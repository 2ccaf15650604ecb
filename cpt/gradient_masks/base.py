"""Gradient masks and step constraints: they combine with every method and with each other."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.core.distributed import select_local_rows, to_local
from cpt.core.schema import check_value
from cpt.data.collate import Batch
from cpt.gradient_masks.options import ActsOn
from cpt.models.objectives import Objective
from cpt.models.units import Projection
from cpt.optim.rounding import TO_NEAREST, Rounding

PROTECTED_BELOW = 0.05  # an entry with a factor up to this counts as protected
Protection = Callable[[Tensor], Tensor]  # projects a movement on the protected subspace, same shape
Step = tuple[nn.Parameter, Tensor]  # a parameter and its gradient or step, of the same shape


class GradientMask(nn.Module):
    """Scales the gradient or the step of each weight. Masks multiply, so their order is free.

    `apply_to` is `gradient` (scaled before clipping and the optimizer; Adam divides most of a constant factor
    out again), `update` (p <- p_old + factor (p_new - p_old), weight decay included) or `frozen` (as
    `update`, and the optimizer's moments too; its step count is one for all rows of a parameter)."""

    static = False  # whether the factors are the same at every step of a domain
    limits_rows = False  # whether the backward pass of each layer computes gradients of some rows only
    reads_importance_batches = False  # whether `before_domain` reads its importance batches
    comes_first = False  # whether it changes a step before the factors, which then limit the result

    def __init__(self, *, apply_to: str) -> None:
        super().__init__()
        check_value("apply_to", apply_to, ActsOn)
        self.apply_to = apply_to
        self.recording = False  # during the forward passes of the training loss
        self.is_only_micro_batch = True  # of its step
        self.text: int | None = None  # number of the held-out text that is evaluated, if it is observed

    def watch(self, model: PreTrainedModel, projections: Sequence[Projection] | None) -> None:
        """Registers the model, again whenever its shape has changed; state is kept by parameter name.
        `projections` are the trained linear layers, None for all within the blocks."""

    def activate(self, domain: int) -> None:
        """Called before a domain's steps, on resume too; idempotent, without data."""

    def before_domain(
        self, model: PreTrainedModel, objective: Objective, importance_batches: Iterable[Batch]
    ) -> None:
        """Called before a domain's first step, after the method's hook; not on resume."""

    def decide(self) -> None:
        """Called between the forward passes of a training loss and its backward pass."""

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Parameters with factors that broadcast to them; called once per optimizer step."""
        return iter(())

    def masked_weights(self) -> Iterable[nn.Parameter]:
        """The weights whose steps it may scale, for the log; none are listed of a mask that reaches all."""
        return ()

    def protected_subspace(self) -> dict[nn.Parameter, Protection]:
        """By parameter, the projection on what is protected; by default entries of a static factor near 0."""
        if not self.static:
            return {}

        def keep_protected(factor: Tensor, movement: Tensor) -> Tensor:
            is_protected = factor.to(movement) <= PROTECTED_BELOW
            return movement * is_protected

        return {parameter: partial(keep_protected, factor) for parameter, factor in self.factors()}

    def diagnostics(self) -> dict[str, Tensor]:
        """Named tensors to store after a domain, such as importances."""
        return {}


class Constraint(GradientMask):
    """Changes a step as a whole: a projection, or a selection by the optimizer's state.

    `apply_to` is `gradient` (before clipping and the optimizer; Adam's division by entry leaves a subspace
    again) or `update` (the step itself, weight decay included)."""

    def covered(self) -> Iterable[nn.Parameter]:
        """The constrained parameters, once per optimizer step; none while there is no constraint yet."""
        return ()

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        """Changes gradients, or steps p_new - p_old, of the covered parameters in place, all at once."""


@contextmanager
def mark_observed(masks: Sequence[GradientMask], text: int | None) -> Iterator[None]:
    """Marks forward passes as the evaluation of a held-out text that masks may observe (None: not)."""
    for mask in masks:
        mask.text = text
    try:
        yield
    finally:
        for mask in masks:
            mask.text = None


class StepSnapshot:
    """Parameters before an optimizer step that a mask or constraint then corrects: by a `factor` on one
    parameter, and on its moments where `apply_to` is `frozen`, or as a whole."""

    def __init__(
        self,
        mask: GradientMask,
        parameters: Iterable[nn.Parameter],
        *,
        factor: Tensor | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.mask = mask
        self.factor = factor
        self.previous = [(parameter, parameter.detach().clone()) for parameter in dict.fromkeys(parameters)]
        self.moments: dict[str, Tensor] | None = None  # before the step, by name
        if optimizer is not None and mask.apply_to == "frozen":
            parameter, _ = self.previous[0]
            self.moments = {name: value.clone() for name, value in find_moments(parameter, optimizer).items()}

    @torch.no_grad()
    def apply(self, optimizer: Optimizer, rounding: Rounding = TO_NEAREST) -> None:
        """Corrects the step that the optimizer has made; `rounding` stores the corrected weights."""
        if self.factor is None:
            self.constrain_step(optimizer, rounding)
        else:
            self.scale_step(self.factor, optimizer, rounding)

    def constrain_step(self, optimizer: Optimizer, rounding: Rounding) -> None:
        """Has the constraint change the steps of all parameters together."""
        steps = []
        for parameter, old in self.previous:
            steps.append((parameter, rounding.widen(parameter.detach()) - rounding.widen(old)))
        cast(Constraint, self.mask).constrain(steps, optimizer)
        for (parameter, step), (_, old) in zip(steps, self.previous, strict=True):
            rounding.store(parameter, step.add_(old))

    def scale_step(self, factor: Tensor, optimizer: Optimizer, rounding: Rounding) -> None:
        """Scales the step of the one parameter that the factor is of, and where they were copied the changes
        of its moments."""
        parameter, old = self.previous[0]
        weights = rounding.widen(parameter.detach())
        scale_(weights, factor, start=rounding.widen(old))
        rounding.store(parameter, weights)
        if self.moments is not None:
            # Moments that the first step has just made were 0 before it.
            for name, value in find_moments(parameter, optimizer).items():
                scale_(value, factor, start=self.moments.get(name, torch.zeros_like(value)))


@contextmanager
def mark_recorded(masks: Sequence[GradientMask], *, is_only_micro_batch: bool = True) -> Iterator[None]:
    """Marks forward passes as those of the training loss; `is_only_micro_batch`: of their step."""
    for mask in masks:
        mask.recording = True
        mask.is_only_micro_batch = is_only_micro_batch
    try:
        yield
    finally:
        for mask in masks:
            mask.recording = False

    # Not after an error: then no backward pass follows.
    for mask in masks:
        mask.decide()


def scale_(tensor: Tensor, factor: Tensor, *, start: Tensor | None = None) -> None:
    """In place tensor <- factor * tensor, or start + factor (tensor - start); the factor broadcasts."""
    local_factor = select_local_rows(factor, tensor)
    local_tensor = to_local(tensor)
    local_factor = local_factor.to(local_tensor.device)
    if start is None:
        local_tensor.mul_(local_factor)
    else:  # lerp is exact at both ends: factor 1 leaves the tensor's bits and factor 0 those of the start
        local_start = to_local(start)
        local_tensor.copy_(torch.lerp(local_start, local_tensor, local_factor.to(local_start)))


def find_moments(parameter: nn.Parameter, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer state with an entry per weight of a parameter; empty before the first step."""
    moments = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape:
            moments[name] = value
    return moments
