"""A model that is run with other weights: the one place where they change places."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cpt.core.sharding import is_sharded, local, shard_like
from cpt.models.sharding import named_weights, rest


@contextmanager
def swap_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other weights, by the names of its parameters, while it lasts: what is tied to one of
    them has it too. Nothing is copied that is where the model is, and gradients go to the weights that are
    given; what rests elsewhere is there for as long as it lasts.

    Of a sharded model the own rows are overwritten, and then put back: its blocks find their weights nowhere
    else. There gradients go nowhere.

    Raises AttributeError for a name that no parameter has."""
    rest(model)
    shared = {name: weight for name, weight in weights.items() if is_sharded(model.get_parameter(name))}
    others = {
        id(model.get_parameter(name)): weight.to(model.get_parameter(name).device)
        for name, weight in weights.items()
        if name not in shared
    }
    own = [
        (part, name, parameter)
        for part in model.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in others
    ]
    kept = overwrite(model, shared)
    try:
        for part, name, parameter in own:
            part._parameters[name] = others[id(parameter)]  # what torch.func.functional_call does
        yield
    finally:
        for part, name, parameter in own:
            part._parameters[name] = parameter
        overwrite(model, kept)


@torch.no_grad()
def overwrite(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Puts weights into the own rows of a sharded model, by the names of its parameters; gives a copy of what
    stood there."""
    if not weights:
        return {}
    present, kept = named_weights(model), {}
    for name, weight in weights.items():
        kept[name] = present[name].detach().clone()
        local(present[name]).copy_(local(shard_like(weight, present[name])))
    return kept
