"""N-LoRA (Yang et al., COLING 2025): IncLoRA whose new adapter changes few entries of W, so that domains
rarely collide.

    L = L_lm + lambda sum over maps ||B_t A_t||_1                       (`penalty: product`, the paper)
    L = L_lm + lambda sum over maps and ranks i ||b_i||_1 ||a_i||_1     (`penalty: factors`)

B_t A_t [d_out, d_in] is what the adapter adds to W but for alpha / r; b_i [d_out] is a column of B_t, a_i
[d_in] a row of A_t. The second is an upper bound of the first, equal at rank 1, without a matrix as large as
W."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpt.adapters import lora
from cpt.data.collate import Batch
from cpt.methods.lora import IncLoRA
from cpt.methods.options import NLoRAOptions

Pair = tuple[Tensor, Tensor]  # A [r, d_in], B [d_out, r]


class _ProductNorm(torch.autograd.Function):
    """||B A||_1. The gradients sign(B A) A^T and B^T sign(B A) are computed in the forward pass, so that only
    one product at a time is in memory."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        exact = torch.promote_types(a.dtype, torch.float32)
        with torch.autocast(a.device.type, enabled=False):
            wide_a, wide_b = a.to(exact), b.to(exact)
            product = wide_b @ wide_a
            signs = product.sign()
            ctx.save_for_backward((wide_b.T @ signs).to(a), (signs @ wide_a.T).to(b))
            return product.abs_().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Pair:
        of_a, of_b = ctx.saved_tensors
        return gradient * of_a, gradient * of_b


def product_norm(pairs: Iterable[Pair]) -> Tensor:
    """The sum over pairs of ||B A||_1, a scalar."""
    return torch.stack([_ProductNorm.apply(a, b) for a, b in pairs]).sum()


def factors_norm(pairs: Iterable[Pair]) -> Tensor:
    """The sum over pairs and ranks of ||b_i||_1 ||a_i||_1, a scalar."""
    terms = [(b.abs().sum(0, dtype=torch.float) * a.abs().sum(1, dtype=torch.float)).sum() for a, b in pairs]
    return torch.stack(terms).sum()


class NLoRA(IncLoRA):
    """Trains a new LoRA adapter per domain whose product has few entries."""

    options: NLoRAOptions

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(batch)
        if self.options.strength:
            newest = [lora.factors_of(layer) for layer in lora.lora_layers(self.model).values()]
            norm = product_norm if self.options.penalty == "product" else factors_norm
            terms["sparsity"] = self.options.strength * norm(newest)
        return terms
