"""Files of safetensors, read and written tensor by tensor.

The library writes a file of tensors that are all in memory, and maps the files that it reads, whose pages
then count as memory of the process. Here a process holds one tensor at a time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

LENGTH_BYTES = 8  # of the number at the start of a file: the bytes of its header
ALIGNMENT = 8  # bytes, of the first tensor
METADATA = "__metadata__"
OFFSETS = "data_offsets"
COMPACT = (",", ":")  # as the library separates the entries of a header


def open_tensors(path: Path) -> Any:
    """A file as safetensors opens it, which copies what is read instead of mapping the file."""
    return safe_open(path, "pt", backend="pread")


class TensorWriter:
    """Writes a file of safetensors, a context manager. `layout` has a tensor for each name of the file, which
    gives its type and shape; the values are written later, in any order. The file has the bytes that
    safetensors writes of the same tensors."""

    def __init__(self, path: Path, layout: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> None:
        self.path = path
        self.layout = layout
        self.header = make_header(layout, metadata)

    def __enter__(self) -> Self:
        encoded_header = json.dumps(self.header, separators=COMPACT, ensure_ascii=False).encode()
        encoded_header += b" " * (-len(encoded_header) % ALIGNMENT)
        self.data_start = LENGTH_BYTES + len(encoded_header)
        self.file = self.path.open("wb", buffering=0)
        self.file.write(len(encoded_header).to_bytes(LENGTH_BYTES, "little") + encoded_header)
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes the values of a tensor, from any device. Raises ValueError if its type or shape differs from
        the layout."""
        expected = self.layout[name]
        if tensor.dtype != expected.dtype or tensor.shape != expected.shape:
            raise ValueError(
                f"{name} is {tensor.dtype} {[*tensor.shape]}, but the header of {self.path} says "
                f"{expected.dtype} {[*expected.shape]}"
            )
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        begin, _ = self.header[name][OFFSETS]
        self.file.seek(self.data_start + begin)
        remaining = memoryview(cast(Any, values.numpy()))
        while remaining:  # the system writes 2 GB at most at a time
            num_written = self.file.write(remaining)
            remaining = remaining[num_written:]


def make_header(layout: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """The header of a file with tensors of some types and shapes."""
    # The names of types and the order of tensors are the library's, which depend on names and types alone.
    empty_tensors = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in layout.items()}
    encoded = save(empty_tensors, None if metadata is None else dict(metadata))
    length = int.from_bytes(encoded[:LENGTH_BYTES], "little")
    header: dict[str, Any] = json.loads(encoded[LENGTH_BYTES : LENGTH_BYTES + length])

    begin = 0
    for name, entry in header.items():
        if name == METADATA:
            continue
        tensor = layout[name]
        end = begin + tensor.numel() * tensor.itemsize
        entry["shape"] = [*tensor.shape]
        entry[OFFSETS] = [begin, end]
        begin = end
    return header
