"""The optimizer's state (moments, counts of steps): carried from domain to domain, and laid out in memory as
fused steps need it.

A fused step ignores strides: for a column-major matrix and a row-major gradient, `torch._fused_adamw_` of
torch 2.13 silently uses other entries' gradients. It takes sharded tensors or whole ones, not both."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpt.core.distributed import is_sharded
from cpt.core.messages import count_noun
from cpt.core.tensors import NamedTensors

log = logging.getLogger(__name__)
ROW_MAJOR = ("state1", "state2")  # moments of bitsandbytes, which are row-major as the weight becomes
QUANTIZATION = (
    "qmap1",
    "qmap2",
    "absmax1",
    "absmax2",
)  # of bitsandbytes: the 256 values, the scale of a block


class CarriedState(NamedTensors):
    """An optimizer's state by parameter name between two domains, on the CPU; empty during a domain. A whole
    number is a tensor of one meanwhile."""

    def capture(self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Takes over the state of an optimizer, but no entry of None. Raises ValueError for one that
        is neither a tensor nor a whole number."""
        self.clear()
        for name, parameter in named_parameters:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    self.update({f"{name}:{key}": value.cpu()})
                elif type(value) is int:
                    self.update({f"{name}:{key}": torch.tensor(value)})
                elif value is not None:
                    raise ValueError(
                        f"optim.state_across_domains is invalid: {type(optimizer).__name__} keeps "
                        f"{key}={value}. Allowed: none"
                    )

    def load_into(self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Loads the state into a new optimizer, and logs which parameters are new or gone."""
        carried: dict[str, dict[str, Any]] = {}  # by parameter and key
        for joint_name, value in self.named().items():
            name, _, key = joint_name.rpartition(":")
            is_whole_number = value.dtype == torch.int64 and value.ndim == 0
            carried.setdefault(name, {})[key] = int(value) if is_whole_number else value
        names = {parameter: name for name, parameter in named_parameters}

        # By index, as in a state_dict. The entries that remain in `carried` are of parameters that no longer
        # exist.
        loaded: dict[int, dict[str, Any]] = {}
        new_names = []
        for index, parameter in enumerate(list_parameters(optimizer)):
            name = names[parameter]
            if name in carried and fits_parameter(carried[name], parameter):
                loaded[index] = carried.pop(name)
            else:
                new_names.append(name)

        # Nothing is carried into the first domain, where all parameters are new.
        if loaded:
            log_differences(new_names, "without one, as new")
            log_differences(list(carried), "no longer there")
        optimizer.load_state_dict({**optimizer.state_dict(), "state": loaded})

    def parameter_of(self, name: str) -> str:
        return name.rpartition(":")[0].removeprefix("model.")  # a module names its model's parameters so

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CarriedState":
        # Stays on the CPU and is never cast: a count of steps in 16 bits would be rounded.
        return self


def list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """An optimizer's parameters over all groups, as its state_dict counts them."""
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


def fits_parameter(state: Mapping[str, Any], parameter: nn.Parameter) -> bool:
    """Whether each tensor of a state has the shape of a parameter, or one that broadcasts to it; but for
    those with which moments in 8 bits are read, whose shapes are others."""
    shapes = []
    for name, value in state.items():
        if isinstance(value, Tensor) and name not in QUANTIZATION:
            shapes.append(value.shape)
    with suppress(RuntimeError):  # shapes that do not go together
        return all(torch.broadcast_shapes(shape, parameter.shape) == parameter.shape for shape in shapes)
    return False


def log_differences(names: Sequence[str], description: str) -> None:
    if names:
        log.info(
            "Carrying over optimizer state: %s %s, like %s",
            count_noun(len(names), "parameter"),
            description,
            names[0],
        )


def match_strides(values: Tensor, like: Tensor) -> Tensor:
    """The values with the strides of another tensor of their shape."""
    # A count of steps is a scalar, and of a sharded parameter the rows are laid out already.
    if is_sharded(like) or values.shape != like.shape or values.stride() == like.stride():
        return values
    return torch.empty_like(like, dtype=values.dtype, device=values.device).copy_(values)


def lay_out_moments(optimizer: Optimizer) -> None:
    """Gives moments the strides of their parameters; files are row-major. bitsandbytes lays out its own."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and name not in ROW_MAJOR:
                state[name] = match_strides(value, parameter)


def unfuse_mixed(optimizer: Optimizer) -> None:
    """Turns fused steps off for groups with sharded and whole parameters."""
    for group in optimizer.param_groups:
        is_mixed = len({is_sharded(parameter) for parameter in group["params"]}) > 1
        if group.get("fused") and is_mixed:
            group["fused"] = False
