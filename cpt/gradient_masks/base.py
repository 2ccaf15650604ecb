"""Masks over gradients and steps: they go with every method, and with each other."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.core.schema import check_value
from cpt.core.sharding import local, rows_of
from cpt.data.collate import Batch
from cpt.gradient_masks.options import ActsOn
from cpt.models.objectives import Objective
from cpt.models.units import Projection

NEXT_TO_NOTHING = 0.05  # of a step: an entry that may do no more counts as protected
Protection = Callable[[Tensor], Tensor]  # of a movement what lies inside what is protected, of its shape


class GradientMask(nn.Module):
    """Scales what a step does to each weight. Masks multiply, so their order is free.

    `acts_on` is `gradient` (the gradient is scaled before clipping and the optimizer; Adam divides most of a
    constant factor out again), `update` (the step itself is: p <- p_old + factor (p_new - p_old), weight
    decay included) or `frozen` (as `update`, and the optimizer's moments as well; its count of steps is one
    for all rows of a parameter)."""

    lasting = False  # whether the factors are the same at every step of a domain

    limits = False  # whether gradients of some rows alone are computed, for which maps are taken apart

    def __init__(self, *, acts_on: str) -> None:
        super().__init__()
        check_value("acts_on", acts_on, ActsOn)
        self.acts_on = acts_on
        self.recording = False  # whether the forward passes under way are those of the training loss
        self.alone = True  # whether these are all that the optimizer step has

    def watch(self, model: PreTrainedModel, maps: Sequence[Projection] | None) -> None:
        """Looks at the model: at first, and again when it has another shape; what is known of its parts
        stays, by their names. `maps` are the linear maps that are trained, None for all within the blocks."""

    def activate(self, domain: int) -> None:
        """Called before a domain's steps, also when it is resumed; sees no data; idempotent."""

    def before_domain(self, model: PreTrainedModel, objective: Objective, probe: Iterable[Batch]) -> None:
        """Work before a domain's first step, behind the method's; not repeated when it is resumed. What it
        finds is in the state."""

    def decide(self) -> None:
        """Called when the forward passes of a training loss are made, before its backward pass."""

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Parameters with their factors, broadcastable to them; asked for once per optimizer step."""
        return iter(())

    def protects(self) -> dict[nn.Parameter, Protection]:
        """What of a movement lies inside what is protected for a whole domain, by parameter: here the entries
        of which a step may do next to nothing, if they are the same at every step."""
        if not self.lasting:
            return {}
        return {parameter: partial(keep_protected, factor) for parameter, factor in self.factors()}

    def diagnostics(self) -> dict[str, Tensor]:
        """What there is to look at after a domain, by name: importances, how often a row was chosen."""
        return {}


def keep_protected(factor: Tensor, way: Tensor) -> Tensor:
    """Of a movement the entries whose factor is next to 0."""
    return way * (factor.to(way) <= NEXT_TO_NOTHING)


Step = tuple[nn.Parameter, Tensor]  # a parameter and what is to be done to it, of its shape


class Constraint(GradientMask):
    """Changes a step as a whole: a projection, or a choice that the optimizer's own state decides.

    `acts_on` is `gradient` (before clipping and the optimizer, which undoes some of it: Adam's division by
    entry leaves no subspace where it was) or `update` (the step itself, weight decay included)."""

    def covered(self) -> Iterable[nn.Parameter]:
        """The parameters whose steps are changed; asked for once per optimizer step. Where there is nothing
        to keep to yet, none: then a step has the bits that it has without a constraint."""
        return ()

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        """Changes gradients, or steps p_new - p_old, in place: those of the covered parameters that have a
        gradient, all at once."""


@dataclass(frozen=True)
class Held:
    """Covered parameters before the optimizer's step."""

    constraint: Constraint
    before: Sequence[Step]

    @classmethod
    def of(cls, constraint: Constraint, parameters: Iterable[nn.Parameter]) -> "Held":
        return cls(constraint, [(each, each.detach().clone()) for each in dict.fromkeys(parameters)])

    @torch.no_grad()
    def constrain(self, optimizer: Optimizer) -> None:
        """Leaves of the step what the constraint does."""
        steps = [(parameter, parameter.detach() - old) for parameter, old in self.before]
        self.constraint.constrain(steps, optimizer)
        for (parameter, step), (_, old) in zip(steps, self.before, strict=True):
            parameter.copy_(step.add_(old))


@contextmanager
def recording(masks: Sequence[GradientMask], *, alone: bool = True) -> Iterator[None]:
    """While it lasts, forward passes are those of the training loss; `alone` says whether they are all that
    the step has."""
    for mask in masks:
        mask.recording, mask.alone = True, alone
    try:
        yield
    finally:
        for mask in masks:
            mask.recording = False
    for mask in masks:
        mask.decide()


@dataclass(frozen=True)
class Before:
    """A parameter before the optimizer's step, and the optimizer's state of it where that is masked too."""

    parameter: nn.Parameter
    factor: Tensor
    old: Tensor
    state: dict[str, Tensor] | None

    @classmethod
    def of(cls, parameter: nn.Parameter, factor: Tensor, optimizer: Optimizer | None) -> "Before":
        state = None
        if optimizer is not None:
            state = {name: value.clone() for name, value in moments(parameter, optimizer).items()}
        return cls(parameter, factor, parameter.detach().clone(), state)

    @torch.no_grad()
    def scale(self, optimizer: Optimizer) -> None:
        """Leaves of the step what the factor says."""
        scale_(self.parameter, self.factor, start=self.old)
        if self.state is not None:
            for name, value in moments(self.parameter, optimizer).items():
                scale_(value, self.factor, start=self.state.get(name, torch.zeros_like(value)))


def scale_(tensor: Tensor, factor: Tensor, *, start: Tensor | None = None) -> None:
    """Multiplies a tensor in place by a factor that is broadcastable to it, or of the way that it has come
    from its `start` leaves so much. All that masks do to a step is done here."""
    factor, tensor = rows_of(factor, tensor), local(tensor)
    factor = factor.to(tensor.device)
    if start is None:
        tensor.mul_(factor)
    else:  # lerp is exact at both ends: factor 1 leaves the tensor's bits and factor 0 those of the start
        before = local(start)
        tensor.copy_(torch.lerp(before, tensor, factor.to(before)))


def moments(parameter: nn.Parameter, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state that has an entry for every weight of a parameter; none before the first step."""
    state = optimizer.state.get(parameter, {})
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim
    }
