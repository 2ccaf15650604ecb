"""A model that becomes larger and stays the same function: more neurons, more heads, more blocks.

Neurons and heads (Net2Net; Chen et al., ICLR 2016; ELLE; Qin et al., Findings of ACL 2022, section 3.1): of a
network y = W_out f(W_in x) with n units, m(j) = j for j <= n and a drawn unit for j > n, and C_i units that
are drawn from i or are it,

    W_in'[j] = W_in[m(j)],    W_out'[:, j] = W_out[:, m(j)] / C_m(j) + d_j,    sum of d_j over copies of i = 0

which is exact for any f of a unit alone, gated ones and heads too. Copies of a unit with equal shares would
have equal gradients for ever; the noise d, which cancels, parts them. Of heads that share a key/value head
the group is copied as a whole.

Blocks: behind the last of each stack come copies of the last ones, whose maps to the residual sum are zero.
Where a block begins with its norm they change nothing. Where a norm follows the sum (BERT, RoBERTa) it is
carried out once more, so that this is not exact.

The configuration goes along (`cpt.models.reconfiguring`): what it can not say is refused. A model that was
refused is of no more use; one on the meta device is as good to ask."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.models import economy
from cpt.models.reconfiguring import (
    BY_LAYER,
    GROUPS,
    HEADS,
    LAYERS,
    NEURONS,
    SIZES,
    adjusted,
    describe,
    replace_parameter,
    set_fields,
)
from cpt.models.units import Between, Written, blocks, sublayers


def grow_neurons(model: PreTrainedModel, more: int, *, noise: float) -> None:
    """Gives each feed-forward network so many more neurons, copies of drawn ones; `noise` is the standard
    deviation of d, as a share of that of W_out. Draws from torch's own generator, on the CPU. Raises
    ValueError for a model whose configuration can not say so."""
    if more == 0:
        return
    with adjusted(model, f"neurons of {describe(model)}"):
        found = sublayers(model, ("neurons",))
        for each in found:
            widen(each, draw_units(each.count, more), noise=noise)
        set_fields(model, dict.fromkeys(NEURONS, found[0].count + more))


def grow_heads(model: PreTrainedModel, more: int, *, noise: float) -> None:
    """Gives each attention so many more key/value heads with their query heads, copies of drawn ones, the
    same in all blocks, which may share what they know of positions by head; else as `grow_neurons`."""
    if more == 0:
        return
    with adjusted(model, f"heads of {describe(model)}"):
        found = sublayers(model, ("heads",))
        shared = max(members.shape[1] for _, members in found[0].sources)
        groups = draw_units(found[0].count // shared, more)
        heads = (groups[:, None] * shared + torch.arange(shared)).flatten()
        for each in found:
            size = each.out.inputs // each.count
            widen_positions(model.get_submodule(each.name), each.count, heads)
            widen(each, heads, noise=noise)
        count = found[0].count + len(heads)
        set_fields(model, dict.fromkeys(HEADS, count) | dict.fromkeys(GROUPS, count // shared))
        set_fields(model, dict.fromkeys(SIZES, size))


def grow_layers(model: PreTrainedModel, more: int) -> None:
    """Gives each stack so many more blocks behind its last, copies of the last ones that add nothing. Raises
    ValueError where there are not so many to copy, and as `grow_neurons`."""
    if more == 0:
        return
    stacks: dict[str, int] = {}
    for name, _ in blocks(model):
        stacks[name.rpartition(".")[0]] = stacks.get(name.rpartition(".")[0], 0) + 1
    if more > (most := min(stacks.values())):
        raise ValueError(f"{more} more blocks for {describe(model)}, whose stacks have {most} to copy")
    with adjusted(model, f"layers of {describe(model)}") as skeleton:
        config = model.config
        set_fields(model, {name: getattr(config, name, 0) + more for name in LAYERS})
        if (kinds := getattr(config, BY_LAYER, None)) is not None:
            set_fields(model, {BY_LAYER: [*kinds, *kinds[-more:]]})
        empty = skeleton()
        for stack, count in stacks.items():
            layers = model.get_submodule(stack)
            for number in range(count, count + more):
                block = empty.get_submodule(f"{stack}.{number}")
                layers.append(copy_block(block, layers[number - more]))
        new = tuple(f"{stack}.{n}." for stack, count in stacks.items() for n in range(count, count + more))
        for each in sublayers(model, ("heads", "neurons")):
            if each.out.name.startswith(new):
                for parameter in each.out.module.parameters():
                    nn.init.zeros_(parameter)


def more_neurons(model: PreTrainedModel, times: float) -> int:
    """How many neurons a feed-forward network gains that is to be so many times as wide."""
    return round((times - 1) * sublayers(model, ("neurons",))[0].count) if times != 1 else 0


def draw_units(units: int, more: int) -> Tensor:
    """So many drawn units [more]: each comes once before one comes twice."""
    rounds = [torch.randperm(units, device="cpu") for _ in range(-(-more // units))]
    return torch.cat(rounds)[:more]


@torch.no_grad()
def widen(between: Between, chosen: Tensor, *, noise: float) -> None:
    """Adds copies of the units `chosen` [m] behind those that there are, in the maps that write units and in
    the one that reads them."""
    for written in between.sources:
        source, rows = written[0], copied_rows(written, chosen, between.count)
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


def copied_rows(written: Written, chosen: Tensor, units: int) -> Tensor:
    """Which output feature of a map stands at each place when units are copied: behind each set of features
    that belong together (Q, K and V of a fused map) those of their copies."""
    source, members = written
    found = []
    for segment in source.segments:
        owners = members[segment, 0]  # of a shared key/value head the first of its query heads
        firsts = owners.unique()
        place = torch.full((units,), -1)
        place[firsts] = torch.arange(len(firsts))
        table = segment[owners.argsort(stable=True)].view(len(firsts), -1)
        copies = place[chosen]
        found += [segment, table[copies[copies >= 0]].flatten()]
    return torch.cat(found)


def part_copies(weight: Tensor, axis: int, origins: Tensor, noise: float) -> Tensor:
    """Adds noise to the last columns or rows of a weight, those of copies, and takes it away at `origins`,
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
def widen_positions(attention: nn.Module, count: int, chosen: Tensor) -> None:
    """The same for an embedding with a column per head: T5's relative positions."""
    for table in attention.modules():
        if isinstance(table, nn.Embedding) and table.embedding_dim == count:
            replace_parameter(
                table, "weight", take(table.weight, 1, torch.cat([torch.arange(count), chosen]))
            )


def take(weight: Tensor, axis: int, places: Tensor) -> Tensor:
    return weight.index_select(axis, places.to(weight.device))


@torch.no_grad()
def copy_block(block: nn.Module, origin: nn.Module) -> nn.Module:
    """A block without storage with the weights, the type, the configuration and the modes of another one; a
    norm that the other lacks begins at one."""
    own = dict(origin.named_parameters()) | dict(origin.named_buffers())
    like = next(origin.parameters())
    block.to_empty(device=like.device)
    for name, value in (*block.named_parameters(), *block.named_buffers()):
        begun = torch.full_like(value, float(not name.endswith("bias")), dtype=like.dtype)
        value.data = own.get(name, begun).detach().clone()
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
