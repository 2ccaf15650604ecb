"""A model that becomes larger and stays the same function (Net2Net; Chen et al., ICLR 2016; ELLE; Qin et al.,
Findings of ACL 2022, section 3.1).

Of y = W_out f(W_in x) with n units, unit j > n is a copy of a drawn m(j); C_i counts unit i and its copies:

    W_in'[j] = W_in[m(j)],    W_out'[:, j] = W_out[:, m(j)] / C_m(j) + d_j,    sum of d_j over copies of i = 0

exact for any f of a unit alone; noise d, of a standard deviation that is a share `noise` of that of W_out,
gives copies different gradients. Hidden features all come k times: layers that read them are divided by k and
get d, and so is the last norm before a tied head. New blocks are copies of a stack's last ones whose layers
to the residual sum are zero; not exact where a norm follows the sum (BERT, RoBERTa).

The configuration changes with the model; what it cannot express raises ValueError, after which the model is
not usable. On the meta device this is a test without cost."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.core.errors import find_reason
from cpt.core.messages import count_noun
from cpt.models.activation_checkpointing import CHECKPOINTING
from cpt.models.fast_kernels import COMPILE_OPTIONS
from cpt.models.loading import BLOCK_LISTS, is_tied, make_skeleton
from cpt.models.units import (
    SubLayer,
    find_blocks,
    find_mixer_outs,
    find_output_axis,
    find_projections,
    find_sublayers,
)

# Names of the fields of configurations that hold the number of neurons, of heads, …
NEURON_FIELDS = (
    "intermediate_size", "d_ff", "n_inner", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"
)  # fmt: skip
HEAD_FIELDS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
HEAD_SIZE_FIELDS = ("head_dim", "d_kv")
DEPTH_FIELDS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
# Model types that are the same function if each hidden feature comes several times: no embedding is scaled by
# a width, and the last norm is right before the head.
REPEATABLE_MODEL_TYPES = (
    "bert", "roberta", "modernbert", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "phi3", "t5"
)  # fmt: skip
# Attributes of a block's modules that are set on the model, not by the configuration.
MODE_ATTRIBUTES = ("config", CHECKPOINTING, f"_{CHECKPOINTING}_func")


@contextmanager
def adjust_config(model: PreTrainedModel, grown_part: str) -> Iterator[Callable[[], PreTrainedModel]]:
    """A context inside which the caller grows a model and changes its configuration to fit. It yields a
    function that makes a skeleton of the current configuration. On leaving, the modules get the sizes that
    the configuration says. Raises ValueError if the configuration does not make the model's shapes; the
    message names the `grown_part`: "neurons", "heads", "layers" or "hidden size"."""

    def make_grown_skeleton() -> PreTrainedModel:
        try:
            type(model.config).from_dict(model.config.to_dict())  # as it will be read, which checks it
            return make_skeleton(model)
        except Exception as error:  # whatever a configuration raises
            raise ValueError(
                f"{grown_part} of a {model.config.model_type} can not be grown: {find_reason(error)}"
            ) from error

    yield make_grown_skeleton

    skeleton = make_grown_skeleton()
    state = model.state_dict()
    for name, tensor in skeleton.state_dict().items():
        shape = state[name].shape if name in state else ()
        if shape != tensor.shape:
            raise ValueError(
                f"{grown_part} of a {model.config.model_type} can not be grown: "
                f"its configuration makes {name} {list(tensor.shape)}, not {list(shape)}"
            )
    copy_sizes(skeleton, model)


def copy_sizes(skeleton: PreTrainedModel, model: PreTrainedModel) -> None:
    """Gives a model's modules the sizes that those of a skeleton store, and its stacks their own
    configurations."""
    for name, skeleton_module in skeleton.named_modules():
        module = model.get_submodule(name)
        for key, value in vars(skeleton_module).items():
            if type(value) in (int, float, tuple) and vars(module).get(key) != value:
                setattr(module, key, value)
        config = getattr(skeleton_module, "config", None)
        if config is not None and module.config is not model.config:
            vars(module.config).update(deepcopy(vars(config)))


def set_fields(model: PreTrainedModel, fields: Mapping[str, Any]) -> None:
    """Sets those of some fields that a model's configuration has; the others are for other model types."""
    for name, value in fields.items():
        if name in model.config.attribute_map or name in vars(model.config):
            setattr(model.config, name, value)


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    requires_grad = getattr(module, name).requires_grad
    setattr(module, name, nn.Parameter(value.detach(), requires_grad=requires_grad))


def grow_neurons(model: PreTrainedModel, num_copies: int, *, noise: float) -> None:
    """Adds copies of `num_copies` drawn neurons to each feed-forward network."""
    if num_copies == 0:
        return
    with adjust_config(model, "neurons"):
        feed_forwards = find_sublayers(model, ("neurons",))
        for feed_forward in feed_forwards:
            neurons = draw_units(feed_forward.count, num_copies)
            add_copies(feed_forward, neurons, noise=noise)
        grown_count = feed_forwards[0].count + num_copies
        set_fields(model, dict.fromkeys(NEURON_FIELDS, grown_count))
        # LFM 2 would compute another number from it.
        set_fields(model, {"block_auto_adjust_ff_dim": False})


@torch.no_grad()
def grow_heads(model: PreTrainedModel, num_copies: int, *, noise: float) -> None:
    """Adds copies of `num_copies` drawn key/value heads with their query heads, the same in all blocks."""
    if num_copies == 0:
        return
    with adjust_config(model, "heads"):
        attentions = find_sublayers(model, ("heads",))
        count = attentions[0].count
        head_size = attentions[0].out.inputs // count
        # The features of a key or value belong to all query heads of its group, those of a query to one.
        queries_per_group = max(members.shape[1] for _, members in attentions[0].sources)

        groups = draw_units(count // queries_per_group, num_copies)
        heads = (groups[:, None] * queries_per_group + torch.arange(queries_per_group)).flatten()
        for attention in attentions:
            add_bias_columns(model.get_submodule(attention.name), heads, count=attention.count)
            add_copies(attention, heads, noise=noise)

        grown_count = count + len(heads)
        fields = dict.fromkeys(HEAD_FIELDS, grown_count) | dict.fromkeys(HEAD_SIZE_FIELDS, head_size)
        fields["num_key_value_heads"] = grown_count // queries_per_group
        set_fields(model, fields)


def add_bias_columns(attention: nn.Module, heads: Tensor, *, count: int) -> None:
    """Copies the columns of some heads in the tables of positions of an attention with `count` heads: T5's
    have a column for each head."""
    for table in attention.modules():
        if isinstance(table, nn.Embedding) and table.embedding_dim == count:
            columns = torch.cat([torch.arange(count), heads])
            replace_parameter(table, "weight", index_axis(table.weight, 1, columns))


def grow_layers(model: PreTrainedModel, num_copies: int) -> None:
    """Adds copies of each stack's last blocks that contribute nothing. Raises ValueError for too many."""
    if num_copies == 0:
        return
    depths = Counter(name.rpartition(".")[0] for name, _ in find_blocks(model))
    smallest_depth = min(depths.values())
    if num_copies > smallest_depth:
        block_count = count_noun(smallest_depth, "block")
        raise ValueError(f"the stacks of a {model.config.model_type} have {block_count} to copy")

    with adjust_config(model, "layers") as make_grown_skeleton:
        set_fields(model, {name: getattr(model.config, name, 0) + num_copies for name in DEPTH_FIELDS})
        for field in BLOCK_LISTS:
            block_entries = vars(model.config).get(field)  # not those that a property computes
            if block_entries is not None:
                # Some configurations allow a longer list than there are blocks.
                entries = list(block_entries)[:smallest_depth]
                set_fields(model, {field: [*entries, *entries[-num_copies:]]})

        skeleton = make_grown_skeleton()
        prefixes: list[str] = []  # of the new blocks
        for stack, depth in depths.items():
            layers = model.get_submodule(stack)
            for number in range(depth, depth + num_copies):
                new_block = skeleton.get_submodule(f"{stack}.{number}")
                layers.append(copy_block(new_block, layers[number - num_copies]))
                prefixes.append(f"{stack}.{number}.")

        zero_outputs(model, prefixes)


def zero_outputs(model: PreTrainedModel, prefixes: Sequence[str]) -> None:
    """Sets the outputs of blocks with these prefixes to zero, so that the blocks leave the hidden states
    unchanged."""
    outs = [sublayer.out for sublayer in find_sublayers(model, ("heads", "neurons"))]
    for out in (*outs, *find_mixer_outs(model)):
        if out.name.startswith(tuple(prefixes)):
            for parameter in out.module.parameters():
                nn.init.zeros_(parameter)


def spread_copies(depth: int, num_copies: int) -> list[int]:
    """The blocks of `depth` that are followed by a copy, evenly spread up to the last one.

    >>> spread_copies(8, 2)
    [3, 7]
    """
    return [depth * (number + 1) // num_copies - 1 for number in range(num_copies)]


def count_depths(model: PreTrainedModel) -> Counter[str]:
    """The number of blocks of each stack, by its name."""
    return Counter(name.rpartition(".")[0] for name, _ in find_blocks(model))


def insert_layers(model: PreTrainedModel, share: float, *, blocks: Sequence[int] | None = None) -> list[str]:
    """Adds to each stack copies of blocks, each after its original and without contribution: of the blocks of
    some numbers (ADEPT; Zhang et al., ICLR 2026), else evenly spread (LLaMA Pro; Wu et al., ACL 2024, section
    3.2), round(share * depth) of them, at least one. Returns the names of the copies. Raises ValueError where
    the configuration makes blocks of other kinds."""
    depths = count_depths(model)
    num_copies = len(blocks) if blocks else max(1, round(share * min(depths.values())))

    def list_originals(depth: int) -> list[int]:
        return sorted(blocks) if blocks else spread_copies(depth, num_copies)

    with adjust_config(model, "layers") as make_grown_skeleton:
        set_fields(model, {name: getattr(model.config, name, 0) + num_copies for name in DEPTH_FIELDS})
        for field in BLOCK_LISTS:
            entries = vars(model.config).get(field)  # not those that a property computes
            if entries is not None:
                depth = min(depths.values())
                set_fields(model, {field: insert_copies(list(entries)[:depth], list_originals(depth))})

        skeleton = make_grown_skeleton()
        names: list[str] = []
        for stack, depth in depths.items():
            layers = model.get_submodule(stack)
            # From the last on, so that the numbers of those before it stay.
            for number, original in reversed(list(enumerate(list_originals(depth)))):
                new_name = f"{stack}.{original + number + 1}"
                copy = copy_block(skeleton.get_submodule(new_name), layers[original])
                layers.insert(original + 1, copy)
                names.append(new_name)
        check_block_kinds(model, skeleton)
        zero_outputs(model, [f"{name}." for name in names])
    return sorted(names)


def insert_copies(entries: Sequence[Any], originals: Sequence[int]) -> list[Any]:
    """A list with an entry for each block, for blocks of which those at some places are followed by a copy.

    >>> insert_copies(["a", "b", "c", "d"], [1, 3])
    ['a', 'b', 'b', 'c', 'd', 'd']
    """
    grown = []
    for number, entry in enumerate(entries):
        grown.append(entry)
        if number in originals:
            grown.append(entry)
    return grown


def check_block_kinds(model: PreTrainedModel, skeleton: PreTrainedModel) -> None:
    """Raises ValueError if the blocks of a model are of other kinds than its configuration makes at their
    positions, as where every n-th block is of another kind."""
    blocks = dict(find_blocks(model))
    for name, expected_block in find_blocks(skeleton):
        for module_name, expected in expected_block.named_modules():
            module = blocks[name].get_submodule(module_name)
            for key, value in vars(expected).items():
                is_kind = type(value) in (int, float, str) and not key.startswith("_")
                is_number = "idx" in key or "layer_id" in key
                if is_kind and not is_number and vars(module).get(key, value) != value:
                    raise ValueError(
                        f"layers of a {model.config.model_type} can not be inserted: its configuration makes "
                        f"{key}={value} in {name}.{module_name}, not {vars(module)[key]}"
                    )


@torch.no_grad()
def copy_block(block: nn.Module, origin: nn.Module) -> nn.Module:
    """Gives a block without storage the weights, dtype, configuration and modes of another one."""
    origin_tensors = dict(origin.named_parameters()) | dict(origin.named_buffers())
    first_parameter = next(origin.parameters())

    # A parameter that the origin lacks, as some blocks have layers of their own, starts as that of a norm:
    # the weight at 1, the bias at 0.
    block.to_empty(device=first_parameter.device)
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        start = 0.0 if name.endswith("bias") else 1.0
        default = torch.full_like(tensor, start, dtype=first_parameter.dtype)
        tensor.data = origin_tensors.get(name, default).detach().clone()
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name not in origin_tensors or origin_tensors[name].requires_grad)

    origin_modules = dict(origin.named_modules())
    for name, module in block.named_modules():
        attributes = vars(origin_modules[name]) if name in origin_modules else {}
        for mode in MODE_ATTRIBUTES:
            if mode in attributes:
                setattr(module, mode, attributes[mode])
    if origin._compiled_call_impl is not None:
        block.compile(**COMPILE_OPTIONS)
    return block.train(origin.training)


@torch.no_grad()
def grow_hidden(model: PreTrainedModel, times: int, *, noise: float) -> None:
    """Multiplies the hidden size. Raises ValueError for a model type for which this is not exact."""
    if times == 1:
        return
    config = model.config
    if config.model_type not in REPEATABLE_MODEL_TYPES:
        model_types = ", ".join(REPEATABLE_MODEL_TYPES)
        raise ValueError(
            f"the hidden size of a {config.model_type} can not be grown exactly, only that of {model_types}"
        )
    segments = {projection.module: projection.segments for projection in find_projections(model)}
    with adjust_config(model, "hidden size") as make_grown_skeleton:
        # The neurons stay as many: a configuration may derive their number from the hidden size.
        num_neurons = find_sublayers(model, ("neurons",))[0].count
        set_fields(model, dict.fromkeys(NEURON_FIELDS, num_neurons))
        multiply_widths(model, times)
        repeat_parameters(model, make_grown_skeleton(), segments, times=times, noise=noise)

        # A tied head reads the repeated features with the repeated rows of the embedding, so its logits are
        # `times` as large. A T5 may scale the head's input by the root of the width, which is larger now.
        divisor = float(times) if is_tied(model) else 1.0
        if getattr(config, "scale_decoder_outputs", False):
            divisor /= times**0.5
        last_norm = [module for module in model.modules() if type(module).__name__.endswith("Norm")][-1]
        for parameter in last_norm.parameters():  # right before the head
            parameter.data /= divisor


def multiply_widths(model: PreTrainedModel, times: int) -> None:
    """Multiplies the hidden size in a configuration, and the heads where it has no size of a head."""
    fields: tuple[str, ...] = ("hidden_size", "word_embed_proj_dim")
    if not any(hasattr(model.config, name) for name in HEAD_SIZE_FIELDS):
        fields = (*fields, *HEAD_FIELDS, "num_key_value_heads")
    widths = {name: times * getattr(model.config, name) for name in fields if hasattr(model.config, name)}
    set_fields(model, widths)


def repeat_parameters(
    model: PreTrainedModel,
    skeleton: PreTrainedModel,
    segments: Mapping[nn.Module, Sequence[Tensor]],
    *,
    times: int,
    noise: float,
) -> None:
    """Gives a model the parameters of a skeleton with a hidden size `times` as large. `segments` are those of
    the linear layers within blocks."""
    modules = dict(model.named_modules(remove_duplicate=False))
    # Two modules that share a parameter still do: the new one by the id of the old one, which is kept alive.
    grown: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, skeleton_module in skeleton.named_modules(remove_duplicate=False):
        module = modules[name]
        for key, target in skeleton_module.named_parameters(recurse=False):
            parameter = getattr(module, key)
            if id(parameter) not in grown:
                values = repeat_features(
                    module, parameter, target.shape, segments.get(module), times=times, noise=noise
                )
                new_parameter = nn.Parameter(values, requires_grad=parameter.requires_grad)
                grown[id(parameter)] = (parameter, new_parameter)
            _, new_parameter = grown[id(parameter)]
            setattr(module, key, new_parameter)


def repeat_features(
    module: nn.Module,
    parameter: nn.Parameter,
    shape: Sequence[int],
    segments: Sequence[Tensor] | None,
    *,
    times: int,
    noise: float,
) -> Tensor:
    """The values of a module's parameter in a shape that is `times` as long along some axes; `segments` are
    those of layers within blocks, or None. Layers that read repeated features get noise."""
    is_linear = isinstance(module, nn.Linear | Conv1D) and parameter.ndim == 2
    values = parameter.detach()
    for axis in range(parameter.ndim):
        if parameter.shape[axis] == shape[axis]:
            continue
        features = torch.arange(parameter.shape[axis])
        if is_linear and axis != find_output_axis(module):  # reads the features
            origins = features.repeat(times)
            shares = index_axis(values, axis, origins) / times
            values = separate_copies(shares, axis, origins[len(features) :], noise)
            continue

        # Q, K and V of a fused layer are repeated each on its own, unless its rows go head by head.
        is_output = axis == (find_output_axis(module) if is_linear else 0)
        repeated: Sequence[Tensor] = (features,)
        if is_output and segments is not None and all(is_contiguous(segment) for segment in segments):
            repeated = segments
        values = index_axis(values, axis, torch.cat([segment.repeat(times) for segment in repeated]))
    return values.clone()


def is_contiguous(segment: Tensor) -> bool:
    """Whether ascending indices have no gaps."""
    return len(segment) == int(segment[-1] - segment[0]) + 1


def draw_units(units: int, count: int) -> Tensor:
    """Drawn units [count]: each comes once before one comes twice."""
    rounds = [torch.randperm(units, device="cpu") for _ in range(math.ceil(count / units))]
    return torch.cat(rounds)[:count]


@torch.no_grad()
def add_copies(sublayer: SubLayer, units: Tensor, *, noise: float) -> None:
    """Adds copies of some units [m] to the layers that write units and the one that reads them."""
    for source, members in sublayer.sources:
        rows = find_copied_rows(source.segments, members, units, count=sublayer.count)
        replace_parameter(source.module, "weight", index_axis(source.weight, source.axis, rows))
        if source.bias is not None:
            replace_parameter(source.module, "bias", index_axis(source.bias, 0, rows))

    # A unit and its copies share the unit's weights in the layer that reads them: its output stays.
    out = sublayer.out
    input_axis = 1 - out.axis
    size = out.inputs // sublayer.count
    features = torch.arange(out.inputs).view(sublayer.count, size)
    origins = torch.cat([features.flatten(), features[units].flatten()])
    multiplicity = torch.bincount(units, minlength=sublayer.count) + 1
    divisors = multiplicity[origins // size].to(out.weight)
    if input_axis == 0:
        divisors = divisors[:, None]
    weight = index_axis(out.weight, input_axis, origins) / divisors
    replace_parameter(out.module, "weight", separate_copies(weight, input_axis, origins[out.inputs :], noise))


def find_copied_rows(segments: Sequence[Tensor], members: Tensor, units: Tensor, *, count: int) -> Tensor:
    """By which rows a layer that writes units is indexed to add copies of some units [m] of `count`: those of
    each segment (Q, K, V), followed by the rows of the copied units in it. `members` [rows, …] are the units
    of each row."""
    rows: list[Tensor] = []
    for segment in segments:
        owners = members[segment, 0]  # of a shared key/value head the first of its query heads
        segment_units = owners.unique()
        rows_by_unit = segment[owners.argsort(stable=True)].view(len(segment_units), -1)

        # Copied query heads that own no key/value head add no rows to its segment.
        index_of_unit = torch.full((count,), -1)
        index_of_unit[segment_units] = torch.arange(len(segment_units))
        copied = index_of_unit[units]
        rows += [segment, rows_by_unit[copied[copied >= 0]].flatten()]
    return torch.cat(rows)


def index_axis(weight: Tensor, axis: int, indices: Tensor) -> Tensor:
    return weight.index_select(axis, indices.to(weight.device))


def separate_copies(weight: Tensor, axis: int, origins: Tensor, noise: float) -> Tensor:
    """Adds noise to the last columns or rows of a weight, and subtracts it at their `origins`."""
    if noise == 0:
        return weight
    shape = list(weight.shape)
    shape[axis] = len(origins)
    perturbation = torch.randn(shape, device="cpu").to(weight) * (noise * weight.std())
    first_copy = weight.shape[axis] - len(origins)
    weight.narrow(axis, first_copy, len(origins)).add_(perturbation)
    return weight.index_add_(axis, origins.to(weight.device), perturbation, alpha=-1)
