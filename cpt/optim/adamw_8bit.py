"""AdamW with moments in 8 bits (Dettmers et al., ICLR 2022), by bitsandbytes."""

from collections.abc import Iterable
from typing import Any

import bitsandbytes
import torch
from torch import Tensor


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """bitsandbytes' AdamW, whose moments are 256 values in blocks of 256 weights, each with a scale.

    Its kernels ignore strides, so that a weight is laid out row after row before its first step. The moments
    are from the start: as bitsandbytes makes them, they have the strides that the weight had before."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        min_8bit_size: int,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, min_8bit_size=min_8bit_size
        )

    def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(p.shape, dtype=dtype, device=p.device)
