"""Too little memory: allocations that fail, and processes that the kernel ends for their size.

    python benchmarks/costs/little_memory.py --trials 20

In turn: a run under a limit of its data or of its address space (setrlimit) that is reached at a random
moment; kill -9, as by the OOM killer, of the largest tokenization process of a run; and of the largest job
of a sweep. Each has to end with one line about memory and a non-zero exit code, and no process may be left;
the same command without the limit has to end with the bits of an undisturbed run. A library in Rust or C++
may end the process in its own words, or hang, and so may Python where a thread has no memory to begin
(github.com/python/cpython/issues/140746): that is recorded, what hangs is killed, and the same command has
to resume."""

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from tests.campaigns import runs  # noqa: E402
from tests.campaigns.frame import RESULTS, describe_version, run_trials, without_paths  # noqa: E402
from tests.conftest import VOCABULARIES, sentences  # noqa: E402
from tests.support.forked_scripts import read_proc, start_script, wait_for, wait_for_exit  # noqa: E402

KINDS = ("data", "address space", "tokenising", "data", "sweep")
LIMITS = {"data": (60, "RLIMIT_DATA", "VmData:"), "address space": (250, "RLIMIT_AS", "VmSize:")}
# (MiB that a run takes beyond its start, about; the limit; its line of /proc/self/status)
MEMORY = re.compile(r"memory|SIGKILL|[Kk]illed")
OWN_WORDS = re.compile(
    r"memory allocation of \d+ bytes failed|bad_alloc|OpenBLAS|pthread_create"
    "|Exception ignored in thread started by"
)
OWN_S = 20.0  # that such a library has to end its process
LIMITED = """
import resource, sys
sys.path[:0] = [{root!r}]
import torch, lightning.pytorch, cpt.train, cpt.trainer.loop
line = next(each for each in open("/proc/self/status") if each.startswith("{field}"))
most = int(line.split()[1]) * 1024 + ({room} << 20)
resource.setrlimit(resource.{limit}, (most, most))
from cpt.__main__ import main
main()
"""
SMALL_SHARDS = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
from cpt.data import tokenize
tokenize.SHARD = 1 << 20
from cpt.__main__ import main
if __name__ == "__main__":
    main()
"""


def kill_largest(pids: list[int]) -> None:
    def resident(pid: int) -> int:
        pages = read_proc(f"{pid}/statm").split()
        return int(pages[1]) if pages else 0

    if pids:
        runs.kill(max(pids, key=resident))


def is_memory_named(words: str) -> bool:
    line = runs.one_line(words)
    return line is not None and MEMORY.search(line) is not None


def try_limited_run(folder: Path, home: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    """A run in which an allocation fails, or none does."""
    overrides = [f"method={runs.shuffled(runs.METHODS, number)}", *runs.GIVEN]
    run = home / "run"
    expected = runs.run_undisturbed(folder, overrides)
    arguments = runs.command(folder, run, *overrides)

    max_room, limit, field = LIMITS[kind]
    room = draw.randint(0, max_room)
    script = home / "limited.py"
    script.write_text(LIMITED.format(root=str(ROOT), room=room, limit=limit, field=field))
    process = runs.begin(arguments, run, script=script)
    wait_for(lambda: not process.is_alive() or OWN_WORDS.search(runs.read_log(run)))
    code = wait_for_exit(process, seconds=OWN_S)

    words = runs.read_log(run)
    has_own_words = OWN_WORDS.search(words) is not None
    rerun = runs.run_again(arguments, run, expected)
    is_expected_end = code == 0 or (code == 1 and is_memory_named(words)) or (code != 0 and has_own_words)
    return {
        "method": overrides[0],
        "room_mib": room,
        "code": code,
        "own_words": has_own_words,
        "line": runs.one_line(words),
        **rerun,
        "fine": is_expected_end and rerun["same"],
        "last": words,
    }


def try_killed_tokenization(
    folder: Path, home: Path, number: int, draw: random.Random, kind: str
) -> dict[str, Any]:
    """The largest of the processes that tokenize is killed."""
    for seed, (name, words) in enumerate(VOCABULARIES.items()):
        path = folder / "long" / name / "all.txt"
        if not path.exists():
            path.parent.mkdir(parents=True)
            path.write_text("\n".join(sentences(words, count=30_000, seed=seed)) + "\n")

    run = home / "run"
    overrides = [*runs.GIVEN, "domains.preprocessing_num_workers=2", f"domains.root={folder / 'long'}"]
    expected = runs.run_undisturbed(folder, overrides)
    arguments = runs.command(folder, run, *overrides, cache=home / "cache")
    script = home / "several.py"
    script.write_text(SMALL_SHARDS)
    process = runs.begin(arguments, run, script=script)

    def workers() -> list[int]:
        return [pid for pid in runs.family(process.pid)[1:] if "spawn_main" in read_proc(f"{pid}/cmdline")]

    wait_for(lambda: workers() or not process.is_alive())
    process.join(draw.uniform(0, 1))
    members = runs.family(process.pid)
    worker_pids = workers()
    kill_largest(worker_pids)
    code = wait_for_exit(process, seconds=runs.HANGS_S)

    words = runs.read_log(run)
    have_ended = runs.wait_until_gone(members)
    rerun = runs.run_again(arguments, run, expected)
    is_expected_end = code == 0 or (code == 1 and is_memory_named(words))
    return {
        "workers": len(worker_pids),
        "code": code,
        "gone": have_ended,
        "line": runs.one_line(words),
        **rerun,
        "fine": bool(is_expected_end and have_ended and rerun["same"] and worker_pids),
        "last": words,
    }


def try_killed_sweep(folder: Path, home: Path, number: int, draw: random.Random, kind: str) -> dict[str, Any]:
    """The largest job of a sweep is killed: the sweep says so, and fails."""
    methods = sorted({runs.shuffled(runs.METHODS, number + turn) for turn in (0, 5)})
    arguments = runs.sweep_of(folder, home, methods)
    log = home / "log"
    process = start_script(ROOT / "run.py", *arguments, cwd=home, log=log)
    wait_for(lambda: len(runs.family(process.pid)) > 1 or not process.is_alive())
    process.join(draw.uniform(0.5, 8))
    jobs = runs.family(process.pid)[1:]
    kill_largest(jobs)
    code = wait_for_exit(process)
    have_ended = runs.wait_until_gone(jobs)
    words = log.read_text(errors="replace")

    rerun_code = wait_for_exit(start_script(ROOT / "run.py", *arguments, cwd=home, log=log))
    unlike = runs.find_unlike(folder, home, methods)
    is_failed = (code == 1 and "memory" in words) or not jobs
    return {
        "methods": methods,
        "jobs": len(jobs),
        "code": code,
        "gone": have_ended,
        "then": rerun_code,
        "unlike": unlike,
        "fine": is_failed and have_ended and rerun_code == 0 and not unlike,
        "last": words,
    }


def run_trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    """A trial of the kind whose turn it is; the process's last words are kept where it is not fine."""
    kind = KINDS[number % len(KINDS)]
    home = folder / f"memory-{number}"
    home.mkdir()
    if kind == "tokenising":
        result = try_killed_tokenization(folder, home, number, draw, kind)
    elif kind == "sweep":
        result = try_killed_sweep(folder, home, number, draw, kind)
    else:
        result = try_limited_run(folder, home, number, draw, kind)
    shutil.rmtree(home)
    last_words = "" if result["fine"] else result["last"][-1500:]
    return {"kind": kind, **result, "last": last_words}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.json")
    options = parser.parse_args()
    version = describe_version()
    results = []
    start_time = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(options.first, options.first + options.trials)
        for result in run_trials(run_trial, Path(folder), numbers, seed=options.seed):
            results.append(result)
            print(json.dumps(result), flush=True)

    num_fine = sum(result["fine"] for result in results)
    seconds = round(time.monotonic() - start_time)
    report = {
        "campaign": "memory",
        "day": version["day"],
        "commit": version["commit"],
        "asked": options.trials,
        "seed": options.seed,
        "made": len(results),
        "fine": num_fine,
        "seconds": seconds,
        "trials": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(without_paths(json.dumps(report, indent=1), Path(folder)) + "\n")
    print(f"memory: {num_fine} of {len(results)} fine, {seconds} s")
    return int(num_fine < len(results))


if __name__ == "__main__":
    sys.exit(main())
