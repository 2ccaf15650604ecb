"""The language-model loss of the parts of a mixture: new text, past domains, general text and sources."""

from dataclasses import replace

import torch
from torch import Tensor

from cpt.data.collate import Batch
from cpt.models.chunked_head import WeightedLoss


class PartLosses:
    """Sums of the loss (nats) and scored tokens by part, [2, parts] float64, since they were last taken; None
    without any. Those of one process."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def observe(self, weighted: WeightedLoss, batch: Batch) -> WeightedLoss:
        """The loss of a batch, multiplied by the weights of the parts; adds the losses to these sums:

        L = 1/N sum_i w_i l_i,    w_i the weight of the source of token i, N all scored tokens of the step
        """
        parts = batch["parts"][batch["rows"]]  # [K]
        weights = None
        if "part_weights" in batch:
            weights = batch["part_weights"][batch["rows"]]
        if self.sums is None:
            num_parts = batch["part_counts"].shape[1]
            self.sums = torch.zeros((2, num_parts), dtype=torch.float64)
        self.sums = self.sums.to(parts.device)  # those of a checkpoint are on the CPU

        def loss(logits: Tensor, positions: slice) -> Tensor:
            values = weighted.loss(logits, positions)
            self.add(parts[positions], values.detach())
            return values if weights is None else weights[positions].to(values) * values

        return replace(weighted, loss=loss)

    def add(self, parts: Tensor, values: Tensor) -> None:
        """Adds losses (nats) [k] of tokens of these parts, by their numbers [k]."""
        assert self.sums is not None
        self.sums[0].index_add_(0, parts, values.double())
        self.sums[1].index_add_(0, parts, torch.ones_like(values, dtype=torch.float64))

    def take(self) -> Tensor | None:
        """The sums so far, [2, parts]: nats and tokens; None without any. The next ones begin at 0."""
        sums = self.sums
        self.sums = None
        return sums
