"""Weights & Biases goes away while a run logs to it: does the run end, and with the same bits?

A trial is one of EVENTS, at any moment of a run. Its server is one of this machine, which answers as that of
W&B until it refuses every request. The run has to end with exit code 0 and the bits of one without W&B, with
one line at most on W&B's failure and no traceback."""

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
def serving() -> Iterator[Server]:
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


def try_run(
    arguments: list[str], run: Path, *, event: str, moment: float, disk_folder: Path, server: Server
) -> dict[str, Any]:
    """Starts the run, lets W&B go away after so many seconds, and waits for the end."""
    process = runs.begin(arguments, run)
    process.join(moment)
    had_ended = not process.is_alive()
    service = find_service(process.pid)
    if event == "server refuses":
        server.is_refusing = True
    elif event == "home read-only":
        runs.wait_for(lambda: remount(disk_folder, "ro") or not process.is_alive())
    elif event == "service killed" and service is not None:
        runs.kill(service)
    return {
        "had_ended": had_ended,
        "had_service": service is not None,
        "code": wait_for_exit(process, seconds=runs.HANGS_S),
        "answers": server.num_answers,
        "refusals": server.num_refusals,
    }


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    event = EVENTS[number % len(EVENTS)]
    method = f"method={runs.shuffled(runs.METHODS, number)}"
    expected = runs.run_undisturbed(folder, [method, *runs.GIVEN])
    home = folder / f"tracking-{number}"
    run = home / "run"
    disk_folder = home / "disk"
    size = f"{draw.randint(4, 400)}k" if event == "disk full" else LARGE

    mode = "online" if event == "server refuses" else "offline"
    options = [method, *runs.GIVEN, "logger=wandb", f"logger.mode={mode}"]
    arguments = runs.command(folder, run, *options)
    variables = {"HOME": str(disk_folder)}
    if event == "disk full":
        variables = {"WANDB_DIR": str(disk_folder)}
    try:
        with disk(disk_folder, size), serving() as server:
            variables["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.server_port}"
            variables["WANDB_API_KEY"] = KEY
            variables["WANDB_FINISH_TIMEOUT"] = str(FINISH_TIMEOUT_S)
            moment = draw.uniform(0, 1.5 * expected["seconds"])  # W&B takes a few seconds of its own
            with mock.patch.dict(os.environ, variables):
                end = try_run(
                    arguments, run, event=event, moment=moment, disk_folder=disk_folder, server=server
                )
        words = runs.read_log(run)
        num_warnings = len(WARNING.findall(words))
        is_same = end["code"] == 0 and runs.bits(run) == expected["bits"]
    finally:
        shutil.rmtree(home, ignore_errors=True)
    is_fine = is_same and num_warnings <= 1 and OWN_LINE.search(words) is None
    return {
        "event": event,
        "method": method,
        "moment": round(moment, 2),
        **end,
        "warnings": num_warnings,
        "same": is_same,
        "fine": is_fine,
        "last": "" if is_fine else words[-1500:],
    }
