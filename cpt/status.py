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
from cpt.core.output import run_program

STATES = (
    *("running", "waiting", "finished", "preempted", "failed"),
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
    about = "run folders, or folders that hold them (default: outputs)"
    parser.add_argument("folders", type=Path, nargs="*", default=[Path("outputs")], help=about)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    given = parser.parse_args(arguments)
    cast(TextIOWrapper, sys.stdout).reconfigure(errors="backslashreplace")  # file names may be no text
    absent = ",".join(printable(path) for path in given.folders if not path.is_dir())
    runs = [] if absent else read_statuses(given.folders)
    if not runs:
        why = f"FOLDER={absent} is invalid: no such folder. Allowed: run folders, or folders that hold them"
        why = why if absent else f"no run in {', '.join(map(printable, given.folders))}"
        print(f"cpt: {why}", file=sys.stderr)
        return 1
    number = Counter(run.state for run in runs)
    counts = {state: number[state] for state in STATES if number[state]}
    if given.json:
        print(json.dumps({"at": utc_now(), "counts": counts, "runs": [asdict(run) for run in runs]}))
    else:
        total = ", ".join(f"{number} {state}" for state, number in counts.items())
        lines = [ROW.format(*HEADER), *map(format_status, runs)]
        print(*lines, f"{len(runs)} run{'s' * (len(runs) != 1)}: {total}", sep="\n")
    return 0


def read_statuses(folders: Sequence[Path]) -> list[RunStatus]:
    """The runs at or below folders, by name."""
    found = dict[Path, RunStatus]()
    for folder in folders:
        for at, below, files in os.walk(os.path.normpath(folder)):
            below[:] = [each for each in below if not each.endswith(PARTIAL)]  # copies that are being made
            if not {*RUN_FILES}.isdisjoint(files):
                found[Path(at)] = read_status(Path(at))
                below.clear()
            below[:] = [each for each in below if not each.startswith(".")]  # .cache, .hydra
    return [found[path] for path in sorted(found, key=str)]


def read_status(path: Path) -> RunStatus:
    finished, done, why = peek_scores(path)
    try:
        beat = Heartbeat.load(path)
    except ValueError as error:
        beat, why = None, str(error)
    if beat is None:
        state = "finished" if finished else "unknown" if why else "unfinished"
        return RunStatus(run=str(path), state=state, done=1.0 if finished else done, why=why)
    state, said, alive = beat.state, beat.why, beat.alive
    if beat.active and not alive:
        state, said = "silent" if beat.process.is_alive() is None else "killed", ""
    if alive and beat.process.is_stopped():
        state, said = "stopped", f"kill -CONT {beat.process.pid} continues it"
    if finished and not alive:  # the scores decide
        said = "" if state == "finished" else f"its last start: {state}, {said}".rstrip(", ")
        state = "finished"
    elif state == "finished":
        state, said = "unfinished", "scores.json is not that of a finished run"
    done, why = done if beat.done is None else beat.done, "; ".join(filter(None, (said, why)))
    return RunStatus(run=str(path), state=state, done=done, why=why, process=beat.process, heartbeat=beat)


def peek_scores(folder: Path) -> tuple[bool, float | None, str]:
    """Whether a run is finished, its fraction done, why scores.json is unreadable."""
    path = folder / "scores.json"
    try:
        facts = read_run_facts(path)
        num_stages_done, num_stages = len(facts["rows"]) - 1, len(facts["run"]["order"])
        is_finished = facts["run"]["finished"] is True
    except FileNotFoundError:
        return False, None, ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False, None, "scores.json cannot be read"
    fraction = min(1.0, max(0, num_stages_done) / num_stages) if num_stages else None
    return is_finished, fraction, ""


def read_run_facts(path: Path) -> dict[str, Any]:
    """The entries `rows` and `run` of a scores.json. cpt writes an entry a line: of such a file the matrix is
    not read. Any other form is read as a report reads it. Raises ValueError for a damaged file, OSError."""
    facts: dict[str, Any] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(": ")
            if name in ('"rows"', '"run"'):
                try:
                    facts[name.strip('"')] = json.loads(value.rstrip().rstrip(","))
                except ValueError:  # over several lines
                    break
            if len(facts) == 2:
                return facts

    from cpt.evaluation.scores import Scores  # imports that the usual form does not need

    scores = Scores.load(path)
    return {"rows": scores.rows, "run": scores.run}


def format_status(run: RunStatus) -> str:
    """A line of the table."""
    left = seen = by = phase = ""
    if (beat := run.heartbeat) is not None:
        age, is_active = age_s(beat.written), run.state in ACTIVE
        size, unit = next(each for each in UNITS if age >= each[0] or each[0] == 1)
        seen = f"{int(age // size)} {unit}"
        if is_active and beat.run_eta_s is not None:
            left = format_time(beat.run_eta_s)
        if run.state != "finished":
            phase = printable(beat.phase) + (f" ({beat.stage}/{beat.stages})" if beat.stage else "")
            if beat.step is not None and beat.steps:
                phase += f" {math.floor(100 * beat.step / beat.steps)} %"
            if is_active and beat.phase_eta_s is not None:
                phase += f", {format_time(beat.phase_eta_s)}"
    if run.process is not None and run.state in (*ACTIVE, "silent", "stopped"):
        by = f"{printable(run.process.host)}:{run.process.pid}"
    done, why = "" if run.done is None else f"{math.floor(100 * run.done)} %", printable(run.why)
    what = ": ".join(filter(None, (phase, why if len(why) <= MAX_WHY else f"{why[: MAX_WHY - 1]}…")))
    name = "  ".join(filter(None, (printable(run.run), what)))
    return ROW.format(run.state, done, left, seen, by, name).rstrip()


def format_time(seconds: float) -> str:
    """`0:12`, `1:02:03`, `3 d 4 h`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: object) -> str:
    """A name or a message on one line, control characters escaped."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text)
    )


if __name__ == "__main__":
    run_program(main)
