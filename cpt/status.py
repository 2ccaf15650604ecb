"""How far runs are: `python -m cpt.status [FOLDER…]`, by default outputs.

A line for each run at or below the folders: its state, how much is learned, the time left, the last sign of
life, who holds it, what it is at or why it ended. Nothing is changed, and nobody is waited for."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from cpt.core import queues, signs
from cpt.core.output import run_program
from cpt.core.queues import Queue
from cpt.core.signs import Sign
from cpt.evaluation.lines import count_rows

STATES = (
    *("running", "waiting", "queued", "finished", "preempted", "failed"),
    "killed",  # its process is gone and has not said why
    "silent",  # held on another machine, and no sign of life has come for signs.FRESH_S
    "unbegun",  # of a sweep that has ended
    "unfinished",  # without a sign of its own: of an older cpt
    "unknown",  # damaged
)
HELD = ("running", "waiting", "queued", "silent")  # states in which a process is, or may be, at work
OF_RUNS = ("config.yaml", "scores.json", signs.FILE)
ROW = "{:10} {:>7} {:>10} {:>7}  {:20}  {}"
HEAD = ("state", "learned", "left", "seen", "by", "run")
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
FEW = 120  # characters of a message on a line; --json has all
CLEAR = "\033[H\033[J"


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is seen of a run from outside; None is what is not known."""

    run: str
    state: str  # one of STATES
    phase: str = ""
    stage: int | None = None
    stages: int | None = None
    step: float | None = None
    steps: float | None = None
    unit: str = ""
    learned: float | None = None  # share of the optimizer steps, or of the stages where only these are known
    phase_eta_s: float | None = None
    run_eta_s: float | None = None
    untimed: Sequence[str] = ()  # what is not in run_eta_s
    seen_s: float | None = None  # seconds since the last sign of life
    moved_s: float | None = None  # seconds since something was done
    host: str | None = None
    pid: int | None = None
    why: str = ""


def main(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text
    if given.watch is not None and not 0 < given.watch < math.inf:
        return refuse(f"--watch={given.watch}; allowed: seconds, more than 0")
    if absent := [path for path in given.folders if not path.is_dir()]:
        return refuse(
            f"no folder {', '.join(map(show, absent))}; allowed: run folders, and folders that hold them"
        )
    with suppress(KeyboardInterrupt):
        while True:
            looks = look_at(given.folders)
            if not looks and given.watch is None:
                return refuse(f"no run in {', '.join(map(show, given.folders))}")
            clears = given.watch is not None and sys.stdout.isatty() and not given.json
            print(CLEAR * clears + (as_json(looks) if given.json else "\n".join(tell(looks))), flush=True)
            if given.watch is None:
                break
            time.sleep(given.watch)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m cpt.status", description=__doc__.split("\n\n")[1])
    made.add_argument(
        "folders",
        type=Path,
        nargs="*",
        default=[Path("outputs")],
        metavar="FOLDER",
        help="run folders, or folders that hold them (default: outputs)",
    )
    made.add_argument("--json", action="store_true", help="for programs")
    made.add_argument(
        "--watch", type=float, metavar="SECONDS", help="look again every so often, until Ctrl-C"
    )
    return made


def refuse(why: str) -> int:
    print(f"cpt: {why}", file=sys.stderr)
    return 1


def look_at(folders: Sequence[Path]) -> list[Look]:
    """The runs at or below folders, by name, and those that sweeps there have not begun."""
    runs, sweeps = find_runs(folders)
    listed = {
        Path(os.path.normpath(sweep / run)): queue
        for sweep in sweeps
        if (queue := Queue.load(sweep)) is not None
        for run in queue.runs
    }
    looks = [look(path) for path in runs | {path for path in listed if is_run(path)}]
    return sorted(
        [*looks, *(not_begun(path, listed[path]) for path in listed if not is_run(path))], key=by_name
    )


def by_name(look: Look) -> str:
    return look.run


def is_run(path: Path) -> bool:
    return any((path / name).exists() for name in OF_RUNS)


def find_runs(given: Sequence[Path]) -> tuple[set[Path], set[Path]]:
    """Run folders, and the folders of sweeps, at or below the given ones."""
    runs, sweeps = set(), set()
    for path in given:
        for at, folders, files in os.walk(os.path.normpath(path)):
            if queues.FILE in files:
                sweeps.add(Path(at))
            if not {*OF_RUNS}.isdisjoint(files):
                runs.add(Path(at))
                folders.clear()
            folders[:] = [each for each in folders if not each.startswith(".")]  # .cache, .hydra
    return runs, sweeps


def not_begun(path: Path, queue: Queue) -> Look:
    """A run that a sweep has listed and that has no folder yet; whether a sweep on another machine is there
    still, nobody can tell from here."""
    who = {"host": queue.holder.host, "pid": queue.holder.pid}
    if queue.holder.lives() is False:
        return Look(run=str(path), state="unbegun", why="its sweep has ended; the same command begins it")
    return Look(run=str(path), state="queued", **who)


def look(path: Path) -> Look:
    """What is seen of a run folder."""
    finished, learned, why = read_scores(path)
    try:
        sign = Sign.load(path)
    except ValueError as error:
        state = "finished" if finished else "unknown"
        return Look(run=str(path), state=state, learned=learned, why=str(error))
    if sign is None:
        state = "finished" if finished else "unknown" if why else "unfinished"
        return Look(run=str(path), state=state, learned=learned, seen_s=touched(path), why=why)
    state, said = judge(sign, finished)
    going, own = state in signs.GOING, asdict(sign)
    taken = (
        "phase",
        "stage",
        "stages",
        "step",
        "steps",
        "unit",
        *("phase_eta_s", "run_eta_s", "untimed") * going,
    )
    return Look(
        run=str(path),
        state=state,
        learned=sign.learned if sign.learned is not None else learned,
        seen_s=sign.age_s,
        moved_s=signs.age(sign.moved),
        host=sign.holder.host,
        pid=sign.holder.pid,
        why="; ".join(filter(None, (said, why))),
        **{name: own[name] for name in taken if state != "finished"},
    )


def judge(sign: Sign, finished: bool) -> tuple[str, str]:
    """The state of a run with a sign, and why: whether it is finished is what its scores say."""
    if sign.alive:
        return sign.state, sign.why
    ended = {True: sign.state, False: "killed", None: "silent"}[not sign.going or sign.holder.lives()]
    if finished:
        return "finished", "" if ended == "finished" else f"its last start: {ended}, {sign.why}".rstrip(", ")
    if ended == "finished":
        return "unfinished", "scores.json is not that of a finished run"
    return ended, sign.why if not sign.going else ""


def read_scores(folder: Path) -> tuple[bool, float | None, str]:
    """Whether a run's scores say that it is finished, the share of its stages that they have, and why they
    cannot be read; not the matrix, which may be large."""
    found: dict[str, Any] = {}
    try:
        with (folder / "scores.json").open(encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(": ")
                if name in ('"rows"', '"run"'):
                    found[name.strip('"')] = json.loads(value.rstrip().rstrip(","))
                if len(found) == 2:
                    break
        done = count_rows(folder / "scores.json", len(found["rows"])) - 1
        return found["run"]["finished"] is True, share(done, len(found["run"]["order"])), ""
    except FileNotFoundError:
        return False, None, ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False, None, "scores.json cannot be read"


def share(done: int, stages: int) -> float | None:
    return min(1.0, max(0, done) / stages) if stages else None


def touched(folder: Path) -> float | None:
    """Seconds since something was written of a run that says nothing of itself."""
    times = [os.stat(folder / name).st_mtime for name in (*OF_RUNS, "run.log") if (folder / name).exists()]
    return max(0.0, time.time() - max(times)) if times else None


def tell(looks: Sequence[Look]) -> Iterator[str]:
    """A line for each run, cut where a terminal ends, and one for all."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for row in (HEAD, *map(columns, looks)):
        yield cut(ROW.format(*row).rstrip(), width)
    counts = ", ".join(f"{number} {state}" for state, number in count(looks).items())
    yield f"{len(looks)} run{'s' * (len(looks) != 1)}: {counts}"


def columns(look: Look) -> tuple[str, ...]:
    learned = "" if look.learned is None else f"{math.floor(100 * look.learned)} %"
    left = "" if look.run_eta_s is None else clock(look.run_eta_s) + "+" * bool(look.untimed)
    by = f"{show(look.host)}:{look.pid}" if look.host is not None and look.state in HELD else ""
    what = ": ".join(filter(None, (doing(look), cut(show(look.why), FEW))))
    return look.state, learned, left, ago(look.seen_s), by, "  ".join(filter(None, (show(look.run), what)))


def doing(look: Look | Sign, *, timed: bool = True) -> str:
    """The phase, where in it and, if `timed`, the time left of it."""
    number = f" ({look.stage}/{look.stages})" if look.stage and look.stages else ""
    step = ""
    if look.step is not None and look.steps:
        step = f" {math.floor(100 * look.step / look.steps)} %"
    left = f", {clock(look.phase_eta_s)}" if timed and look.phase_eta_s is not None else ""
    return f"{show(look.phase)}{number}{step}{left}"


def clock(seconds: float) -> str:
    """0:12, 1:02:03, 3 d 4 h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def ago(seconds: float | None) -> str:
    """In the largest unit of which there is one."""
    if seconds is None:
        return ""
    size, unit = next(each for each in UNITS if seconds >= each[0] or each[0] == 1)
    return f"{int(seconds // size)} {unit}"


def show(text: object) -> str:
    """A name or a message on one line of a terminal, whatever is in it."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text)
    )


def cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"[:width]


def count(looks: Sequence[Look]) -> dict[str, int]:
    """How many runs are in each state that one is in."""
    found = Counter(each.state for each in looks)
    return {state: found[state] for state in STATES if found[state]}


def as_json(looks: Sequence[Look]) -> str:
    return json.dumps({"at": signs.now(), "counts": count(looks), "runs": [asdict(each) for each in looks]})


if __name__ == "__main__":
    run_program(main)
