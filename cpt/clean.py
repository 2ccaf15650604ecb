"""Show what cached text and finished runs could free on the disk, and why; remove it with --yes.

Cached text, tokenizers and base models that no run has opened for 30 days are rebuilt when a run needs
them. Cached rows of an older format are not read any more. What a running process uses stays. With --stages
also the stage files of finished runs: without them no domain can be added to a run or given back
(`cpt.withdraw`), and nothing more can be evaluated in its earlier stages. Models, reports and scores stay.
Exit code 1 if something could not be removed."""

import argparse
import errno
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from cpt.core.cache import CACHED, PARTIAL, discard, is_outdated
from cpt.core.cache_use import find_users
from cpt.core.messages import count_noun
from cpt.core.output import run_program
from cpt.evaluation.scores import Scores
from cpt.reporting.formats import format_bytes
from cpt.trainer.run_dir import STAGE_FILE

DAY = 24 * 3600


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpt.clean", description=__doc__)
    allowed = "caches, run folders, or folders that hold them (default: outputs and $CPT_CACHE)"
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=allowed)
    parser.add_argument("--days", type=float, default=30, help="days without use of a cached folder (30)")
    parser.add_argument("--stages", action="store_true", help="also stage files of finished runs")
    parser.add_argument("--yes", action="store_true", help="remove")
    options = parser.parse_args(arguments)
    if not options.days >= 0:  # negative, or nan
        print(f"cpt: --days={options.days} is invalid. Allowed: 0 or more", file=sys.stderr)
        return 1
    absent = [str(path) for path in options.folders if not path.is_dir()]
    if absent:
        print(
            f"cpt: FOLDER={','.join(absent)} is invalid: no such folder. Allowed: {allowed}", file=sys.stderr
        )
        return 1

    folders = options.folders or [Path("outputs"), Path(os.environ.get("CPT_CACHE") or "outputs")]
    reasons: dict[Path, str] = {}
    for folder in folders:
        reasons.update(find_removable(folder, options.days, with_stages=options.stages))
    total_size = 0
    exit_code = 0
    for path, reason in sorted(reasons.items()):
        size = count_freed_bytes(path)  # before it is removed
        total_size += size
        outcome = describe_users(path)
        if options.yes:
            try:
                outcome = f"; {remove(path)}"
            except OSError as error:
                outcome = f"; not removed ({error.strerror})"
                exit_code = 1
        print(f"{format_bytes(size):>12}  {path}: {reason}{outcome}")
    print(format_summary(len(reasons), total_size, are_removed=options.yes))
    return exit_code


def format_summary(count: int, size: int, *, are_removed: bool) -> str:
    """How many entries there were, what they take together, and how one removes them. Some entries may have
    stayed, as they were in use: each has its own line.

    >>> format_summary(0, 0, are_removed=False)
    'Nothing to remove'
    >>> format_summary(1, 900, are_removed=False)
    '1 entry, 900 B; add --yes to remove'
    >>> format_summary(3, 900, are_removed=True)
    '3 entries'
    """
    if count == 0:
        return "Nothing to remove"
    text = count_noun(count, "entry", "entries")
    return text if are_removed else f"{text}, {format_bytes(size)}; add --yes to remove"


def count_freed_bytes(path: Path) -> int:
    """The bytes that the removal of a file or folder frees: of files with hard links elsewhere none."""
    stats = []
    for entry in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):  # a process has just removed it
            if not entry.is_dir():
                stats.append(entry.lstat())

    # The disk is freed with the last link to a file: all of its links have to be at or below the path.
    num_links = Counter(stat.st_ino for stat in stats)
    num_bytes = 0
    for stat in stats:
        if num_links[stat.st_ino] == stat.st_nlink:
            num_bytes += stat.st_size // stat.st_nlink
    return num_bytes


def find_removable(folder: Path, days: float, *, with_stages: bool) -> Iterator[tuple[Path, str]]:
    """What could be removed at or below a folder, and why."""
    for root, subfolders, files in os.walk(folder.resolve()):
        path = Path(root)
        is_partial = path.name.endswith(PARTIAL)
        is_run = "scores.json" in files
        if is_partial or is_cached(path) or is_run:
            subfolders.clear()  # what they hold is removed with them, or stays

        if is_partial:
            if time.time() - find_last_change(path) > DAY:
                yield path, "left by a killed process"
        elif is_cached(path):
            unused_days = (time.time() - path.stat().st_mtime) / DAY
            if is_outdated(path):
                yield path, "of an older format, which this version does not read"
            elif unused_days > days:
                yield path, f"not used for {count_noun(round(unused_days), 'day')}"
        elif with_stages and is_run:
            for stage_folder in find_stage_folders(path):
                yield stage_folder, f"of a finished run{describe_loss(stage_folder)}"


def find_last_change(folder: Path) -> float:
    """The latest modification time of a folder or anything in it, in seconds since 1970. What a build removes
    meanwhile is left out."""
    times = []
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):
            times.append(path.lstat().st_mtime)
    return max(times, default=time.time())


def find_stage_folders(run: Path) -> list[Path]:
    """The folders of stages and of step checkpoints of a finished run, if they are not empty. None of a run
    that is unfinished, nor of one whose scores cannot be read, for which a line is printed."""
    try:
        is_finished = Scores.load(run / "scores.json").run["finished"]
    except (ValueError, OSError) as error:
        print(f"cpt: leaving {run}: {error}")
        return []
    if not is_finished:
        return []
    folders = [run / "stages", run / "checkpoints"]
    return [folder for folder in folders if any(folder.glob("*"))]


def describe_loss(stage_folder: Path) -> str:
    """What a finished run needs its stage files for; empty for the folder of step checkpoints."""
    if stage_folder.name != "stages":
        return ""
    order = Scores.load(stage_folder.parent / "scores.json").run["order"]
    numbers = {int(path.stem) for path in stage_folder.glob(f"[0-9]*.{STAGE_FILE}")}
    # The stage before a domain continues without it; the last one has modules of all domains, and is the one
    # before the next domain of a run that extends this one.
    given_back = [domain for number, domain in enumerate(order) if number in numbers]
    if given_back:
        return f", with which extend adds domains and cpt.withdraw gives back {', '.join(given_back)}"
    return ", with which extend adds domains and cpt.withdraw gives back those that were added since"


def describe_users(path: Path) -> str:
    """`; in use by process 17 on node1` of a cached folder, else nothing."""
    processes = find_users(path) if is_cached(path) else []
    names = [f"process {process.pid} on {process.host}" for process in processes]
    return f"; in use by {', '.join(names)}" if names else ""


def is_cached(path: Path) -> bool:
    return CACHED.fullmatch("/".join(path.parts[-2:])) is not None


def remove(path: Path) -> str:
    """Removes a file or folder, but not while a process makes or uses it or a run has its folder; returns
    what came of it. Raises OSError if it could not be removed."""
    # The lock of whoever writes there: of a run for its stages, of an artifact for its partial folder too.
    name = path.name.removesuffix(PARTIAL)
    is_of_run = name in ("stages", "checkpoints")
    lock = path.parent / (".lock" if is_of_run else f"{name}.lock")
    try:
        with FileLock(lock, timeout=0):
            if not is_cached(path):  # which no process records a use of
                discard(path)
                check_removed(path)
                return "removed"

            # Moved away first: a process records its use before it looks for the artifact.
            removed_path = path.with_name(f"{path.name}.removed{PARTIAL}")
            os.replace(path, removed_path)
            use = describe_users(path)
            if use:
                os.replace(removed_path, path)
                return use.removeprefix("; ")
            discard(removed_path)
            check_removed(removed_path)
            return "removed"
    except Timeout:
        return "in use"


def check_removed(path: Path) -> None:
    """Raises OSError for a file or folder that is still there after `discard`, which ignores errors: files of
    another user may be left."""
    if path.exists():
        raise PermissionError(errno.EACCES, f"files are left in {path}")


if __name__ == "__main__":
    run_program(main)
