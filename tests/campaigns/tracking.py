"""Weights & Biases goes away while a run logs to it: does the run end, and with the same bits?

A trial is one of EVENTS, at any moment of a run: one that came after the run's end is repeated at another. Its
server is one of this machine, which answers as that of W&B until it refuses every request. The run has to end
with exit code 0 and the bits of one without W&B, with one line at most on W&B's failure and no traceback."""

import json
import os
import random
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from tests.campaigns import runs
from tests.campaigns.faults import LARGE, disk, remount
from tests.support.forked_scripts import read_proc, wait_for_exit

EVENTS = ("server refuses", "disk full", "home read-only", "service killed")
WARNING = re.compile(r"logger\.wandb failed \(|logging offline")
FINISH_TIMEOUT_S = 20
REFUSED = 503
MAX_ATTEMPTS = 8
MIN_KIB = 4  # of a disk that is to be full
NEARLY_FULL = 4096  # bytes: less than W&B writes at once
KEY = "0" * 40  # of the form of a key
OWN_LINE = re.compile(r"^(Exception in thread|Traceback)", re.MULTILINE)


class Server(ThreadingHTTPServer):
    """Answers what W&B's client asks for a run; `is_refusing`: nothing any more."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.is_refusing = False
        self.num_answers = 0
        self.num_refusals = 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.is_refusing:
            self.server.num_refusals += 1
            self.send_error(REFUSED)
            return
        self.server.num_answers += 1
        answer = json.dumps(
            answer_query(body.decode(errors="replace"), port=self.server.server_port)
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


def answer_query(body: str, *, port: int) -> dict[str, Any]:
    """What W&B's server would say of the queries that its client sends for a run."""
    if "upsertBucket" in body:
        entity = {"id": "e", "name": "tester"}
        project = {"id": "p", "name": "cpt", "entity": entity}
        bucket = {"id": "b", "name": "run", "displayName": "run", "project": project, "historyLineCount": 0}
        return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
    if "viewer" in body:
        return {"data": {"viewer": {"id": "v", "entity": "tester", "username": "tester", "flags": "{}"}}}
    if "serverInfo" in body:
        return {"data": {"serverInfo": {"features": [], "cliVersionInfo": {}}}}
    if "createRunFiles" in body:
        url = f"http://127.0.0.1:{port}/file"
        names = json.loads(body)["variables"]["files"]
        files = [{"name": name, "uploadUrl": url} for name in names]
        return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}}
    if body.startswith('{"query"') and "model(" not in body:
        return {"data": None, "errors": [{"message": "not available"}]}
    return {"data": {}}


@contextmanager
def run_server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def find_service(pid: int) -> int | None:
    """The process of W&B among those of a run."""
    services = [member for member in runs.family(pid) if "wandb-core" in read_proc(f"{member}/cmdline")]
    return services[0] if services else None


def start_and_lose(
    arguments: list[str], run: Path, *, event: str, moment: float, disk_folder: Path, server: Server
) -> dict[str, Any]:
    """Starts the run, lets W&B go away after so many seconds, and waits for the end. `had_event` says whether
    the run still needed what went away."""
    process = runs.begin(arguments, run)
    process.join(moment)
    had_event = process.is_alive()

    service = find_service(process.pid)
    if event == "server refuses":
        server.is_refusing = True
    elif event == "home read-only":
        runs.wait_for(lambda: remount(disk_folder, "ro") or not process.is_alive())
    elif event == "service killed":
        had_event = service is not None
        if service is not None:
            runs.kill(service)

    code = wait_for_exit(process, seconds=runs.HANGS_S)
    if event == "server refuses":
        had_event = server.num_refusals > 0
    elif event == "disk full":
        had_event = shutil.disk_usage(disk_folder).free < NEARLY_FULL

    return {
        "had_event": had_event,
        "code": code,
        "answers": server.num_answers,
        "refusals": server.num_refusals,
    }


def attempt(
    folder: Path, home: Path, options: list[str], *, event: str, moment: float, size: str
) -> dict[str, Any]:
    """The end of a run of which W&B goes away, with its bits and its log."""
    run = home / "run"
    disk_folder = home / "disk"
    mode = "online" if event == "server refuses" else "offline"
    arguments = runs.command(folder, run, *options, "logger=wandb", f"logger.mode={mode}")
    variables = {"WANDB_API_KEY": KEY, "WANDB_FINISH_TIMEOUT": str(FINISH_TIMEOUT_S)}
    variables["WANDB_DIR" if event == "disk full" else "HOME"] = str(disk_folder)
    try:
        with disk(disk_folder, size), run_server() as server:
            variables["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.server_port}"
            with mock.patch.dict(os.environ, variables):
                end = start_and_lose(
                    arguments, run, event=event, moment=moment, disk_folder=disk_folder, server=server
                )
        bits = runs.bits(run) if end["code"] == 0 else None
        return end | {"bits": bits, "words": runs.read_log(run)}
    finally:
        shutil.rmtree(home, ignore_errors=True)


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    """An event at a moment of a run, earlier and with less room until it happens within the run."""
    event = EVENTS[number % len(EVENTS)]
    options = [f"method={runs.shuffled(runs.METHODS, number)}", *runs.GIVEN]
    expected = runs.run_undisturbed(folder, options)
    moment = draw.uniform(0, 1.5 * expected["seconds"])  # W&B takes a few seconds of its own
    num_kib = draw.randint(MIN_KIB, 400)

    for attempt_number in range(MAX_ATTEMPTS):
        home = folder / f"tracking-{number}-{attempt_number}"
        size = f"{num_kib}k" if event == "disk full" else LARGE
        end = attempt(folder, home, options, event=event, moment=moment, size=size)
        words = end.pop("words")
        is_same = end.pop("bits") == expected["bits"]
        num_warnings = len(WARNING.findall(words))
        is_fine = is_same and num_warnings <= 1 and OWN_LINE.search(words) is None
        if end["had_event"] or not is_fine:
            break
        # The service lives from the start of the logger to the end of the run.
        moment = draw.uniform(0, expected["seconds"])
        num_kib = max(MIN_KIB, num_kib // 2)

    return {
        "event": event,
        "method": options[0],
        "moment": round(moment, 2),
        **end,
        "attempts": attempt_number + 1,
        "warnings": num_warnings,
        "same": is_same,
        "fine": is_fine and end["had_event"],
        "last": "" if is_fine else words[-1500:],
    }
