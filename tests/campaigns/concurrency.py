"""The same command twice, killed holders, sweeps that are started again: does each end, and with the same
bits?

    python tests/campaigns/concurrency.py --trials 60 --seed 0

In turn: a second start of a run, at any moment of the first, waits or is refused in one line with the
host and the number of the process that is at work; a start beside a killed one's lock; a second start of
a sweep while it is running; a sweep whose process was killed, started again at once while its jobs may
still be there. The shared cache is empty in every fourth trial."""

import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

from tests.campaigns import runs  # noqa: E402
from tests.campaigns.frame import ROOT, conduct  # noqa: E402
from tests.campaigns.kills import GIVEN as OF_SWEEPS  # noqa: E402
from tests.campaigns.kills import sweep_of  # noqa: E402
from tests.support.processes import ended, started  # noqa: E402

KINDS = ("twice", "stale lock", "sweep twice", "sweep again")
GIVEN = ("trainer.steps=20",)
METHODS = ("ncl", "derpp")
REFUSED = re.compile(r"another process is at work in \S+( \(host \S+, process \d+\))?;")


def of_a_run(place: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    given = [f"method={runs.shuffled(runs.METHODS, number)}", *GIVEN]
    expected, home = runs.whole(place, given), place / f"run-{number}"
    cache = home / "cache" if number // 4 % 4 == 0 else place / "cache"
    arguments = runs.command(place, home / "run", *given, cache=cache)
    home.mkdir()
    logs = [home / "first", home / "second"]
    first = started(ROOT / "run.py", *arguments, cwd=home, log=logs[0])
    first.join(draw.uniform(0, expected["seconds"]))
    if kind == "stale lock":
        first.kill()
        first.join()
    second = started(ROOT / "run.py", *arguments, cwd=home, log=logs[1])
    codes = [ended(each, seconds=runs.HANGS_S) for each in (first, second)]
    said = logs[1].read_text()
    told = {"kind": kind, "method": given[0], "codes": codes, "refused": bool(found := REFUSED.search(said))}
    told["names the holder"] = bool(found and found[1])
    told["same"] = runs.bits(home / "run") == expected["bits"]
    fine = codes[1] == 0 or (codes[1] == 1 and told["refused"] and runs.one_line(said) is not None)
    told["fine"] = fine and told["same"] and (kind == "stale lock" or codes[0] == 0)
    told["fine"] &= not (kind == "stale lock" and codes[1])
    told["last"] = "" if told["fine"] else (logs[0].read_text() + said)[-1500:]
    shutil.rmtree(home)
    return told


def of_a_sweep(place: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    expected = {name: runs.whole(place, [f"method={name}", *OF_SWEEPS]) for name in METHODS}
    home = place / f"sweep-{number}"
    home.mkdir()
    arguments, logs = sweep_of(place, home, list(METHODS)), [home / "first", home / "second"]
    first = started(ROOT / "run.py", *arguments, cwd=home, log=logs[0])
    first.join(draw.uniform(0.5, 4 + 2 * sum(each["seconds"] for each in expected.values())))
    if kind == "sweep again":
        first.kill()
        first.join()
    second = started(ROOT / "run.py", *arguments, cwd=home, log=logs[1])
    codes = [ended(each, seconds=2 * runs.HANGS_S) for each in (first, second)]
    # A job that another sweep is at fails here; the same command again does what is missing.
    then = ended(started(ROOT / "run.py", *arguments, cwd=home, log=logs[1]), seconds=2 * runs.HANGS_S)
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
