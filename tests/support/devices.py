"""A second device where there is none: meta, whose tensors have no values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

OVER = ("aten::_to_copy", "aten::copy_", "aten::set_")  # what may go from one device to the other


class MixedDevicesError(RuntimeError):
    """An operation of tensors on two devices, as a GPU would refuse it."""


class SecondDevice(TorchDispatchMode):
    """While it is on, operations on meta tensors are computed in shapes alone, copies from there to the CPU
    are 0, and an operation of both devices raises MixedDevicesError, but for scalars that are on the CPU."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        away = any(each.is_meta for each in given)
        if not away:
            return function(*args, **kwargs)
        if function._schema.name in OVER:
            return go_over(function, args, kwargs)
        if any(each.ndim for each in given if not each.is_meta):
            where = [(each.device.type, list(each.shape)) for each in given]
            raise MixedDevicesError(f"{function} of {where}")
        return in_shapes(function, args, kwargs)


def go_over(function: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    if function._schema.name == "aten::_to_copy":
        like = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
        return torch.zeros_like(args[0], **like)
    return args[0] if not args[0].is_meta else function(*args, **kwargs)


def in_shapes(function: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives where there are no values; where its shape depends on them, they are 0."""
    try:
        return function(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        args, kwargs = tree_map_only(
            Tensor, lambda each: torch.zeros_like(each, device="cpu"), (args, kwargs)
        )
        given = {**kwargs, **({"device": torch.device("cpu")} if "device" in kwargs else {})}
        found = function(*args, **given)
        return tree_map_only(Tensor, lambda each: each.to("meta"), found)
