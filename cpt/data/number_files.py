"""Files of numbers of one type and nothing else, `NAME.TYPE`: written piece by piece, read memory-mapped."""

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

NARROWED = 1 << 20  # numbers that are converted at once


def find_smallest_type(maximum: int) -> np.dtype:
    """The smallest type that holds numbers from 0 to `maximum`: unsigned up to 4 bytes, then int64."""
    number_type = np.min_scalar_type(maximum)
    return number_type if number_type.itemsize <= 4 else np.dtype(np.int64)


class NumberWriter:
    """Writes numbers to FOLDER/NAME.TYPE. Within the context the file is open."""

    def __init__(self, folder: Path, name: str, number_type: np.dtype) -> None:
        self.number_type = number_type
        self.path = folder / f"{name}.{number_type.name}"
        for stale_path in folder.glob(f"{name}.*"):  # of a start that was stopped, perhaps of another type
            stale_path.unlink()
        self.file = self.path.open("wb")

    def write(self, numbers: np.ndarray) -> None:
        """Adds numbers, which the type has to hold."""
        self.file.write(numbers.astype(self.number_type, copy=False).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.file.close()


def find_number_file(folder: Path, name: str) -> Path:
    """FOLDER/NAME.TYPE."""
    (path,) = folder.glob(f"{name}.*")
    return path


def map_numbers(folder: Path, name: str) -> np.ndarray:
    """The numbers of FOLDER/NAME.TYPE, [numbers], memory-mapped and read-only."""
    path = find_number_file(folder, name)
    # Arrow's map keeps no file open, unlike numpy's: a run may have hundreds of texts.
    with pa.memory_map(str(path)) as file:
        return np.frombuffer(file.read_buffer(), read_number_type(path))


def read_numbers(folder: Path, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
    """The numbers of FOLDER/NAME.TYPE, or those from `begin` to `end`, in memory: pages of a map that are
    read one after another would count as memory, too."""
    path = find_number_file(folder, name)
    count = -1 if end is None else end - begin
    offset = begin * read_number_type(path).itemsize
    return np.fromfile(path, read_number_type(path), count, offset=offset)


def read_number_type(path: Path) -> np.dtype:
    return np.dtype(path.suffix.removeprefix("."))


def narrow_numbers(folder: Path, name: str, maximum: int) -> None:
    """Replaces FOLDER/NAME.TYPE by a file of the smallest type that holds numbers up to `maximum`."""
    path = find_number_file(folder, name)
    narrow_type = find_smallest_type(maximum)
    if narrow_type == read_number_type(path):
        return
    num_numbers = path.stat().st_size // read_number_type(path).itemsize
    with NumberWriter(folder, f"{name}-narrow", narrow_type) as writer:
        for begin in range(0, num_numbers, NARROWED):
            end = min(begin + NARROWED, num_numbers)
            writer.write(read_numbers(folder, name, begin, end))
    path.unlink()
    writer.path.rename(folder / f"{name}.{narrow_type.name}")
