"""A model with a larger hidden size that stays the same function: each hidden feature comes several times.

All of them come k times, and not a part of them, as in ELLE (Qin et al., Findings of ACL 2022): only then are
a norm's mean and variance those of before. With m(j) = j mod n,

    W_in'[:, j] = W_in[:, m(j)] / k + d_j,    W_out'[j] = W_out[m(j)],    sum of d_j over copies of i = 0

of maps that read hidden features and of maps that write them. Before a head that is tied to the embedding,
whose rows are longer now, the last norm is divided by k. Where heads have no size of their own there are k
times as many."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.models.growth import part_copies, take
from cpt.models.reconfiguring import (
    GROUPS,
    HEADS,
    HIDDEN,
    NEURONS,
    SIZES,
    adjusted,
    describe,
    set_fields,
)
from cpt.models.resizing import is_tied
from cpt.models.units import projections, sublayers

# Whose function keeps what it is where each hidden feature comes several times: no embedding is scaled by a
# width, and the last norm stands right before the head.
WHOLE = (
    "bert",
    "roberta",
    "modernbert",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "t5",
)
Segments = Sequence[Tensor]


def grow_hidden(model: PreTrainedModel, times: int, *, noise: float) -> None:
    """Makes the hidden size so many times what it is; else as `grow_neurons`. Raises ValueError for a model
    of which it is not known that this keeps the function."""
    if times == 1:
        return
    if model.config.model_type not in WHOLE:
        raise ValueError(
            f"hidden size of {describe(model)} can not be grown exactly, as far as is known; "
            f"known: {', '.join(WHOLE)}"
        )
    config, segments = model.config, {each.module: each.segments for each in projections(model)}
    with adjusted(model, f"hidden size of {describe(model)}") as skeleton:
        set_fields(model, dict.fromkeys(NEURONS, sublayers(model, ("neurons",))[0].count))
        scaled = HIDDEN if any(hasattr(config, name) for name in SIZES) else (*HIDDEN, *HEADS, *GROUPS)
        set_fields(model, {name: times * getattr(config, name) for name in scaled if hasattr(config, name)})
        repeat_features(model, skeleton(), times, segments=segments, noise=noise)
        factor = (times if is_tied(model) else 1) / times ** (getattr(config, "scale_decoder_outputs", 0) / 2)
        for parameter in last_norm(model).parameters():
            parameter.data /= factor


@torch.no_grad()
def repeat_features(
    model: PreTrainedModel,
    wanted: PreTrainedModel,
    times: int,
    *,
    segments: Mapping[nn.Module, Segments],
    noise: float,
) -> None:
    """Repeats each parameter along the axes along which that of another model is so many times as long; what
    two modules share stays shared. `segments` are those of the maps within blocks; `noise` is that of maps
    that read what is repeated."""
    parts, done = dict(model.named_modules(remove_duplicate=False)), {}
    for name, other in wanted.named_modules(remove_duplicate=False):
        module = parts[name]
        for key, target in other.named_parameters(recurse=False):
            own = getattr(module, key)
            if id(own) not in done:
                done[id(own)] = own, repeated(module, own, target.shape, segments.get(module), times, noise)
            setattr(module, key, done[id(own)][1])


def repeated(
    module: nn.Module,
    own: nn.Parameter,
    shape: Sequence[int],
    segments: Segments | None,
    times: int,
    noise: float,
) -> nn.Parameter:
    """A parameter of a module in a shape that is `times` as long along some axes."""
    is_map = isinstance(module, nn.Linear | Conv1D) and own.ndim == 2
    out = int(isinstance(module, Conv1D)) if is_map else 0
    value = own.detach()
    for axis in [axis for axis in range(own.ndim) if own.shape[axis] != shape[axis]]:
        count = own.shape[axis]
        if is_map and axis != out:
            origins = torch.arange(count).repeat(times)
            value = part_copies(take(value, axis, origins) / times, axis, origins[count:], noise)
        else:
            together = segments if axis == out and are_apart(segments) else [torch.arange(count)]
            value = take(value, axis, torch.cat([each.repeat(times) for each in together]))
    return nn.Parameter(value.clone(), requires_grad=own.requires_grad)


def are_apart(segments: Segments | None) -> bool:
    """Whether the segments of a map stand one after another, and not by head."""
    return segments is not None and all(len(each) == each[-1] - each[0] + 1 for each in segments)


def last_norm(model: PreTrainedModel) -> nn.Module:
    """The norm that stands before the head, the last to be defined."""
    return [each for each in model.modules() if type(each).__name__.endswith("Norm")][-1]
