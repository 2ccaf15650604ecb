"""Dropout, wherever a Hugging Face model has it: in modules and in plain attributes."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from cpt.models.forward import in_mode


def rates(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Modules, attributes and rates of all dropout in a model. The rate of skipping a whole layer
    (`layerdrop`) is not dropout."""
    found = []
    for module in model.modules():
        names = ["p"] if isinstance(module, nn.Dropout) else [n for n in vars(module) if "dropout" in n]
        found += [(module, n, getattr(module, n)) for n in names if type(getattr(module, n)) in (float, int)]
    return found


@contextmanager
def dropout(model: nn.Module, rate: float | None) -> Iterator[None]:
    """Train mode while it lasts, with every dropout at `rate` (None: at its own rate); then all is as it
    was."""
    own = rates(model)
    try:
        for module, name, before in own:
            setattr(module, name, before if rate is None else rate)
        with in_mode(model, training=True):
            yield
    finally:
        for module, name, before in own:
            setattr(module, name, before)


def check_dropout(model: nn.Module, rate: float | None, *, option: str, without: str) -> None:
    """Raises ValueError if two passes in train mode with dropout at `rate` could not differ; `option` is what
    gives the rate, `without` what does without these passes."""
    if rate is not None and not 0 < rate < 1:
        raise ValueError(f"method.{option}={rate}; allowed: above 0 and below 1, or null for the model's own")
    own = [before for *_, before in rates(model)]
    if not any(own if rate is None else [rate] * len(own)):
        given = "null" if rate is None else rate
        reason = "all its dropout rates are 0" if own else "it has no dropout"
        raise ValueError(
            f"two passes of {type(model).__name__} with method.{option}={given} would not differ: {reason}; "
            f"allowed: {f'{option} above 0' if own else 'another model'}, or {without}"
        )
