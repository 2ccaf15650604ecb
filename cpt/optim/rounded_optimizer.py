"""Steps of any optimizer in 32 bits on weights in 16, so that small ones are not lost (cpt.optim.rounding).

Per weight, an optimizer keeps 2 bytes of the weight, 2 of its gradient and its own state in 32 bits; while a
step is made, copies of some parameters at a time are in 32 bits."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpt.core.distributed import to_local
from cpt.optim.rounding import StochasticRounding

MAX_COPIED = 1 << 26  # weights that have copies in 32 bits at a time, unless one parameter has more


class RoundedOptimizer(Optimizer):
    """Makes the steps of another optimizer on copies of parameters in 32 bits, and stores what results,
    rounded. Groups and state are of this optimizer; the other one gets those of the parameters at hand."""

    def __init__(self, optimizer: Optimizer, rounding: StochasticRounding) -> None:
        self.optimizer = optimizer
        self.rounding = rounding
        super().__init__(optimizer.param_groups, optimizer.defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # An optimizer may store a number in a group that each step changes, as a count of steps. All parts
        # start from the same one, and it changes once, after the last part.
        groups_after = self.param_groups
        for parameters in self.divide_parameters():
            groups_after = self.step_together(parameters)
        self.update_groups(groups_after)
        return loss

    def divide_parameters(self) -> Iterator[list[nn.Parameter]]:
        """The parameters with gradients, some at a time."""
        part: list[nn.Parameter] = []
        num_weights = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                size = to_local(parameter).numel()
                if part and num_weights + size > MAX_COPIED:
                    yield part
                    part = []
                    num_weights = 0
                part.append(parameter)
                num_weights += size
        if part:
            yield part

    @torch.no_grad()
    def step_together(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        """A step of some parameters; returns the groups as they are after it."""
        copies: dict[Tensor, Tensor] = {}
        for parameter in parameters:
            copy = self.rounding.widen(parameter.detach())
            assert parameter.grad is not None
            copy.grad = self.rounding.widen(parameter.grad)
            copies[parameter] = copy
        self.lend(copies)
        self.optimizer.step()

        for parameter in parameters:
            copy = copies[parameter]
            self.state[parameter] = self.optimizer.state[copy]
            self.rounding.store(parameter, copy)
        return self.optimizer.param_groups

    def lend(self, substitutes: Mapping[Tensor, Tensor]) -> None:
        """Gives the other optimizer a copy of the groups, and the state of the parameters that have a
        substitute, which replaces its parameter there."""
        lent_groups = []
        for group in self.param_groups:
            members = [substitutes[parameter] for parameter in group["params"] if parameter in substitutes]
            lent_groups.append({**group, "params": members})
        self.optimizer.param_groups = lent_groups

        lent_state: defaultdict[Tensor, Any] = defaultdict(dict)
        for parameter, substitute in substitutes.items():
            if parameter in self.state:
                lent_state[substitute] = self.state[parameter]
        self.optimizer.state = lent_state

    def update_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes over what the groups of the other optimizer store, but for the parameters."""
        for group, other_group in zip(self.param_groups, groups, strict=True):
            group.update({**other_group, "params": group["params"]})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, which casts the state of a parameter to its type. It is that of a copy here."""
        substitutes: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                empty = to_local(parameter).new_empty(0)  # only type and device are read
                substitutes[parameter] = self.rounding.widen(empty)
        self.lend(substitutes)
        self.optimizer.load_state_dict(dict(state_dict))

        self.update_groups(self.optimizer.param_groups)
        self.state.clear()
        for parameter, substitute in substitutes.items():
            if substitute in self.optimizer.state:
                self.state[parameter] = self.optimizer.state[substitute]
