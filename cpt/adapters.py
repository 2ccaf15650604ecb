"""Small networks beside the sub-layers of an unmodified Hugging Face model, which are trained in its place.

A bottleneck stands behind a sub-layer's output projection, before dropout and the residual sum (Houlsby et
al., ICML 2019; Pfeiffer et al., EACL 2021); a plug-in stands parallel to the sub-layer (Ke et al., EMNLP
2022). Both are children of the projection and act by its forward hook, so that a copy of the model has copies
of them. Their second map is zero at first: the model is then the base, bit for bit."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from cpt.blocks import Between, Projection, sublayers
from cpt.options import choice
from cpt.parts import Scope

PLACES = {"pfeiffer": ("neurons",), "houlsby": ("heads", "neurons")}
ACTIVATIONS = ("relu", "gelu", "silu")
QUERY = re.compile(r"(w?q|query)(?![a-z])\w*", re.IGNORECASE)
STD = 0.02  # of a new first map


class Bottleneck(nn.Module):
    """h + up(act(down(h))), of `width` features through `size`."""

    def __init__(self, width: int, size: int, *, activation: str, like: Tensor) -> None:
        super().__init__()
        self.down = nn.Linear(width, size, device=like.device, dtype=like.dtype)
        self.activation = ACT2FN[activation]
        self.up = nn.Linear(size, width, device=like.device, dtype=like.dtype)
        self.reset()

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        """Draws the first map anew, on the CPU, and sets all else to zero."""
        self.down.weight.copy_(STD * torch.randn(self.down.weight.shape, generator=generator))
        for tensor in (self.down.bias, self.up.weight, self.up.bias):
            tensor.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """What is added, [..., width], to an output [..., width]."""
        return self.up(self.activation(self.down(hidden)))

    def add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The projection's forward hook."""
        return output + self(output).to(output)


class Plugin(nn.Module):
    """What stands parallel to a sub-layer: up(relu(down(x))) of its input, [..., width] through `size`, or
    relu of that."""

    def __init__(self, width: int, size: int, *, output_relu: bool, like: Tensor) -> None:
        super().__init__()
        self.down = nn.Linear(width, size, device=like.device, dtype=like.dtype)
        self.activation = nn.ReLU()
        self.up = nn.Linear(size, width, device=like.device, dtype=like.dtype)
        self.last = nn.ReLU() if output_relu else nn.Identity()
        self.input: Tensor | None = None  # of the sub-layer, while it runs
        self.reset(zero=not output_relu)

    @torch.no_grad()
    def reset(self, *, zero: bool) -> None:
        """Draws the first map and, where it is not to be zero, the second; biases are zero."""
        for linear in (self.down, self.up):
            linear.weight.copy_(STD * torch.randn(linear.weight.shape))
            linear.bias.zero_()
        if zero:
            self.up.weight.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """What is added, [..., width], for an input [..., width]."""
        return self.last(self.up(self.activation(self.down(hidden))))

    def take(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """The pre-hook of a map that reads the sub-layer's input."""
        self.input = args[0]

    def add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The output projection's forward hook."""
        hidden, self.input = self.input, None
        return output + self(hidden).to(output)


def checked(*, placement: str, reduction: int, activation: str) -> dict[str, Any]:
    """The options of `attach` as a method has them; raises ValueError for what is not allowed."""
    choice("placement", placement, allowed=tuple(PLACES))
    choice("activation", activation, allowed=ACTIVATIONS)
    if isinstance(reduction, bool) or not isinstance(reduction, int) or reduction < 1:
        raise ValueError(f"method.reduction={reduction}; allowed: a whole number, 1 or more")
    return {"placement": placement, "reduction": reduction, "activation": activation}


def attach(model: PreTrainedModel, *, placement: str, reduction: int, activation: str) -> Scope:
    """Puts a bottleneck behind the FFN of each block (`pfeiffer`) or behind attention and FFN (`houlsby`), of
    the hidden size over `reduction`; gives what is to be trained. A model takes them once."""
    added = {}
    for place in sublayers(model, PLACES[placement]):
        like, width = place.out.module.weight, place.out.outputs
        part = Bottleneck(width, max(1, width // reduction), activation=activation, like=like)
        place.out.module.add_module("adapter", part)
        place.out.module.register_forward_hook(part.add)
        added[f"{place.out.name}.adapter"] = part
    return scope_of(added)


def attach_plugins(model: PreTrainedModel, *, attention: float, ffn: float, output_relu: bool) -> Scope:
    """Puts a plug-in parallel to each attention and each FFN, its inner size as a share of the hidden size;
    gives what is to be trained. A model takes them once."""
    places = [(place, attention) for place in sublayers(model, ("heads",))]
    places += [(place, ffn) for place in sublayers(model, ("neurons",))]
    added = {}
    for place, share in places:
        like, width = place.out.module.weight, place.out.outputs
        part = Plugin(width, max(1, round(share * width)), output_relu=output_relu, like=like)
        place.out.module.add_module("plugin", part)
        entrance(place).register_forward_pre_hook(part.take)
        place.out.module.register_forward_hook(part.add)
        added[f"{place.out.name}.plugin"] = part
    return scope_of(added)


def entrance(place: Between) -> nn.Module:
    """A map that reads a sub-layer's input: of an attention that of the queries, as keys and values may come
    from an encoder."""
    maps = [source for source, _ in place.sources]
    return next((m for m in maps if QUERY.fullmatch(m.name.rpartition(".")[2])), maps[0]).module


def scope_of(parts: dict[str, nn.Module]) -> Scope:
    """All parameters of the parts, and their linear maps."""
    names = [f"{name}.{key}" for name, part in parts.items() for key, _ in part.named_parameters()]
    linears = [
        (f"{name}.{key}", getattr(part, key)) for name, part in parts.items() for key in ("down", "up")
    ]
    maps = [Projection(name, each, 0, (torch.arange(each.out_features),)) for name, each in linears]
    return Scope(tuple(names), tuple(maps))
