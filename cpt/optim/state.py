"""The optimizer's state (moments, counts of steps): carried from domain to domain, and laid out in memory as
fused steps need it.

A fused step ignores strides: for a column-major matrix and a row-major gradient, `torch._fused_adamw_` of
torch 2.13 silently uses other entries' gradients. It takes sharded tensors or whole ones, not both."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpt.core.distributed import is_sharded
from cpt.core.tensors import NamedTensors

log = logging.getLogger(__name__)


class CarriedState(NamedTensors):
    """An optimizer's state by parameter name between two domains, on the CPU; empty during a domain."""

    def capture(self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Takes over the state of an optimizer. Raises ValueError where not all of it is tensors."""
        self.clear()
        for name, parameter in named_parameters:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    self.update({f"{name}:{key}": value.cpu()})
                elif value is not None:
                    raise ValueError(
                        f"optim.state_across_domains is invalid: {type(optimizer).__name__} keeps "
                        f"{key}={value}. Allowed: none"
                    )

    def load_into(self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Loads the state into a new optimizer, and logs which parameters are new or gone."""
        carried: dict[str, dict[str, Tensor]] = {}  # by parameter and key
        for joint_name, value in self.named().items():
            name, _, key = joint_name.rpartition(":")
            carried.setdefault(name, {})[key] = value
        names = {parameter: name for name, parameter in named_parameters}

        # By number, as a state_dict has it. What remains in `carried` belongs to no parameter any more.
        loaded: dict[int, dict[str, Tensor]] = {}
        new_names = []
        for index, parameter in enumerate(parameters_of(optimizer)):
            name = names[parameter]
            if name in carried and fits_parameter(carried[name], parameter):
                loaded[index] = carried.pop(name)
            else:
                new_names.append(name)

        # Nothing is carried into the first domain, where all parameters are new.
        if loaded:
            log_differences(new_names, "new and start without state")
            log_differences(list(carried), "gone")
        optimizer.load_state_dict({**optimizer.state_dict(), "state": loaded})

    def parameter_of(self, name: str) -> str:
        return name.rpartition(":")[0].removeprefix("model.")  # a module names its model's parameters so

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CarriedState":
        # Stays on the CPU and is never cast: a count of steps in 16 bits would be rounded.
        return self


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """An optimizer's parameters over all groups, as its state_dict counts them."""
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


def fits_parameter(state: Mapping[str, Tensor], parameter: nn.Parameter) -> bool:
    """Whether each tensor of a state has the shape of a parameter, or one that broadcasts to it."""
    with suppress(RuntimeError):  # shapes that do not go together
        return all(
            torch.broadcast_shapes(value.shape, parameter.shape) == parameter.shape
            for value in state.values()
        )
    return False


def log_differences(names: Sequence[str], description: str) -> None:
    if names:
        log.info(
            "Carrying over optimizer state: %d parameters are %s, like %s", len(names), description, names[0]
        )


def lie_as(values: Tensor, like: Tensor) -> Tensor:
    """The values with the strides of another tensor of their shape."""
    # A count of steps is a scalar, and of a sharded parameter the rows are laid out already.
    if is_sharded(like) or values.shape != like.shape or values.stride() == like.stride():
        return values
    return torch.empty_like(like, dtype=values.dtype, device=values.device).copy_(values)


def lay_out_moments(optimizer: Optimizer) -> None:
    """Gives moments the strides of their parameters; files are row-major."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = lie_as(value, parameter)


def unfuse_mixed(optimizer: Optimizer) -> None:
    """Turns fused steps off for groups with sharded and whole parameters."""
    for group in optimizer.param_groups:
        is_mixed = len({is_sharded(parameter) for parameter in group["params"]}) > 1
        if group.get("fused") and is_mixed:
            group["fused"] = False
