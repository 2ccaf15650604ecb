"""The same command twice, killed holders, sweeps that are started again: does each end, and with the same
bits?

    python tests/campaigns/concurrency.py --trials 60 --seed 0

In turn: a second start of a run, at any moment of the first, waits or is refused in one line with the
host and the number of the process that is at work; a start beside a killed one's lock; a second start of
a sweep while it is running; a sweep whose process was killed, started again at once while its jobs may
still be there; and the first three again on files as of a slow server (tests/support/remote_files.py):
calls that take up to 0.3 s and a few up to 3 s. In each eighth such trial of a run some files cannot be
read either (ESTALE, EIO): a start may end with that in one line, and the same command goes on. The shared
cache is empty in every fourth trial."""

import random
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

from tests.campaigns import runs  # noqa: E402
from tests.campaigns.frame import ROOT, conduct  # noqa: E402
from tests.support.processes import ended, started  # noqa: E402
from tests.support.remote_files import remote  # noqa: E402

REMOTE = "remote "
KINDS = ("twice", "stale lock", "sweep twice", "sweep again")
KINDS += tuple(f"{REMOTE}{kind}" for kind in KINDS[:3])
GIVEN, METHODS = ("trainer.steps=20",), ("ncl", "derpp")
UNREADABLE = 0.003  # share of the files that are opened
# The program, with files as the environment says.
SCRIPT = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
from tests.support.remote_files import install
install()
from cpt.__main__ import main
main()
"""
REFUSED = re.compile(r"another process is at work in \S+( \(host \S+, process \d+\))?;")


@dataclass(frozen=True)
class Starts:
    """How the processes of a trial are started."""

    home: Path
    arguments: list[str]
    seed: str | None  # of files on a slow server; None: as they are
    unreadable: float = 0.0

    def start(self, log: Path) -> Any:
        if self.seed is None:
            return started(ROOT / "run.py", *self.arguments, cwd=self.home, log=log)
        script = self.home / "remote.py"
        script.write_text(SCRIPT)
        with remote(self.home, seed=f"{self.seed} {log.name}", unreadable=self.unreadable):
            return started(script, *self.arguments, cwd=self.home, log=log)

    def twice(self, moment: float, *, killed: bool, seconds: float) -> list[int]:
        """Two starts, the second a moment after the first, which is then killed or not; how they ended."""
        first = self.start(self.home / "log-1")
        first.join(moment)
        if killed:
            first.kill()
            first.join()
        second = self.start(self.home / "log-2")
        return [ended(each, seconds=seconds * runs.HANGS_S) for each in (first, second)]


def of_a_run(place: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    given = [f"method={runs.shuffled(runs.METHODS, number)}", *GIVEN]
    turn, slow, killed = number // len(KINDS), kind.startswith(REMOTE), "stale lock" in kind
    expected, home = runs.whole(place, given), place / f"twice-{number}"
    cache = home / "cache" if slow or turn % 4 == 0 else place / "cache"
    home.mkdir()
    if slow and turn % 4:
        shutil.copytree(place / "cache", cache)
    arguments = runs.command(place, home / "run", *given, cache=cache)
    broken = slow and turn % 8 == 7
    starts = Starts(home, arguments, str(draw.random()) if slow else None, UNREADABLE * broken)
    codes = starts.twice(draw.uniform(0, expected["seconds"]), killed=killed, seconds=3 if slow else 1)
    words = [log.read_text() for log in sorted(home.glob("log-*"))]
    told = {"kind": kind, "method": given[0], "unreadable": broken, "codes": codes}
    told["lines"] = [runs.one_line(each) for each in words]
    told["then"] = broken and ended(replace(starts, seed=None).start(home / "third"), seconds=runs.HANGS_S)
    told["same"] = (home / "run" / "scores.json").exists() and runs.bits(home / "run") == expected["bits"]

    def may_be(which: int) -> bool:
        line, code = told["lines"][which], codes[which]
        unread = broken and code == 1 and line is not None and "Errno" in line
        refused = which == 1 and not killed and code == 1 and bool(line and REFUSED.search(line))
        return code == 0 or unread or refused or (killed and which == 0)

    told["fine"] = told["same"] and may_be(0) and may_be(1) and not told["then"]
    told["last"] = "" if told["fine"] else "".join(each[-1500:] for each in words)
    shutil.rmtree(home)
    return told


def of_a_sweep(place: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    home, slow = place / f"sweeps-{number}", kind.startswith(REMOTE)
    home.mkdir()  # on a slow server its jobs make the base and the tokens there, one for the other
    arguments = runs.sweep_of(place, home, METHODS, cache=home / "cache" if slow else None)
    starts = Starts(home, arguments, str(draw.random()) if slow else None)
    latest = 4 + 2 * sum(runs.whole(place, [f"method={name}", *runs.GIVEN])["seconds"] for name in METHODS)
    again, hangs = kind == "sweep again", 4 if slow else 2
    codes = starts.twice(draw.uniform(0.5, latest), killed=again, seconds=hangs)
    # A job that another sweep is at fails here; the same command again does what is missing.
    then = ended(starts.start(home / "log-2"), seconds=hangs * runs.HANGS_S)
    told = {"kind": kind, "codes": codes, "then": then, "unlike": runs.unlike(place, home, METHODS)}
    told["fine"] = then == 0 and not told["unlike"]
    told["last"] = "" if told["fine"] else (home / "log-2").read_text()[-1500:]
    shutil.rmtree(home)
    return told


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    kind = KINDS[number % len(KINDS)]
    return (of_a_sweep if "sweep" in kind else of_a_run)(place, number, draw, kind)


if __name__ == "__main__":
    sys.exit(conduct(trial, name="concurrency", about=__doc__, trials=60))
