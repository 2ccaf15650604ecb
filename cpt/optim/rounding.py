"""Updates that weights in bfloat16 cannot represent."""

from collections.abc import Iterable

import torch
from torch import nn

SAMPLE_SIZE = 4096  # entries of a tensor


@torch.no_grad()
def lost_update_share(parameters: Iterable[nn.Parameter], *, rate: float) -> float:
    """The share of weights, 0 to 1, that a step of size `rate` does not change in bfloat16: it is less than
    half the distance to the next number of 8 significant bits.

    A step of Adam is about as large as the learning rate. The share is estimated from evenly spaced entries
    of every tensor, and is therefore the same for the same weights."""
    num_lost = 0.0  # an estimate, not a count
    num_weights = 0
    for parameter in parameters:
        entries = parameter.detach().flatten()
        stride = max(1, len(entries) // SAMPLE_SIZE)
        sample = entries[::stride].to(torch.bfloat16)
        is_lost = (sample - rate) == sample

        # The sample stands for the whole tensor.
        num_lost += float(is_lost.double().sum() / max(1, len(sample))) * len(entries)
        num_weights += len(entries)
    return num_lost / max(1, num_weights)
