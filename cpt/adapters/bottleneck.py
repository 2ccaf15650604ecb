"""Bottleneck adapters in a frozen Hugging Face model: in series with a sub-layer's output projection (Houlsby
et al., ICML 2019) or a block's last residual sum (Pfeiffer et al., EACL 2021), or parallel to a sub-layer, as
plug-ins (Ke et al., EMNLP 2022). They are children of the projection or block and act by forward hooks, so
that a copy of the model has copies of them. The second layer starts at zero: the model is then the base, bit
for bit."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from cpt.adapters.domain_store import Scope
from cpt.core.exceptions import InvalidOptionError
from cpt.models.narrow_layers import make_empty_hidden
from cpt.models.units import Projection, SubLayer, find_blocks, find_sublayers

INIT_STD = 0.02  # of a new first layer
QUERY_NAME = re.compile(r"(w?q|query)(?![a-z])\w*", re.IGNORECASE)


class Bottleneck(nn.Module):
    """Adds up(act(down(h))) to h; in a block whose output h is a norm of a sum, to that sum."""

    def __init__(self, width: int, size: int, *, activation: str, like: Tensor) -> None:
        super().__init__()
        self.down = nn.Linear(width, size, device=like.device, dtype=like.dtype)
        self.activation = ACT2FN[activation]
        self.up = nn.Linear(size, width, device=like.device, dtype=like.dtype)
        # The last norm with its input and output, while the block runs.
        self.last_norm: tuple[nn.Module, Tensor, Tensor] | None = None
        self.reset()

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        """Draws the first layer's weight on the CPU, and sets all else to zero."""
        self.down.weight.copy_(INIT_STD * torch.randn(self.down.weight.shape, generator=generator))
        for tensor in (self.down.bias, self.up.weight, self.up.bias):
            tensor.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """What is added, [..., width], to an output [..., width]."""
        return self.up(self.activation(self.down(hidden)))

    def add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The projection's forward hook."""
        return output + self(output).to(output)

    def record_norm(self, norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """The forward hook of the norms in a block."""
        self.last_norm = (norm, args[0], output)

    def add_to_sum(self, block: nn.Module, args: Any, output: Any) -> Any:
        """The block's forward hook; its output is hidden states, or a tuple that begins with them."""
        is_tuple = isinstance(output, tuple)
        hidden = output[0] if is_tuple else output
        last_norm = self.last_norm
        self.last_norm = None
        # A block that ends with a norm, as BERT's, has the last norm's output as its own.
        if last_norm is not None and last_norm[2] is hidden:
            norm, residual_sum, _ = last_norm
            # `forward`, as a call would run the hooks of the norm again.
            hidden = norm.forward(residual_sum + self(hidden).to(residual_sum))
        else:
            hidden = hidden + self(hidden).to(hidden)
        return (hidden, *output[1:]) if is_tuple else hidden


def attach_bottlenecks(model: PreTrainedModel, *, placement: str, reduction: int, activation: str) -> Scope:
    """Adds bottlenecks, of the hidden size over `reduction`, after the last residual sum of each block
    (`pfeiffer`), its FFN (`ffn`) or attention and FFN (`houlsby`). Raises ValueError for none."""
    width = model.config.hidden_size
    if reduction > width:
        raise InvalidOptionError("method.reduction_factor", reduction, allowed=f"1 to {width}, all features")

    # The modules that get an adapter as a child, by name: blocks, or the last layers of sub-layers.
    if placement == "pfeiffer":
        hosts = find_blocks(model)
    else:
        kinds = ("neurons",) if placement == "ffn" else ("heads", "neurons")
        hosts = [(sublayer.out.name, sublayer.out.module) for sublayer in find_sublayers(model, kinds)]

    adapters: dict[str, Bottleneck] = {}
    for name, host in hosts:
        adapter = Bottleneck(width, width // reduction, activation=activation, like=make_empty_hidden(model))
        if placement == "pfeiffer":
            for module in host.modules():
                if "Norm" in type(module).__name__:
                    module.register_forward_hook(adapter.record_norm)
            host.register_forward_hook(adapter.add_to_sum)
        else:
            host.register_forward_hook(adapter.add)
        host.add_module("adapter", adapter)
        adapters[f"{name}.adapter"] = adapter
    return make_bottleneck_scope(adapters)


class Plugin(Bottleneck):
    """A bottleneck parallel to a sub-layer: adds up(relu(down(x))) of the sub-layer's input x [..., width] to
    its output, or with `output_relu` relu(up(relu(down(x))))."""

    def __init__(self, width: int, size: int, *, output_relu: bool, like: Tensor) -> None:
        super().__init__(width, size, activation="relu", like=like)
        self.output_relu = output_relu
        self.input: Tensor | None = None  # of the sub-layer, while it runs
        # A ReLU of zeros would have no gradient. Drawn in either case, so that later draws are the same.
        weight = INIT_STD * torch.randn(self.up.weight.shape)
        if output_relu:
            self.up.weight.data.copy_(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        change = super().forward(hidden)
        return change.relu() if self.output_relu else change

    def record_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """The pre-hook of a layer that reads the sub-layer's input."""
        self.input = args[0]

    def add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The output projection's forward hook."""
        hidden = self.input
        self.input = None
        return output + self(hidden).to(output)


def attach_plugins(model: PreTrainedModel, *, attention: float, ffn: float, output_relu: bool) -> Scope:
    """Adds a plug-in parallel to each attention and each FFN, their inner size as a share of the hidden."""
    plugins: dict[str, Bottleneck] = {}
    for kind, share in (("heads", attention), ("neurons", ffn)):
        for sublayer in find_sublayers(model, (kind,)):
            width = sublayer.out.outputs
            size = max(1, round(share * width))
            plugin = Plugin(width, size, output_relu=output_relu, like=make_empty_hidden(model))
            sublayer.out.module.add_module("plugin", plugin)
            find_entrance(sublayer).module.register_forward_pre_hook(plugin.record_input)
            sublayer.out.module.register_forward_hook(plugin.add)
            plugins[f"{sublayer.out.name}.plugin"] = plugin
    return make_bottleneck_scope(plugins)


def find_entrance(sublayer: SubLayer) -> Projection:
    """A layer that reads the sub-layer's input: keys and values may come from an encoder."""
    # An FFN has no query; all of its layers read the same input.
    sources = [source for source, _ in sublayer.sources]
    for source in sources:
        if QUERY_NAME.fullmatch(source.name.rpartition(".")[2]):
            return source
    return sources[0]


def make_bottleneck_scope(adapters: dict[str, Bottleneck]) -> Scope:
    """The parameters and linear layers of adapters by name."""
    names = []
    projections = []
    for name, adapter in adapters.items():
        names += [f"{name}.{key}" for key, _ in adapter.named_parameters()]
        for key, layer in (("down", adapter.down), ("up", adapter.up)):
            all_features = torch.arange(layer.out_features)  # one segment: all output features
            projections.append(Projection(f"{name}.{key}", module=layer, axis=0, segments=(all_features,)))
    return Scope(tuple(names), tuple(projections))
