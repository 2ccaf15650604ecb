"""What the operations of a simulated pass compute and move."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cpt.core.allocations import find_tensors
from cpt.models.simulated_quantization import DEQUANTIZE_4BIT
from cpt.trainer.costs import OperationCounter

ATEN = torch.ops.aten
# Operations that reserve memory without reading or writing it.
RESERVING = (ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided)


@dataclass(frozen=True)
class Work:
    """What operations compute and move; fractions are of steps and shards."""

    flops: Mapping[str, float] = field(default_factory=dict)  # of products and attention, by dtype of inputs
    num_bytes: float = 0.0  # that all other operations read and write
    num_dequantized: float = 0.0  # weights that are dequantized from 4 bits

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())

    def plus(self, increment: "Work", *, times: float = 1.0) -> "Work":
        """The sum of this work and `times` the increment."""
        flops = dict(self.flops)
        for type_name, num_flops in increment.flops.items():
            flops[type_name] = flops.get(type_name, 0.0) + times * num_flops
        return Work(
            flops,
            num_bytes=self.num_bytes + times * increment.num_bytes,
            num_dequantized=self.num_dequantized + times * increment.num_dequantized,
        )


class WorkRecorder(OperationCounter):
    """Records the work of a pass, whose operations have tensors without storage.

    Work that grows with the rows of the batch is recorded apart from work that does not, like the cast of a
    weight: so the work of any number of rows follows from one pass. The update of the weights is recorded
    apart, too, as a step of several micro-batches makes it once. The caller sets `is_update` before it."""

    def __init__(self, grows_with_rows: Callable[[Tensor], bool]) -> None:
        """`grows_with_rows` says whether the bytes of a tensor grow with the rows of the batch."""
        super().__init__()
        self.grows_with_rows = grows_with_rows
        self.is_update = False
        # The keys say whether work is of the update, and whether it grows with the rows.
        self.work: dict[tuple[bool, bool], Work] = {}
        self.written_arguments: dict[Any, list[int]] = {}  # positions, by kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flops_before = self.total
        output = super().__torch_dispatch__(func, types, args, kwargs)
        count, is_composite = self.kernels[func]
        if is_composite or func.namespace == "prim":
            return output  # a composite operation is the sum of others, which were recorded

        if count is not None:
            self.add_products(self.total - flops_before, args)
        elif func is DEQUANTIZE_4BIT:
            self.add(Work(num_dequantized=output.numel()), grows=False)
        elif func.overloadpacket not in RESERVING:
            self.add_bytes(func, args, kwargs or {}, output)
        return output

    def add_products(self, num_flops: int, args: Any) -> None:
        """Adds the operations of a product or of attention with these arguments."""
        tensors = list(find_tensors(args))
        type_name = str(tensors[0].dtype).removeprefix("torch.")
        # Before the update all products grow: they are of activations or of their gradients.
        grows = not self.is_update or any(self.grows_with_rows(tensor) for tensor in tensors)
        self.add(Work({type_name: num_flops}), grows=grows)

    def add_bytes(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Adds the bytes that an operation reads, which are its arguments, and those that it writes:
        arguments that it changes in place, and results with memory of their own. A view moves nothing."""
        changed_in_place: list[Tensor] = []
        for position in self.find_written(func):
            if position < len(args):
                changed_in_place.extend(find_tensors(args[position]))

        read = [*find_tensors(args), *find_tensors(list(kwargs.values()))]
        storages = {tensor.untyped_storage()._cdata for tensor in read}
        results = list(find_tensors(output))
        new_results = [result for result in results if result.untyped_storage()._cdata not in storages]

        is_view = bool(results) and not new_results and not changed_in_place
        if is_view:
            return
        for tensor in [*read, *changed_in_place, *new_results]:
            num_bytes = tensor.numel() * tensor.itemsize
            self.add(Work(num_bytes=num_bytes), grows=self.grows_with_rows(tensor))

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
        self.work[key] = self.work.get(key, Work()).plus(work)
