"""Checksums of files: what is read later is what was written."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

FILE = "checksums.json"
AT_ONCE = 1 << 20  # bytes that are read at a time


@dataclass(frozen=True)
class Checksums:
    """Size and checksum of files below a folder, by their path within it."""

    files: dict[str, tuple[int, str]]

    @classmethod
    def of(cls, folder: Path, paths: Iterable[Path]) -> "Checksums":
        """Those of files as they are now."""
        names = {path.relative_to(folder).as_posix(): path for path in paths}
        return cls({name: (names[name].stat().st_size, checksum(names[name])) for name in sorted(names)})

    @classmethod
    def load(cls, path: Path) -> "Checksums":
        """Those that a file remembers. Raises ValueError if the file is gone or damaged."""
        if not path.exists():
            raise ValueError(f"{path.name} is gone")
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            files = {name: (size, value) for name, (size, value) in told["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path.name} is damaged") from error
        found = cls(files)
        if told.get("own") != found.own():
            raise ValueError(f"{path.name} is damaged")
        return found

    def text(self) -> str:
        return json.dumps({"files": self.files, "own": self.own()}, indent=0)

    def own(self) -> str:
        """The checksum of these checksums."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.files, sort_keys=True).encode())

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def lost(self, folder: Path) -> Iterator[str]:
        """What is wrong that sizes can tell."""
        for name, (size, _) in self.files.items():
            found = size_of(folder / name)
            if found is None:
                yield f"{name} is gone"
            elif found != size:
                yield f"{name} has {found} bytes, not {size}"

    def damaged(self, folder: Path) -> Iterator[str]:
        """What is wrong with the files, every byte of them."""
        lost = list(self.lost(folder))
        yield from lost
        for name, (size, value) in self.files.items():
            if size_of(folder / name) == size and checksum_or_reason(folder / name) != value:
                yield f"{name} differs from its checksum"


def size_of(path: Path) -> int | None:
    """The bytes of a file; None where there is none."""
    return path.stat().st_size if path.is_file() else None


def checksum(path: Path) -> str:
    """The xxh3 of a file, 32 hexadecimal digits: against accidents, not against forgers."""
    found = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(AT_ONCE):
            found.update(block)
    return found.hexdigest()


def checksum_or_reason(path: Path) -> str:
    """A checksum; of a file that the disk cannot read any more, the reason, which equals none."""
    try:
        return checksum(path)
    except OSError as error:
        return str(error)


def seal(folder: Path) -> None:
    """Writes the checksums of all files of a folder into it; then the disk holds all of it."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != FILE]
    (folder / FILE).write_text(Checksums.of(folder, files).text(), encoding="utf-8")
    for path in (*files, folder / FILE, *{path.parent for path in files} - {folder}, folder):
        sync(path)


def sync(path: Path) -> None:
    """Has the disk hold a file, or the entries of a folder, before anything that is written later."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
