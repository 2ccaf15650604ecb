"""Runs under torchrun: a worker is killed, the agent has a signal, two agents meet. Are the bits the same?

A trial trains ncl on two domains with DDP or FSDP, in turn, and one of these happens in a stage:

* *kill*: one of two workers is killed by SIGKILL; the agent starts both again (`--max-restarts`).
* *signal*: SIGUSR1 or SIGTERM to the agent saves the run; it resumes with one process or four instead of two.
* *nodes*: two agents with a worker each meet at a rendezvous on the loopback, and nothing happens.

A run of two processes has to end with the bits of one that nobody disturbed; with other numbers of
processes, whose sums have another order, with losses that differ by less than NEAR."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.campaigns import runs
from tests.campaigns.frame import ROOT

EVENTS, STRATEGIES = ("kill", "signal", "nodes"), ("ddp", "fsdp")
STEPS = ("trainer.steps=40", "trainer.checkpoint_every=10", "trainer.accelerator=cpu")
HEARD = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
IN_A_STAGE = re.compile(r"\((1/2|2/2)\)")
FIRST_PORT = 23000  # of those that trials meet at
NEAR = 0.01  # nats
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # docs/distributed.md says why


def begin(arguments: list[str], run: Path, *, port: int, processes: int = 2, nodes: int = 1) -> list[Any]:
    run.mkdir(parents=True, exist_ok=True)
    agent = [sys.executable, "-m", "torch.distributed.run", HEARD, f"--nnodes={nodes}", "--max-restarts=2"]
    agent += [f"--nproc-per-node={processes}", "--rdzv-backend=c10d", f"--rdzv-id={port}"]
    agent += [f"--rdzv-endpoint=127.0.0.1:{port}", str(ROOT / "run.py"), *arguments]
    agent += [f"trainer.devices={processes}", f"trainer.num_nodes={nodes}"]
    with runs.log_of(run).open("ab") as log:
        streams = {"stdout": log, "stderr": subprocess.STDOUT, "env": os.environ | OWN_STORES}
        return [subprocess.Popen(agent, cwd=run.parent, **streams) for _ in range(nodes)]


def end(agents: list[Any]) -> list[int]:
    codes = []
    for agent in agents:
        try:
            codes.append(agent.wait(runs.HANGS_S))
        except subprocess.TimeoutExpired:
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(agent.pid).children(recursive=True):
                    process.kill()
            agent.kill()
            codes.append(agent.wait())
    return codes


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    event, strategy = EVENTS[number % 3], STRATEGIES[number // 3 % 2]
    options, run = [f"strategy={strategy}", *STEPS], folder / f"torchrun-{number}"
    port = FIRST_PORT + 10 * number
    expected, arguments = (
        runs.run_undisturbed(folder, options, twin=True),
        runs.command(folder, run, *options),
    )
    outcome: dict[str, Any] = {"event": event, "strategy": strategy}
    if event == "nodes":
        codes = end(begin(arguments, run, port=port, processes=1, nodes=2))
        return outcome | {"codes": codes, "fine": codes == [0, 0] and runs.bits(run) == expected["bits"]}
    agents = begin(arguments, run, port=port)
    runs.wait_for(lambda: IN_A_STAGE.search(runs.read_log(run)) or agents[0].poll() is not None)
    time.sleep(moment := draw.uniform(0, 2))
    children = psutil.Process(agents[0].pid).children()
    workers = [process for process in children if "run.py" in " ".join(process.cmdline())]
    outcome |= {"moment": round(moment, 2), "workers": len(workers)}
    if event == "kill":
        runs.kill(draw.choice(workers).pid)
        codes = end(agents)
        is_resumed = "Resuming" in runs.read_log(run)
        fine = codes == [0] and runs.bits(run) == expected["bits"]
        return outcome | {"codes": codes, "resumed": is_resumed, "fine": fine}
    agents[0].send_signal(name := draw.choice([signal.SIGUSR1, signal.SIGTERM]))
    codes, state = end(agents), json.loads((run / "progress.json").read_text())["state"]
    outcome |= {"signal": name.name, "codes": codes, "state": state, "processes": draw.choice([1, 4])}
    (final_code,) = end(begin(arguments, run, port=port + 1, processes=outcome["processes"]))
    undisturbed = folder / "wholes" / str([*runs.UNDISTURBED].index((str(folder), *options, True)))
    ends = [json.loads((process / "scores.json").read_text())["nll"] for process in (run, undisturbed)]
    far = float(np.abs(np.subtract(*ends)).max())
    fine = state == "preempted" and final_code == 0 and far < NEAR
    return outcome | {"then": final_code, "nats": round(far, 6), "fine": fine}
