"""peft's linear layer with low-rank pairs, whose sum takes one product.

    y = (W x + b) + alpha / r B (A x)

peft makes B (A x), scales it and adds it: three passes over outputs [N, d_out] forward and two backward,
which at rank 8 take longer than the products. Here the second product adds to the first one's result as it is
made (addmm). In 32 bits that changes the last digits; in 16 bits a sum is rounded once, not thrice.

`joined`, on a processor in 32 bits, of no fewer rows than the map has inputs, adds the pair to the map
instead, whose product is then the whole:

    y = (W + alpha / r B A) x + b,    dL/dA = alpha / r (B^T dL/dy) x^T,    dL/dB = alpha / r dL/dy (A x)^T

W + alpha / r B A is made again on the way back rather than kept. The last digits are others again, so that
what equals LoRA to the bit (a mask that lets all pass, a mixture of one) does so without it alone. In 16 bits
W + B A would round away what a pair learns."""

import logging
from functools import cache
from typing import Any

import torch
from peft.tuners.lora.layer import Linear, LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

log = logging.getLogger(__name__)


class PairedLinear(Linear):
    """A layer of peft that adds its pairs to the frozen map's output in place of making another, or to the
    map."""

    joined = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or self.disable_adapters or self.merged or self.lora_variant:
            return super().forward(x, *args, **kwargs)
        names = [name for name in self.active_adapters if name in self.lora_A]
        if names and self.joined and self.may_join(x, names):
            return self.join(x, names)
        result = self.base_layer(x)
        for name in names:
            result = self.add(name, x, result)
        return result

    def may_join(self, x: Tensor, names: list[str]) -> bool:
        """Whether pairs are added to the map for this x. Tells, once, why that is never so."""
        if why := self.say_why_not(x, names):
            tell_without_effect(why)
            return False
        return x.numel() >= x.shape[-1] ** 2

    def say_why_not(self, x: Tensor, names: list[str]) -> str:
        """Why pairs may not be added to the map, however many rows there are; nothing where they may."""
        maps = [self.base_layer, *(half[name] for half in (self.lora_A, self.lora_B) for name in names)]
        kinds = {x.dtype, *(each.weight.dtype for each in maps)}
        reasons = {
            "the model is not on a processor": x.device.type != "cpu",
            "it computes in 16 bits": torch.is_autocast_enabled(x.device.type)
            or kinds not in ({torch.float32}, {torch.float64}),
            "a mask looks at the halves of the pairs": any(map(is_watched, maps)),
            "the pairs have dropout": not all(
                isinstance(self.lora_dropout[name], nn.Identity) for name in names
            ),
            "the map is trained, or of a kind of its own": any(
                each.requires_grad for each in self.base_layer.parameters()
            )
            or not isinstance(self.base_layer, nn.Linear | Conv1D),
        }
        return next((why for why, holds in reasons.items() if holds), "")

    def join(self, x: Tensor, names: list[str]) -> Tensor:
        """What the map with its pairs makes of x [..., d_in]."""
        base = self.base_layer
        weight = base.weight.T if isinstance(base, Conv1D) else base.weight
        pairs = [
            each
            for name in names
            for each in (self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])
        ]
        flat = JoinedProduct.apply(x.flatten(0, -2), weight, base.bias, *pairs)
        return flat.view(*x.shape[:-1], flat.shape[-1])

    def add(self, name: str, x: Tensor, result: Tensor) -> Tensor:
        """The result [..., d_out] with what a pair makes of x [..., d_in]."""
        a, b, scale = self.lora_A[name], self.lora_B[name], self.scaling[name]
        low = a(self.lora_dropout[name](self._cast_input_dtype(x, a.weight.dtype)))
        if low.dtype != result.dtype:  # pairs in 32 bits beside a map in 16
            return (result + b(low) * scale).to(result.dtype)
        flat = torch.addmm(result.flatten(0, -2), low.flatten(0, -2), b.weight.T, alpha=scale)
        return flat.view(result.shape)


class JoinedProduct(torch.autograd.Function):
    """x [N, d_in] by a frozen weight [d_out, d_in] and bias [d_out] or None, with pairs A [r, d_in],
    B [d_out, r] and their scales, one after another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *pairs: Any) -> Tensor:
        halves, ctx.scales = [*zip(pairs[::3], pairs[1::3], strict=True)], pairs[2::3]
        ctx.save_for_backward(x, weight, *(half for pair in halves for half in pair))
        return nn.functional.linear(x, add_pairs(weight, halves, ctx.scales), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (given,), (x, weight, *flat) = gradients, ctx.saved_tensors
        halves = [*zip(flat[::2], flat[1::2], strict=True)]
        of_x = given @ add_pairs(weight, halves, ctx.scales) if ctx.needs_input_grad[0] else None
        found: list[Tensor | None] = []
        for number, ((a, b), scale) in enumerate(zip(halves, ctx.scales, strict=True)):
            asked = ctx.needs_input_grad[3 + 3 * number :]
            found.append((given @ b).T.mul(scale) @ x if asked[0] else None)
            # r rows and their transpose take less time than r columns
            found.append(((x @ a.T).T.mul(scale) @ given).T if asked[1] else None)
            found.append(None)
        return of_x, None, None, *found


def add_pairs(weight: Tensor, halves: list[tuple[Tensor, Tensor]], scales: tuple[float, ...]) -> Tensor:
    """A weight [d_out, d_in] with what pairs add to it."""
    for (a, b), scale in zip(halves, scales, strict=True):
        weight = torch.addmm(weight, b, a, alpha=scale)
    return weight


def is_watched(module: nn.Module) -> bool:
    """Whether someone looks at what a module takes or makes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in hooks)


@cache
def tell_without_effect(why: str) -> None:
    """Tells, once in a process, that pairs are not added to maps."""
    log.warning("method.joined=true without effect: %s", why)


def pair_up(layer: LoraLayer, *, joined: bool) -> None:
    """Makes a plain linear layer of peft's such a one: its parts and their names stay as they are."""
    if type(layer) is Linear:
        layer.__class__, layer.joined = PairedLinear, joined
