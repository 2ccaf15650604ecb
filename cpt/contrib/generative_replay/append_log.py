"""Append-only files that are continued after a kill."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpt.core.files import replace

log = logging.getLogger(__name__)
PLACE = "place.json"


class Growing:
    """Append-only files of a folder. `commit` flushes them to disk and records their sizes with a place, any
    JSON value. Opening them again truncates them to the last commit, whose value is `place`, None if there
    is none. Files that are shorter than recorded, or were written in another `form`, restart empty."""

    def __init__(self, folder: Path, names: Sequence[str], *, form: Any) -> None:
        self.folder, self.form = folder, form
        self.place, sizes = None, dict.fromkeys(names, 0)
        record = folder / PLACE
        if record.exists():
            try:
                known = json.loads(record.read_text(encoding="utf-8"))
                if known["form"] != form or set(known["sizes"]) != set(names):
                    raise ValueError(f"{PLACE} has another form")
                for name, size in known["sizes"].items():
                    if (folder / name).stat().st_size < size:
                        raise ValueError(f"{name} is truncated")
                self.place, sizes = known["place"], known["sizes"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("Restarting %s, which cannot be continued (%s)", folder, error)
                record.unlink()
        self.files = {name: (folder / name).open("ab") for name in names}
        for name, file in self.files.items():
            file.truncate(sizes[name])

    def append(self, name: str, data: bytes | memoryview) -> None:
        self.files[name].write(data)

    def commit(self, place: Any) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self.files.items()}
        replace(self.folder / PLACE, json.dumps({"form": self.form, "sizes": sizes, "place": place}))

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def finish(self) -> None:
        """Closes files that are complete."""
        self.close()
        (self.folder / PLACE).unlink(missing_ok=True)
