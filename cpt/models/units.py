"""Heads, neurons, output units and tokens of an unmodified Hugging Face model: where they live, and gates.

Places are told by shape. A block is a member of a ModuleList all of whose members hold an attention; in it,
units stand between linear maps that write them (sources) and one that reads them (out): heads between query,
key, value and the output projection, neurons between up (and gate) and down. Only what no shape tells is
named: how a model type lays out what it fuses into one weight."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

KINDS = ("heads", "neurons", "outputs", "tokens")
ATTENTION = re.compile(r".*?(?:attention|attn)[^.]*(?=\.)", re.IGNORECASE)
# Where all maps are square, only the last part of its name tells a source from an out.
SOURCE = re.compile(r"(w?[qkv]|w?qkv|query|key|value|up|gate|wi)(?![a-z])\w*", re.IGNORECASE)
MIXING_NORM = {"heads": r"(q|k|v|query|key|value)_\w*norm|attn_sub_norm", "neurons": "ffn_sub_norm"}
FUSED = {"gpt2": "apart", "modernbert": "apart", "phi3": "apart", "bloom": "by head", "gpt_neox": "by head"}
Written = tuple["Projection", Tensor]  # a map that writes units, with the members of its output features


@dataclass(frozen=True)
class Part:
    """A slice of one parameter that units own: each feature along `axis` belongs to the units `members`
    [features, r]; r > 1 where query heads share a key/value head, -1 for no unit."""

    module: nn.Module
    attribute: str
    axis: int
    members: Tensor


@dataclass(frozen=True)
class Units:
    """The units of one kind at one place, gated at the features that go "in" or "out" of `gate`; tokens, at
    the output of every part's module: an encoder and a decoder have a table each."""

    name: str
    kind: str
    count: int
    gate: nn.Module
    side: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Projection:
    """A linear map of a block, the weight's axis over output features, and the sets of them that are ranked
    together: a fused map's Q, K, V or gate, up apart. Where they are ranked by another module's output than
    its own, that is `measured`."""

    name: str
    module: nn.Module
    axis: int
    segments: tuple[Tensor, ...]
    measured: nn.Module | None = None

    @property
    def outputs(self) -> int:
        return self.module.weight.shape[self.axis]

    @property
    def inputs(self) -> int:
        return self.module.weight.shape[1 - self.axis]


@dataclass(frozen=True)
class Between:
    """`count` units within the module `name`: the maps that write them and the one that reads them."""

    name: str
    count: int
    sources: list[Written]
    out: Projection


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost repeated layers that hold an attention, in order; ValueError if there are none."""
    found: list[tuple[str, nn.Module]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not name.startswith(inside):
            layers = [(f"{name}.{number}", layer) for number, layer in module.named_children()]
            if all(len(maps_by_attention(*layer)) > 1 for layer in layers):
                found += layers
                inside += (f"{name}.",)
    if not found:
        raise ValueError(f"no transformer blocks in {type(model).__name__}; found {list_matrices(model)}")
    return found


def find_units(model: nn.Module, kinds: Sequence[str]) -> list[Units]:
    """The units of the kinds wanted, block by block, tokens last; ValueError for a kind that is not one, and
    for units that can not be told or separated."""
    if not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(f"units={list(kinds)}; allowed: one or more of {', '.join(KINDS)}")
    found = []
    for name, block in blocks(model):
        if "heads" in kinds:
            found += [inner_units(model, heads, "heads") for heads in attentions(model, name, block)]
        if "neurons" in kinds:
            found.append(inner_units(model, feed_forward(model, name, block), "neurons"))
        if "outputs" in kinds:
            found.append(output_units(feed_forward(model, name, block)))
    return found + ([token_units(model)] if "tokens" in kinds else [])


def projections(model: nn.Module) -> list[Projection]:
    """All linear maps within the blocks, sources before their out."""
    found = []
    for inner in sublayers(model, ("heads", "neurons")):
        found += [source for source, _ in inner.sources] + [inner.out]
    return found


def matrices(model: nn.Module) -> list[Projection]:
    """All matrices of a model that are the weight of a module, a tied one once: linear maps, embeddings, the
    head."""
    found: dict[nn.Parameter, Projection] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 2:
            found.setdefault(weight, Projection(name, module, int(isinstance(module, Conv1D)), ()))
    return list(found.values())


def sublayers(model: nn.Module, kinds: Sequence[str]) -> list[Between]:
    """The attentions (`heads`) and feed-forward networks (`neurons`) that are wanted, block by block."""
    found = []
    for name, block in blocks(model):
        found += attentions(model, name, block) if "heads" in kinds else []
        found += [feed_forward(model, name, block)] if "neurons" in kinds else []
    return found


def factors(group: Units, keep: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The factor of what a step does to each parameter of the group, broadcastable to it, when unit k keeps
    keep[k] of [0, 1]: a feature of several units keeps their minimum, one of none keeps all."""
    padded, seen = torch.cat([keep.view(group.count), keep.new_ones(1)]), set()
    for part in group.parts:
        parameter = getattr(part.module, part.attribute)
        if id(parameter) not in seen:  # tied tables are one parameter
            seen.add(id(parameter))
            factor, ones = padded[part.members.to(keep.device)].amin(dim=1), [1] * parameter.ndim
            yield parameter, factor.view(*ones[: part.axis], -1, *ones[part.axis + 1 :])


def inner_units(model: nn.Module, between: Between, kind: str) -> Units:
    """Units between maps; ValueError where a norm runs over more features than those of one unit."""
    size = between.out.inputs // between.count
    for name, module in model.get_submodule(between.name).named_modules(prefix=between.name):
        shape = getattr(getattr(module, "weight", None), "shape", ())
        if re.fullmatch(MIXING_NORM[kind], name.rpartition(".")[2]) and len(shape) == 1 and shape[0] > size:
            raise ValueError(f"{kind} can not be separated: {name} normalises {shape[0]} features at once")
    parts = [part for source in between.sources for part in row_parts(*source)]
    columns = shared_members(between.count, between.count, size)
    parts.append(Part(between.out.module, "weight", 1 - between.out.axis, columns))
    return Units(f"{between.name}.{kind}", kind, between.count, between.out.module, "in", tuple(parts))


def output_units(between: Between) -> Units:
    down, count = between.out, between.out.outputs
    parts = row_parts(down, shared_members(count, count, 1))
    return Units(f"{between.name}.outputs", "outputs", count, down.module, "out", tuple(parts))


def token_units(model: PreTrainedModel) -> Units:
    """The rows of the input embedding. T5 and BART never call the table that they name as such, but their
    encoder's and decoder's, tied to it or not."""
    main = model.get_input_embeddings()
    inner = [part.get_input_embeddings() for part in model.modules() if isinstance(part, PreTrainedModel)]
    tables = [table for table in dict.fromkeys(inner) if table.weight.shape == main.weight.shape]
    name, count = next(n for n, module in model.named_modules() if module is main), main.num_embeddings
    parts = tuple(Part(table, "weight", 0, shared_members(count, count, 1)) for table in tables)
    return Units(f"{name}.tokens", "tokens", count, main, "out", parts)


def maps_by_attention(name: str, block: nn.Module) -> dict[str, list[Projection]]:
    """A block's linear maps in order of definition, by the attention that holds them; "" for no attention."""
    found: dict[str, list[Projection]] = {"": []}
    for full, module in block.named_modules(prefix=name):
        if isinstance(module, nn.Linear | Conv1D):
            axis, match = int(isinstance(module, Conv1D)), ATTENTION.match(full, len(name) + 1)
            linear = Projection(full, module, axis, (torch.arange(module.weight.shape[axis]),))
            found.setdefault(full[: match.end()] if match else "", []).append(linear)
    return found


def attentions(model: PreTrainedModel, name: str, block: nn.Module) -> list[Between]:
    return [
        between(model, path, "heads", maps) for path, maps in maps_by_attention(name, block).items() if path
    ]


def feed_forward(model: PreTrainedModel, name: str, block: nn.Module) -> Between:
    """The neurons of a block. Experts, which are no linear maps, must not be overlooked."""
    found = maps_by_attention(name, block)
    paths = tuple(f"{path}." for path in found if path)
    matrices = [n for n, p in block.named_parameters(name) if p.ndim > 1 and not n.startswith(paths)]
    return between(model, name, "neurons", found[""] if len(found[""]) == len(matrices) else [])


def between(model: PreTrainedModel, name: str, kind: str, maps: Sequence[Projection]) -> Between:
    """Units of a module by the widths of its maps, the last of which to the hidden size is the out."""
    module, config = model.get_submodule(name), model.config
    wide = [m for m in maps if m.outputs == config.hidden_size]
    out = next((m for m in reversed(wide) if not SOURCE.fullmatch(m.name.rpartition(".")[2])), None)
    sources = [m for m in maps if m is not out]
    if out is not None and all(source.inputs == config.hidden_size for source in sources):
        units = head_count(module, config.num_attention_heads) if kind == "heads" else out.inputs
        size, widths = out.inputs // units, [source.outputs for source in sources]
        for counts in possible_shares(kind, units) if size * units == out.inputs else ():
            apart = sorted(widths) == sorted(count * size for count in counts)
            if apart or widths == [sum(counts) * size]:
                split = [(width // size,) for width in widths] if apart else [counts]
                pairs = zip(sources, split, strict=True)
                return Between(
                    name, units, [written_units(*pair, units, config.model_type) for pair in pairs], out
                )
    raise ValueError(
        f"{name}: {kind} can not be told; known: Q, K, V (apart or fused) and an output projection; "
        f"up, perhaps gate (apart or fused) and down; found {list_matrices(module, name)}"
    )


def possible_shares(kind: str, units: int) -> list[tuple[int, ...]]:
    """What the sources may write: heads of Q, K and V; neurons of up, or of gate and up."""
    groups = [count for count in range(1, units + 1) if kind == "heads" and units % count == 0]
    return [(units, count, count) for count in groups] or [(units,), (units, units)]


def written_units(source: Projection, counts: Sequence[int], units: int, model_type: str) -> Written:
    """A source, a segment for each count of units that it writes, and the members of its output features."""
    features, size = torch.arange(source.outputs), source.outputs // sum(counts)
    segments = features.split([count * size for count in counts])
    if len(counts) > 1 and model_type not in FUSED:
        given = f"{source.name} {list(source.module.weight.shape)} is a fused map of a {model_type}"
        raise ValueError(f"{given}; layouts are known for {', '.join(FUSED)}")
    if len(counts) > 1 and FUSED[model_type] == "by head":
        segments = features.view(units, len(counts), size).transpose(0, 1).flatten(1).unbind()
    members = torch.full((source.outputs, units // min(counts)), -1)
    for segment, count in zip(segments, counts, strict=True):
        members[segment, : units // count] = shared_members(units, count, size)
    return replace(source, segments=segments), members


def head_count(attention: nn.Module, default: int) -> int:
    """Query heads of an attention by its own word: a decoder may have other than its encoder."""
    names = ("num_heads", "num_attention_heads", "n_heads")
    told = (getattr(module, name, None) for module in attention.modules() for name in names)
    return next((count for count in told if isinstance(count, int)), default)


def shared_members(heads: int, groups: int, size: int) -> Tensor:
    """Members [groups * size, heads // groups] when `heads` share `groups` of `size` features in order."""
    return torch.arange(heads).view(groups, -1).repeat_interleave(size, dim=0)


def row_parts(linear: Projection, members: Tensor) -> Iterator[Part]:
    """The output features of a map: of its weight and of its bias, if it has one."""
    yield Part(linear.module, "weight", linear.axis, members)
    if linear.module.bias is not None:
        yield Part(linear.module, "bias", 0, members)


def list_matrices(module: nn.Module, name: str = "") -> str:
    """Names and shapes of a module's matrices, for an error message."""
    matrices = [f"{n} {list(p.shape)}" for n, p in module.named_parameters(name) if p.ndim > 1]
    return ", ".join(matrices[:12] + ["..."] * (len(matrices) > 12)) or "no matrices"
