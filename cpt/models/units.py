"""Heads, neurons, output features and tokens of any Hugging Face model, found by the shapes of its modules.

A block is a member of a ModuleList all of whose members hold an attention; of a hybrid some hold a mixer
instead, which has a convolution. Within a block, units lie between the linear layers that write them
(sources) and the one that reads them (out): heads between query, key, value and the output projection,
neurons between up (and gate) and down. Only the layout of fused weights is looked up by model type."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.core.exceptions import InvalidOptionError, MessageError
from cpt.core.messages import count_noun
from cpt.models.quantization import QuantizedLinear

UNIT_KINDS = ("heads", "neurons", "outputs", "tokens")
ATTENTION = re.compile(r".*?(?:attention|attn)[^.]*(?=\.)", re.IGNORECASE)
# Where all layers are square, only the last part of its name distinguishes a source from an out.
SOURCE_NAME = re.compile(r"(w?[qkv]|w?qkv|query|key|value|up|gate|wi)(?![a-z])\w*", re.IGNORECASE)
MIXING_NORM = {"heads": r"(q|k|v|query|key|value)_\w*norm|attn_sub_norm", "neurons": "ffn_sub_norm"}
FUSED = {
    "gpt2": "apart", "modernbert": "apart", "phi3": "apart", "glm": "apart", "glm4": "apart", "lfm2": "apart",
    "bloom": "by head", "gpt_neox": "by head",
}  # fmt: skip
# What a message lists: the layers of attentions and feed-forward networks, and of mixers.
SUPPORTED_LAYERS = "Q, K, V (fused or not), an output projection; up, down, perhaps gate (fused or not)"
SUPPORTED_MIXER_LAYERS = "one to three linear layers of equal width (fused or not), an output projection"
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads")  # attributes of attention modules
MAX_LISTED = 12  # matrices that a message lists


class UnknownLayersError(MessageError):
    """A model whose linear layers are not those of known attentions and feed-forward networks."""


@dataclass(frozen=True)
class Part:
    """A slice of one parameter that units own: features along `axis` belong to the units `members`
    [features, r], several where query heads share a key/value head, -1 for none."""

    module: nn.Module
    attribute: str
    axis: int
    members: Tensor


@dataclass(frozen=True)
class Units:
    """The units of one kind in one sublayer, gated at the features that go "in" or "out" of `gate`; tokens,
    at the output of every part's module."""

    name: str
    kind: str
    count: int
    gate: nn.Module
    side: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Projection:
    """A linear layer, the weight's axis over output features, and the sets of these that are ranked together,
    as Q, K, V of a fused layer; `measured`, if not None, is the module whose output ranks them."""

    name: str
    module: nn.Module
    axis: int
    segments: tuple[Tensor, ...]
    measured: nn.Module | None = None

    @property
    def weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.module.weight)

    @property
    def bias(self) -> nn.Parameter | None:
        return cast(nn.Parameter | None, self.module.bias)

    @property
    def outputs(self) -> int:
        return find_weight_shape(self.module)[self.axis]

    @property
    def inputs(self) -> int:
        return find_weight_shape(self.module)[1 - self.axis]


@dataclass(frozen=True)
class SubLayer:
    """An attention (`heads`), feed-forward network (`neurons`) or mixer (`channels`): `count` units, the
    layers that write them with the members [outputs, r] of their output features, and the one that reads
    them."""

    name: str
    kind: str
    count: int
    sources: list[tuple[Projection, Tensor]]
    out: Projection

    @property
    def projections(self) -> list[Projection]:
        return [*(source for source, _ in self.sources), self.out]


@dataclass(frozen=True)
class BlockLayers:
    """The linear layers of a block in order of definition: those of its attentions and of its mixers, by the
    names of these, and those of a feed-forward network, which are in neither."""

    attentions: dict[str, list[Projection]]
    mixers: dict[str, list[Projection]]
    feed_forward: list[Projection]


def find_weight_shape(module: nn.Module) -> torch.Size:
    """The shape of a linear layer's weight; a quantized one is stored in another."""
    if isinstance(module, QuantizedLinear):
        return torch.Size((module.out_features, module.in_features))
    return cast(nn.Parameter, module.weight).shape


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost repeated layers that hold an attention, or in a hybrid a mixer, in order; raises
    ValueError if there are none."""
    blocks: list[tuple[str, nn.Module]] = []
    stack_prefixes: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module) or name.startswith(stack_prefixes):
            continue
        layers = [(f"{name}.{number}", layer) for number, layer in module.named_children()]
        if is_stack(layers):
            blocks += layers
            stack_prefixes += (f"{name}.",)
    if not blocks:
        raise UnknownLayersError(
            f"no transformer blocks in {type(model).__name__}; found {list_matrices(model)}"
        )
    return blocks


def list_needed_blocks(model: nn.Module, *, key: str, value: Any, allowed: str) -> list[nn.Module]:
    """The blocks of a model. Raises InvalidOptionError for the option that needs them where none is known."""
    try:
        return [block for _, block in find_blocks(model)]
    except UnknownLayersError as error:
        raise InvalidOptionError(key, value, reason=str(error), allowed=allowed) from error


def is_stack(layers: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether named layers are the blocks of a model: each holds an attention, or in a hybrid some do, and
    the others hold a mixer, as the short convolutions of LFM 2."""
    block_layers = [group_block_layers(*layer) for layer in layers]
    has_attention = any(block.attentions for block in block_layers)
    return has_attention and all(block.attentions or block.mixers for block in block_layers)


def find_sublayers(
    model: PreTrainedModel, kinds: Collection[str], *, skips_mixtures: bool = False
) -> list[SubLayer]:
    """The attentions (`heads`), mixers (`channels`) and feed-forward networks (`neurons`), block by block;
    mixtures of experts are left out if `skips_mixtures`. Raises ValueError for a layer of another kind, and
    for mixtures."""
    sublayers = []
    for name, block in find_blocks(model):
        linear_layers = group_block_layers(name, block)
        if "heads" in kinds:
            for attention, layers in linear_layers.attentions.items():
                sublayers.append(find_sublayer(model, attention, "heads", layers))
        if "channels" in kinds:
            for mixer, layers in linear_layers.mixers.items():
                sublayers.append(find_sublayer(model, mixer, "channels", layers))
        if "neurons" not in kinds:
            continue

        if has_experts(block):
            if skips_mixtures:
                continue
            raise UnknownLayersError(f"{name} has a mixture of experts in place of a feed-forward network")
        feed_forward = linear_layers.feed_forward
        # A matrix that is in no linear layer would be left out of the units: then there is no layer to
        # identify them by, which `find_sublayer` refuses.
        outside = [*linear_layers.attentions, *linear_layers.mixers]
        if len(feed_forward) != count_matrices(block, name, outside=outside):
            feed_forward = []
        sublayers.append(find_sublayer(model, name, "neurons", feed_forward))
    return sublayers


def find_mixer_outs(model: PreTrainedModel) -> list[Projection]:
    """The layer of each mixer that writes what the mixer adds to the hidden states. Raises ValueError for a
    mixer without one."""
    outs = []
    for name, block in find_blocks(model):
        for mixer, layers in group_block_layers(name, block).mixers.items():
            out = find_out(layers, model.config.hidden_size)
            if out is None:
                matrices = list_matrices(block, name)
                raise UnknownLayersError(f"{mixer} has no output projection; found {matrices}")
            outs.append(out)
    return outs


def find_mixer_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The matrices and filters of the mixers, by name. Empty of a model without blocks."""
    try:
        blocks = find_blocks(model)
    except ValueError:
        return {}
    weights = {}
    for name, block in blocks:
        prefixes = tuple(f"{mixer}." for mixer in group_block_layers(name, block).mixers)
        for key, parameter in block.named_parameters(name):
            if parameter.ndim > 1 and key.startswith(prefixes):
                weights[key] = parameter
    return weights


def has_experts(module: nn.Module) -> bool:
    """Whether a module holds a mixture of experts: fused parameters, or modules named experts."""
    if find_expert_parameters(module):
        return True
    return any(name.rpartition(".")[2] == "experts" for name, _ in module.named_modules())


def find_expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of experts that are one parameter for all experts of a block, by name. They have three
    axes, an expert, its outputs and its inputs, in the order of the model's class."""
    convolution_ids = set[int]()
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d):
            convolution_ids.update(id(parameter) for parameter in part.parameters())
    expert_parameters = {}
    for name, parameter in module.named_parameters():
        if parameter.ndim == 3 and id(parameter) not in convolution_ids:
            expert_parameters[name] = parameter
    return expert_parameters


def find_mixture_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The matrices outside of attentions and mixers in the blocks that hold experts, by name: experts,
    routers, and what all tokens share. Empty of a model without blocks."""
    try:
        blocks = find_blocks(model)
    except ValueError:
        return {}
    weights = {}
    for name, block in blocks:
        if not has_experts(block):
            continue
        linear_layers = group_block_layers(name, block)
        prefixes = tuple(f"{module}." for module in (*linear_layers.attentions, *linear_layers.mixers))
        for key, parameter in block.named_parameters(name):
            if parameter.ndim > 1 and not key.startswith(prefixes):
                weights[key] = parameter
    return weights


def count_matrices(block: nn.Module, name: str, *, outside: Sequence[str]) -> int:
    """The number of a block's matrices that are outside of some of its modules."""
    prefixes = tuple(f"{module}." for module in outside)
    matrices = [key for key, parameter in block.named_parameters(name) if parameter.ndim > 1]
    return sum(not key.startswith(prefixes) for key in matrices)


def find_units(
    model: PreTrainedModel,
    kinds: Sequence[str],
    *,
    skips_mixtures: bool = False,
    needs_separation: bool = True,
) -> list[Units]:
    """The units of some UNIT_KINDS, block by block, tokens last; mixtures of experts have none if
    `skips_mixtures`. Raises ValueError for another kind, for units that are not found, and if
    `needs_separation` for those that are not separable: a norm over the features of several units makes a
    unit's output depend on the weights of others."""
    if not kinds or not set(kinds) <= set(UNIT_KINDS):
        raise ValueError(f"units={list(kinds)} is invalid. Allowed: one or more of {', '.join(UNIT_KINDS)}")

    sublayer_kinds = {"neurons" if kind == "outputs" else kind for kind in kinds}
    units = []
    for sublayer in find_sublayers(model, sublayer_kinds, skips_mixtures=skips_mixtures):
        if sublayer.kind in kinds:
            if needs_separation:
                check_separable(model, sublayer)
            units.append(make_inner_units(sublayer))
        if sublayer.kind == "neurons" and "outputs" in kinds:
            units.append(make_output_units(sublayer))
    if "tokens" in kinds:
        units.append(make_token_units(model))
    if not units:
        raise InvalidOptionError(
            "method.units",
            list(kinds),
            reason=f"every feed-forward network of this {model.config.model_type} is a mixture of experts, "
            "which has no neurons that all tokens share",
            allowed="heads, tokens",
        )
    return units


def check_separable(model: PreTrainedModel, sublayer: SubLayer) -> None:
    """Raises ValueError for a sublayer with a norm over more features than those of one unit."""
    size = sublayer.out.inputs // sublayer.count
    for name, module in model.get_submodule(sublayer.name).named_modules(prefix=sublayer.name):
        last_name = name.rpartition(".")[2]
        shape: tuple[int, ...] = getattr(getattr(module, "weight", None), "shape", ())
        is_mixing_norm = re.fullmatch(MIXING_NORM[sublayer.kind], last_name) is not None
        if is_mixing_norm and len(shape) == 1 and shape[0] > size:
            raise UnknownLayersError(
                f"{sublayer.kind} can not be separated: {name} normalises {shape[0]} features at once"
            )


def make_inner_units(sublayer: SubLayer) -> Units:
    """The heads or neurons of a sublayer, gated where its last layer reads them."""
    out = sublayer.out
    parts: list[Part] = []
    for source, members in sublayer.sources:
        parts += make_output_parts(source, members)
    columns = share_members(sublayer.count, sublayer.count, out.inputs // sublayer.count)
    parts.append(Part(module=out.module, attribute="weight", axis=1 - out.axis, members=columns))
    name = f"{sublayer.name}.{sublayer.kind}"
    return Units(
        name=name, kind=sublayer.kind, count=sublayer.count, gate=out.module, side="in", parts=tuple(parts)
    )


def make_output_units(sublayer: SubLayer) -> Units:
    """The output features of a feed-forward network, a unit each."""
    out = sublayer.out
    parts = make_output_parts(out, share_members(out.outputs, out.outputs, 1))
    return Units(
        name=f"{sublayer.name}.outputs",
        kind="outputs",
        count=out.outputs,
        gate=out.module,
        side="out",
        parts=tuple(parts),
    )


def make_token_units(model: PreTrainedModel) -> Units:
    """The rows of the embedding of tokens, a unit each."""
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)

    # T5 and BART never call the table that they name as such, but their encoder's and decoder's.
    stacks = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    tables = dict.fromkeys(stack.get_input_embeddings() for stack in stacks)
    members = share_members(embedding.num_embeddings, embedding.num_embeddings, 1)
    parts = [
        Part(module=table, attribute="weight", axis=0, members=members)
        for table in tables
        if table.weight.shape == embedding.weight.shape
    ]
    return Units(
        name=f"{name}.tokens",
        kind="tokens",
        count=embedding.num_embeddings,
        gate=embedding,
        side="out",
        parts=tuple(parts),
    )


def find_projections(model: PreTrainedModel, *, skips_mixtures: bool = False) -> list[Projection]:
    """All linear layers of the blocks. The layers of a sub-layer that write its units (sources) come before
    the one that reads them (out). Those of mixtures of experts are left out if `skips_mixtures`."""
    projections: list[Projection] = []
    kinds = ("heads", "channels", "neurons")
    for sublayer in find_sublayers(model, kinds, skips_mixtures=skips_mixtures):
        projections += sublayer.projections
    return projections


def find_weight_matrices(model: nn.Module) -> list[Projection]:
    """All matrices that are the weight of a module, a tied one once: linear layers, embeddings, the head."""
    matrices: dict[nn.Parameter, Projection] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 2:
            matrices.setdefault(
                weight, Projection(name=name, module=module, axis=find_output_axis(module), segments=())
            )
    return list(matrices.values())


def find_block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of the linear layers in the blocks, those of adapters too. Raises ValueError for a model
    without known blocks."""
    matrices: list[nn.Parameter] = []
    for _, block in find_blocks(model):
        for module in block.modules():
            if isinstance(module, nn.Linear | Conv1D):
                matrices.append(cast(nn.Parameter, module.weight))
    return matrices


def find_output_axis(module: nn.Module) -> int:
    """The axis of a layer's weight over its output features: GPT-2's Conv1D stores the transpose."""
    return 1 if isinstance(module, Conv1D) else 0


def make_factors(group: Units, keep: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """(parameter, factor of its update) for each parameter of some units, when unit k keeps the share keep[k]
    of its update. A feature of several units has the smallest of their factors."""
    # Features of no unit have the member -1, which is the last entry.
    padded_keep = torch.cat([keep.view(group.count), keep.new_ones(1)])
    seen_ids = set()
    for part in group.parts:
        parameter = getattr(part.module, part.attribute)
        if id(parameter) in seen_ids:  # tied tables are one parameter
            continue
        seen_ids.add(id(parameter))
        factor = padded_keep[part.members.to(keep.device)].amin(dim=1)
        shape = [1] * parameter.ndim
        shape[part.axis] = -1
        yield parameter, factor.view(shape)


@contextmanager
def gate_units(groups: Iterable[Units], gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiplies each unit's activation by its gate, [count] or per sample [B, count], inside the context.
    Raises ValueError for gates of another shape."""
    with ExitStack() as hooks:
        for group in groups:
            gate = gates.get(group.name)
            if gate is None:
                continue
            if gate.ndim not in (1, 2) or gate.shape[-1] != group.count:
                raise ValueError(f"{group.name} has {group.count} units; given gates of {list(gate.shape)}")

            if group.side == "in":
                handles = [group.gate.register_forward_pre_hook(partial(scale_input, gate))]
            elif group.kind == "tokens":
                tables = [part.module for part in group.parts]
                handles = [table.register_forward_hook(partial(scale_rows, gate)) for table in tables]
            else:
                handles = [group.gate.register_forward_hook(partial(scale_output, gate))]
            for handle in handles:
                hooks.callback(handle.remove)
        yield


def scale_input(gate: Tensor, module: nn.Module, args: Any) -> tuple[Any, ...]:
    return scale_features(args[0], gate), *args[1:]


def scale_output(gate: Tensor, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return scale_features(output, gate)


def scale_rows(gate: Tensor, table: nn.Module, args: Any, output: Tensor) -> Tensor:
    """The rows [B, T, D] of an embedding times the gates of their ids [B, T]."""
    ids = args[0]
    factors = gate[ids] if gate.ndim == 1 else gate.gather(1, ids)
    return output * factors.unsqueeze(-1).to(output)


def scale_features(x: Tensor, gate: Tensor) -> Tensor:
    """Activations [B, T, D], or [B * T, D] as OPT flattens them, times a gate of [count] or [B, count].
    Raises ValueError for another number of samples."""
    factors = gate.to(x).repeat_interleave(x.shape[-1] // gate.shape[-1], dim=-1)
    if gate.ndim == 1:
        return x * factors
    if len(x) % len(gate) or (x.ndim > 2 and len(x) != len(gate)):
        sample_count = count_noun(len(gate), "sample")
        raise ValueError(f"gates of {sample_count}; given activations of {list(x.shape)}")
    by_sample = x.view(len(gate), -1, x.shape[-1])
    return (by_sample * factors.unsqueeze(1)).view(x.shape)


def group_block_layers(name: str, block: nn.Module) -> BlockLayers:
    """A block's linear layers by the attention or the mixer that holds them."""
    attentions: dict[str, list[Projection]] = {}
    outside: list[Projection] = []
    for full_name, module in block.named_modules(prefix=name):
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        axis = find_output_axis(module)
        rows = torch.arange(find_weight_shape(module)[axis])
        layer = Projection(name=full_name, module=module, axis=axis, segments=(rows,))
        match = ATTENTION.match(full_name, len(name) + 1)
        if match:
            attentions.setdefault(full_name[: match.end()], []).append(layer)
        else:
            outside.append(layer)

    mixers: dict[str, list[Projection]] = {}
    for child_name, child in block.named_children():
        mixer = f"{name}.{child_name}"
        layers = [layer for layer in outside if layer.name.startswith(f"{mixer}.")]
        if layers and any(isinstance(module, nn.Conv1d) for module in child.modules()):
            mixers[mixer] = layers
    mixer_prefixes = tuple(f"{mixer}." for mixer in mixers)
    feed_forward = [layer for layer in outside if not layer.name.startswith(mixer_prefixes)]
    return BlockLayers(attentions, mixers, feed_forward)


def find_sublayer(
    model: PreTrainedModel, name: str, kind: str, linear_layers: Sequence[Projection]
) -> SubLayer:
    """The sublayer `name` with its units of a kind, which are found by the widths of its linear layers: `out`
    is the last one that writes the hidden size, the others are its sources. Raises ValueError for layers
    whose widths are not those of a sublayer of this kind."""
    module = model.get_submodule(name)
    hidden_size = model.config.hidden_size
    out = find_out(linear_layers, hidden_size)
    sources = [layer for layer in linear_layers if layer is not out]
    if out is not None and all(source.inputs == hidden_size for source in sources):
        layouts: list[tuple[int, ...]]
        if kind == "heads":
            count = count_heads(model, module)
            group_counts = [groups for groups in range(1, count + 1) if count % groups == 0]
            layouts = [(count, groups, groups) for groups in group_counts]  # Q, K, V
        elif kind == "channels":
            count = out.inputs
            layouts = [(count,), (count, count), (count, count, count)]  # what is mixed, and its gates
        else:
            count = out.inputs
            layouts = [(count,), (count, count)]  # up, or gate and up

        # A fused layer holds several of them: the widths of all sources together say which layout it is.
        split_counts = match_layout(layouts, sources, size=out.inputs // count)
        if split_counts is not None and out.inputs % count == 0:
            split_sources = [
                split_source(source, counts, count, model.config.model_type)
                for source, counts in zip(sources, split_counts, strict=True)
            ]
            return SubLayer(name=name, kind=kind, count=count, sources=split_sources, out=out)
    supported = SUPPORTED_MIXER_LAYERS if kind == "channels" else SUPPORTED_LAYERS
    raise UnknownLayersError(
        f"{name}: {kind} cannot be identified; supported: {supported}; found {list_matrices(module, name)}"
    )


def find_out(linear_layers: Sequence[Projection], hidden_size: int) -> Projection | None:
    """The last layer to the hidden size whose name is not that of a source; None without one."""
    for layer in reversed(linear_layers):
        last_name = layer.name.rpartition(".")[2]
        if layer.outputs == hidden_size and not SOURCE_NAME.fullmatch(last_name):
            return layer
    return None


def count_heads(model: PreTrainedModel, attention: nn.Module) -> int:
    """The query heads of an attention; a decoder may have another number than its encoder."""
    for module in attention.modules():
        for key in NUM_HEADS:
            num_heads = getattr(module, key, None)
            if isinstance(num_heads, int):
                return num_heads
    return cast(int, model.config.num_attention_heads)


def match_layout(
    layouts: Iterable[Sequence[int]], sources: Sequence[Projection], *, size: int
) -> list[Sequence[int]] | None:
    """For each source, the counts of the units that it writes: several for a fused source.

    A layout is the counts of units of Q, K and V, or of up and gate, with units of `size` features. The first
    one whose widths are those of the sources is returned, as one source for each count or as one fused source
    for all. None if no layout has these widths."""
    widths = [source.outputs for source in sources]
    for counts in layouts:
        if sorted(widths) == sorted(count * size for count in counts):
            return [(width // size,) for width in widths]
        if widths == [sum(counts) * size]:
            return [counts]
    return None


def split_source(
    source: Projection, counts: Sequence[int], num_units: int, model_type: str
) -> tuple[Projection, Tensor]:
    """A source with a segment for each count of units that it writes, and the members of its features. Raises
    UnknownLayersError for a fused layer of unknown layout."""
    is_fused = len(counts) > 1
    if is_fused and model_type not in FUSED:
        raise UnknownLayersError(
            f"{source.name} {list(find_weight_shape(source.module))} is a fused layer of a {model_type}; "
            f"layouts are known for {', '.join(FUSED)}"
        )

    rows = torch.arange(source.outputs)
    size = source.outputs // sum(counts)
    if is_fused and FUSED[model_type] == "by head":
        segments = rows.view(num_units, len(counts), size).transpose(0, 1).flatten(1).unbind()
    else:
        segments = rows.split([count * size for count in counts])

    # Each feature has as many columns as query heads share the fewest key/value heads.
    members = torch.full((source.outputs, num_units // min(counts)), -1)
    for segment, count in zip(segments, counts, strict=True):
        members[segment, : num_units // count] = share_members(num_units, count, size)
    return replace(source, segments=segments), members


def share_members(heads: int, groups: int, size: int) -> Tensor:
    """Members [groups * size, heads // groups] when `heads` share `groups` of `size` features in order."""
    return torch.arange(heads).view(groups, -1).repeat_interleave(size, dim=0)


def make_output_parts(linear: Projection, members: Tensor) -> list[Part]:
    """The output features of a linear layer: those of its weight, and of its bias if it has one."""
    parts = [Part(module=linear.module, attribute="weight", axis=linear.axis, members=members)]
    if linear.bias is not None:
        parts.append(Part(module=linear.module, attribute="bias", axis=0, members=members))
    return parts


def list_matrices(module: nn.Module, name: str = "") -> str:
    """The names and shapes of a module's first matrices, for messages."""
    matrices = []
    for full_name, parameter in module.named_parameters(name):
        if parameter.ndim > 1:
            matrices.append(f"{full_name} {list(parameter.shape)}")
    if not matrices:
        return "no matrices"
    listed = matrices[:MAX_LISTED]
    if len(matrices) > MAX_LISTED:
        listed.append("...")
    return ", ".join(listed)
