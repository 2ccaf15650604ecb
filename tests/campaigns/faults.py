"""Disks that are full or read-only, and files that are cut off or changed: what does a run do with them?

Half of the trials run on a small file system of their own (a tmpfs; needs root) under the outputs, the
cache or the temporary folder, that is full at a random place or read-only from a random moment on. The
run has to end in one line with the path, and the same command on a larger disk has to end with the bits
of a run that nobody disturbed.

The others change one file, of a kind in turn, of a run that was killed within its second domain, or of a
finished one, or of its cache: a bit flipped, cut off, emptied, removed. Then the same command either ends
with the same bits or refuses in one line that names the file's folder at least; and once the file is as
it was, it ends with the same bits. What `python -m cpt.verify` finds is noted."""

import contextlib
import io
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from cpt.verify import main
from tests.campaigns import runs
from tests.campaigns.frame import ROOT
from tests.support.forked_scripts import start_script, wait_for_exit

GIVEN = ("trainer.steps=12", "save_all_stages=true", "logger=csv")
LARGE = "1g"
MOST_KIB = {"outputs": 1200, "cache": 1500, "tmp": 64}  # what a run writes there, about
NUMBER = re.compile(r"[0-9a-f]{16}|\d+")
HARMS = ("flip", "cut", "empty", "gone")


@contextlib.contextmanager
def disk(at: Path, size: str) -> Iterator[None]:
    """A file system of its own. Raises CalledProcessError where that may not be had."""
    at.mkdir(parents=True, exist_ok=True)
    how = ["mount", "-t", "tmpfs", "-o", f"size={size}", "campaign", at]
    subprocess.run(how, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", at], check=True, capture_output=True)


def remount(at: Path, option: str) -> bool:
    return subprocess.run(["mount", "-o", f"remount,{option}", at], capture_output=True).returncode == 0


def on_disk(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    which, kind = [*MOST_KIB][number // 2 % len(MOST_KIB)], draw.choice(("full", "full", "read-only"))
    home = place / f"disk-{number}"
    at, size = home / which, f"{draw.randint(4, MOST_KIB[which])}k" if kind == "full" else LARGE
    expected, cache = runs.whole(place, GIVEN), at / "cache" if which == "cache" else place / "cache"
    run = (at if which == "outputs" else home) / "run"
    arguments, log = runs.command(place, run, *GIVEN, cache=cache), home / "log"
    told: dict[str, Any] = {"fault": kind, "disk": which, "size": size}
    temporary = {"TMPDIR": str(at)} if which == "tmp" else {}
    try:
        with disk(at, size), mock.patch.dict(os.environ, temporary):
            process = start_script(ROOT / "run.py", *arguments, cwd=home, log=log)
            if kind == "read-only":
                process.join(draw.uniform(0, expected["seconds"]))
                runs.wait_for(lambda: remount(at, "ro") or not process.is_alive())
            code = wait_for_exit(process, seconds=runs.HANGS_S)
            words = log.read_text()
            told |= {"code": code, "line": runs.one_line(words)}
            remount(at, f"rw,size={LARGE}")
            again = start_script(ROOT / "run.py", *arguments, cwd=home, log=log)
            told["then"] = wait_for_exit(again, seconds=runs.HANGS_S)
            told["same"] = told["then"] == 0 and runs.bits(run) == expected["bits"]
            named = code == 1 and told["line"] is not None and str(at) in told["line"]
            told["fine"] = told["same"] and (code == 0 or named)
            told["last"] = "" if told["fine"] else words[-1500:]
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return told


def half_done(place: Path) -> Path:
    home = place / "half"
    if not home.exists():
        arguments = runs.command(place, home / "run", *GIVEN, cache=home / "cache")
        process, seen = runs.begin(arguments, home / "run"), home / "run" / "checkpoints" / "002-food.ckpt"
        if not runs.wait_for(lambda: seen.exists() or not process.is_alive()):
            raise RuntimeError(runs.said(home / "run"))
        process.kill()
        wait_for_exit(process)
    return home


def all_done(place: Path) -> Path:
    home = place / "done"
    if not home.exists():
        shutil.copytree(half_done(place), home)
        arguments = runs.command(place, home / "run", *GIVEN, cache=home / "cache")
        if runs.complete(arguments, home / "run"):
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
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data if how == "flip" else data[: draw.randrange(len(data)) if how == "cut" else 0])


def verify(home: Path, path: Path) -> bool:
    """Whether `python -m cpt.verify` names the file, or its folder."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        main([str(home / "run"), str(home / "cache")])
    lines = told.getvalue().splitlines()[:-1]
    return any(path.name in line or str(path.parent) in line for line in lines)


def damaged(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    source = (half_done, all_done)[number // 2 % 2](place)
    expected, home = runs.whole(place, GIVEN), place / f"damaged-{number}"
    shutil.copytree(source, home)
    found = kinds(home)
    kind = runs.shuffled(sorted(found), number // 4)
    path, how = draw.choice(found[kind]), draw.choice(HARMS)
    whole, since = path.read_bytes(), len(runs.said(home / "run").encode())
    harm(path, how, draw)
    told: dict[str, Any] = {"fault": how, "kind": kind, "of": source.name, "verified": verify(home, path)}
    run, arguments = home / "run", runs.command(place, home / "run", *GIVEN, cache=home / "cache")
    told["code"] = runs.complete(arguments, run)
    words = runs.said(run, since)
    told["line"] = runs.one_line(words)
    of_stage = "stages" in path.parts
    seen = told["verified"] or not of_stage  # a finished run has no need of it
    if told["code"] or of_stage:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole)
    if told["code"]:
        seen = told["code"] == 1 and told["line"] is not None and str(path.parent) in told["line"]
        told |= runs.again(arguments, run, expected)
    else:
        told["same"] = runs.bits(run) == expected["bits"]
    told["fine"] = seen and told["same"]
    told["last"] = "" if told["fine"] else words[-1500:]
    shutil.rmtree(home, ignore_errors=True)
    return told


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    return (damaged, on_disk)[number % 2](place, number, draw)
