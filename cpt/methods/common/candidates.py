"""What a new part may begin as: candidates, compared on the domain's probe."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from cpt.core.collectives import sum_in_place
from cpt.data.collate import Batch
from cpt.models.forward import in_mode


@torch.no_grad()
def measure_perplexities(
    model: nn.Module,
    probe: Iterable[Batch],
    totals: Sequence[Callable[[Batch], Tensor]],
    *,
    device: torch.device,
) -> Tensor:
    """The perplexity of each candidate on the probes of all processes, [candidates] in 64 bits on the device:
    a forward pass of the probe each. `totals` give the summed loss (nats) of a batch, a scalar, with one
    candidate each in the model, which is in eval mode."""
    sums = torch.zeros(len(totals) + 1, dtype=torch.double, device=device)
    with in_mode(model, training=False):
        for batch in probe:
            scored = sums.new_tensor(len(batch["positions"]))
            sums += torch.stack([*(total(batch) for total in totals), scored])
    sum_in_place(sums)
    return (sums[:-1] / sums[-1].clamp_min(1)).exp()
