"""Tensors by name as a module's state: for what is kept of parameters, whose names say whose it is."""

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cpt.core.distributed import shard_like, to_local
from cpt.core.errors import FAILED_ALLOCATION
from cpt.core.files import check_archive, replacing, writing

CPU = torch.device("cpu")


def load_tensors(path: Path | str, *, mapped: bool = True) -> Any:
    """What a file of torch.save holds, on the CPU; `mapped` tensors are read from disk when they are used.
    Raises ValueError for a file of another kind, and for one that holds anything but tensors, numbers, texts
    and collections of them: to read other objects could execute code."""
    try:
        return torch.load(path, weights_only=True, mmap=mapped, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds other things than tensors; it is not loaded, since that could execute code"
        ) from error
    except (RuntimeError, EOFError) as error:
        if FAILED_ALLOCATION.search(str(error)):
            raise
        raise ValueError(f"{path} is damaged, or was not written by torch.save") from error


def save_state(state: Any, path: Path) -> None:
    """Writes a file of torch.save atomically. Raises OSError where it cannot be written."""
    with writing(path), replacing(path) as partial:
        torch.save(state, partial)


def check_state(path: Path, *, remedy: str, required_key: str = "") -> None:
    """Raises ValueError if a file is not one that `load_checked_state` would load."""
    load_checked_state(path, remedy=remedy, required_key=required_key)


def load_checked_state(path: Path, *, remedy: str, required_key: str = "") -> dict[str, Any]:
    """The dictionary in a file of torch.save. Raises ValueError if the file is missing or damaged, holds
    anything but a dictionary, or, if a `required_key` is given, one without this key. The message ends with
    the `remedy`: what the user can do."""
    check_archive(path, remedy=remedy)
    try:
        state = load_tensors(path)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from error
    if not isinstance(state, dict) or (required_key and required_key not in state):
        raise ValueError(f"{path} is a file of something else; {remedy}")
    return state


class NamedTensors(nn.Module):
    """Tensors by any names, on the module's device, or offloaded to the CPU (`offload`) and copied to the
    device when they are used (`on_module_device`).

    `persistent` says whether they are part of the state_dict; what construction always gives again need not
    be. A state that is loaded says which there are, whatever there was."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, *, persistent: bool = True) -> None:
        super().__init__()
        self.persistent = persistent
        self.layout: Mapping[str, Tensor] = {}  # by name, the parameters as which the tensors are sharded
        self.offloaded = False
        self.device = next(iter(tensors.values())).device if tensors else CPU  # where the module is
        self.update(tensors or {})

    def offload(self) -> None:
        """Keeps the tensors on the CPU from now on, whatever the module's device."""
        self.offloaded = True
        for name, tensor in self.named().items():
            self._buffers[to_buffer_name(name)] = self.on_storage_device(tensor)

    def on_storage_device(self, tensor: Tensor) -> Tensor:
        """A tensor on the device where this module stores its tensors; itself, if it is there."""
        return tensor.to(CPU) if self.offloaded else tensor

    def on_module_device(self, tensor: Tensor) -> Tensor:
        """A stored tensor on the module's device, on which it is used."""
        return tensor.to(self.device)

    def named(self) -> dict[str, Tensor]:
        """The tensors by name, on the device where they are stored."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers(recurse=False)}

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Stores the values of tensors. A stored tensor of the name and shape gets the values in place;
        without one, a copy of the tensor is registered."""
        for name, tensor in tensors.items():
            buffer = self._buffers.get(to_buffer_name(name))
            if buffer is not None and buffer.shape == tensor.shape:
                buffer.copy_(shard_like(tensor, buffer))
            else:
                copy = self.on_storage_device(tensor.detach())
                if copy.device == tensor.device:  # it was not copied
                    copy = copy.clone()
                self.register_buffer(to_buffer_name(name), copy, persistent=self.persistent)

    def shard(self, parameters: Mapping[str, Tensor]) -> None:
        """Shards each tensor as the parameter of its name is sharded, also those that are loaded later."""
        self.layout = parameters
        for name, tensor in self.named().items():
            self._buffers[to_buffer_name(name)] = self.share_out(name, tensor)

    def share_out(self, name: str, values: Tensor) -> Tensor:
        """`values` sharded as the parameter that they belong to (`shard`). They stay whole if parameters are
        not sharded, or if this one has another shape."""
        parameter = self.layout.get(self.parameter_of(name))
        if parameter is None or parameter.shape != values.shape:
            return values
        device = CPU if self.offloaded else None  # None: the device of the parameter
        return self.on_storage_device(shard_like(values, parameter, device=device))

    def parameter_of(self, name: str) -> str:
        """The name of the parameter as which a tensor is sharded; subclasses whose tensors have other names
        than the parameters override this."""
        return name

    def clear(self) -> None:
        self._buffers.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "NamedTensors":
        """Moves or casts the tensors, as `nn.Module.to` does by an `fn`; offloaded ones are only cast.

        `fn` is tried on an empty tensor to find the device and the type to which it converts."""
        self.device = fn(torch.empty(0, device=self.device)).device
        if not self.offloaded:
            return super()._apply(fn, recurse)

        for child in self.children():
            child._apply(fn, recurse)
        for name, tensor in self.named().items():
            empty = to_local(tensor).new_empty(0)
            dtype = fn(empty).dtype
            self._buffers[to_buffer_name(name)] = tensor.to(dtype)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Loads the tensors of a state, whatever their names and shapes: persistent buffers become those of
        the state. One that has a tensor of its name and shape is loaded into it."""
        stored: dict[str, Tensor] = {}  # by buffer name
        for key, values in list(state_dict.items()):
            if key.startswith(prefix):
                name = key.removeprefix(prefix)
                stored[name] = self.share_out(name.replace("/", "."), values)
                state_dict[key] = stored[name]

        if self.persistent:
            buffers: dict[str, Tensor | None] = {}
            for name, values in stored.items():
                buffer = self._buffers.get(name)
                if buffer is None or buffer.shape != values.shape:
                    buffer = self.on_storage_device(torch.empty_like(values))
                buffers[name] = buffer
            self._buffers = buffers
        super()._load_from_state_dict(state_dict, prefix, *args)


class PreciseTensors(NamedTensors):
    """Tensors in at least 32 bits, which stay so where the module is cast to something coarser."""

    def __init__(self, tensors: Mapping[str, Tensor], *, persistent: bool = True) -> None:
        super().__init__({name: upcast(tensor) for name, tensor in tensors.items()}, persistent=persistent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NamedTensors:
        return super()._apply(partial(move_uncast, fn), recurse)


def move_uncast(fn: Callable[[Tensor], Tensor], buffer: Tensor) -> Tensor:
    """What a module's `_apply` makes of a buffer, but for a cast of one of at least 32 bits."""
    if not buffer.is_floating_point() or buffer.itemsize < 4:
        return fn(buffer)
    bits = torch.int32 if buffer.itemsize == 4 else torch.int64
    return fn(buffer.view(bits)).view(buffer.dtype)


def upcast(values: Tensor) -> Tensor:
    """The values, detached, in at least 32 bits."""
    return values.detach().to(torch.promote_types(values.dtype, torch.float32))


def to_buffer_name(name: str) -> str:
    """The name of a buffer, in which no dot may stand."""
    return name.replace(".", "/")
