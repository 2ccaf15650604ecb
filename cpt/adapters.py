"""Small networks beside the sub-layers of an unmodified Hugging Face model, which are trained in its place.

A bottleneck stands behind a sub-layer's output projection, before dropout and the residual sum (Houlsby et
al., ICML 2019), or behind a block's last residual sum (Pfeiffer et al., EACL 2021); a plug-in stands parallel
to the sub-layer (Ke et al., EMNLP 2022). All are children of the projection or the block and act by forward
hooks, so that a copy of the model has copies of them. Their second map is zero at first: the model is then
the base, bit for bit."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from cpt.blocks import Between, Projection, blocks, sublayers
from cpt.options import choice
from cpt.parts import Scope

SUB_LAYERS = {"ffn": ("neurons",), "houlsby": ("heads", "neurons")}
PLACEMENTS = ("pfeiffer", *SUB_LAYERS)
ACTIVATIONS = ("relu", "gelu", "silu")
QUERY = re.compile(r"(w?q|query)(?![a-z])\w*", re.IGNORECASE)
STD = 0.02  # of a new first map


class Bottleneck(nn.Module):
    """up(act(down(h))), of `width` features through `size`, which is added to h; in a block whose output h is
    a norm of a sum, to that sum."""

    def __init__(self, width: int, size: int, *, activation: str, like: Tensor) -> None:
        super().__init__()
        self.down = nn.Linear(width, size, device=like.device, dtype=like.dtype)
        self.activation = ACT2FN[activation]
        self.up = nn.Linear(size, width, device=like.device, dtype=like.dtype)
        self.normed: tuple[nn.Module, Tensor, Tensor] | None = None  # the last norm, while the block runs
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

    def follow_block(self, block: nn.Module) -> None:
        """Hooks that add to the last residual sum of a block, whether a norm follows it or not."""
        for module in block.modules():
            if "Norm" in type(module).__name__:
                module.register_forward_hook(self.note)
        block.register_forward_hook(self.add_to_sum)

    def note(self, norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """The forward hook of the norms in a block."""
        self.normed = (norm, args[0], output)

    def add_to_sum(self, block: nn.Module, args: Any, output: Any) -> Any:
        """The block's forward hook; its output is hidden states, or a tuple that begins with them."""
        hidden, *others = output if isinstance(output, tuple) else (output,)
        (norm, summed, normed), self.normed = self.normed or (None, None, None), None
        if normed is hidden:
            hidden = norm.forward(summed + self(hidden).to(summed))
        else:
            hidden = hidden + self(hidden).to(hidden)
        return (hidden, *others) if isinstance(output, tuple) else hidden


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
    choice("placement", placement, allowed=PLACEMENTS)
    choice("activation", activation, allowed=ACTIVATIONS)
    if isinstance(reduction, bool) or not isinstance(reduction, int) or reduction < 1:
        raise ValueError(f"method.reduction={reduction}; allowed: a whole number, 1 or more")
    return {"placement": placement, "reduction": reduction, "activation": activation}


def attach(model: PreTrainedModel, *, placement: str, reduction: int, activation: str) -> Scope:
    """Puts bottlenecks, of the hidden size over `reduction`, behind the last residual sum of each block
    (`pfeiffer`), behind its FFN (`ffn`) or behind attention and FFN (`houlsby`); gives what is to be trained.
    A model takes them once."""
    added, width = {}, model.config.hidden_size
    size = max(1, width // reduction)
    for name, module in places(model, placement):
        if hasattr(module, "adapter"):
            raise ValueError(f"{name} has an adapter already")
        part = Bottleneck(width, size, activation=activation, like=next(module.parameters()))
        part.follow_block(module) if placement == "pfeiffer" else module.register_forward_hook(part.add)
        module.add_module("adapter", part)
        added[f"{name}.adapter"] = part
    return scope_of(added)


def places(model: PreTrainedModel, placement: str) -> list[tuple[str, nn.Module]]:
    """What bottlenecks stand behind, by name: blocks, or output projections of sub-layers."""
    if placement == "pfeiffer":
        return blocks(model)
    return [(place.out.name, place.out.module) for place in sublayers(model, SUB_LAYERS[placement])]


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
