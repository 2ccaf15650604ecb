"""Memory of computations without storage: which bytes the tensors hold that operations make, and when.

Inside torch's FakeTensorMode operations compute shapes and types alone, forward and backward, and the storage
of a tensor has a size but no memory. A storage lives as long as something refers to it, as autograd does to
what it has saved, so that the sizes of those that are alive are what a real computation would allocate. What
kernels need within an operation is not among them."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

FindUse = Callable[[Any, Any, Tensor], str]  # of an operation, its first argument and a result


@dataclass(slots=True)
class Allocation:
    """The bytes of a storage, what they are used for, and the first and last operation, by number, in which
    it is alive; None: it still is."""

    num_bytes: int
    use: str
    first: int
    last: int | None = None


class AllocationRecorder(TorchDispatchMode):
    """Records the storages that operations make; `find_use` says what each is used for."""

    def __init__(self, find_use: FindUse) -> None:
        super().__init__()
        self.find_use = find_use
        self.allocations: list[Allocation] = []
        self.alive: dict[int, Allocation] = {}  # by the address of the storage
        self.ignored: set[int] = set()  # addresses
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked for by each operation without storage
            return func(*args)
        self.num_operations += 1
        output = func(*args, **(kwargs or {}))
        for tensor in find_tensors(output):
            address = tensor.untyped_storage()._cdata
            if address not in self.alive and address not in self.ignored:
                self.add(tensor, self.find_use(func, args[0] if args else None, tensor))
        return output

    def add(self, tensor: Tensor, use: str) -> None:
        """Records the storage of a tensor from the current operation on, until nothing refers to it."""
        storage = tensor.untyped_storage()
        allocation = Allocation(storage.nbytes(), use, first=self.num_operations)
        self.allocations.append(allocation)
        self.alive[storage._cdata] = allocation
        weakref.finalize(storage, self.end, storage._cdata)

    def end(self, address: int) -> None:
        self.alive.pop(address).last = self.num_operations

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Does not record the storages of tensors, such as the weights, that are there throughout."""
        self.ignored.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def rename(self, tensors: Iterable[Tensor], use: str) -> None:
        """Sets what recorded tensors turned out to be used for."""
        for tensor in tensors:
            allocation = self.alive.get(tensor.untyped_storage()._cdata)
            if allocation is not None:
                allocation.use = use

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Leaves out what turned out to be state that stays."""
        addresses = {tensor.untyped_storage()._cdata for tensor in tensors}
        dropped = [allocation for address, allocation in self.alive.items() if address in addresses]
        dropped_ids = {id(allocation) for allocation in dropped}
        self.allocations = [entry for entry in self.allocations if id(entry) not in dropped_ids]


class AllocationTable:
    """The allocations of a computation as columns, whose bytes may be replaced by those of a larger one."""

    def __init__(self, recorder: AllocationRecorder) -> None:
        allocations = recorder.allocations
        self.num_operations = recorder.num_operations
        self.num_bytes = np.array([allocation.num_bytes for allocation in allocations], np.int64)
        self.first = np.array([allocation.first for allocation in allocations], np.int64)
        lasts = []
        for allocation in allocations:
            lasts.append(self.num_operations if allocation.last is None else allocation.last)
        self.last = np.array(lasts, np.int64)

        uses = np.array([allocation.use for allocation in allocations], dtype=object)
        self.has_use = {use: uses == use for use in dict.fromkeys(uses)}

    def find_peak(self, num_bytes: np.ndarray, *, excluded_uses: Sequence[str] = ()) -> dict[str, int]:
        """The bytes by use in the operation in which most are alive, if allocations have `num_bytes`; without
        those of some uses."""
        counted = num_bytes.copy()
        for use in excluded_uses:
            if use in self.has_use:
                counted[self.has_use[use]] = 0

        # The bytes that an operation allocates, less those freed after the previous one: their running sum is
        # the bytes alive. The last entry is after all operations.
        changes = np.zeros(self.num_operations + 2, np.int64)
        np.add.at(changes, self.first, counted)
        np.subtract.at(changes, self.last + 1, counted)
        operation = int(np.cumsum(changes)[:-1].argmax())

        is_alive = (self.first <= operation) & (self.last >= operation)
        by_use = {use: int(counted[is_alive & has_use].sum()) for use, has_use in self.has_use.items()}
        return {use: total for use, total in by_use.items() if total}


class KnownValues(TorchDispatchMode):
    """Computes values inside FakeTensorMode where all tensors of an operation have values, as token ids and
    counters have, and for torch.arange, which makes positions. Shapes of other tensors and branches may
    depend on these values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked for in every operation
            return args[0].fake_device
        kwargs = kwargs or {}
        tensors = [*find_tensors(args), *find_tensors(list(kwargs.values()))]
        if tensors:
            is_known = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        else:
            is_known = func.overloadpacket is torch.ops.aten.arange
        if not is_known:
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


class UnitScalars(TorchDispatchMode):
    """Takes 1 for each number that is read from a tensor without values, as Adafactor reads the norm of a
    parameter. It suits computations whose shapes do not depend on such numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func is torch.ops.aten._local_scalar_dense.default
        if is_read and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def find_tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from find_tensors(value)
