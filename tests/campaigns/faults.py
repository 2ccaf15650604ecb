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
    mount_command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "campaign", at]
    subprocess.run(mount_command, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", at], check=True, capture_output=True)


def remount(at: Path, option: str) -> bool:
    return subprocess.run(["mount", "-o", f"remount,{option}", at], capture_output=True).returncode == 0


def try_disk(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    which = [*MOST_KIB][number // 2 % len(MOST_KIB)]
    kind = draw.choice(("full", "full", "read-only"))
    home = folder / f"disk-{number}"
    at = home / which
    size = f"{draw.randint(4, MOST_KIB[which])}k" if kind == "full" else LARGE
    expected = runs.run_undisturbed(folder, GIVEN)

    cache = at / "cache" if which == "cache" else folder / "cache"
    run = (at if which == "outputs" else home) / "run"
    arguments = runs.command(folder, run, *GIVEN, cache=cache)
    log = home / "log"

    outcome: dict[str, Any] = {"fault": kind, "disk": which, "size": size}
    temporary = {"TMPDIR": str(at)} if which == "tmp" else {}
    try:
        with disk(at, size), mock.patch.dict(os.environ, temporary):
            process = start_script(ROOT / "run.py", *arguments, cwd=home, log=log)
            if kind == "read-only":
                process.join(draw.uniform(0, expected["seconds"]))
                runs.wait_for(lambda: remount(at, "ro") or not process.is_alive())
            code = wait_for_exit(process, seconds=runs.HANGS_S)
            words = log.read_text()
            outcome["code"] = code
            outcome["line"] = runs.one_line(words)
            remount(at, f"rw,size={LARGE}")
            second_start = start_script(ROOT / "run.py", *arguments, cwd=home, log=log)
            outcome["then"] = wait_for_exit(second_start, seconds=runs.HANGS_S)
            outcome["same"] = outcome["then"] == 0 and runs.bits(run) == expected["bits"]
            named = code == 1 and outcome["line"] is not None and str(at) in outcome["line"]
            outcome["fine"] = outcome["same"] and (code == 0 or named)
            outcome["last"] = "" if outcome["fine"] else words[-1500:]
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return outcome


def make_half_done_run(folder: Path) -> Path:
    home = folder / "half"
    if not home.exists():
        arguments = runs.command(folder, home / "run", *GIVEN, cache=home / "cache")
        process = runs.begin(arguments, home / "run")
        checkpoint = home / "run" / "checkpoints" / "002-food.ckpt"
        if not runs.wait_for(lambda: checkpoint.exists() or not process.is_alive()):
            raise RuntimeError(runs.read_log(home / "run"))
        process.kill()
        wait_for_exit(process)
    return home


def make_finished_run(folder: Path) -> Path:
    home = folder / "done"
    if not home.exists():
        shutil.copytree(make_half_done_run(folder), home)
        arguments = runs.command(folder, home / "run", *GIVEN, cache=home / "cache")
        if runs.complete(arguments, home / "run"):
            raise RuntimeError(runs.read_log(home / "run"))
    return home


def group_files(home: Path) -> dict[str, list[Path]]:
    """The files of a run and its cache, by kind: the name, with each number a star."""
    files_by_kind: dict[str, list[Path]] = {}
    for path in sorted(home.rglob("*")):
        relative_path = path.relative_to(home)
        if path.is_file() and path.stat().st_size and path.suffix != ".lock" and len(relative_path.parts) > 1:
            files_by_kind.setdefault(NUMBER.sub("*", str(relative_path)), []).append(path)
    return files_by_kind


def damage_file(path: Path, harm_kind: str, draw: random.Random) -> None:
    if harm_kind == "gone":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if harm_kind == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif harm_kind == "cut":
        del data[draw.randrange(len(data)) :]
    else:
        data.clear()
    path.write_bytes(data)


def verify(home: Path, path: Path) -> bool:
    """Whether `python -m cpt.verify` names the file, or its folder."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        main([str(home / "run"), str(home / "cache")])
    lines = output.getvalue().splitlines()[:-1]
    return any(path.name in line or str(path.parent) in line for line in lines)


def try_damage(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    source = (make_half_done_run, make_finished_run)[number // 2 % 2](folder)
    expected = runs.run_undisturbed(folder, GIVEN)
    home = folder / f"damaged-{number}"
    shutil.copytree(source, home)
    files_by_kind = group_files(home)
    kind = runs.shuffled(sorted(files_by_kind), number // 4)
    path = draw.choice(files_by_kind[kind])
    harm_kind = draw.choice(HARMS)

    original = path.read_bytes()
    log_size = len(runs.read_log(home / "run").encode())
    damage_file(path, harm_kind, draw)
    outcome: dict[str, Any] = {
        "fault": harm_kind,
        "kind": kind,
        "of": source.name,
        "verified": verify(home, path),
    }

    run = home / "run"
    arguments = runs.command(folder, home / "run", *GIVEN, cache=home / "cache")
    outcome["code"] = runs.complete(arguments, run)
    words = runs.read_log(run, log_size)
    outcome["line"] = runs.one_line(words)
    of_stage = "stages" in path.parts
    is_detected = outcome["verified"] or not of_stage  # a finished run has no need of it

    if outcome["code"] or of_stage:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(original)
    if outcome["code"]:
        is_detected = (
            outcome["code"] == 1 and outcome["line"] is not None and str(path.parent) in outcome["line"]
        )
        outcome |= runs.run_again(arguments, run, expected)
    else:
        outcome["same"] = runs.bits(run) == expected["bits"]

    outcome["fine"] = is_detected and outcome["same"]
    outcome["last"] = "" if outcome["fine"] else words[-1500:]
    shutil.rmtree(home, ignore_errors=True)
    return outcome


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    return (try_damage, try_disk)[number % 2](folder, number, draw)
