"""The same command twice, killed holders, sweeps that are started again: does each end, and with the same
bits?

    python tests/campaigns/concurrency.py --trials 60 --seed 0

In turn: a second start of a run, at any moment of the first, waits or is refused in one line with the
host and the number of the process that is at work; a start beside a killed one's lock; a second start of
a sweep while it is running; a sweep whose process was killed, started again at once while its jobs may
still be there; and the first three again on files as of a slow server (tests/support/remote_files.py): calls
that take up to 0.3 s and a few up to 3 s, what the other process does seen up to a second late. In each
eighth such trial of a run some files cannot be read either (ESTALE, EIO): a start may end with that in one
line, and the same command goes on. The shared cache is empty in every fourth trial."""

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
from tests.campaigns.kills import GIVEN as OF_SWEEPS  # noqa: E402
from tests.campaigns.kills import sweep_of  # noqa: E402
from tests.support.processes import ended, started  # noqa: E402
from tests.support.remote_files import remote  # noqa: E402

REMOTE = "remote "
KINDS = ("twice", "stale lock", "sweep twice", "sweep again")
KINDS += tuple(f"{REMOTE}{kind}" for kind in KINDS[:3])
GIVEN = ("trainer.steps=20",)
METHODS = ("ncl", "derpp")
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


def of_a_run(place: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    given = [f"method={runs.shuffled(runs.METHODS, number)}", *GIVEN]
    turn, is_remote = number // len(KINDS), kind.startswith(REMOTE)
    expected, home = runs.whole(place, given), place / f"run-{number}"
    cache = home / "cache" if is_remote or turn % 4 == 0 else place / "cache"
    home.mkdir()
    if is_remote and turn % 4:
        shutil.copytree(place / "cache", cache)
    arguments = runs.command(place, home / "run", *given, cache=cache)
    broken = is_remote and turn % 8 == 7
    starts = Starts(home, arguments, str(draw.random()) if is_remote else None, UNREADABLE * broken)
    told = {"kind": kind, "method": given[0], "unreadable": broken}
    told |= start_twice(starts, kind.removeprefix(REMOTE), draw.uniform(0, expected["seconds"]))
    told["lines"] = [runs.one_line(log.read_text()) for log in sorted(home.glob("log-*"))]
    if broken:
        told["then"] = ended(replace(starts, seed=None).start(home / "third"), seconds=runs.HANGS_S)
    told["same"] = (home / "run" / "scores.json").exists() and runs.bits(home / "run") == expected["bits"]
    told["fine"] = is_fine(told)
    told["last"] = "" if told["fine"] else "".join(log.read_text()[-1500:] for log in home.glob("log-*"))
    shutil.rmtree(home)
    return told


def start_twice(starts: Starts, kind: str, moment: float) -> dict[str, Any]:
    """Two starts, the second a moment after the first; how they ended."""
    logs = [starts.home / f"log-{which}" for which in (1, 2)]
    first = starts.start(logs[0])
    first.join(moment)
    if kind == "stale lock":
        first.kill()
        first.join()
    second = starts.start(logs[1])
    hangs = runs.HANGS_S * (1 if starts.seed is None else 3)
    codes = [ended(each, seconds=hangs) for each in (first, second)]
    found = REFUSED.search(logs[1].read_text())
    return {"codes": codes, "refused": bool(found), "names the holder": bool(found and found[1])}


def is_fine(told: dict[str, Any]) -> bool:
    """Whether one start did the work, and the other did it too, was refused in a line, or could not read."""
    killed = "stale lock" in told["kind"]

    def may_be(which: int) -> bool:
        line, code = told["lines"][which], told["codes"][which]
        unread = told["unreadable"] and code == 1 and line is not None and "Errno" in line
        refused = which == 1 and told["refused"] and line is not None and code == 1 and not killed
        return code == 0 or unread or refused or (killed and which == 0)

    return told["same"] and may_be(0) and may_be(1) and not told.get("then")


def of_a_sweep(place: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    expected = {name: runs.whole(place, [f"method={name}", *OF_SWEEPS]) for name in METHODS}
    home = place / f"sweep-{number}"
    home.mkdir()
    is_remote = kind.startswith(REMOTE)
    arguments = sweep_of(place, home, list(METHODS))
    if is_remote:  # its jobs make the base and the tokens there, one for the other
        arguments = [f"cache_dir={home}/cache" if "cache_dir=" in each else each for each in arguments]
    starts = Starts(home, arguments, str(draw.random()) if is_remote else None)
    logs = [home / "first", home / "second"]
    first = starts.start(logs[0])
    first.join(draw.uniform(0.5, 4 + 2 * sum(each["seconds"] for each in expected.values())))
    if kind == "sweep again":
        first.kill()
        first.join()
    second = starts.start(logs[1])
    hangs = (4 if is_remote else 2) * runs.HANGS_S
    codes = [ended(each, seconds=hangs) for each in (first, second)]
    # A job that another sweep is at fails here; the same command again does what is missing.
    then = ended(starts.start(logs[1]), seconds=hangs)
    found = {name: next(home.glob(f"outputs/sweep/{name}_*/scores.json"), None) for name in METHODS}
    same = all(path and runs.bits(path.parent) == expected[name]["bits"] for name, path in found.items())
    told = {"kind": kind, "codes": codes, "then": then, "same": same, "fine": same and then == 0}
    told["last"] = "" if told["fine"] else logs[1].read_text()[-1500:]
    shutil.rmtree(home)
    return told


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    kind = KINDS[number % len(KINDS)]
    return (of_a_sweep if "sweep" in kind else of_a_run)(place, number, draw, kind)


if __name__ == "__main__":
    sys.exit(conduct(trial, name="concurrency", about=__doc__, trials=60))
