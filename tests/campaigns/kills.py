"""kill -9 at random moments of runs of all methods and features, and of sweeps: are the bits the same?

A trial kills a run once to three times, each at any moment of what is left of it; then the same command
ends it. Every third run is of two processes, of which any one is killed and the other has to leave by
itself; every fifth trial is a sweep of two methods, of which the sweep or one of its jobs is killed.
`python -m cpt.verify` has to find nothing in the end."""

import random
import shutil
import time
from pathlib import Path
from typing import Any

from cpt.verify import find_damage_in_run
from tests.campaigns import runs
from tests.campaigns.frame import ROOT
from tests.support.forked_scripts import start_script, wait_for_exit


def kill_at(process: Any, moment: float, draw: random.Random) -> dict[str, Any]:
    """Kills one of a run's processes after so many seconds; how long the others took to leave."""
    process.join(moment)
    if not process.is_alive():
        return {}

    members = runs.family(process.pid)
    rank = draw.randrange(len(members))
    start = time.monotonic()
    runs.kill(members[rank])
    have_left = runs.wait_until_gone(members)
    seconds = round(time.monotonic() - start, 2)

    for member in members:
        runs.kill(member)
    wait_for_exit(process)
    return {"rank": rank, "of": len(members), "left": have_left, "left_after_s": seconds}


def try_run(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    case = runs.shuffled(runs.CASES, number)
    is_distributed = number % 3 == 2
    home = folder / f"kills-{number}"
    run = home / "run"

    options = [*runs.options_of(folder, case), *runs.GIVEN]
    if is_distributed:
        options += runs.DDP
    if draw.random() < 0.2:
        options += runs.endtasks_of(folder)
    expected = runs.run_undisturbed(folder, options, twin=is_distributed)

    has_own_cache = draw.random() < 0.3
    cache = home / "cache" if has_own_cache else folder / "cache"
    arguments = runs.command(folder, run, *options, cache=cache)

    # A run that makes the base for its own cache takes longer.
    latest = expected["seconds"] * (1.5 if has_own_cache else 1)
    kills = []
    for _ in range(draw.randint(1, 3)):
        process = runs.begin(arguments, run, twin=is_distributed)
        kills.append(kill_at(process, draw.uniform(0, latest), draw))

    outcome = {
        "case": case,
        "processes": 2 if is_distributed else 1,
        "own cache": has_own_cache,
        "kills": kills,
    }
    outcome.update(runs.run_again(arguments, run, expected, twin=is_distributed))
    outcome["damage"] = list(find_damage_in_run(run))
    all_left = all(kill.get("left", True) for kill in kills)
    outcome["fine"] = outcome["same"] and not outcome["damage"] and all_left
    outcome["last"] = "" if outcome["fine"] else runs.read_log(run)[-1500:]
    shutil.rmtree(home)
    return outcome


def try_sweep(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    methods = sorted({runs.shuffled(runs.METHODS, number + turn) for turn in (0, 5)})
    home = folder / f"sweep-{number}"
    log = home / "log"
    home.mkdir()
    arguments = runs.sweep_of(folder, home, methods)
    undisturbed = [runs.run_undisturbed(folder, [f"method={name}", *runs.GIVEN]) for name in methods]
    longest = 4 + 2 * sum(run["seconds"] for run in undisturbed)

    kills: list[dict[str, Any]] = []
    for _ in range(draw.randint(1, 2)):
        process = start_script(ROOT / "run.py", *arguments, cwd=home, log=log)
        process.join(draw.uniform(0.5, longest))
        if not process.is_alive():
            break

        members = runs.family(process.pid)
        victim = draw.choice(members)
        runs.kill(victim)
        is_sweep = victim == process.pid  # which no job outlives; that of a job goes on with the others
        have_left = runs.wait_until_gone(members) if is_sweep else True
        kills.append({"killed": "sweep" if is_sweep else "job", "of": len(members), "left": have_left})
        wait_for_exit(process)

    code = wait_for_exit(start_script(ROOT / "run.py", *arguments, cwd=home, log=log))
    outcome = {
        "sweep": methods,
        "kills": kills,
        "code": code,
        "unlike": runs.find_unlike(folder, home, methods),
    }
    outcome["fine"] = not outcome["unlike"] and code == 0 and all(kill["left"] for kill in kills)
    outcome["last"] = "" if outcome["fine"] else log.read_text()[-1500:]
    if outcome["fine"]:
        shutil.rmtree(home)
    else:
        home.rename(folder / f"unlike-{number}")
    return outcome


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    run_trial = try_sweep if number % 5 == 4 else try_run
    return run_trial(folder, number, draw)
