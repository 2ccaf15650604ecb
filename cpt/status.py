"""Status of runs: `python -m cpt.status [FOLDER…]`, by default outputs.

A line per run at or below the folders: state, fraction done, time left, age of the last heartbeat,
process, and what it does or why it ended. Read-only."""

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

from cpt.core.cache import PARTIAL
from cpt.core.heartbeat import ACTIVE, PROGRESS_FILE, Heartbeat, ProcessId, age_s, utc_now
from cpt.core.messages import count_noun, format_duration, truncate
from cpt.core.output import run_program
from cpt.evaluation.row_files import find_row_files

STATES = (
    "running",
    "waiting",
    "finished",
    "preempted",
    "failed",
    "stopped",  # its process is there, but stopped by SIGSTOP, Ctrl-Z, a debugger or a scheduler
    "killed",  # its process is gone without a word
    "silent",  # on another machine, and without a heartbeat for heartbeat.STALE_S
    "unfinished",  # without a heartbeat file
    "unknown",  # damaged
)
RUN_FILES = ("config.yaml", "scores.json", PROGRESS_FILE)
HEADER = ("state", "done", "left", "seen", "by", "run")
ROW = "{:10} {:>7} {:>10} {:>7}  {:20}  {}"
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
MAX_WHY = 120  # characters of a message in the table; --json has all


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run from outside; None where unknown. The fields are those of `--json`."""

    run: str
    state: str  # one of STATES
    done: float | None = None  # fraction of the optimizer steps, or of the stages if only these are known
    why: str = ""
    process: ProcessId | None = None
    heartbeat: Heartbeat | None = None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpt.status", description=__doc__.split("\n\n")[1])
    folders = "run folders, or folders that hold them (default: outputs)"
    parser.add_argument("folders", type=Path, nargs="*", default=[Path("outputs")], help=folders)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args(arguments)
    cast(TextIOWrapper, sys.stdout).reconfigure(errors="backslashreplace")  # file names may be no text

    absent = [escape_controls(path) for path in options.folders if not path.is_dir()]
    if absent:
        allowed = "run folders, or folders that hold them"
        message = f"FOLDER={','.join(absent)} is invalid: no such folder. Allowed: {allowed}"
        print(f"cpt: {message}", file=sys.stderr)
        return 1
    runs = read_statuses(options.folders)
    if not runs:
        print(f"cpt: no run in {', '.join(map(escape_controls, options.folders))}", file=sys.stderr)
        return 1

    runs_by_state = Counter(run.state for run in runs)
    counts = {state: runs_by_state[state] for state in STATES if runs_by_state[state]}
    if options.json:
        print(json.dumps({"at": utc_now(), "counts": counts, "runs": [asdict(run) for run in runs]}))
    else:
        print(ROW.format(*HEADER))
        for run in runs:
            print(format_status(run))
        total = ", ".join(f"{count} {state}" for state, count in counts.items())
        print(f"{count_noun(len(runs), 'run')}: {total}")
    return 0


def read_statuses(folders: Sequence[Path]) -> list[RunStatus]:
    """The runs at or below folders, by name."""
    statuses: dict[Path, RunStatus] = {}
    for folder in folders:
        for root, subfolders, files in os.walk(os.path.normpath(folder)):
            is_run = any(name in files for name in RUN_FILES)
            if is_run:
                statuses[Path(root)] = read_status(Path(root))
                subfolders.clear()
            # Neither copies that are being made, nor .cache and .hydra.
            subfolders[:] = [
                name for name in subfolders if not name.endswith(PARTIAL) and not name.startswith(".")
            ]
    return [statuses[path] for path in sorted(statuses, key=str)]


def read_status(path: Path) -> RunStatus:
    """The status of a run by its scores and its heartbeat, either of which may be missing or damaged."""
    is_finished, fraction, problem = peek_scores(path)
    try:
        beat = Heartbeat.load(path)
    except ValueError as error:
        beat = None
        problem = str(error)

    if beat is None:
        if is_finished:
            return RunStatus(run=str(path), state="finished", done=1.0, why=problem)
        state = "unknown" if problem else "unfinished"
        return RunStatus(run=str(path), state=state, done=fraction, why=problem)

    state, message = judge_state(beat, is_finished=is_finished)
    return RunStatus(
        run=str(path),
        state=state,
        done=fraction if beat.done is None else beat.done,
        why="; ".join(filter(None, (message, problem))),
        process=beat.process,
        heartbeat=beat,
    )


def judge_state(beat: Heartbeat, *, is_finished: bool) -> tuple[str, str]:
    """The state of a run, and why, from its heartbeat and its process; `is_finished` by its scores."""
    state: str = beat.state
    message = beat.why
    is_alive = beat.alive
    if beat.active and not is_alive:
        is_elsewhere = beat.process.is_alive() is None
        state = "silent" if is_elsewhere else "killed"
        message = ""
    if is_alive and beat.process.is_stopped():
        state = "stopped"
        message = f"kill -CONT {beat.process.pid} continues it"

    # Scores take precedence: if a finished run was started again, the heartbeat is that of the new start.
    if is_finished and not is_alive:
        if state == "finished":
            return "finished", ""
        return "finished", f"its last start: {state}, {message}".rstrip(", ")
    if state == "finished":
        return "unfinished", "scores.json is not that of a finished run"
    return state, message


def peek_scores(folder: Path) -> tuple[bool, float | None, str]:
    """Whether a run is finished, its fraction done, why scores.json is unreadable."""
    path = folder / "scores.json"
    try:
        rows, run = read_rows_and_run(path)
        num_new_rows = len(list(find_row_files(folder, first=len(rows))))
        num_stages_done = len(rows) + num_new_rows - 1
        # The row of one stage with all domains has this name, which no domain may have.
        num_stages = 1 if "joint" in rows else len(run["order"])
        is_finished = run["finished"] is True
    except FileNotFoundError:
        return False, None, ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False, None, "scores.json cannot be read"
    fraction = min(1.0, max(0, num_stages_done) / num_stages) if num_stages else None
    return is_finished, fraction, ""


def read_rows_and_run(path: Path) -> tuple[Any, Any]:
    """The entries `rows` and `run` of a scores.json. cpt writes an entry a line: of such a file the matrix is
    not read. Any other form is read as a report reads it. Raises ValueError for a damaged file, OSError."""
    entries = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(": ")
            if key in ('"rows"', '"run"'):
                try:
                    entries[key] = json.loads(value.rstrip().rstrip(","))
                except ValueError:  # over several lines
                    break
            if len(entries) == 2:
                return entries['"rows"'], entries['"run"']

    from cpt.evaluation.scores import Scores  # imports that the usual form does not need

    scores = Scores.load(path)
    return scores.rows, scores.run


def format_status(run: RunStatus) -> str:
    """A line of the table."""
    beat = run.heartbeat
    is_active = run.state in ACTIVE
    remaining = ""
    age = ""
    phase = ""
    if beat is not None:
        age = format_age(age_s(beat.written))
        if is_active and beat.run_eta_s is not None:
            remaining = format_duration(beat.run_eta_s)
        if run.state != "finished":
            phase = format_phase(beat, is_active=is_active)

    # The process of a run that has ended is of no use: another one may have its number.
    process = ""
    if run.process is not None and (is_active or run.state in ("silent", "stopped")):
        process = f"{escape_controls(run.process.host)}:{run.process.pid}"
    percentage = "" if run.done is None else f"{math.floor(100 * run.done)} %"
    details = ": ".join(filter(None, (phase, truncate(escape_controls(run.why), MAX_WHY))))
    name = "  ".join(filter(None, (escape_controls(run.run), details)))
    return ROW.format(run.state, percentage, remaining, age, process, name).rstrip()


def format_phase(beat: Heartbeat, *, is_active: bool) -> str:
    """What a run does, for example `training (2/3) 40 %, 0:12`."""
    phase = escape_controls(beat.phase)
    if beat.stage:
        phase += f" ({beat.stage}/{beat.stages})"
    if beat.step is not None and beat.steps:
        phase += f" {math.floor(100 * beat.step / beat.steps)} %"
    if is_active and beat.phase_eta_s is not None:
        phase += f", {format_duration(beat.phase_eta_s)}"
    return phase


def format_age(seconds: float) -> str:
    """In whole units of the largest kind: `5 s`, `2 min`, `3 d`."""
    for size, unit in UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return "0 s"


def escape_controls(text: object) -> str:
    """A name or a message on one line, control characters escaped."""
    characters = []
    for character in str(text):
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


if __name__ == "__main__":
    run_program(main)
