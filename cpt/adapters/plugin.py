"""Plug-ins: bottlenecks parallel to attention and feed-forward layers (CPT; Ke et al., EMNLP 2022)."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters.bank import Scope
from cpt.adapters.bottleneck import STD, scope_of
from cpt.models.units import Between, sublayers

QUERY = re.compile(r"(w?q|query)(?![a-z])\w*", re.IGNORECASE)


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
