"""A SLURM of two nodes on this machine, for tests: munged, slurmctld and a slurmd for each node, on the
loopback.

Debian's packages `slurm-wlm` and `munge` suffice. It has no accounting, limits nothing, and needs root. Of
its two partitions a job in `urgent` preempts those in `batch`, which have GRACE_S seconds to save."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NODES = ("n1", "n2")
PORT = 28170  # of slurmctld; those of the nodes follow
GRACE_S = 20
SLURMD_TIMEOUT_S = 10  # after which a silent node is down
START_S = 30.0
STOP_S = 15.0


def missing_programs() -> str:
    """Why a cluster cannot be started here; empty if it can."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "a cluster needs root"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


class SlurmCluster:
    """A cluster with its files in a folder. `environment` is that of what submits to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        self.environment = {**os.environ, "SLURM_CONF": str(self.config), "PATH": path}

    def start(self) -> None:
        """Starts the daemons; raises RuntimeError if the nodes do not become idle."""
        for name in ("ctld", "log", "munge", "pids", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.start_munge()
        self.config.write_text(self.describe())
        self.run("slurmctld", "-f", str(self.config))
        for node in NODES:
            self.start_node(node)
        if not wait_until(self.is_idle, START_S):
            raise RuntimeError(f"the nodes of SLURM are not idle: {self.ask('sinfo', '-N', '-l')}")

    def start_munge(self) -> None:
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        options = {
            "key-file": key,
            "socket": self.folder / "munge" / "socket",
            "seed-file": self.folder / "munge" / "seed",
            "pid-file": self.folder / "pids" / "munged",
            "log-file": self.folder / "log" / "munged.log",
        }
        self.run("munged", "--force", *(f"--{name}={value}" for name, value in options.items()))

    def start_node(self, node: str) -> None:
        self.run("slurmd", "-f", str(self.config), "-N", node)

    def describe(self) -> str:
        """slurm.conf. A requeued job may start after 5 seconds (cred_expire); by default after 120."""
        folder = self.folder
        host = socket.gethostname().partition(".")[0]
        lines = [
            "ClusterName=cpttests",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={PORT}",
            "SlurmUser=root",
            f"AuthInfo=socket={folder}/munge/socket,cred_expire=5",
            "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
            "ProctrackType=proctrack/pgid",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "ReturnToService=2",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "KillWait=10",
            f"SlurmdTimeout={SLURMD_TIMEOUT_S}",
            "SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1",
            "SlurmdParameters=config_overrides",
            f"StateSaveLocation={folder}/ctld",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/pids/slurmctld",
            f"SlurmdPidFile={folder}/pids/slurmd.%n",
            f"SlurmctldLogFile={folder}/log/slurmctld.log",
            f"SlurmdLogFile={folder}/log/slurmd.%n.log",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
        ]
        for number, node in enumerate(NODES, 1):
            address = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={PORT + number}"
            lines.append(f"NodeName={node} {address} CPUs=8 RealMemory=8000")
        common = "Nodes=ALL DefaultTime=60 State=UP"
        lines.append(f"PartitionName=batch Default=YES PriorityTier=1 GraceTime={GRACE_S} {common}")
        lines.append(f"PartitionName=urgent PriorityTier=10 PreemptMode=OFF {common}")
        return "\n".join(lines) + "\n"

    def run(self, *command: str) -> str:
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        if result.returncode != 0:
            raise RuntimeError(f"{command[0]} ended with {result.returncode}: {result.stderr.strip()}")
        return result.stdout.strip()

    def ask(self, *command: str) -> str:
        """As `run`, and empty if it fails."""
        try:
            return self.run(*command)
        except (RuntimeError, subprocess.TimeoutExpired):
            return ""

    def is_idle(self) -> bool:
        return self.ask("sinfo", "-h", "-N", "-p", "batch", "-o", "%T").split() == ["idle"] * len(NODES)

    def submit(self, *options: str) -> str:
        """Submits a job by sbatch; gives its number."""
        return self.run("sbatch", "--parsable", *options)

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, like JobState; empty if unknown."""
        fields = (word.partition("=") for word in self.ask("scontrol", "-o", "show", "job", job).split())
        return next((value for key, _, value in fields if key == name), "")

    def fail_node(self, node: str) -> None:
        """Kills a node's daemon and all that it started, as a machine that loses power."""
        processes = [psutil.Process(self.pid(f"slurmd.{node}"))]
        steps = [process for process in psutil.process_iter() if self.is_step_of(process, node)]
        processes += steps
        for step in steps:
            processes += step.children(recursive=True)

        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def is_step_of(self, process: psutil.Process, node: str) -> bool:
        """Whether a process is a slurmstepd of a node, by the node's spool folder among its open files."""
        try:
            if not process.name().startswith("slurmstepd"):
                return False
            log = self.folder / "log" / f"slurmd.{node}.log"
            return any(file.path == str(log) for file in process.open_files())
        except psutil.Error:
            return False

    def pid(self, name: str) -> int:
        return int((self.folder / "pids" / name).read_text())

    def stop(self) -> None:
        """Cancels all jobs, then ends the daemons by their pid files."""
        jobs = self.ask("squeue", "-h", "-o", "%A").split()
        if jobs:
            self.ask("scancel", *jobs)
            wait_until(lambda: not self.ask("squeue", "-h", "-o", "%A"), STOP_S)
        for name in (*(f"slurmd.{node}" for node in NODES), "slurmctld", "munged"):
            try:
                process = psutil.Process(self.pid(name))
            except (OSError, ValueError, psutil.NoSuchProcess):
                continue
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except psutil.TimeoutExpired:
                process.kill()
