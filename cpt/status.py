"""Status of runs: `python -m cpt.status [FOLDER…]`, by default outputs.

A line per run at or below the folders: state, fraction learned, time left, age of the last heartbeat,
process, and what it does or why it ended. Read-only."""

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

from cpt.core.heartbeat import (
    ACTIVE,
    PROGRESS_FILE,
    SWEEP_FILE,
    Heartbeat,
    ProcessId,
    age_s,
    load_sweep,
    utc_now,
)
from cpt.core.output import run_program
from cpt.evaluation.journal import rows_so_far

STATES = (
    *("running", "waiting", "queued", "finished", "preempted", "failed"),
    "killed",  # its process is gone without a word
    "silent",  # on another machine, and without a heartbeat for heartbeat.STALE_S
    "unbegun",  # listed by a sweep that has ended
    "unfinished",  # without a heartbeat file
    "unknown",  # damaged
)
RUN_FILES = ("config.yaml", "scores.json", PROGRESS_FILE)
HEADER = ("state", "learned", "left", "seen", "by", "run")
ROW = "{:10} {:>7} {:>10} {:>7}  {:20}  {}"
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
MAX_WHY = 120  # characters of a message in the table; --json has all
CLEAR_SCREEN = "\033[H\033[J"


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run from outside; None where unknown. The fields are those of `--json`."""

    run: str
    state: str  # one of STATES
    phase: str = ""
    stage: int | None = None
    stages: int | None = None
    step: int | float | None = None
    steps: float | None = None
    unit: str = ""
    learned: float | None = None  # fraction of the optimizer steps, or of the stages if only these are known
    phase_eta_s: float | None = None
    run_eta_s: float | None = None
    untimed: Sequence[str] = ()  # later phases that run_eta_s does not include
    seen_s: float | None = None  # seconds since the last heartbeat
    moved_s: float | None = None  # seconds since the last progress
    host: str | None = None
    pid: int | None = None
    why: str = ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpt.status", description=__doc__.split("\n\n")[1])
    about = "run folders, or folders that hold them (default: outputs)"
    parser.add_argument("folders", type=Path, nargs="*", default=[Path("outputs")], help=about)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="refresh until Ctrl-C")
    given = parser.parse_args(arguments)
    cast(TextIOWrapper, sys.stdout).reconfigure(errors="backslashreplace")  # file names may be no text
    if given.watch is not None and not 0 < given.watch < math.inf:
        return fail(f"--watch={given.watch} is invalid: not a period. Allowed: seconds, more than 0")
    if absent := [printable(path) for path in given.folders if not path.is_dir()]:
        allowed = "run folders, or folders that hold them"
        return fail(f"FOLDER={','.join(absent)} is invalid: no such folder. Allowed: {allowed}")
    with suppress(KeyboardInterrupt):
        while True:
            runs = read_statuses(given.folders)
            if given.watch is None and not runs:
                return fail(f"no run in {', '.join(map(printable, given.folders))}")
            number = Counter(run.state for run in runs)
            counts = {state: number[state] for state in STATES if number[state]}
            text = "\n".join(format_statuses(runs, counts))
            if given.json:
                text = json.dumps({"at": utc_now(), "counts": counts, "runs": [asdict(run) for run in runs]})
            clears = given.watch is not None and sys.stdout.isatty() and not given.json
            print(CLEAR_SCREEN * clears + text, flush=True)
            if given.watch is None:
                break
            time.sleep(given.watch)
    return 0


def fail(why: str) -> int:
    print(f"cpt: {why}", file=sys.stderr)
    return 1


def read_statuses(folders: Sequence[Path]) -> list[RunStatus]:
    """The runs at or below folders, and those that sweeps there have listed, by name."""
    found, queued = dict[Path, RunStatus](), dict[Path, ProcessId]()
    for folder in folders:
        for at, below, files in os.walk(os.path.normpath(folder)):
            if SWEEP_FILE in files and (sweep := load_sweep(Path(at))):
                queued |= {Path(os.path.normpath(Path(at) / run)): sweep[1] for run in sweep[0]}
            if not {*RUN_FILES}.isdisjoint(files):
                found[Path(at)] = read_status(Path(at))
                below.clear()
            below[:] = [each for each in below if not each.startswith(".")]  # .cache, .hydra
    for path in queued.keys() - found.keys():
        about: dict[str, Any] = {"state": "queued", "host": queued[path].host, "pid": queued[path].pid}
        if queued[path].is_alive() is False:
            about = {"state": "unbegun", "why": "its sweep has ended; the same command begins it"}
        begun = any((path / name).exists() for name in RUN_FILES)
        found[path] = read_status(path) if begun else RunStatus(run=str(path), **about)
    return [found[path] for path in sorted(found, key=str)]


def read_status(path: Path) -> RunStatus:
    finished, learned, why = peek_scores(path)
    try:
        beat = Heartbeat.load(path)
    except ValueError as error:
        beat, why = None, str(error)
    if beat is None:
        state = "finished" if finished else "unknown" if why else "unfinished"
        return RunStatus(run=str(path), state=state, learned=learned, why=why)
    state, said, alive = beat.state, beat.why, beat.alive
    if beat.active and not alive:
        state, said = "silent" if beat.process.is_alive() is None else "killed", ""
    if finished and not alive:  # the scores decide
        said = "" if state == "finished" else f"its last start: {state}, {said}".rstrip(", ")
        state = "finished"
    elif state == "finished":
        state, said = "unfinished", "scores.json is not that of a finished run"
    shown = ("phase", "stage", "stages", "step", "steps", "unit") * (state != "finished")
    shown += ("phase_eta_s", "run_eta_s", "untimed") * (state in ACTIVE)
    return RunStatus(
        run=str(path),
        state=state,
        why="; ".join(filter(None, (said, why))),
        learned=learned if beat.learned is None else beat.learned,
        seen_s=age_s(beat.written),
        moved_s=age_s(beat.moved),
        host=beat.process.host,
        pid=beat.process.pid,
        **{name: getattr(beat, name) for name in shown},
    )


def peek_scores(folder: Path) -> tuple[bool, float | None, str]:
    """Whether the run is finished, the fraction of its stages that have scores, and why scores.json cannot be
    read. The matrix, which may be large, is not parsed."""
    found: dict[str, Any] = {}
    try:
        with (folder / "scores.json").open(encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(": ")
                if name in ('"rows"', '"run"'):
                    found[name.strip('"')] = json.loads(value.rstrip().rstrip(","))
                if len(found) == 2:
                    break
        done, stages = rows_so_far(folder / "scores.json", len(found["rows"])) - 1, len(found["run"]["order"])
        return found["run"]["finished"] is True, min(1.0, max(0, done) / stages) if stages else None, ""
    except FileNotFoundError:
        return False, None, ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False, None, "scores.json cannot be read"


def format_statuses(runs: Sequence[RunStatus], counts: dict[str, int]) -> Iterator[str]:
    """The lines of the table, cut to the width of a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    yield cut_line(ROW.format(*HEADER), width)
    for run in runs:
        learned = "" if run.learned is None else f"{math.floor(100 * run.learned)} %"
        left = "" if run.run_eta_s is None else format_time(run.run_eta_s) + "+" * bool(run.untimed)
        age = run.seen_s
        size, unit = next(each for each in UNITS if (age or 0) >= each[0] or each[0] == 1)
        seen = "" if age is None else f"{int(age // size)} {unit}"
        held = run.host is not None and run.state in (*ACTIVE, "queued", "silent")
        by = f"{printable(run.host)}:{run.pid}" if held else ""
        stage = f" ({run.stage}/{run.stages})" if run.stage and run.stages else ""
        percent = f" {math.floor(100 * run.step / run.steps)} %" if run.step is not None and run.steps else ""
        eta = f", {format_time(run.phase_eta_s)}" if run.phase_eta_s is not None else ""
        phase = f"{printable(run.phase)}{stage}{percent}{eta}"
        what = ": ".join(filter(None, (phase, cut_line(printable(run.why), MAX_WHY))))
        name = "  ".join(filter(None, (printable(run.run), what)))
        yield cut_line(ROW.format(run.state, learned, left, seen, by, name).rstrip(), width)
    total = ", ".join(f"{number} {state}" for state, number in counts.items())
    yield f"{len(runs)} run{'s' * (len(runs) != 1)}: {total}"


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


def cut_line(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"[:width]


if __name__ == "__main__":
    run_program(main)
