"""Disks that are full or read-only, and files that are cut off or changed: what does a run do with them?

    python tests/campaigns/faults.py --trials 200 --seed 0

Half of the trials run on a small file system of their own (a tmpfs; needs root) under the outputs, the
cache or the temporary folder, that is full at a random place or read-only from a random moment on. The
run has to end in one line with the path, and the same command on a larger disk has to end with the bits
of a run that nobody disturbed.

The others change one file, of a kind in turn, of a run that was killed within its second domain, or of a
finished one, or of its cache: a bit flipped, cut off, emptied, removed. Then the same command either ends
with the same bits or refuses in one line that names the file's folder at least; and once the file is as
it was, it ends with the same bits. What `python -m cpt.verify` finds is noted."""

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

from tests.campaigns import runs  # noqa: E402
from tests.campaigns.frame import ROOT, conduct  # noqa: E402
from tests.support.processes import ended, started  # noqa: E402

GIVEN = ("trainer.steps=12", "keep_stages=true", "logger=csv")
DISKS = ("outputs", "cache", "tmp")
LARGE = "1g"
MOST_KIB = {"outputs": 1200, "cache": 1500, "tmp": 64}  # what a run writes there, about
NUMBER = re.compile(r"[0-9a-f]{16}|\d+")
HARMS = ("flip", "cut", "empty", "gone")
NO_RESULTS = (".lock", "run.log", "progress.json")  # notes that nothing is made of


@contextlib.contextmanager
def disk(at: Path, size: str) -> Iterator[None]:
    """A file system of its own. Raises CalledProcessError where that may not be had."""
    at.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "campaign", at], check=True, capture_output=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", at], check=True, capture_output=True)


def again(at: Path, option: str) -> bool:
    """Mounts it with another option; whether that was possible."""
    return subprocess.run(["mount", "-o", f"remount,{option}", at], capture_output=True).returncode == 0


def on_disk(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    """A run on a disk that is full, or read-only; and the same command when it no longer is."""
    which, kind = DISKS[number // 2 % len(DISKS)], draw.choice(("full", "full", "read-only"))
    here = place / f"disk-{number}"
    at = here / which
    size = f"{draw.randint(4, MOST_KIB[which])}k" if kind == "full" else LARGE
    expected = runs.whole(place, GIVEN)
    told: dict[str, Any] = {"fault": kind, "disk": which, "size": size}
    cache = at / "cache" if which == "cache" else place / "cache"
    run = (at if which == "outputs" else here) / "run"
    arguments = runs.command(place, run, *GIVEN, cache=cache)
    log, before = here / "log", os.environ.get("TMPDIR")
    try:
        with disk(at, size):
            if which == "tmp":
                os.environ["TMPDIR"] = str(at)
            process = started(ROOT / "run.py", *arguments, cwd=here, log=log)
            if kind == "read-only":
                process.join(draw.uniform(0, expected["seconds"]))
                runs.wait_for(lambda: again(at, "ro") or not process.is_alive(), seconds=runs.HANGS_S)
            code = ended(process, seconds=runs.HANGS_S)
            words = log.read_text()
            told |= {"code": code, "line": runs.one_line(words)}
            again(at, f"rw,size={LARGE}")
            told |= {
                "then": ended(started(ROOT / "run.py", *arguments, cwd=here, log=log), seconds=runs.HANGS_S)
            }
            told["same"] = told["then"] == 0 and runs.bits(run) == expected["bits"]
            named = bool(told["line"]) and str(at) in told["line"]
            told["fine"] = told["same"] and (told["code"] == 0 or (told["code"] == 1 and named))
            told["last"] = "" if told["fine"] else words[-1500:]
    finally:
        os.environ.pop("TMPDIR", None) if before is None else os.environ.update(TMPDIR=before)
        shutil.rmtree(here, ignore_errors=True)
    return told


def half_done(place: Path) -> Path:
    """A run that was asked to leave within its second domain, and the cache that it has made."""
    home = place / "half"
    if not home.exists():
        runs.write_texts(place)
        arguments = runs.command(place, home / "run", *GIVEN, "trainer.steps=12", cache=home / "cache")
        process = runs.begin(arguments, home / "run")
        seen = home / "run" / "checkpoints" / "002-food.ckpt"
        if not runs.wait_for(lambda: seen.exists() or not process.is_alive(), seconds=runs.HANGS_S):
            raise RuntimeError(runs.said(home / "run"))
        process.kill()
        ended(process)
    return home


def all_done(place: Path) -> Path:
    """The same one, finished."""
    home = place / "done"
    if not home.exists():
        shutil.copytree(half_done(place), home)
        code = runs.complete(runs.command(place, home / "run", *GIVEN, cache=home / "cache"), home / "run")
        if code:
            raise RuntimeError(runs.said(home / "run"))
    return home


def kinds(home: Path) -> dict[str, list[Path]]:
    """The files of a run and its cache, by kind: the name, with each number a star."""
    found: dict[str, list[Path]] = {}
    for path in sorted(home.rglob("*")):
        inside = path.relative_to(home)
        if path.is_file() and path.stat().st_size and path.suffix != ".lock" and len(inside.parts) > 1:
            found.setdefault(NUMBER.sub("*", str(inside)), []).append(path)
    return found


def harm(path: Path, how: str, draw: random.Random) -> None:
    size = path.stat().st_size
    if how == "gone":
        path.unlink()
    elif how in ("cut", "empty"):
        os.truncate(path, draw.randrange(1, size) if how == "cut" and size > 1 else 0)
    else:
        with path.open("r+b") as file:
            place = draw.randrange(size)
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))


def verify(home: Path, path: Path) -> bool:
    """Whether `python -m cpt.verify` names the file, or its folder."""
    log = home / "verify.log"
    program = home / "verify.py"
    program.write_text("import sys\nfrom cpt.verify import main\nsys.exit(main(sys.argv[1:]))\n")
    os.environ["PYTHONPATH"] = str(ROOT)
    ended(started(program, str(home / "run"), str(home / "cache"), cwd=home, log=log))
    lines = log.read_text().splitlines()[:-1]
    return any(path.name in line or str(path.parent) in line for line in lines)


def damaged(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    """One file that is not what was written."""
    source = (half_done, all_done)[number // 2 % 2](place)
    expected = runs.whole(place, GIVEN)
    home = place / f"damaged-{number}"
    shutil.copytree(source, home)
    try:
        found = kinds(home)
        kind = runs.shuffled(sorted(found), number // 4)
        path, how = draw.choice(found[kind]), draw.choice(HARMS)
        told: dict[str, Any] = {"fault": how, "kind": kind, "of": source.name}
        copy = shutil.copy2(path, place / f"copy-{number}")
        harm(path, how, draw)
        told["verified"] = verify(home, path)
        return told | recovers(place, home, path, Path(copy), bits=expected["bits"], found=told["verified"])
    finally:
        shutil.rmtree(home, ignore_errors=True)
        (place / f"copy-{number}").unlink(missing_ok=True)


def recovers(place: Path, home: Path, path: Path, copy: Path, *, bits: str, found: bool) -> dict[str, Any]:
    """What the same command does with a damaged file, which verify has `found` or not, and what when it is
    whole again."""
    run = home / "run"
    arguments, log = runs.command(place, run, *GIVEN, cache=home / "cache"), runs.log_of(run)
    since = log.stat().st_size if log.exists() else 0
    told: dict[str, Any] = {
        "code": runs.complete(arguments, run),
        "line": runs.one_line(runs.said(run, since)),
    }
    words = runs.said(run, since)
    if told["code"] == 0:
        if told_apart := path.parent.name == "stages":  # a finished run has no need of it; verify finds it
            shutil.copy2(copy, path)
        told["same"] = runs.bits(run) == bits
        told["fine"] = told["same"] and (found or not told_apart)
    else:
        named = bool(told["line"]) and (str(path) in told["line"] or str(path.parent) in told["line"])
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(copy, path)
        told["then"] = runs.complete(arguments, run)
        told["same"] = told["then"] == 0 and runs.bits(run) == bits
        told["fine"] = named and told["code"] == 1 and told["same"]
    told["last"] = "" if told["fine"] else words[-1500:]
    return told


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    return (damaged, on_disk)[number % 2](place, number, draw)


if __name__ == "__main__":
    sys.exit(conduct(trial, name="faults", about=__doc__, trials=200))
