"""Show what cached text and finished runs could free on the disk, and why; remove it with --yes.

Cached text, tokenizers and base models that no run has opened for 30 days are rebuilt when a run needs
them. With --stages also the stage files of finished runs: without them no domain can be added to a run, and
nothing more can be evaluated in its earlier stages. Models, reports and scores stay."""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from cpt.core.cache import CACHED, PARTIAL, discard
from cpt.core.output import run_program
from cpt.evaluation.scores import Scores
from cpt.reporting.frames import megabytes

DAY = 24 * 3600


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpt.clean", description=__doc__)
    what = "caches, run folders, or folders that hold them (default: outputs and $CPT_CACHE)"
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=what)
    parser.add_argument("--days", type=float, default=30, help="days without use of a cached folder (30)")
    parser.add_argument("--stages", action="store_true", help="also stage files of finished runs")
    parser.add_argument("--yes", action="store_true", help="remove")
    given = parser.parse_args(arguments)
    if not given.days >= 0:
        print(f"cpt: --days={given.days} is invalid. Allowed: 0 or more", file=sys.stderr)
        return 1
    folders = given.folders or [Path("outputs"), Path(os.environ.get("CPT_CACHE") or "outputs")]
    if absent := [str(path) for path in given.folders if not path.is_dir()]:
        print(f"cpt: FOLDER={','.join(absent)} is invalid: no such folder. Allowed: {what}", file=sys.stderr)
        return 1
    found = {path: why for each in folders for path, why in removable(each, given.days, stages=given.stages)}
    for path, why in sorted(found.items()):
        size = megabytes(freed_bytes(path))
        ended = f"; {remove(path)}" if given.yes else ""
        print(f"{size:>12}  {path}: {why}{ended}")
    print(f"{len(found)} entries{'' if given.yes else '; add --yes to remove them'}")
    return 0


def freed_bytes(path: Path) -> int:
    """The bytes that the removal of a file or folder frees: of files with hard links elsewhere none."""
    stats = [each.lstat() for each in (path, *path.rglob("*")) if not each.is_dir()]
    links = Counter(each.st_ino for each in stats)
    return sum(each.st_size // each.st_nlink for each in stats if links[each.st_ino] == each.st_nlink)


def removable(folder: Path, days: float, *, stages: bool) -> Iterator[tuple[Path, str]]:
    """What could be removed at or below a folder, and why."""
    for at, inner, files in os.walk(folder.resolve()):
        path, now = Path(at), time.time()
        is_partial, is_cached = path.name.endswith(PARTIAL), CACHED.fullmatch("/".join(path.parts[-2:]))
        if is_partial or is_cached or "scores.json" in files:
            inner.clear()
        if is_partial:
            if now - max(each.lstat().st_mtime for each in (path, *path.rglob("*"))) > DAY:
                yield path, "left by a killed process"
        elif is_cached:
            if (unused := (now - path.stat().st_mtime) / DAY) > days:
                yield path, f"not used for {unused:.0f} days"
        elif stages and "scores.json" in files:
            try:
                kept = ("stages", "checkpoints") * Scores.load(path / "scores.json").run["finished"]
            except (ValueError, OSError) as error:
                print(f"cpt: leaving {path}: {error}")
                continue
            found = (path / name for name in kept)
            yield from ((each, "of a finished run") for each in found if any(each.glob("*")))


def remove(path: Path) -> str:
    """Removes a file or folder, but not while a process makes it or a run has its folder; gives what came of
    it."""
    name = path.name.removesuffix(PARTIAL)
    lock = path.parent / (".lock" if name in ("stages", "checkpoints") else f"{name}.lock")
    try:
        with FileLock(lock, timeout=0):
            discard(path)
    except Timeout:
        return "in use"
    except OSError as error:
        return f"not removed ({error.strerror})"
    return "removed"


if __name__ == "__main__":
    run_program(main)
