"""Files that are appended to, and gone on with by whoever comes after a kill."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import xxhash

from cpt.core.checksums import AT_ONCE
from cpt.core.files import replace

log = logging.getLogger(__name__)
COMMIT = 1 << 25  # bytes that a kill may cost
PLACE = "place.json"


class Growing:
    """Files of a folder that are appended to. `commit` brings them to the disk and remembers a place, their
    sizes and checksums; the next to open them cuts off what came later and goes on from `place`, any JSON
    value, None at the beginning. Files of another `form`, or that are not what is remembered, begin anew."""

    def __init__(self, folder: Path, names: Sequence[str], *, form: Any) -> None:
        self.folder, self.form, self.fresh = folder, form, 0
        self.sums = {name: xxhash.xxh3_128() for name in names}
        self.sizes = dict.fromkeys(names, 0)
        self.place = self.recall()
        self.files = {name: self.open(name) for name in names}

    def recall(self) -> Any:
        """The place that is remembered; None where there is none, or what is there is not what it was."""
        path = self.folder / PLACE
        if not path.exists():
            self.tell_lost()
            return None
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            told, sizes = known["told"], known["told"]["files"]
            if (
                known["own"] != own_checksum(told)
                or told["form"] != self.form
                or set(sizes) != set(self.sums)
            ):
                raise ValueError("its place is of another form, or damaged")
            for name, (size, value) in sizes.items():
                self.look(name, size, value)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is begun anew: what is there cannot be gone on with (%s)", self.folder, error)
            self.sums = {name: xxhash.xxh3_128() for name in self.sums}
            self.sizes = dict.fromkeys(self.sums, 0)
            path.unlink()
            return None
        return told["place"]

    def tell_lost(self) -> None:
        """Tells where much is there and nothing says how far it is whole."""
        found = [self.folder / name for name in self.sums]
        if sum(path.stat().st_size for path in found if path.exists()) > COMMIT:
            log.info("%s is begun anew: what is there remembers no place to go on from", self.folder)

    def look(self, name: str, size: int, value: str) -> None:
        """Reads the beginning of a file; raises ValueError where it is not what is remembered."""
        left = size
        with (self.folder / name).open("rb") as file:
            while left and (block := file.read(min(left, AT_ONCE))):
                self.sums[name].update(block)
                left -= len(block)
        if left:
            raise ValueError(f"{name} has {size - left} bytes, not {size}")
        if self.sums[name].hexdigest() != value:
            raise ValueError(f"{name} differs from its checksum")
        self.sizes[name] = size

    def open(self, name: str) -> IO[bytes]:
        file = (self.folder / name).open("ab")
        file.truncate(self.sizes[name])
        return file

    def append(self, name: str, data: bytes | memoryview) -> None:
        self.files[name].write(data)
        self.sums[name].update(data)
        self.sizes[name] += len(data)
        self.fresh += len(data)

    @property
    def due(self) -> bool:
        """Whether enough has been appended for a commit."""
        return self.fresh >= COMMIT

    def commit(self, place: Any) -> None:
        """Has the disk hold all that was appended, and remembers a place."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        files = {name: [size, self.sums[name].hexdigest()] for name, size in self.sizes.items()}
        told = {"form": self.form, "files": files, "place": place}
        replace(self.folder / PLACE, json.dumps({"told": told, "own": own_checksum(told)}))
        self.fresh = 0

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def finish(self) -> None:
        """Closes files that are complete: no place is remembered any more."""
        self.close()
        (self.folder / PLACE).unlink(missing_ok=True)


def own_checksum(told: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(told, sort_keys=True).encode())
