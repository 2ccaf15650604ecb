"""Tensors by name as a module's state: for what is kept of parameters, whose names say whose it is."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cpt.core.sharding import shard_like


class NamedTensors(nn.Module):
    """Tensors by any names, that go where the module goes.

    `persistent` says whether they are part of the state_dict; what construction always gives again need not
    be. A state that is loaded says which there are, whatever there was."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, *, persistent: bool = True) -> None:
        super().__init__()
        self.persistent = persistent
        self.layout: Mapping[str, Tensor] = {}
        self.update(tensors or {})

    def named(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers(recurse=False)}

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over the values of tensors: into those of their names and shapes, else as new ones."""
        for name, tensor in tensors.items():
            own = self._buffers.get(to_buffer_name(name))
            if own is not None and own.shape == tensor.shape:
                own.copy_(shard_like(tensor, own))
            else:
                self.register_buffer(
                    to_buffer_name(name), tensor.detach().clone(), persistent=self.persistent
                )

    def shard(self, parameters: Mapping[str, Tensor]) -> None:
        """Shares out what is of sharded parameters, by their names, as these are, from now on."""
        self.layout = parameters
        for name, tensor in self.named().items():
            self._buffers[to_buffer_name(name)] = self.share_out(name, tensor)

    def share_out(self, name: str, values: Tensor) -> Tensor:
        """The values of a name, as its parameter is laid out if they have an entry for each of its."""
        like = self.layout.get(self.parameter_of(name))
        return values if like is None or like.shape != values.shape else shard_like(values, like)

    def parameter_of(self, name: str) -> str:
        """The name of the parameter that a tensor is of."""
        return name

    def clear(self) -> None:
        """Forgets all of them."""
        self._buffers.clear()

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        stored = {name.removeprefix(prefix): v for name, v in state_dict.items() if name.startswith(prefix)}
        for name, values in stored.items():
            stored[name] = state_dict[prefix + name] = self.share_out(name.replace("/", "."), values)
        if self.persistent:
            self._buffers = {name: self.room(name.replace("/", "."), v) for name, v in stored.items()}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def room(self, name: str, stored: Tensor) -> Tensor:
        """A tensor that a stored one is loaded into: the own one of the name, if it has its shape."""
        own = self._buffers.get(to_buffer_name(name))
        return own if own is not None and own.shape == stored.shape else torch.empty_like(stored)


BITS = {4: torch.int32, 8: torch.int64}


class PreciseTensors(NamedTensors):
    """Tensors in at least 32 bits, which stay so where the module is cast to something coarser."""

    def __init__(self, tensors: Mapping[str, Tensor], *, persistent: bool = True) -> None:
        super().__init__({name: precise(each) for name, each in tensors.items()}, persistent=persistent)

    def _apply(self, fn: Any, recurse: bool = True) -> "PreciseTensors":
        def moved(buffer: Tensor) -> Tensor:
            if not buffer.is_floating_point():
                return fn(buffer)
            return fn(buffer.view(BITS[buffer.itemsize])).view(buffer.dtype)

        return super()._apply(moved, recurse)


def precise(values: Tensor) -> Tensor:
    """The same, detached, in at least 32 bits."""
    return values.detach().to(torch.promote_types(values.dtype, torch.float32))


def to_buffer_name(name: str) -> str:
    """The name of a buffer, in which no dot may stand."""
    return name.replace(".", "/")
