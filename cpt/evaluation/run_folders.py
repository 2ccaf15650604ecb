"""The folder of a run where the folder of an experiment, with runs below it, was given."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import abbreviate, count_noun
from cpt.evaluation.scores import Scores

RUN_FILES = {"scores.json", "config.yaml"}


def choose_run(folder: Path) -> Path:
    """The folder of a run that a program was given: the folder itself, or the only finished run below it,
    which a line on stderr names. Without a run below it, it is the folder. Raises ValueError for several
    finished runs, and for runs of which none is finished."""
    if is_run(folder):
        return folder
    finished_runs, num_unfinished = find_finished_runs(folder)
    if len(finished_runs) == 1:
        (run,) = finished_runs
        print(f"RUN={folder}: taking {run}, the only finished run below it", file=sys.stderr)
        return run
    if finished_runs:
        raise InvalidOptionError(
            "RUN",
            folder,
            reason=f"{count_noun(len(finished_runs), 'finished run')} are below it",
            allowed=f"one of them: {abbreviate(finished_runs, with_count=True)}",
        )
    if num_unfinished:
        raise InvalidOptionError(
            "RUN",
            folder,
            reason=f"none of {count_noun(num_unfinished, 'run')} below it is finished",
            allowed="the folder of a finished run",
        )
    return folder


def suggest_runs(folder: Path) -> str:
    """What follows the message on an option that names a run, if its folder has no run: the finished runs
    below it; empty without one. Options take no other folder than the one that they name: the config of a run
    must mean the same when further runs are there."""
    if is_run(folder):
        return ""
    finished_runs, _ = find_finished_runs(folder)
    if not finished_runs:
        return ""
    return f"; below this folder: {abbreviate(finished_runs, with_count=True)}"


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_FILES)


def find_finished_runs(folder: Path) -> tuple[list[Path], int]:
    """The finished runs below a folder, sorted, and the number of other runs below it."""
    finished_runs = []
    num_unfinished = 0
    for run in sorted(find_runs_below(folder)):
        if is_finished(run):
            finished_runs.append(run)
        else:
            num_unfinished += 1
    return finished_runs, num_unfinished


def find_runs_below(folder: Path) -> Iterator[Path]:
    """The folders of runs below a folder, apart from those in hidden folders and in other runs."""
    for path, subfolders, files in os.walk(folder):
        if RUN_FILES.isdisjoint(files):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        else:
            yield Path(path)
            subfolders.clear()


def is_finished(run: Path) -> bool:
    try:
        return bool(Scores.load(run / "scores.json").run["finished"])
    except (OSError, ValueError):  # it has none yet, or a damaged one, which no program would take
        return False
