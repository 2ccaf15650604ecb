"""SLURM's environment variables: which task of a job step this process is, and how many there are.

A batch script and the shell of `salloc` have the variables of their job, but only `srun` starts the job's
tasks. Each task that it starts has those of its step."""

import os
from collections.abc import Mapping

from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun

STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST")  # set by srun alone
INTERACTIVE = ("bash", "interactive")  # job names of `srun --pty bash` and `salloc`, as Lightning knows them
TASK = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NNODES",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_GTIDS",
    "SLURM_TASK_PID",
)


def count_requested_tasks() -> int:
    """The number of tasks that the job, or the step of this process, was asked for; 0 outside of SLURM."""
    number = os.environ.get("SLURM_NTASKS", "")
    return int(number) if number.isdigit() else 0


def is_started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_interactive() -> bool:
    return os.environ.get("SLURM_JOB_NAME") in INTERACTIVE


def is_slurm_task() -> bool:
    """Whether srun started this process as a task of a run. torchrun counts its own processes, and a shell
    that srun started, alone, is where a user types commands."""
    in_step = any(name in os.environ for name in STEP) and count_requested_tasks() > 0
    is_shell = count_requested_tasks() == 1 and is_interactive()
    return in_step and not is_shell and not is_started_by_torchrun()


def count_started_tasks() -> int:
    """The number of tasks that work on the run of this process; 1 outside of a step of srun."""
    return count_requested_tasks() if is_slurm_task() else 1


def check_launch(devices: int | None, nodes: int) -> None:
    """Raises ValueError if SLURM has not started one task for each of the `devices` (None: not known yet)
    of each of the `nodes`: in a job of several tasks whose script calls the program without srun, the first
    would wait for the others; a single task for several devices would use one of them."""
    tasks = count_requested_tasks()
    is_job = tasks > 0 and not is_started_by_torchrun()
    if is_job and not is_slurm_task() and not is_interactive():
        if tasks > 1:
            raise InvalidOptionError(
                "SLURM_NTASKS",
                tasks,
                context="without srun, which starts the tasks",
                allowed="srun python run.py …, or --ntasks=1 for one process",
            )
        if devices is not None:
            compare_tasks(tasks, devices, nodes)
    elif devices is not None:
        check_task_count(devices, nodes)


def check_task_count(devices: int, nodes: int) -> None:
    """Raises ValueError if the tasks that srun started are not one for each of the `devices` of each of the
    `nodes`."""
    if is_slurm_task():
        compare_tasks(count_requested_tasks(), devices, nodes)


def compare_tasks(tasks: int, devices: int, nodes: int) -> None:
    """Raises ValueError unless SLURM started a task for each device."""
    if tasks != devices * nodes:
        raise ValueError(
            f"trainer.devices={devices} trainer.num_nodes={nodes} is invalid: SLURM_NTASKS={tasks}. "
            f"Allowed: srun with --nodes={nodes} --ntasks-per-node={devices}, a task per device; "
            f"or the devices of {count_noun(tasks, 'task')} (strategy=ddp, fsdp)"
        )


def count_tasks_per_node(default: int) -> int:
    """The tasks of this step on each node, for `trainer.devices`; the default outside of a step."""
    number = os.environ.get("SLURM_NTASKS_PER_NODE", "")
    return int(number) if count_started_tasks() > 1 and number.isdigit() else default


def step_nodes() -> int:
    """The nodes of this step, for `trainer.num_nodes`; 1 outside of a step."""
    number = os.environ.get("SLURM_NNODES", "")
    return int(number) if count_started_tasks() > 1 and number.isdigit() else 1


def remove_task_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that is not a task: a job of a sweep that runs inside an allocation."""
    dropped = {*TASK, *(name for name in environment if name.startswith("SLURM_STEP"))}
    return {name: value for name, value in environment.items() if name not in dropped}
