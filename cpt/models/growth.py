"""A model that becomes larger and stays the same function, and its embedding that gets rows for new tokens.

Neurons and heads (Net2Net; Chen et al., ICLR 2016; ELLE; Qin et al., Findings of ACL 2022, section 3.1): of a
network y = W_out f(W_in x) with n units, m(j) = j for j <= n and a drawn unit for j > n, and C_i units that
are drawn from i or are it,

    W_in'[j] = W_in[m(j)],    W_out'[:, j] = W_out[:, m(j)] / C_m(j) + d_j,    sum of d_j over copies of i = 0

which is exact for any f of a unit alone, gated ones and heads too. Copies of a unit with equal shares would
always have equal gradients; the noise d, which cancels, separates them. Of heads that share a key/value head
the group is copied as a whole.

Hidden features: all come k times, and not a part of them as in ELLE: only then are a norm's mean and variance
those of before. With m(j) = j mod n, of maps that read hidden features and of maps that write them

    W_in'[:, j] = W_in[:, m(j)] / k + d_j,    W_out'[j] = W_out[m(j)],    sum of d_j over copies of i = 0

Before a head that is tied to the embedding, whose rows are longer now, the last norm is divided by k. If
heads have no size of their own, there are k times as many.

Blocks: after the last of each stack come copies of the last ones, whose maps to the residual sum are zero.
If a block starts with its norm they change nothing. If a norm follows the sum (BERT, RoBERTa) it is applied
once more, so that this is not exact.

The configuration changes with the model, so that others can load it: what it cannot express is an error. A
model that raised one is not usable; one on the meta device may be used to ask."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from cpt.core.errors import reason
from cpt.models import economy
from cpt.models.units import Between, blocks, projections, sublayers

log = logging.getLogger(__name__)
ROWS_SEED = 0  # of new rows: they are part of the base, which does not depend on the run's seed
# Fields of configurations, by what they are a number of.
NEURONS = (
    "intermediate_size", "d_ff", "n_inner", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"
)  # fmt: skip
HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
GROUPS = ("num_key_value_heads",)
SIZES = ("head_dim", "d_kv")
LAYERS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
HIDDEN = ("hidden_size", "word_embed_proj_dim")
BY_LAYER = "layer_types"  # a list with an entry for each layer
NUMBERS = (int, float, tuple)  # sizes that modules store; no bool, which is a mode
# Model types that are the same function if each hidden feature comes several times: no embedding is scaled by
# a width, and the last norm is right before the head.
REPEATABLE = (
    "bert", "roberta", "modernbert", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "phi3", "t5"
)  # fmt: skip


@contextmanager
def adjusted(model: PreTrainedModel, part: str) -> Iterator[Callable[[], PreTrainedModel]]:
    """A model and its configuration are changed inside; afterwards the model is what the configuration makes.
    Gives a function that makes one without storage. Raises ValueError for what a configuration cannot
    express."""
    what = f"{part} of a {model.config.model_type} can not be grown"

    def skeleton() -> PreTrainedModel:
        try:
            type(model.config).from_dict(model.config.to_dict())  # as it will be read, which checks it
            with torch.device("meta"):
                return type(model)(deepcopy(model.config))
        except Exception as error:  # whatever a configuration raises
            raise ValueError(f"{what}: {reason(error)}") from error

    yield skeleton
    wanted = skeleton()
    own = {name: value.shape for name, value in model.state_dict().items()}
    for name, value in wanted.state_dict().items():
        if own.get(name) != value.shape:
            raise ValueError(
                f"{what}: its configuration makes {name} {list(value.shape)}, not {list(own.get(name, ()))}"
            )
    modules = dict(model.named_modules())
    for name, other in wanted.named_modules():  # modules store sizes, and stacks configurations of their own
        module = modules[name]
        for key, value in vars(other).items():
            if type(value) in NUMBERS and vars(module).get(key) != value:
                setattr(module, key, value)
        if (config := getattr(other, "config", None)) is not None and module.config is not model.config:
            vars(module.config).update(deepcopy(vars(config)))


def set_fields(model: PreTrainedModel, values: Mapping[str, Any]) -> None:
    """Sets those of the fields that a configuration has."""
    known = model.config.attribute_map
    for name, value in values.items():
        if name in known or name in vars(model.config):
            setattr(model.config, name, value)


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Gives a module a parameter of another shape, trained if the old one is."""
    setattr(module, name, nn.Parameter(value.detach(), requires_grad=getattr(module, name).requires_grad))


def grow_neurons(model: PreTrainedModel, more: int, *, noise: float) -> None:
    """Adds neurons to each feed-forward network, copies of drawn ones; `noise` is the standard deviation of
    d, as a share of that of W_out. Draws from torch's own generator, on the CPU. Raises ValueError for a
    model whose configuration cannot express it."""
    if more == 0:
        return
    with adjusted(model, "neurons"):
        found = sublayers(model, ("neurons",))
        for each in found:
            widen(each, draw_units(each.count, more), noise=noise)
        set_fields(model, dict.fromkeys(NEURONS, found[0].count + more))


@torch.no_grad()
def grow_heads(model: PreTrainedModel, more: int, *, noise: float) -> None:
    """Adds key/value heads with their query heads to each attention, copies of drawn ones, the same in all
    blocks, which may share relative positions by head; else as `grow_neurons`."""
    if more == 0:
        return
    with adjusted(model, "heads"):
        found = sublayers(model, ("heads",))
        shared = max(members.shape[1] for _, members in found[0].sources)
        groups = draw_units(found[0].count // shared, more)
        heads = (groups[:, None] * shared + torch.arange(shared)).flatten()
        for each in found:
            size = each.out.inputs // each.count
            for table in model.get_submodule(
                each.name
            ).modules():  # T5's relative positions: a column per head
                if isinstance(table, nn.Embedding) and table.embedding_dim == each.count:
                    columns = torch.cat([torch.arange(each.count), heads])
                    replace_parameter(table, "weight", take(table.weight, 1, columns))
            widen(each, heads, noise=noise)
        count = found[0].count + len(heads)
        set_fields(model, dict.fromkeys(HEADS, count) | dict.fromkeys(GROUPS, count // shared))
        set_fields(model, dict.fromkeys(SIZES, size))


def grow_layers(model: PreTrainedModel, more: int) -> None:
    """Adds blocks after the last of each stack, copies of the last ones that add nothing. Raises ValueError
    if there are fewer to copy, and as `grow_neurons`."""
    if more == 0:
        return
    stacks: dict[str, int] = {}
    for name, _ in blocks(model):
        stacks[name.rpartition(".")[0]] = stacks.get(name.rpartition(".")[0], 0) + 1
    if more > (most := min(stacks.values())):
        raise ValueError(
            f"{more} more blocks for a {model.config.model_type}, whose stacks have {most} to copy"
        )
    with adjusted(model, "layers") as skeleton:
        set_fields(model, {name: getattr(model.config, name, 0) + more for name in LAYERS})
        if (kinds := getattr(model.config, BY_LAYER, None)) is not None:
            set_fields(model, {BY_LAYER: [*kinds, *kinds[-more:]]})
        empty = skeleton()
        for stack, count in stacks.items():
            layers = model.get_submodule(stack)
            for number in range(count, count + more):
                layers.append(copy_block(empty.get_submodule(f"{stack}.{number}"), layers[number - more]))
        new = tuple(f"{stack}.{n}." for stack, count in stacks.items() for n in range(count, count + more))
        for each in sublayers(model, ("heads", "neurons")):
            if each.out.name.startswith(new):
                for parameter in each.out.module.parameters():
                    nn.init.zeros_(parameter)


@torch.no_grad()
def grow_hidden(model: PreTrainedModel, times: int, *, noise: float) -> None:
    """Multiplies the hidden size; else as `grow_neurons`. Raises ValueError for a model of which it is not
    known that this keeps the function."""
    if times == 1:
        return
    config = model.config
    if config.model_type not in REPEATABLE:
        raise ValueError(
            f"hidden size of a {config.model_type} can not be grown exactly, as far as is known; "
            f"known: {', '.join(REPEATABLE)}"
        )
    segments = {each.module: each.segments for each in projections(model)}
    with adjusted(model, "hidden size") as skeleton:
        set_fields(model, dict.fromkeys(NEURONS, sublayers(model, ("neurons",))[0].count))
        scaled = HIDDEN if any(hasattr(config, name) for name in SIZES) else (*HIDDEN, *HEADS, *GROUPS)
        set_fields(model, {name: times * getattr(config, name) for name in scaled if hasattr(config, name)})
        modules, done = dict(model.named_modules(remove_duplicate=False)), {}
        for name, other in skeleton().named_modules(remove_duplicate=False):
            for key, target in other.named_parameters(recurse=False):
                own = getattr(modules[name], key)
                if id(own) not in done:  # two modules that share a parameter still do
                    new = repeated(
                        modules[name], own, target.shape, segments.get(modules[name]), times, noise
                    )
                    done[id(own)] = own, new
                setattr(modules[name], key, done[id(own)][1])
        factor = (times if is_tied(model) else 1) / times ** (getattr(config, "scale_decoder_outputs", 0) / 2)
        last_norm = [each for each in model.modules() if type(each).__name__.endswith("Norm")][-1]
        for parameter in last_norm.parameters():  # right before the head
            parameter.data /= factor


def repeated(
    module: nn.Module,
    own: nn.Parameter,
    shape: Sequence[int],
    segments: Sequence[Tensor] | None,
    times: int,
    noise: float,
) -> nn.Parameter:
    """A parameter of a module in a shape that is `times` as long along some axes. `segments` are those of the
    maps within blocks; maps that read what is repeated get noise."""
    is_map = isinstance(module, nn.Linear | Conv1D) and own.ndim == 2
    out = int(isinstance(module, Conv1D)) if is_map else 0
    value = own.detach()
    for axis in [axis for axis in range(own.ndim) if own.shape[axis] != shape[axis]]:
        count = own.shape[axis]
        if is_map and axis != out:
            origins = torch.arange(count).repeat(times)
            value = part_copies(take(value, axis, origins) / times, axis, origins[count:], noise)
            continue
        together = [torch.arange(count)]
        if axis == out and segments is not None and all(len(e) == e[-1] - e[0] + 1 for e in segments):
            together = segments  # one after another, and not by head
        value = take(value, axis, torch.cat([each.repeat(times) for each in together]))
    return nn.Parameter(value.clone(), requires_grad=own.requires_grad)


def draw_units(units: int, more: int) -> Tensor:
    """Drawn units [more]: each comes once before one comes twice."""
    rounds = [torch.randperm(units, device="cpu") for _ in range(-(-more // units))]
    return torch.cat(rounds)[:more]


@torch.no_grad()
def widen(between: Between, chosen: Tensor, *, noise: float) -> None:
    """Adds copies of the units `chosen` [m] after the existing ones, in the maps that write units and in the
    one that reads them."""
    for source, members in between.sources:
        found = []  # which output feature is at each place: after each segment (Q, K, V) those of its copies
        for segment in source.segments:
            owners = members[segment, 0]  # of a shared key/value head the first of its query heads
            firsts = owners.unique()
            place = torch.full((between.count,), -1)
            place[firsts] = torch.arange(len(firsts))
            table = segment[owners.argsort(stable=True)].view(len(firsts), -1)
            copies = place[chosen]
            found += [segment, table[copies[copies >= 0]].flatten()]
        rows = torch.cat(found)
        replace_parameter(source.module, "weight", take(source.module.weight, source.axis, rows))
        if source.module.bias is not None:
            replace_parameter(source.module, "bias", take(source.module.bias, 0, rows))
    out, axis = between.out, 1 - between.out.axis
    size, times = out.inputs // between.count, torch.bincount(chosen, minlength=between.count) + 1
    features = torch.arange(out.inputs).view(between.count, size)
    origins = torch.cat([features.flatten(), features[chosen].flatten()])
    shares = times[origins // size].to(out.module.weight)
    weight = take(out.module.weight, axis, origins) / (shares if axis else shares[:, None])
    replace_parameter(out.module, "weight", part_copies(weight, axis, origins[out.inputs :], noise))


def take(weight: Tensor, axis: int, places: Tensor) -> Tensor:
    return weight.index_select(axis, places.to(weight.device))


def part_copies(weight: Tensor, axis: int, origins: Tensor, noise: float) -> Tensor:
    """Adds noise to the last columns or rows of a weight, those of copies, and subtracts it at `origins`,
    what they are copies of."""
    if noise == 0:
        return weight
    old = weight.shape[axis] - len(origins)
    shape = list(weight.shape)
    shape[axis] = len(origins)
    drawn = torch.randn(shape, device="cpu").to(weight) * (noise * weight.std())
    weight.narrow(axis, old, len(origins)).add_(drawn)
    return weight.index_add_(axis, origins.to(weight.device), drawn, alpha=-1)


@torch.no_grad()
def copy_block(block: nn.Module, origin: nn.Module) -> nn.Module:
    """Gives a block without storage the weights, the type, the configuration and the modes of another one; a
    norm that the other lacks starts at one."""
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
        for mode in ("config", economy.FLAG, f"_{economy.FLAG}_func"):
            if mode in modes.get(name, {}):
                setattr(part, mode, modes[name][mode])
    if origin._compiled_call_impl is not None:
        block.compile(**economy.COMPILER)
    return block.train(origin.training)


def entries(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that an embedding needs for all ids of a tokenizer; ids may have gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)


def check_rows(rows: int, tokenizer: PreTrainedTokenizerBase, *, checkpoint: str, resize: bool) -> None:
    """Raises ValueError where a tokenizer has more entries than the embedding has rows, and is not to be
    resized."""
    if not resize and entries(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer of {checkpoint} has {entries(tokenizer)} entries, its embedding {rows} rows; "
            "allowed: model.resize=true (adds rows for the others), or the tokenizer that the model was "
            "trained with"
        )


def check_head(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose head transformers would not resize with the embedding (in 5.23
    DeBERTa-v2 with legacy=false, whose head is not where it says)."""
    rows, head = model.get_input_embeddings().weight.shape[0], model.get_output_embeddings()
    if head is None or head.weight.shape[0] != rows:
        raise ValueError(
            f"model.resize=true: transformers finds no head of {type(model).__name__} with a row for each "
            "entry; allowed: model.resize=false with a tokenizer that fits the embedding, which has "
            "sentinels where model.objective=span"
        )


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the head's weight is the embedding's: of a T5, transformers 5 says so in any case."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def untie_head(model: PreTrainedModel) -> None:
    """Gives a head that is tied to the embedding a weight of its own, drawn as the embedding of a model of
    width D would be that has logits of size 1, N(0, 1 / D)."""
    if is_tied(model):
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.randn_like(head.weight) * head.weight.shape[1] ** -0.5)


@contextmanager
def as_it_is_tied(model: PreTrainedModel) -> Iterator[None]:
    """While it lasts, the configuration says of the head what is true of it: transformers would tie it."""
    said = model.config.tie_word_embeddings
    model.config.tie_word_embeddings = is_tied(model)
    try:
        yield
    finally:
        model.config.tie_word_embeddings = said


def fit_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, checkpoint: str, resize: bool
) -> None:
    """Adds rows to the embedding, and to a head, where the tokenizer has more entries, as transformers draws
    them: about the mean of the rows that there are; each time the same ones. Takes none away. Raises
    ValueError as `check_rows` and `check_head`."""
    rows, needed = model.get_input_embeddings().weight.shape[0], entries(tokenizer)
    check_rows(rows, tokenizer, checkpoint=checkpoint, resize=resize)
    if not resize:
        return
    if needed <= rows:
        log.info("model.resize=true changes nothing: %d rows, %d entries of the tokenizer", rows, needed)
        return
    check_head(model)
    with torch.random.fork_rng(devices=[]), as_it_is_tied(model):
        torch.manual_seed(ROWS_SEED)
        model.resize_token_embeddings(needed)
    log.info("resized the embedding of %s from %d to %d rows", checkpoint, rows, needed)
