"""Small networks beside the sub-layers of an unmodified Hugging Face model, which are trained in its place.

A bottleneck stands behind a sub-layer's output projection, before dropout and the residual sum (Houlsby et
al., ICML 2019), or behind a block's last residual sum (Pfeiffer et al., EACL 2021); a plug-in stands parallel
to the sub-layer (Ke et al., EMNLP 2022). All are children of the projection or the block and act by forward
hooks, so that a copy of the model has copies of them. Their second map is zero at first: the model is then
the base, bit for bit."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from cpt.adapters.bank import Scope
from cpt.models.units import Projection, blocks, sublayers

SUB_LAYERS = {"ffn": ("neurons",), "houlsby": ("heads", "neurons")}
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


def attach_bottlenecks(model: PreTrainedModel, *, placement: str, reduction: int, activation: str) -> Scope:
    """Puts bottlenecks, of the hidden size over `reduction`, behind the last residual sum of each block
    (`pfeiffer`), behind its FFN (`ffn`) or behind attention and FFN (`houlsby`); gives what is to be trained.
    A model takes them once. Raises ValueError for a bottleneck without a unit."""
    added, width = {}, model.config.hidden_size
    if reduction > width:
        raise ValueError(f"method.reduction={reduction}; allowed: 1 to {width}, the model's hidden size")
    size = width // reduction
    for name, module in bottleneck_places(model, placement):
        if hasattr(module, "adapter"):
            raise ValueError(f"{name} has an adapter already")
        part = Bottleneck(width, size, activation=activation, like=next(module.parameters()))
        part.follow_block(module) if placement == "pfeiffer" else module.register_forward_hook(part.add)
        module.add_module("adapter", part)
        added[f"{name}.adapter"] = part
    return scope_of(added)


def bottleneck_places(model: PreTrainedModel, placement: str) -> list[tuple[str, nn.Module]]:
    """What bottlenecks stand behind, by name: blocks, or output projections of sub-layers."""
    if placement == "pfeiffer":
        return blocks(model)
    return [(place.out.name, place.out.module) for place in sublayers(model, SUB_LAYERS[placement])]


def scope_of(parts: dict[str, nn.Module]) -> Scope:
    """All parameters of the parts, and their linear maps."""
    names = [f"{name}.{key}" for name, part in parts.items() for key, _ in part.named_parameters()]
    linears = [
        (f"{name}.{key}", getattr(part, key)) for name, part in parts.items() for key in ("down", "up")
    ]
    maps = [Projection(name, each, 0, (torch.arange(each.out_features),)) for name, each in linears]
    return Scope(tuple(names), tuple(maps))
