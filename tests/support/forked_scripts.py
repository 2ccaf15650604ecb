"""Scripts in processes of their own that are forked from one that has read torch and Lightning in.

A start of Python that reads them in takes 4 s of a core, a fork 0.1 s."""

import json
import multiprocessing
import os
import random
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.preloaded"])


def start_script(
    script: Path, *arguments: str, cwd: Path, log: Path, errors: Path | None = None, twin: bool = False
) -> BaseProcess:
    """`python script arguments` in `cwd`, its output appended to `log`, errors perhaps to another file.

    With `twin`, the second process that Lightning would start is a fork as well."""
    options = {"cwd": cwd, "logs": (log, errors or log), "variables": dict(os.environ), "twin": twin}
    process = FORKS.Process(target=run_in_fork, args=(str(script), list(arguments)), kwargs=options)
    process.start()
    return process


def wait_for(condition: Callable[[], Any], *, seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False


def wait_for_exit(process: BaseProcess, *, seconds: float = 240) -> int:
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def run_script(script: Path, *arguments: str, cwd: Path) -> CompletedProcess[str]:
    with TemporaryDirectory() as folder:
        output_file = Path(folder) / "output"
        error_file = Path(folder) / "errors"
        process = start_script(script, *arguments, cwd=cwd, log=output_file, errors=error_file)
        code = wait_for_exit(process)
        output = output_file.read_text(encoding="utf-8")
        errors = error_file.read_text(encoding="utf-8")
    return CompletedProcess([str(script), *arguments], code, output, errors)


def send_signal(process: BaseProcess, number: int, *, rank: int = 0) -> None:
    pid = process.pid
    for _ in range(rank):
        pid = find_last_child(pid)
    os.kill(pid, number)


def read_proc(path: str) -> str:
    """What /proc says; nothing of a process that there is no longer."""
    try:
        return Path(f"/proc/{path}").read_text()
    except OSError:
        return ""


def kill_self_or_sleep(seconds):
    """As the kernel kills a process where memory does not suffice."""
    time.sleep(seconds)
    if not seconds:
        os.kill(os.getpid(), signal.SIGKILL)


def has_sigterm_handler(pid: int | None) -> bool:
    """Whether a process has a handler for SIGTERM: from its program's first lines on, not while Python starts
    or, forked beforehand, it waits for its command line."""
    caught = re.search(r"^SigCgt:\s*(\w+)", read_proc(f"{pid}/status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def find_last_child(pid: int) -> int | None:
    children = read_proc(f"{pid}/task/{pid}/children").split()
    return int(children[-1]) if children else None


def is_alive(pid: int) -> bool:
    return read_proc(f"{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])


def run_in_fork(
    script: str, arguments: list[str], *, cwd: Path, logs: tuple[Path, Path], variables: dict, twin: bool
) -> None:
    for stream, log in enumerate(logs, 1):
        with log.open("ab") as file:
            os.dup2(file.fileno(), stream)
    set_environment(variables, cwd)
    second = Twin() if twin else None
    if second and second.pid == 0:
        arguments = second.told()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))  # as Python does for a file
    random.seed()  # a fork inherits what nobody seeded
    np.random.seed()
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        if second and second.pid:
            second.wait()


def set_environment(variables: dict[str, str], cwd: Path | str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)


class Twin:
    """Lightning's Popen: forked before the run begins, it waits for its command line."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.returncode = None
        self.pid = os.fork()
        if self.pid:
            os.close(self.read)
            from lightning.pytorch.strategies.launchers import subprocess_script

            subprocess_script.subprocess = SimpleNamespace(Popen=self.start)

    def start(self, command: list[str], *, env: dict[str, str], cwd: str | None) -> "Twin":
        with os.fdopen(self.write, "w") as words:
            words.write(json.dumps([command[2:], env, cwd]))
        self.write = None
        return self

    def told(self) -> list[str]:
        os.close(self.write)
        with os.fdopen(self.read) as words:
            text = words.read()
        if not text:
            os._exit(0)
        arguments, variables, cwd = json.loads(text)
        set_environment(variables, cwd or ".")
        return arguments

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.write is not None:
            os.close(self.write)
            self.write = None
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
