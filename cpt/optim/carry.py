"""What an optimizer knows of each parameter (moments, counts of steps), carried from domain to domain."""

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpt.core.tensors import NamedTensors

log = logging.getLogger(__name__)
MOST = 3  # names that a message lists


class CarriedState(NamedTensors):
    """An optimizer's state by the names of the parameters, between two domains. While one is learned the
    optimizer alone has it.

    It stays on the CPU in its own precision."""

    def take(self, optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Takes over the state of an optimizer. Raises ValueError where not all of it is tensors."""
        self.clear()
        for name, parameter in named:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    self.update({f"{name}:{key}": value.cpu()})
                elif value is not None:
                    kind = type(optimizer).__name__
                    raise ValueError(f"optim.carry: {kind} keeps {key}={value}; allowed: none")

    def give(self, optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Hands the state on to a new optimizer, and tells which parameters are new or gone."""
        carried = self.by_name()
        names = {parameter: name for name, parameter in named}
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = {
            place: carried.pop(names[parameter])
            for place, parameter in enumerate(params)
            if fits(carried.get(names[parameter]), parameter)
        }
        new = [names[parameter] for place, parameter in enumerate(params) if place not in known]
        if known:
            tell_names(new, "new and begin without a state of the optimizer")
            tell_names(list(carried), "gone")
        optimizer.load_state_dict({**optimizer.state_dict(), "state": known})

    def by_name(self) -> dict[str, dict[str, Tensor]]:
        """The state of each parameter."""
        found: dict[str, dict[str, Tensor]] = {}
        for joint, value in self.named().items():
            name, _, key = joint.rpartition(":")
            found.setdefault(name, {})[key] = value
        return found

    def parameter_of(self, name: str) -> str:
        return name.rpartition(":")[0].removeprefix("model.")  # a module names its model's parameters so

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CarriedState":
        return self


def fits(state: dict[str, Tensor] | None, parameter: nn.Parameter) -> bool:
    """Whether there is a state, and of a parameter of this shape: its entries stand for the parameter's own,
    for its rows or columns, or for all of it."""
    if state is None:
        return False
    try:
        return all(
            torch.broadcast_shapes(v.shape, parameter.shape) == parameter.shape for v in state.values()
        )
    except RuntimeError:
        return False


def tell_names(names: list[str], what: str) -> None:
    """A line for parameters of which something is to be said, none for none."""
    if names:
        listed = ", ".join([*names[:MOST], *["…"][: len(names) > MOST]])
        log.info("optim.carry: of the parameters %d are %s (%s)", len(names), what, listed)
