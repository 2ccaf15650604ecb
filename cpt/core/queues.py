"""What a sweep is to do: `sweep.json` in its folder lists its runs, for those who look on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cpt.core.schema import check_types
from cpt.core.signs import OF_HOLDER, Holder, now, only

FILE = "sweep.json"
VERSION = 1


@dataclass(frozen=True)
class Queue:
    """The run folders of a sweep, by their path from its own, and the process that starts them."""

    runs: list[str]
    holder: Holder
    written: str

    @classmethod
    def load(cls, folder: Path) -> Queue | None:
        """That of a sweep's folder; None where there is none that can be read."""
        try:
            told = json.loads((folder / FILE).read_text(encoding="utf-8"))
            if told["version"] != VERSION:
                return None
            check_types(told, {"runs": list[str], "written": str})
            check_types(told["holder"], OF_HOLDER, of="holder")
            return cls(told["runs"], Holder(**only(told["holder"], OF_HOLDER)), told["written"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def list_runs(folder: Path, runs: Iterable[Path]) -> None:
    """Has a sweep's folder know its runs; those of another sweep that is at work there, and of this one's
    earlier batches, stay. A folder that cannot be written to is no reason for a sweep to end."""
    with suppress(OSError):
        before, own = Queue.load(folder), [os.path.relpath(run, folder) for run in runs]
        if before is not None and before.holder.lives():
            own = list(dict.fromkeys([*before.runs, *own]))
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{FILE}.{os.getpid()}.partial"
        queue = Queue(own, Holder.own(), now())
        partial.write_text(json.dumps({"version": VERSION} | asdict(queue)) + "\n", encoding="utf-8")
        os.replace(partial, folder / FILE)
