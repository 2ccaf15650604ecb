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

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.core.errors import reason
from cpt.models.loading import is_tied, make_skeleton
from cpt.models.memory import CHECKPOINTING, COMPILE_OPTIONS
from cpt.models.units import SubLayer, find_blocks, find_projections, find_sublayers

# Fields of configurations, by what they are a number of.
NEURONS = (
    "intermediate_size", "d_ff", "n_inner", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"
)  # fmt: skip
HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
HEAD_SIZES = ("head_dim", "d_kv")
DEPTHS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
# Model types that are the same function if each hidden feature comes several times: no embedding is scaled by
# a width, and the last norm is right before the head.
REPEATABLE = (
    "bert", "roberta", "modernbert", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "phi3", "t5"
)  # fmt: skip


@contextmanager
def adjust_config(model: PreTrainedModel, part: str) -> Iterator[Callable[[], PreTrainedModel]]:
    """A model and its configuration change inside the context, which yields what makes a skeleton of it."""
    what = f"{part} of a {model.config.model_type} can not be grown"

    def empty() -> PreTrainedModel:
        try:
            type(model.config).from_dict(model.config.to_dict())  # as it will be read, which checks it
            return make_skeleton(model)
        except Exception as error:  # whatever a configuration raises
            raise ValueError(f"{what}: {reason(error)}") from error

    yield empty
    wanted, own = empty(), model.state_dict()
    for name, value in wanted.state_dict().items():
        if (shape := own[name].shape if name in own else ()) != value.shape:
            raise ValueError(f"{what}: its configuration makes {name} {list(value.shape)}, not {list(shape)}")
    for name, other in wanted.named_modules():  # modules store sizes, and stacks configurations of their own
        module = model.get_submodule(name)
        for key, value in vars(other).items():
            if type(value) in (int, float, tuple) and vars(module).get(key) != value:
                setattr(module, key, value)
        if (config := getattr(other, "config", None)) is not None and module.config is not model.config:
            vars(module.config).update(deepcopy(vars(config)))


def set_fields(model: PreTrainedModel, values: Mapping[str, Any]) -> None:
    for name, value in values.items():  # those that a configuration has
        if name in model.config.attribute_map or name in vars(model.config):
            setattr(model.config, name, value)


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    setattr(module, name, nn.Parameter(value.detach(), requires_grad=getattr(module, name).requires_grad))


def grow_neurons(model: PreTrainedModel, more: int, *, noise: float) -> None:
    """Adds copies of drawn neurons to each feed-forward network."""
    if more == 0:
        return
    with adjust_config(model, "neurons"):
        found = find_sublayers(model, ("neurons",))
        for each in found:
            add_copies(each, draw_units(each.count, more), noise=noise)
        set_fields(model, dict.fromkeys(NEURONS, found[0].count + more))


@torch.no_grad()
def grow_heads(model: PreTrainedModel, more: int, *, noise: float) -> None:
    """Adds copies of drawn key/value heads with their query heads, the same in all blocks."""
    if more == 0:
        return
    with adjust_config(model, "heads"):
        found = find_sublayers(model, ("heads",))
        size, shared = found[0].out.inputs // found[0].count, max(m.shape[1] for _, m in found[0].sources)
        groups = draw_units(found[0].count // shared, more)
        heads = (groups[:, None] * shared + torch.arange(shared)).flatten()
        for each in found:
            for table in model.get_submodule(each.name).modules():  # T5's positions: a column per head
                if isinstance(table, nn.Embedding) and table.embedding_dim == each.count:
                    columns = torch.cat([torch.arange(each.count), heads])
                    replace_parameter(table, "weight", index_axis(table.weight, 1, columns))
            add_copies(each, heads, noise=noise)
        count = found[0].count + len(heads)
        fields = dict.fromkeys(HEADS, count) | dict.fromkeys(HEAD_SIZES, size)
        set_fields(model, fields | {"num_key_value_heads": count // shared})


def grow_layers(model: PreTrainedModel, more: int) -> None:
    """Adds copies of each stack's last blocks that contribute nothing. ValueError for too many."""
    if more == 0:
        return
    stacks = Counter(name.rpartition(".")[0] for name, _ in find_blocks(model))
    if more > (most := min(stacks.values())):
        kind = model.config.model_type
        raise ValueError(f"the stacks of a {kind} have {most} blocks to copy")
    with adjust_config(model, "layers") as empty:
        set_fields(model, {name: getattr(model.config, name, 0) + more for name in DEPTHS})
        if (kinds := getattr(model.config, "layer_types", None)) is not None:
            set_fields(model, {"layer_types": [*kinds, *kinds[-more:]]})
        larger, new = empty(), [(stack, size + n) for stack, size in stacks.items() for n in range(more)]
        for stack, number in new:
            layers = model.get_submodule(stack)
            layers.append(copy_block(larger.get_submodule(f"{stack}.{number}"), layers[number - more]))
        for each in find_sublayers(model, ("heads", "neurons")):
            if each.out.name.startswith(tuple(f"{stack}.{number}." for stack, number in new)):
                for parameter in each.out.module.parameters():
                    nn.init.zeros_(parameter)


@torch.no_grad()
def copy_block(block: nn.Module, origin: nn.Module) -> nn.Module:
    """Gives a block without storage the weights, dtype, configuration and modes of another one."""
    own = dict(origin.named_parameters()) | dict(origin.named_buffers())
    like = next(origin.parameters())
    block.to_empty(device=like.device)
    for name, value in (*block.named_parameters(), *block.named_buffers()):
        start = torch.full_like(value, float(not name.endswith("bias")), dtype=like.dtype)
        value.data = own.get(name, start).detach().clone()
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name not in own or own[name].requires_grad)
    modes = {name: vars(part) for name, part in origin.named_modules()}
    for name, part in block.named_modules():
        for mode in ("config", CHECKPOINTING, f"_{CHECKPOINTING}_func"):
            if mode in modes.get(name, {}):
                setattr(part, mode, modes[name][mode])
    if origin._compiled_call_impl is not None:
        block.compile(**COMPILE_OPTIONS)
    return block.train(origin.training)


@torch.no_grad()
def grow_hidden(model: PreTrainedModel, times: int, *, noise: float) -> None:
    """Multiplies the hidden size. Raises ValueError for a model type that is not in REPEATABLE."""
    if times == 1:
        return
    if (config := model.config).model_type not in REPEATABLE:
        told = f"hidden size of a {config.model_type} has no known exact growth"
        raise ValueError(f"{told}, but of {', '.join(REPEATABLE)}")
    segments = {each.module: each.segments for each in find_projections(model)}
    with adjust_config(model, "hidden size") as empty:
        set_fields(model, dict.fromkeys(NEURONS, find_sublayers(model, ("neurons",))[0].count))
        scaled: tuple[str, ...] = ("hidden_size", "word_embed_proj_dim")
        if not any(hasattr(config, name) for name in HEAD_SIZES):
            scaled = (*scaled, *HEADS, "num_key_value_heads")
        set_fields(model, {name: times * getattr(config, name) for name in scaled if hasattr(config, name)})
        modules, done = dict(model.named_modules(remove_duplicate=False)), {}
        for name, other in empty().named_modules(remove_duplicate=False):
            module = modules[name]
            for key, target in other.named_parameters(recurse=False):
                own = getattr(module, key)
                if id(own) not in done:  # two modules that share a parameter still do
                    value = repeat_features(module, own, target.shape, segments.get(module), times, noise)
                    done[id(own)] = own, nn.Parameter(value, requires_grad=own.requires_grad)
                setattr(module, key, done[id(own)][1])
        tied = times if is_tied(model) else 1
        last_norm = [each for each in model.modules() if type(each).__name__.endswith("Norm")][-1]
        for parameter in last_norm.parameters():  # right before the head
            parameter.data /= tied / times ** (getattr(config, "scale_decoder_outputs", 0) / 2)


def repeat_features(
    module: nn.Module, own: nn.Parameter, shape: tuple[int, ...], segments: Any, times: int, noise: float
) -> Tensor:
    """The values of a module's parameter in a shape that is `times` as long along some axes; `segments` are
    those of layers within blocks, or None. Layers that read repeated features get noise."""
    linear, value = isinstance(module, nn.Linear | Conv1D) and own.ndim == 2, own.detach()
    for axis in [axis for axis in range(own.ndim) if own.shape[axis] != shape[axis]]:
        every = torch.arange(own.shape[axis])
        if linear and axis != int(isinstance(module, Conv1D)):
            origins = every.repeat(times)
            wide = index_axis(value, axis, origins) / times
            value = separate_copies(wide, axis, origins[len(every) :], noise)
        else:
            apart = segments is None or any(len(e) != e[-1] - e[0] + 1 for e in segments)  # by head
            together = (every,) if apart or axis != (linear and isinstance(module, Conv1D)) else segments
            value = index_axis(value, axis, torch.cat([each.repeat(times) for each in together]))
    return value.clone()


def draw_units(units: int, more: int) -> Tensor:
    """Drawn units [more]: each comes once before one comes twice."""
    rounds = [torch.randperm(units, device="cpu") for _ in range(-(-more // units))]
    return torch.cat(rounds)[:more]


@torch.no_grad()
def add_copies(place: SubLayer, chosen: Tensor, *, noise: float) -> None:
    """Adds copies of the units `chosen` [m] to the layers that write units and the one that reads them."""
    for source, members in place.sources:
        found = []  # the output feature of each row: after each segment (Q, K, V) those of its copies
        for segment in source.segments:
            owners = members[segment, 0]  # of a shared key/value head the first of its query heads
            firsts = owners.unique()
            number = torch.full((place.count,), -1)
            number[firsts] = torch.arange(len(firsts))
            table = segment[owners.argsort(stable=True)].view(len(firsts), -1)
            copies = number[chosen]
            found += [segment, table[copies[copies >= 0]].flatten()]
        rows = torch.cat(found)
        replace_parameter(source.module, "weight", index_axis(source.weight, source.axis, rows))
        if source.bias is not None:
            replace_parameter(source.module, "bias", index_axis(source.bias, 0, rows))
    out, axis = place.out, 1 - place.out.axis
    size, times = out.inputs // place.count, torch.bincount(chosen, minlength=place.count) + 1
    features = torch.arange(out.inputs).view(place.count, size)
    origins = torch.cat([features.flatten(), features[chosen].flatten()])
    shares = times[origins // size].to(out.weight)
    weight = index_axis(out.weight, axis, origins) / (shares if axis else shares[:, None])
    replace_parameter(out.module, "weight", separate_copies(weight, axis, origins[out.inputs :], noise))


def index_axis(weight: Tensor, axis: int, places: Tensor) -> Tensor:
    return weight.index_select(axis, places.to(weight.device))


def separate_copies(weight: Tensor, axis: int, origins: Tensor, noise: float) -> Tensor:
    """Adds noise to the last columns or rows of a weight, and subtracts it at their `origins`."""
    if noise == 0:
        return weight
    shape = list(weight.shape)
    old, shape[axis] = shape[axis] - len(origins), len(origins)
    drawn = torch.randn(shape, device="cpu").to(weight) * (noise * weight.std())
    weight.narrow(axis, old, len(origins)).add_(drawn)
    return weight.index_add_(axis, origins.to(weight.device), drawn, alpha=-1)
