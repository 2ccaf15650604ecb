"""Runs and sweeps on a real SLURM: preempted, queued again, at their time limit, cancelled, on a node that
fails. Is a step lost, are the bits those of a run that nobody disturbed?

A trial is one of EVENTS on a cluster of two nodes on this machine (tests/support/slurm_cluster.py), which all
trials share. Those of *script* submit the batch script of docs/distributed.md, those of *sweep* start
`hydra/launcher=slurm`. No run saves a checkpoint but at a signal, except where a node fails."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.campaigns import runs
from tests.campaigns.frame import ROOT
from tests.support.slurm_cluster import SlurmCluster, missing_programs

EVENTS = (
    "script preempted",
    "script requeued",
    "script at its time limit",
    "script cancelled",
    "script on a failed node",
    "ddp by srun",
    "fsdp by srun requeued",
    "sweep preempted",
    "sweep with a cancelled job",
    "sweep submitted twice",
)
STEPS = ("trainer.steps=600", "trainer.checkpoint_every_n_steps=100000")
LONG = (
    "trainer.steps=1500",
    "trainer.checkpoint_every_n_steps=100000",
)  # until slurmctld, each 30 s, sees a limit
SAVING = ("trainer.steps=600", "trainer.checkpoint_every_n_steps=20")
IN_A_STAGE = re.compile(r"\((1/2|2/2)\)")
STOPPED = re.compile(r"stopped by SIG\w+ after step \d+")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
ENDS_S = 240.0
METHODS = ("ncl", "ewc")
CLUSTERS: dict[Path, SlurmCluster] = {}


def find_missing_programs() -> str:
    """Why the campaign cannot run here; empty if it can."""
    return missing_programs()


def cluster_in(folder: Path) -> SlurmCluster:
    if folder not in CLUSTERS:
        CLUSTERS[folder] = SlurmCluster(folder / "slurm")
        CLUSTERS[folder].start()
        os.environ["PYTHONPATH"] = str(ROOT)
        CLUSTERS[folder].environment["PYTHONPATH"] = str(ROOT)
    return CLUSTERS[folder]


def close(folder: Path) -> None:
    """Ends the daemons of the trials in a folder: they would hold the ports of the next campaign."""
    cluster = CLUSTERS.pop(folder, None)
    if cluster is not None:
        cluster.stop()


def batch_script(arguments: list[str], *, nodes: int, tasks: int) -> str:
    """The script of docs/distributed.md with other resources and another run."""
    page = (ROOT / "docs" / "distributed.md").read_text()
    script = re.search(r"^#!/bin/bash\n.*?(?=^```)", page, re.DOTALL | re.MULTILINE)
    assert script is not None
    resources = f"#SBATCH --nodes={nodes} --ntasks-per-node={tasks} --cpus-per-task=1"
    command = " ".join(
        ["srun", sys.executable, str(ROOT / "run.py"), *(f"'{argument}'" for argument in arguments)]
    )
    text = re.sub(r"^#SBATCH --nodes=.*$", resources, script[0], flags=re.MULTILINE)
    text = re.sub(r"^srun .*$", lambda match: command, text, flags=re.MULTILINE)
    return text.replace("#SBATCH --signal", "#SBATCH --time=30 --signal")


def wait_for_training(run: Path) -> None:
    if not runs.wait_for(lambda: IN_A_STAGE.search(runs.read_log(run)), seconds=ENDS_S):
        raise RuntimeError(f"no training: {runs.read_log(run)[-600:]}")


def wait_for_end(cluster: SlurmCluster, job: str) -> str:
    runs.wait_for(lambda: cluster.field(job, "JobState") in ENDED, seconds=ENDS_S)
    return cluster.field(job, "JobState")


def preempt(cluster: SlurmCluster) -> None:
    cluster.submit("-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")


def apply_event(cluster: SlurmCluster, event: str, job: str, run: Path) -> None:
    """Does to a job what the event says."""
    if event == "script preempted":
        preempt(cluster)
    elif event in ("script requeued", "fsdp by srun requeued"):
        cluster.run("scontrol", "requeue", job)
    elif event == "script cancelled":
        cluster.run("scancel", job)
    elif event == "script at its time limit":
        # USR1 comes 120 seconds before the limit: at once, where that is a minute.
        cluster.run("scontrol", "update", f"jobid={job}", "timelimit=1")
        runs.wait_for(lambda: STOPPED.search(runs.read_log(run)), seconds=ENDS_S)
        cluster.run("scontrol", "update", f"jobid={job}", "timelimit=30")
    elif event == "script on a failed node":
        node = cluster.field(job, "NodeList")
        cluster.fail_node(node)
        runs.wait_for(lambda: cluster.field(job, "Restarts") == "1", seconds=ENDS_S)
        cluster.start_node(node)


def try_script(cluster: SlurmCluster, folder: Path, number: int, moment: float) -> dict[str, Any]:
    event = EVENTS[number % len(EVENTS)]
    strategy = event.partition(" ")[0] if event.endswith(("by srun", "by srun requeued")) else ""
    steps = {"script at its time limit": LONG, "script on a failed node": SAVING}.get(event, STEPS)
    options = ["method=ncl", *steps]
    options += [f"strategy={strategy}", "trainer.accelerator=cpu"] if strategy else []
    expected = runs.run_undisturbed(folder, options, twin=bool(strategy))
    run = folder / f"slurm-{number}" / "run"
    run.mkdir(parents=True)

    # Two processes: tasks of one node (DDP), or of two (FSDP); devices and nodes follow srun.
    arguments = runs.command(folder, run, *options)
    shape = {"ddp": (1, 2), "fsdp": (2, 1)}.get(strategy, (1, 1))
    script = run.with_name("job.sh")
    script.write_text(batch_script(arguments, nodes=shape[0], tasks=shape[1]))
    variables = "--export=ALL,MASTER_ADDR=127.0.0.1" if strategy else "--export=ALL"
    job = cluster.submit("-o", str(runs.log_of(run)), "-D", str(run.parent), variables, str(script))
    wait_for_training(run)
    time.sleep(moment)
    apply_event(cluster, event, job, run)

    state = wait_for_end(cluster, job)
    outcome: dict[str, Any] = {"event": event, "moment": round(moment, 2), "state": state}
    outcome |= {"restarts": cluster.field(job, "Restarts"), "stops": len(STOPPED.findall(runs.read_log(run)))}
    if event == "script cancelled":
        outcome["then"] = runs.complete(arguments, run)
    is_ended = state == ("CANCELLED" if event == "script cancelled" else "COMPLETED")
    outcome["same"] = (run / "scores.json").exists() and runs.bits(run) == expected["bits"]
    restarts = {"script cancelled": "0", "ddp by srun": "0"}.get(event, "1")
    outcome["fine"] = is_ended and outcome["same"] and outcome["restarts"] == restarts
    outcome["last"] = "" if outcome["fine"] else runs.read_log(run)[-1500:]
    return outcome


def start_sweep(cluster: SlurmCluster, folder: Path, home: Path) -> subprocess.Popen[bytes]:
    run_options = runs.command(folder, home / "unused", *STEPS, f"method={','.join(METHODS)}")
    arguments = [option for option in run_options if not option.startswith("hydra.run.dir=")]
    resources = {"gpus_per_node": 0, "cpus_per_task": 1, "mem_gb": 1, "timeout_min": 30}
    arguments += [f"hydra.launcher.{name}={value}" for name, value in resources.items()]
    command = [sys.executable, str(ROOT / "run.py"), "-m", "hydra/launcher=slurm", "name=sweep", *arguments]
    with (home / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=home, env=cluster.environment, stdout=log, stderr=log)


def find_run(home: Path, method: str) -> Path:
    """The folder of a method's run; one that does not exist before the run has begun."""
    return next(home.glob(f"outputs/sweep/{method}_*"), home / "none")


def is_training(home: Path) -> bool:
    console = find_run(home, METHODS[0]) / "console.log"
    return console.exists() and IN_A_STAGE.search(console.read_text().replace("\r", "\n")) is not None


def try_sweep(cluster: SlurmCluster, folder: Path, number: int, moment: float) -> dict[str, Any]:
    event = EVENTS[number % len(EVENTS)]
    expected = {name: runs.run_undisturbed(folder, [f"method={name}", *STEPS])["bits"] for name in METHODS}
    home = folder / f"slurm-{number}"
    home.mkdir()
    sweep = start_sweep(cluster, folder, home)
    if not runs.wait_for(lambda: is_training(home), seconds=ENDS_S):
        raise RuntimeError(f"no training: {(home / 'log').read_text()[-600:]}")
    time.sleep(moment)
    numbers = cluster.ask("squeue", "-h", "-r", "-n", "sweep", "-o", "%i").split()

    codes = []
    if event == "sweep preempted":
        preempt(cluster)
    elif event == "sweep with a cancelled job":
        cluster.run("scancel", numbers[0])
    else:
        sweep.send_signal(signal.SIGKILL)
        codes.append(sweep.wait())
        sweep = start_sweep(cluster, folder, home)
    codes.append(sweep.wait(ENDS_S))
    outcome: dict[str, Any] = {
        "event": event,
        "moment": round(moment, 2),
        "codes": codes,
        "jobs": len(numbers),
    }
    if event == "sweep with a cancelled job":
        codes.append(start_sweep(cluster, folder, home).wait(ENDS_S))

    log = (home / "log").read_text()
    outcome["submitted"] = sum(int(count) for count in re.findall(r"Submitted (\d+) jobs?:", log))
    outcome["same"] = all(
        (find_run(home, name) / "scores.json").exists() and runs.bits(find_run(home, name)) == expected[name]
        for name in METHODS
    )
    expected_by_event = {"sweep preempted": ([0], 2), "sweep with a cancelled job": ([1, 0], 3)}
    outcome["fine"] = outcome["same"] and (codes, outcome["submitted"]) == expected_by_event.get(
        event, ([-9, 0], 2)
    )
    outcome["last"] = "" if outcome["fine"] else log[-1500:]
    return outcome


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    cluster = cluster_in(folder)
    moment = draw.uniform(0, 1)
    if EVENTS[number % len(EVENTS)].startswith("sweep"):
        return try_sweep(cluster, folder, number, moment)
    return try_script(cluster, folder, number, moment)
