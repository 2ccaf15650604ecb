"""Heads, neurons, output features and tokens of any Hugging Face model, found by the shapes of its modules.

A block is a member of a ModuleList all of whose members hold an attention. Within a block, units lie between
the linear layers that write them (sources) and the one that reads them (out): heads between query, key, value
and the output projection, neurons between up (and gate) and down. Only the layout of fused weights is looked
up by model type."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

UNIT_KINDS = ("heads", "neurons", "outputs", "tokens")
ATTENTION = re.compile(r".*?(?:attention|attn)[^.]*(?=\.)", re.IGNORECASE)
# Where all layers are square, only the last part of its name distinguishes a source from an out.
SOURCE_NAME = re.compile(r"(w?[qkv]|w?qkv|query|key|value|up|gate|wi)(?![a-z])\w*", re.IGNORECASE)
MIXING_NORM = {"heads": r"(q|k|v|query|key|value)_\w*norm|attn_sub_norm", "neurons": "ffn_sub_norm"}
FUSED = {"gpt2": "apart", "modernbert": "apart", "phi3": "apart", "bloom": "by head", "gpt_neox": "by head"}


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
    """The units of one kind in one place, gated at the features that go "in" or "out" of `gate`; tokens, at
    the output of every part's module."""

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
        return self.weight.shape[self.axis]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1 - self.axis]


@dataclass(frozen=True)
class SubLayer:
    """An attention (`heads`) or feed-forward network (`neurons`): `count` units, the layers that write them
    with the members [outputs, r] of their output features, and the one that reads them."""

    name: str
    kind: str
    count: int
    sources: list[tuple[Projection, Tensor]]
    out: Projection

    @property
    def projections(self) -> list[Projection]:
        return [*(source for source, _ in self.sources), self.out]


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost repeated layers that hold an attention, in order; ValueError if there are none."""
    found: list[tuple[str, nn.Module]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not name.startswith(inside):
            layers = [(f"{name}.{number}", layer) for number, layer in module.named_children()]
            if all(len(group_by_attention(*layer)) > 1 for layer in layers):
                found += layers
                inside += (f"{name}.",)
    if not found:
        raise ValueError(f"no transformer blocks in {type(model).__name__}; found {list_matrices(model)}")
    return found


def find_sublayers(model: PreTrainedModel, kinds: Collection[str]) -> list[SubLayer]:
    """The attentions (`heads`) and feed-forward networks (`neurons`), block by block."""
    found = []
    for name, block in find_blocks(model):
        linear = group_by_attention(name, block)
        if "heads" in kinds:
            found += [find_sublayer(model, path, "heads", own) for path, own in linear.items() if path]
        if "neurons" in kinds:
            paths = tuple(f"{path}." for path in linear if path)
            rest = [n for n, p in block.named_parameters(name) if p.ndim > 1 and not n.startswith(paths)]
            # Experts are no linear layers and must not be overlooked.
            own = linear[""] if len(linear[""]) == len(rest) else []
            found.append(find_sublayer(model, name, "neurons", own))
    return found


def find_units(model: PreTrainedModel, kinds: Sequence[str]) -> list[Units]:
    """The units of some UNIT_KINDS, block by block, tokens last. Raises ValueError for another kind, and for
    units that are not found or not separable: those with a norm over more features than those of one unit."""
    if not kinds or not set(kinds) <= set(UNIT_KINDS):
        raise ValueError(f"units={list(kinds)} is invalid. Allowed: one or more of {', '.join(UNIT_KINDS)}")
    found = []
    for place in find_sublayers(model, {"neurons" if kind == "outputs" else kind for kind in kinds}):
        size, out = place.out.inputs // place.count, place.out
        if place.kind in kinds:
            for name, module in model.get_submodule(place.name).named_modules(prefix=place.name):
                last = name.rpartition(".")[2]
                shape: tuple[int, ...] = getattr(getattr(module, "weight", None), "shape", ())
                if re.fullmatch(MIXING_NORM[place.kind], last) and len(shape) == 1 and shape[0] > size:
                    features = f"{name} normalises {shape[0]} features at once"
                    raise ValueError(f"{place.kind} can not be separated: {features}")
            parts = [part for source in place.sources for part in output_parts(*source)]
            columns = share_members(place.count, place.count, size)
            parts.append(Part(out.module, "weight", 1 - out.axis, columns))
            name = f"{place.name}.{place.kind}"
            found.append(Units(name, place.kind, place.count, out.module, "in", tuple(parts)))
        if place.kind == "neurons" and "outputs" in kinds:
            parts = output_parts(out, share_members(out.outputs, out.outputs, 1))
            name = f"{place.name}.outputs"
            found.append(Units(name, "outputs", out.outputs, out.module, "out", tuple(parts)))
    if "tokens" in kinds:
        # T5 and BART never call the table that they name as such, but their encoder's and decoder's.
        main = model.get_input_embeddings()
        inner = [part.get_input_embeddings() for part in model.modules() if isinstance(part, PreTrainedModel)]
        tables = [table for table in dict.fromkeys(inner) if table.weight.shape == main.weight.shape]
        members = share_members(main.num_embeddings, main.num_embeddings, 1)
        parts = [Part(table, "weight", 0, members) for table in tables]
        name = next(name for name, module in model.named_modules() if module is main)
        found.append(Units(f"{name}.tokens", "tokens", main.num_embeddings, main, "out", tuple(parts)))
    return found


def find_projections(model: PreTrainedModel) -> list[Projection]:
    """All linear layers of the blocks, sources before their out."""
    return [each for place in find_sublayers(model, ("heads", "neurons")) for each in place.projections]


def find_weight_matrices(model: nn.Module) -> list[Projection]:
    """All matrices that are the weight of a module, a tied one once: linear layers, embeddings, the head."""
    found: dict[nn.Parameter, Projection] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 2:
            found.setdefault(weight, Projection(name, module, int(isinstance(module, Conv1D)), ()))
    return list(found.values())


def update_factors(group: Units, keep: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The factor of each parameter's update when unit k keeps keep[k]; of shared features their minimum."""
    padded, seen = torch.cat([keep.view(group.count), keep.new_ones(1)]), set()
    for part in group.parts:
        parameter = getattr(part.module, part.attribute)
        if id(parameter) not in seen:  # tied tables are one parameter
            seen.add(id(parameter))
            factor, ones = padded[part.members.to(keep.device)].amin(dim=1), [1] * parameter.ndim
            yield parameter, factor.view(*ones[: part.axis], -1, *ones[part.axis + 1 :])


@contextmanager
def gate_units(groups: Iterable[Units], gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiplies each unit's activation by its gate, [count] or per sample [B, count], inside the context."""
    with ExitStack() as hooks:
        for group in groups:
            if (gate := gates.get(group.name)) is None:
                continue
            if gate.ndim not in (1, 2) or gate.shape[-1] != group.count:
                raise ValueError(f"{group.name} has {group.count} units; given gates of {list(gate.shape)}")
            if group.side == "in":
                pre = lambda _, args, gate=gate: (scale_features(args[0], gate), *args[1:])  # noqa: E731
                hooks.callback(group.gate.register_forward_pre_hook(pre).remove)
                continue

            def scale(
                _: nn.Module, args: Any, x: Tensor, group: Units = group, gate: Tensor = gate
            ) -> Tensor:
                if group.kind != "tokens":
                    return scale_features(x, gate)
                found = gate[args[0]] if gate.ndim == 1 else gate.gather(1, args[0])  # of ids [B, T]
                return x * found.unsqueeze(-1).to(x)

            for module in [part.module for part in group.parts] if group.kind == "tokens" else [group.gate]:
                hooks.callback(module.register_forward_hook(scale).remove)
        yield


def scale_features(x: Tensor, gate: Tensor) -> Tensor:
    """Activations [B, T, D], or [B * T, D] as OPT flattens them, times a gate of [count] or [B, count]."""
    wide = gate.to(x).repeat_interleave(x.shape[-1] // gate.shape[-1], dim=-1)
    if gate.ndim == 1:
        return x * wide
    if len(x) % len(gate) or (x.ndim > 2 and len(x) != len(gate)):
        raise ValueError(f"gates of {len(gate)} samples; given activations of {list(x.shape)}")
    return (x.view(len(gate), -1, x.shape[-1]) * wide.unsqueeze(1)).view(x.shape)


def group_by_attention(name: str, block: nn.Module) -> dict[str, list[Projection]]:
    """A block's linear layers in order of definition, by the attention that holds them; "" for none."""
    found: dict[str, list[Projection]] = {"": []}
    for full, module in block.named_modules(prefix=name):
        if isinstance(module, nn.Linear | Conv1D):
            axis, match = int(isinstance(module, Conv1D)), ATTENTION.match(full, len(name) + 1)
            linear = Projection(full, module, axis, (torch.arange(module.weight.shape[axis]),))
            found.setdefault(full[: match.end()] if match else "", []).append(linear)
    return found


def find_sublayer(model: PreTrainedModel, name: str, kind: str, linear: Sequence[Projection]) -> SubLayer:
    """Units from the widths of linear layers; the last to the hidden size is the out."""
    module, hidden = model.get_submodule(name), model.config.hidden_size
    wide = [each for each in linear if each.outputs == hidden]
    out = next((w for w in reversed(wide) if not SOURCE_NAME.fullmatch(w.name.rpartition(".")[2])), None)
    sources = [each for each in linear if each is not out]
    if out is not None and all(source.inputs == hidden for source in sources):
        if kind == "heads":  # a decoder may have others than its encoder
            keys = ("num_heads", "num_attention_heads", "n_heads")
            told = [getattr(part, key, None) for part in module.modules() for key in keys]
            units = next((n for n in told if isinstance(n, int)), model.config.num_attention_heads)
            divisors = [count for count in range(1, units + 1) if units % count == 0]
            shares: list[tuple[int, ...]] = [(units, count, count) for count in divisors]  # Q, K, V
        else:
            units = out.inputs
            shares = [(units,), (units, units)]  # up, or gate and up
        size, widths = out.inputs // units, [source.outputs for source in sources]
        for counts in shares if size * units == out.inputs else ():
            separate = sorted(widths) == sorted(count * size for count in counts)
            if separate or widths == [sum(counts) * size]:
                split = zip(sources, [(w // size,) for w in widths] if separate else [counts], strict=True)
                written = [split_source(each, own, units, model.config.model_type) for each, own in split]
                return SubLayer(name, kind, units, written, out)
    why = f"{name}: {kind} cannot be identified; supported: Q, K, V (fused or not), an output projection; up"
    raise ValueError(f"{why}, down, perhaps gate (fused or not); found {list_matrices(module, name)}")


def split_source(
    source: Projection, counts: Sequence[int], units: int, model_type: str
) -> tuple[Projection, Tensor]:
    """A source with a segment for each count of units that it writes, and the members of its features."""
    rows, size = torch.arange(source.outputs), source.outputs // sum(counts)
    segments = rows.split([count * size for count in counts])
    if len(counts) > 1 and model_type not in FUSED:
        given = f"{source.name} {list(source.weight.shape)} is a fused map of a {model_type}"
        raise ValueError(f"{given}; layouts are known for {', '.join(FUSED)}")
    if len(counts) > 1 and FUSED[model_type] == "by head":
        segments = rows.view(units, len(counts), size).transpose(0, 1).flatten(1).unbind()
    members = torch.full((source.outputs, units // min(counts)), -1)
    for segment, count in zip(segments, counts, strict=True):
        members[segment, : units // count] = share_members(units, count, size)
    return replace(source, segments=segments), members


def share_members(heads: int, groups: int, size: int) -> Tensor:
    """Members [groups * size, heads // groups] when `heads` share `groups` of `size` features in order."""
    return torch.arange(heads).view(groups, -1).repeat_interleave(size, dim=0)


def output_parts(linear: Projection, members: Tensor) -> list[Part]:
    """The output features of a linear layer: of its weight, and of its bias if it has one."""
    bias = [Part(linear.module, "bias", 0, members)] if linear.bias is not None else []
    return [Part(linear.module, "weight", linear.axis, members), *bias]


def list_matrices(module: nn.Module, name: str = "") -> str:
    matrices = [f"{n} {list(p.shape)}" for n, p in module.named_parameters(name) if p.ndim > 1]
    return ", ".join(matrices[:12] + ["..."] * (len(matrices) > 12)) or "no matrices"
