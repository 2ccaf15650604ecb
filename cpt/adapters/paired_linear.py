"""peft's linear layer with low-rank pairs, whose sum takes one product.

    y = (W x + b) + alpha / r B (A x)

peft makes B (A x), scales it and adds it: three passes over outputs [N, d_out] forward and two backward,
which at rank 8 take longer than the products. Here the second product adds to the first one's result as
it is made (addmm). In 32 bits that changes the last digits; in 16 bits a sum is rounded once, not thrice."""

from typing import Any

import torch
from peft.tuners.lora.layer import Linear, LoraLayer
from torch import Tensor


class PairedLinear(Linear):
    """A layer of peft that adds its pairs to the frozen map's output in place of making a second output."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or self.disable_adapters or self.merged or self.lora_variant:
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x)
        for name in self.active_adapters:
            if name in self.lora_A:
                result = self.add(name, x, result)
        return result

    def add(self, name: str, x: Tensor, result: Tensor) -> Tensor:
        """The result [..., d_out] with what a pair makes of x [..., d_in]."""
        a, b, scale = self.lora_A[name], self.lora_B[name], self.scaling[name]
        low = a(self.lora_dropout[name](self._cast_input_dtype(x, a.weight.dtype)))
        if low.dtype != result.dtype:  # pairs in 32 bits beside a map in 16
            return (result + b(low) * scale).to(result.dtype)
        flat = torch.addmm(result.flatten(0, -2), low.flatten(0, -2), b.weight.T, alpha=scale)
        return flat.view(result.shape)


def pair_up(layer: LoraLayer) -> None:
    """Makes a plain linear layer of peft's such a one: its parts and their names stay as they are."""
    if type(layer) is Linear:
        layer.__class__ = PairedLinear
