"""N-LoRA (Yang et al., COLING 2025): IncLoRA whose new pair changes few entries of W, so that domains collide
in few.

    L = L_lm + lambda sum over maps ||B_t A_t||_1                       (`penalty: product`, the paper)
    L = L_lm + lambda sum over maps and ranks i ||b_i||_1 ||a_i||_1     (`penalty: factors`)

B_t A_t [d_out, d_in] is what the pair adds to W but for alpha / r; b_i [d_out] is a column of B_t and a_i
[d_in] a row of A_t. The second is a bound of the first, equal to it at rank 1, and no matrix as large as W is
made for it. The released code has ||A_t B_t||_1 of the product [r, r] the other way round, which exists only
where d_in = d_out."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.data.collate import Batch
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import NLoRAOptions

Pair = tuple[Tensor, Tensor]  # A [r, d_in], B [d_out, r]


class _ProductNorm(torch.autograd.Function):
    """||B A||_1 of a pair. Its gradients, sign(B A) A^T and B^T sign(B A), are made along with it, so that
    the product is there for one map at a time and never waits for the backward pass."""

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


PENALTIES = ("product", "factors")


class NLoRA(ContinualModule):
    """Trains a new pair per domain on top of the earlier ones, whose product has few entries. `strength` is
    lambda."""

    options: NLoRAOptions

    def __init__(self, options: NLoRAOptions, shared: Shared) -> None:
        super().__init__(options, shared, scope=lora.attach_lora(shared.model, **options.pair))
        lora.resize_on_load(self.model)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.domain.index > 0:
            lora.begin_adapter(self.model, stored=self.options.stored, seed=self.drawing().initial_seed())

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(batch)
        if self.options.strength:
            terms["sparsity"] = self.options.strength * self.sparsity()
        return terms

    def sparsity(self) -> Tensor:
        """The norm that the options say, of the newest pairs of all maps, a scalar."""
        newest = [lora.factors_of(layer) for layer in lora.lora_layers(self.model).values()]
        return product_norm(newest) if self.options.penalty == "product" else factors_norm(newest)

    def backbone(self, domain: int) -> PreTrainedModel:
        return lora.without_tuners(self.model, merged=True)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.options.exported == "merged":
            return super().export(folder, order)
        return lora.export_adapters(folder, self.model, {order[-1]: lora.joined_weights(self.model)})
