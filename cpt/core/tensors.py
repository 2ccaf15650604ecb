"""Tensors by name as a module's state: for what is kept of parameters, whose names say whose it is."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class NamedTensors(nn.Module):
    """Tensors by any names, that go where the module goes.

    `persistent` says whether they are part of the state_dict; what construction always gives again need not
    be. A state that is loaded says which there are, whatever there was."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, *, persistent: bool = True) -> None:
        super().__init__()
        self.persistent = persistent
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
                own.copy_(tensor)
            else:
                self.register_buffer(
                    to_buffer_name(name), tensor.detach().clone(), persistent=self.persistent
                )

    def clear(self) -> None:
        """Forgets all of them."""
        self._buffers.clear()

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        stored = {name.removeprefix(prefix): v for name, v in state_dict.items() if name.startswith(prefix)}
        if self.persistent:
            self._buffers = {name: self.room(name.replace("/", "."), v) for name, v in stored.items()}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def room(self, name: str, stored: Tensor) -> Tensor:
        """A tensor that a stored one is loaded into: the own one of the name, if it has its shape."""
        own = self._buffers.get(to_buffer_name(name))
        return own if own is not None and own.shape == stored.shape else torch.empty_like(stored)


def to_buffer_name(name: str) -> str:
    """The name of a buffer, in which no dot may stand."""
    return name.replace(".", "/")
