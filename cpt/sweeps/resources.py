"""The machine's cores and GPUs, shared out among the jobs of a sweep."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from cpt.core.processes import cores


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; torch would take seconds."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.replace(" ", "").split(",") if name not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [str(index) for index in range(len(re.findall(r"^GPU ", listed, re.MULTILINE)))]


def devices(cfg: DictConfig, *, gpus: int) -> int:
    """How many devices `trainer.devices` asks for; all where it is not a number ("auto", -1, a list)."""
    given = OmegaConf.select(cfg, "trainer.devices")
    return given if isinstance(given, int) and given > 0 else max(1, gpus)


def share_out_machine(
    configs: Sequence[DictConfig], *, jobs: int | None, threads: int | None, waiting: int | None = None
) -> list[dict[str, str]]:
    """The environment of each of the jobs at once: its share of the cores and of the GPUs. `waiting` of the
    configs are still to run (default: all); what goes on later has the threads that it would have had, since
    with others the last bits differ."""
    on_cpu = all(OmegaConf.select(cfg, "trainer.accelerator") == "cpu" for cfg in configs)
    gpus = [] if on_cpu else visible_gpus()
    each = max(devices(cfg, gpus=len(gpus)) for cfg in configs)
    fitting = max(1, (len(gpus) or cores()) // each)
    number = min(jobs or fitting, len(configs))
    shared = thread_variables(number * each, threads=threads)
    number = number if waiting is None else min(number, waiting)
    if not gpus:
        return [shared] * number
    firsts = [place % fitting * each for place in range(number)]
    return [shared | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + each])} for first in firsts]


def thread_variables(processes: int, *, threads: int | None) -> dict[str, str]:
    """`threads`, or the cores divided by the processes at once, unless the user has set either variable."""
    number, names = threads or max(1, cores() // processes), ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    if threads is None and any(name in os.environ for name in names):
        names = ()
    # Threads that wait by spinning halve the speed of the other processes.
    waiting = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")} if processes > 1 else {}
    return dict.fromkeys(names, str(number)) | waiting
