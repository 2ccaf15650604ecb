"""Losses and divergences by document, as an evaluation sums them."""

import torch
from torch import Tensor
from torchmetrics import Metric


class DocumentNLL(Metric):
    """Nats and scored tokens by document, each [documents], summed over processes."""

    full_state_update = False
    nll: Tensor
    count: Tensor

    def __init__(self, documents: int) -> None:
        super().__init__()
        self.add_state("nll", torch.zeros(documents, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(documents, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, nll: Tensor, count: Tensor, documents: Tensor) -> None:
        self.nll.index_add_(0, documents, nll.to(self.nll))
        self.count.index_add_(0, documents, count.to(self.count))

    def compute(self) -> tuple[Tensor, Tensor]:
        return self.nll, self.count


class DocumentDivergence(Metric):
    """By document the divergence from the base, the nats of the base and of the model, and the scored tokens,
    [4, documents], summed over processes."""

    full_state_update = False
    sums: Tensor

    def __init__(self, documents: int) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(4, documents, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, kl: Tensor, base_nll: Tensor, nll: Tensor, documents: Tensor) -> None:
        """Adds values at scored positions, [K] each, of the documents that they are in."""
        values = torch.stack([kl, base_nll, nll, torch.ones_like(kl)]).to(self.sums)
        self.sums.index_add_(1, documents, values)

    def compute(self) -> Tensor:
        return self.sums
