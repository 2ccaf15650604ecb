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

EVENTS = ("kill", "signal", "nodes")
STRATEGIES = ("ddp", "fsdp")
STEPS = ("trainer.steps=40", "trainer.checkpoint_every_n_steps=10", "trainer.accelerator=cpu")
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

    environment = os.environ | OWN_STORES
    agents = []
    with runs.log_of(run).open("ab") as log:
        for _ in range(nodes):
            agents.append(
                subprocess.Popen(agent, cwd=run.parent, stdout=log, stderr=subprocess.STDOUT, env=environment)
            )
    return agents


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
    event = EVENTS[number % 3]
    strategy = STRATEGIES[number // 3 % 2]
    run = folder / f"torchrun-{number}"
    port = FIRST_PORT + 10 * number
    options = [f"strategy={strategy}", *STEPS]
    expected = runs.run_undisturbed(folder, options, twin=True)
    arguments = runs.command(folder, run, *options)
    outcome: dict[str, Any] = {"event": event, "strategy": strategy}
    if event == "nodes":
        outcome["codes"] = end(begin(arguments, run, port=port, processes=1, nodes=2))
        outcome["fine"] = outcome["codes"] == [0, 0] and runs.bits(run) == expected["bits"]
        return outcome

    agents = begin(arguments, run, port=port)
    runs.wait_for(lambda: IN_A_STAGE.search(runs.read_log(run)) or agents[0].poll() is not None)
    moment = draw.uniform(0, 2)
    time.sleep(moment)
    children = psutil.Process(agents[0].pid).children()
    workers = [process for process in children if "run.py" in " ".join(process.cmdline())]
    outcome["moment"] = round(moment, 2)
    outcome["workers"] = len(workers)
    if event == "kill":
        runs.kill(draw.choice(workers).pid)
        outcome["codes"] = end(agents)
        outcome["resumed"] = "Resuming" in runs.read_log(run)
        outcome["fine"] = outcome["codes"] == [0] and runs.bits(run) == expected["bits"]
        return outcome

    # A signal saves the run, which goes on with another number of processes.
    signal_name = draw.choice([signal.SIGUSR1, signal.SIGTERM])
    agents[0].send_signal(signal_name)
    outcome["signal"] = signal_name.name
    outcome["codes"] = end(agents)
    outcome["state"] = json.loads((run / "progress.json").read_text())["state"]
    outcome["processes"] = draw.choice([1, 4])
    (final_code,) = end(begin(arguments, run, port=port + 1, processes=outcome["processes"]))

    undisturbed = folder / "wholes" / str([*runs.UNDISTURBED].index((str(folder), *options, True)))
    nll = json.loads((run / "scores.json").read_text())["nll"]
    expected_nll = json.loads((undisturbed / "scores.json").read_text())["nll"]
    distance = float(np.abs(np.subtract(nll, expected_nll)).max())
    outcome["then"] = final_code
    outcome["nats"] = round(distance, 6)
    outcome["fine"] = outcome["state"] == "preempted" and final_code == 0 and distance < NEAR
    return outcome
