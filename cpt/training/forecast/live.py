"""Bytes of the tensors that are alive: on a processor nothing else tells, as the process holds more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class Live(TorchDispatchMode):
    """Follows the storages of one device. Those that are handed to `hold` count from then on, those that an
    operation makes while it is on from there; each until it is freed, also while it is off. `peak` is the
    most bytes at once. What a kernel uses within itself is not seen."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.now, self.peak = device, 0, 0
        self.known = WeakIdKeyDictionary(ref_type=weakref.ref)

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for given in tree_iter((args, kwargs)):
            self.note(given, counts=False)
        made = function(*args, **(kwargs or {}))
        for each in tree_iter(made):
            self.note(each, counts=True)
        return made

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that are there already."""
        for tensor in tensors:
            self.note(tensor, counts=True)

    def note(self, value: Any, *, counts: bool) -> None:
        """Remembers the storage of a tensor; what was there before and nobody held does not count."""
        if not isinstance(value, Tensor) or value.device.type != self.device.type:
            return
        storage = value.untyped_storage()
        if storage in self.known:
            return
        self.known[storage] = size = storage.nbytes() if counts else 0
        if size:
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.free, size).atexit = False

    def free(self, size: int) -> None:
        self.now -= size


def bytes_of(tensors: Iterable[Tensor], *, seen: set[int] | None = None) -> int:
    """Bytes of tensors, of which those that share a storage, or whose storage was `seen`, count once."""
    known, total = set() if seen is None else seen, 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in known:
            known.add(storage._cdata)
            total += storage.nbytes()
    return total
