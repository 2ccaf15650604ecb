"""The state of optim=adamw_8bit without the kernels of bitsandbytes, which need not be installed where a plan
is computed."""

from collections.abc import Callable, Iterable
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BLOCK_SIZE = 256  # weights of one scale
NUM_VALUES = 256  # of a moment in 8 bits


@torch.library.custom_op("cpt::update_8bit", mutates_args=())
def update_8bit(weight: Tensor) -> None:
    """The place of a kernel of bitsandbytes that updates a weight by moments in 8 bits. Computed time counts
    this operation apart from others."""


update_8bit.register_fake(lambda weight: None)
UPDATE_8BIT = torch.ops.cpt.update_8bit.default


class SimulatedAdamW8bit(Optimizer):
    """Keeps as many bytes as cpt.optim.adamw_8bit.AdamW8bit, and leaves the weights as they are."""

    def __init__(self, params: Iterable[Any], *, lr: float, min_8bit_size: int, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self.min_8bit_size = min_8bit_size
        self.values = [torch.empty(NUM_VALUES), torch.empty(NUM_VALUES)]  # of all parameters

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self.make_state(parameter)
                update_8bit(parameter)

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter.numel() < self.min_8bit_size:
            return {
                "state1": parameter.new_empty(parameter.shape, dtype=torch.float32),
                "state2": parameter.new_empty(parameter.shape, dtype=torch.float32),
            }
        num_blocks = ceil(parameter.numel() / BLOCK_SIZE)
        return {
            "state1": parameter.new_empty(parameter.shape, dtype=torch.uint8),
            "state2": parameter.new_empty(parameter.shape, dtype=torch.uint8),
            "absmax1": parameter.new_empty(num_blocks, dtype=torch.float32),
            "absmax2": parameter.new_empty(num_blocks, dtype=torch.float32),
            "qmap1": self.values[0],
            "qmap2": self.values[1],
        }
