"""What the operations of a simulated pass compute and move."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cpt.core.allocations import find_tensors
from cpt.models.simulated_quantization import DEQUANTIZE_4BIT
from cpt.optim.simulated_8bit import UPDATE_8BIT
from cpt.trainer.costs import OperationCounter
from cpt.trainer.kernel_calls import KernelCall, ScaleSize, describe_call

ATEN = torch.ops.aten
# Operations that reserve memory without reading or writing it.
RESERVING = (ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided)
INDEX_TYPES = (torch.int32, torch.int64)  # of the bounds of groups


@dataclass(frozen=True)
class Work:
    """What operations compute and move; fractions are of steps and shards. What `calls` compute and move is
    not among the other figures."""

    flops: Mapping[str, float] = field(default_factory=dict)  # of products and attention, by dtype of inputs
    num_bytes: float = 0.0  # that all other operations read and write
    num_dequantized: float = 0.0  # weights that are dequantized from 4 bits
    num_8bit_updates: float = 0.0  # weights that are updated by moments in 8 bits
    calls: Mapping[KernelCall, float] = field(default_factory=dict)  # how often each is made

    @property
    def total_flops(self) -> float:
        in_calls = sum(num_calls * call.num_flops for call, num_calls in self.calls.items())
        return sum(self.flops.values()) + in_calls

    def plus(self, increment: "Work", *, times: float = 1.0) -> "Work":
        """The sum of this work and `times` the increment."""
        flops = dict(self.flops)
        for type_name, num_flops in increment.flops.items():
            flops[type_name] = flops.get(type_name, 0.0) + times * num_flops
        calls = dict(self.calls)
        for call, num_calls in increment.calls.items():
            calls[call] = calls.get(call, 0.0) + times * num_calls
        return Work(
            flops,
            num_bytes=self.num_bytes + times * increment.num_bytes,
            num_dequantized=self.num_dequantized + times * increment.num_dequantized,
            num_8bit_updates=self.num_8bit_updates + times * increment.num_8bit_updates,
            calls=calls,
        )

    def scale_calls(self, scale_size: ScaleSize, *, share: float) -> "Work":
        """The same work, with calls that each compute and move `share` of it, and as many more of them."""
        calls: dict[KernelCall, float] = {}
        for call, num_calls in self.calls.items():
            scaled = call.scale(scale_size, share=share)
            calls[scaled] = calls.get(scaled, 0.0) + num_calls / share
        return replace(self, calls=calls)


class WorkRecorder(OperationCounter):
    """Records the work of a pass, whose operations have tensors without storage.

    Work that grows with the rows of the batch is recorded apart from work that does not, like the cast of a
    weight: so the work of any number of rows follows from one pass. The update of the weights is recorded
    apart, too, as a step of several micro-batches makes it once. The caller sets `is_update` before it."""

    def __init__(self, grows_with_rows: Callable[[Tensor], bool], *, keeps_calls: bool = False) -> None:
        """`grows_with_rows` says whether the bytes of a tensor grow with the rows of the batch. With
        `keeps_calls`, operations over these rows are recorded as calls, which can be timed."""
        super().__init__()
        self.grows_with_rows = grows_with_rows
        self.keeps_calls = keeps_calls
        self.is_update = False
        # The keys say whether work is of the update, and whether it grows with the rows.
        self.counted: dict[tuple[bool, bool], Work] = {}
        self.calls: Counter[KernelCall] = Counter()
        self.written_arguments: dict[Any, list[int]] = {}  # positions, by kernel

    @property
    def work(self) -> dict[tuple[bool, bool], Work]:
        """The work by whether it is of the update, and whether it grows with the rows."""
        work = dict(self.counted)
        if self.calls:
            growing = (False, True)
            work[growing] = work.get(growing, Work()).plus(Work(calls=self.calls))
        return work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flops_before = self.total
        output = super().__torch_dispatch__(func, types, args, kwargs)
        count, is_composite = self.kernels[func]
        if is_composite or func.namespace == "prim":
            return output  # a composite operation is the sum of others, which were recorded
        if func is DEQUANTIZE_4BIT:
            self.add(Work(num_dequantized=output.numel()), grows=False)
            return output
        if func is UPDATE_8BIT:
            self.add(Work(num_8bit_updates=args[0].numel()), grows=False)
            return output

        is_product = count is not None
        num_flops = self.total - flops_before
        moved_tensors = self.list_moved_tensors(func, args, kwargs or {}, output)
        if self.is_kept(moved_tensors, args, is_product=is_product):
            self.add_call(func, args, kwargs or {}, num_flops=num_flops, moved_tensors=moved_tensors)
        elif is_product:
            self.add_products(num_flops, args)
        else:
            for tensor in moved_tensors:
                self.add(Work(num_bytes=tensor.nbytes), grows=self.grows_with_rows(tensor))
        return output

    def is_kept(self, moved_tensors: Sequence[Tensor], args: Any, *, is_product: bool) -> bool:
        """Whether an operation is recorded as a call. Products of groups are not: how large each group is
        depends on values."""
        if not self.keeps_calls or self.is_update:
            return False
        if is_product and any(tensor.dtype in INDEX_TYPES for tensor in find_tensors(args)):
            return False
        return any(self.grows_with_rows(tensor) for tensor in moved_tensors)

    def add_call(
        self,
        func: Any,
        args: Any,
        kwargs: Mapping[str, Any],
        *,
        num_flops: int,
        moved_tensors: Sequence[Tensor],
    ) -> None:
        """Adds a call. Of a product the bytes are not counted: the rate at which products are computed has
        them in it."""
        call = describe_call(
            func,
            args,
            kwargs,
            num_flops=num_flops,
            flops_type=find_type_name(args),
            num_bytes=0 if num_flops else sum(tensor.nbytes for tensor in moved_tensors),
        )
        self.calls[call] += 1

    def add_products(self, num_flops: int, args: Any) -> None:
        """Adds the operations of a product or of attention with these arguments."""
        # Before the update all products grow: they are of activations or of their gradients.
        grows = not self.is_update or any(self.grows_with_rows(tensor) for tensor in find_tensors(args))
        self.add(Work({find_type_name(args): num_flops}), grows=grows)

    def list_moved_tensors(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> list[Tensor]:
        """The tensors that an operation reads, which are its arguments, and those that it writes: arguments
        that it changes in place, and results with memory of their own. A view moves nothing."""
        if func.overloadpacket in RESERVING:
            return []
        changed_in_place: list[Tensor] = []
        for position in self.find_written(func):
            if position < len(args):
                changed_in_place.extend(find_tensors(args[position]))

        arguments = [*find_tensors(args), *find_tensors(list(kwargs.values()))]
        storages = {tensor.untyped_storage()._cdata for tensor in arguments}
        results = list(find_tensors(output))
        new_results = [result for result in results if result.untyped_storage()._cdata not in storages]

        is_view = bool(results) and not new_results and not changed_in_place
        return [] if is_view else [*arguments, *changed_in_place, *new_results]

    def find_written(self, func: Any) -> list[int]:
        """The positions of the arguments that a kernel writes to."""
        if func not in self.written_arguments:
            positions = []
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    positions.append(position)
            self.written_arguments[func] = positions
        return self.written_arguments[func]

    def add(self, work: Work, *, grows: bool) -> None:
        """Adds work to that of its kind; `grows`: with the rows of the batch."""
        key = (self.is_update, grows)
        self.counted[key] = self.counted.get(key, Work()).plus(work)


def find_type_name(args: Any) -> str:
    """The dtype of the first tensor among arguments; float32 without one."""
    first = next(find_tensors(args), None)
    return "float32" if first is None else str(first.dtype).removeprefix("torch.")
