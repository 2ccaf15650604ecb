"""A model that is run with other weights: the one place where they change places."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def swap_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other weights, by the names of its parameters, while it lasts: what is tied to one of
    them has it too. Nothing is copied, and gradients go to the weights that are given.

    Raises AttributeError for a name that no parameter has."""
    others = {id(model.get_parameter(name)): weight for name, weight in weights.items()}
    own = [
        (part, name, parameter)
        for part in model.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in others
    ]
    try:
        for part, name, parameter in own:
            part._parameters[name] = others[id(parameter)]  # what torch.func.functional_call does
        yield
    finally:
        for part, name, parameter in own:
            part._parameters[name] = parameter
