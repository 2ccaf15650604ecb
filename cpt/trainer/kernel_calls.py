"""Calls of torch's kernels that are described without tensors, so that they can be made and timed later."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from torch import Tensor

FILL = 0.5  # the values of a timed call's tensors; integers and booleans are 0, which is a valid index
CALL_SECONDS = 0.01  # for which a call is repeated
MAX_MEMORY_SHARE = 0.25  # of the free memory, which the tensors of a timed call may take

ScaleSize = Callable[[int], int]


@dataclass(frozen=True)
class TensorShape:
    """What a kernel sees of a tensor without its values."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes that are read: an axis with stride 0 is one value that is repeated."""
        num_bytes = self.dtype.itemsize
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if stride != 0:
                num_bytes *= size
        return num_bytes

    def make(self) -> Tensor:
        """A tensor of this shape whose axes follow each other in memory as described."""
        axes = sorted(range(len(self.sizes)), key=lambda axis: -self.strides[axis])
        sizes_in_memory = [1 if self.strides[axis] == 0 else self.sizes[axis] for axis in axes]
        tensor = torch.empty(sizes_in_memory, dtype=self.dtype)
        tensor.fill_(FILL if self.dtype.is_floating_point else 0)
        positions = [axes.index(axis) for axis in range(len(axes))]
        return tensor.permute(positions).expand(self.sizes)


@dataclass(frozen=True)
class KernelCall:
    """A kernel and its arguments, with the shapes of tensors in their place."""

    kernel: Any
    arguments: Any
    keywords: Any  # pairs of a name and an argument
    # What the call computes and moves, for where it cannot be timed.
    num_flops: float = field(compare=False)
    flops_type: str = field(compare=False)  # of the inputs
    num_bytes: float = field(compare=False)

    def scale(self, scale_size: ScaleSize, *, share: float) -> "KernelCall":
        """The call with all sizes scaled, of tensors and among arguments. It computes and moves `share` of
        what the call did."""
        return replace(
            self,
            arguments=scale_sizes(self.arguments, scale_size),
            keywords=scale_sizes(self.keywords, scale_size),
            num_flops=self.num_flops * share,
            num_bytes=self.num_bytes * share,
        )


def describe_call(
    kernel: Any,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    num_flops: float,
    flops_type: str,
    num_bytes: float,
) -> KernelCall:
    """A call without its tensors, and what it computes and moves."""
    return KernelCall(
        kernel,
        describe_argument(arguments),
        describe_argument(list(keywords.items())),
        num_flops=num_flops,
        flops_type=flops_type,
        num_bytes=num_bytes,
    )


def describe_argument(value: Any) -> Any:
    """An argument with shapes in the place of tensors, and tuples in that of lists."""
    if isinstance(value, Tensor):
        return TensorShape(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(describe_argument(part) for part in value)
    return value


def scale_sizes(value: Any, scale_size: ScaleSize) -> Any:
    """A described argument whose sizes are scaled."""
    if isinstance(value, TensorShape):
        sizes = tuple(scale_size(size) for size in value.sizes)
        return TensorShape(sizes, value.strides, value.dtype)
    if isinstance(value, tuple):
        return tuple(scale_sizes(part, scale_size) for part in value)
    is_size = isinstance(value, int) and not isinstance(value, bool)
    return scale_size(value) if is_size else value


def make_argument(value: Any) -> Any:
    """The argument of a description."""
    if isinstance(value, TensorShape):
        return value.make()
    if isinstance(value, tuple):
        return [make_argument(part) for part in value]
    return value


def count_argument_bytes(value: Any) -> int:
    """The bytes of the tensors of a described argument."""
    if isinstance(value, TensorShape):
        return value.num_bytes
    if isinstance(value, tuple):
        return sum(count_argument_bytes(part) for part in value)
    return 0


class KernelTimer:
    """The seconds of calls on this CPU, each of which is timed once."""

    def __init__(self) -> None:
        self.seconds: dict[KernelCall, float | None] = {}

    def find_seconds(self, call: KernelCall) -> float | None:
        """The seconds of CPU time of a call. None for a call that cannot be repeated here: its tensors do not
        fit into memory, or it fails with the values that `make_argument` chooses."""
        if call not in self.seconds:
            self.seconds[call] = time_kernel(call)
        return self.seconds[call]


def time_kernel(call: KernelCall) -> float | None:
    """The seconds of CPU time of a call; None where `KernelTimer.find_seconds` has none."""
    # A result may be as large as all arguments together.
    num_bytes = 2 * count_argument_bytes((call.arguments, call.keywords))
    if num_bytes > MAX_MEMORY_SHARE * psutil.virtual_memory().available:
        return None

    arguments = make_argument(call.arguments)
    keywords = {name: make_argument(value) for name, value in call.keywords}
    try:
        with torch.no_grad():
            return time_calls(lambda: call.kernel(*arguments, **keywords), at_least=CALL_SECONDS)
    except (RuntimeError, IndexError, ValueError, TypeError):  # it needs other values in its arguments
        return None


def time_calls(
    call: Callable[[], Any], *, at_least: float, read_clock: Callable[[], float] = time.thread_time
) -> float:
    """Seconds of a call, the mean of as many as take a time. By default they are CPU time of this thread,
    which other programs do not lengthen."""
    call()  # before time is taken, as the first call loads kernels
    num_calls = 0
    seconds = 0.0
    start_time = read_clock()
    while seconds < at_least:
        call()
        num_calls += 1
        seconds = read_clock() - start_time
    return seconds / num_calls
