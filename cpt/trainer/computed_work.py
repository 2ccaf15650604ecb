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
# They reserve memory, and move no bytes.
RESERVING = (ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided)


@dataclass(frozen=True)
class Work:
    """Operations of matrix products and attention by the type of their inputs, bytes that all other
    operations read and write, and weights that are dequantized from 4 bits."""

    flops: Mapping[str, float] = field(default_factory=dict)
    num_bytes: float = 0.0
    num_dequantized: float = 0.0

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())

    def plus(self, increment: "Work", *, times: float = 1.0) -> "Work":
        flops = dict(self.flops)
        for type_name, num_flops in increment.flops.items():
            flops[type_name] = flops.get(type_name, 0.0) + times * num_flops
        return Work(
            flops,
            num_bytes=self.num_bytes + times * increment.num_bytes,
            num_dequantized=self.num_dequantized + times * increment.num_dequantized,
        )


class WorkRecorder(OperationCounter):
    """Records the work of operations without storage: that which grows with the rows of the batch, and that
    which does not, as casting a weight; before the update of the weights, and in it.

    `grows` says of a tensor whether its bytes grow with the rows. Products before the update all grow."""

    def __init__(self, grows: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.grows = grows
        self.is_update = False
        # By whether it is of the update, and whether it grows.
        self.work: dict[tuple[bool, bool], Work] = {}
        self.written_arguments: dict[Any, list[int]] = {}  # positions, by kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flops_before = self.total
        output = super().__torch_dispatch__(func, types, args, kwargs)
        count, is_composite = self.kernels[func]
        if is_composite or func.namespace == "prim":  # the operations within a composite one are recorded
            return output

        if count is not None:
            self.add_products(self.total - flops_before, args)
        elif func is DEQUANTIZE_4BIT:
            self.add(Work(num_dequantized=output.numel()), grows=False)
        elif func.overloadpacket not in RESERVING:
            self.add_bytes(func, args, kwargs or {}, output)
        return output

    def add_products(self, num_flops: int, args: Any) -> None:
        tensors = list(find_tensors(args))
        type_name = str(tensors[0].dtype).removeprefix("torch.")
        grows = not self.is_update or any(self.grows(tensor) for tensor in tensors)
        self.add(Work({type_name: num_flops}), grows=grows)

    def add_bytes(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Adds the bytes of the arguments, of those that are written once more, and of new results. A view
        moves nothing."""
        changed_in_place = list[Tensor]()
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
            self.add(Work(num_bytes=tensor.numel() * tensor.itemsize), grows=self.grows(tensor))

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
        key = (self.is_update, grows)
        self.work[key] = self.work.get(key, Work()).plus(work)
