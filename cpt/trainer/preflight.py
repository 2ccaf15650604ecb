"""Pre-flight: check a plan with torch, Lightning and transformers before texts are read, and make what a run
needs in addition to its texts."""

import inspect
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.memory import keep_blocks_for_run
from cpt.core.messages import count_noun
from cpt.core.processes import (
    count_cores,
    find_stray_ranks,
    is_first_process,
    is_job_within_a_sweep,
    is_one_of_several,
)
from cpt.core.schema import check_names, list_option_types
from cpt.core.slurm import check_task_count
from cpt.data.options import share_batch
from cpt.loggers.wandb_environment import WandbPlace
from cpt.trainer.auto import Machine, choose_devices, resolve_machine
from cpt.trainer.base_dtype import choose_base_dtype
from cpt.trainer.callbacks import make_callbacks, make_loggers
from cpt.trainer.check_model import check_model
from cpt.trainer.check_optimizer import check_optimizer
from cpt.trainer.lightning import make_trainer, naming_cause, silence_libraries
from cpt.trainer.options import Precision, Strategy, TrainerOptions
from cpt.trainer.plan import Plan
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
# By which a launcher, torchrun or srun, says how many processes a run has.
LAUNCHER_VARIABLES = ("LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS")
TRAINER_ARGUMENTS = inspect.signature(Trainer).parameters


@dataclass(frozen=True)
class Preflight:
    """What a run has before its texts."""

    machine: Machine
    loggers: dict[str, Logger]
    callbacks: dict[str, Callback]
    harness: Any  # the tasks of lm-evaluation-harness, or None


def prepare_run(plan: Plan, run: RunDir) -> Preflight:
    """Prepares the process, and what needs no text. Raises ValueError for a plan that cannot be run."""
    silence_libraries()
    keep_blocks_for_run(is_checkpointed=plan.trainer.gradient_checkpointing)
    check_optimizer("optim", {"_target_": plan.optim.target, **plan.optim.arguments})
    check_export_folder(run.model)
    config = check_model(plan)
    base_dtype = choose_base_dtype(plan, config)

    devices, strategy = choose_devices(plan.trainer)
    if plan.logger.wandb_place is not None:
        check_wandb(plan.logger.wandb_place)
    loggers = make_loggers(plan.logger.others, folder=run.path)
    callbacks = make_callbacks(plan.callbacks)

    # Only a trainer knows the number of processes and the device. This one is not used for training: each
    # stage of the run makes its own.
    trainer = try_trainer(
        plan.trainer,
        devices=devices,
        strategy=strategy,
        loggers=list(loggers.values()),
        callbacks=list(callbacks.values()),
    )
    warn_of_cpu_processes(plan.trainer, trainer)
    log_awaited_processes(trainer.world_size)
    check_task_count(trainer.num_devices, plan.trainer.num_nodes)
    check_process_start(trainer.world_size, format_value(devices))
    check_processes(plan, trainer.world_size)

    # A resumed run keeps its precision, also on another device, and so does what is compiled.
    scores = run.load_scores()
    machine = resolve_machine(
        plan,
        config,
        device=trainer.strategy.root_device,
        devices=devices,
        strategy=strategy,
        num_processes=trainer.num_devices,
        stored_numerics=scores.numerics if scores else {},
        base_dtype=base_dtype,
    )
    return Preflight(machine, loggers, callbacks, make_harness(plan, machine.precision))


def check_export_folder(folder: Path) -> None:
    """Raises ValueError where the exported model could not be written, which would fail only after all
    training."""
    exists = folder.exists() or folder.is_symlink()
    if exists and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder, but the exported model is written there; move it away")
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"{folder} cannot be written, but the exported model belongs there; make it writable"
        )


def check_wandb(destination: WandbPlace) -> None:
    """Raises ValueError for options and variables that W&B refuses. An installation of W&B that cannot be
    imported is no reason to: the run will say so and continue."""
    try:
        from cpt.loggers.wandb_run import check_settings
    except Exception:  # not ImportError alone: W&B's parts may be of different versions
        return
    check_settings(destination)


def try_trainer(
    options: TrainerOptions,
    *,
    devices: Any,
    strategy: Strategy,
    loggers: Sequence[Logger],
    callbacks: Sequence[Callback],
) -> Trainer:
    """A trainer on this machine. Raises ValueError for options that Lightning does not know or rejects."""
    check_names(options.others, [*list_option_types(TrainerOptions), *TRAINER_ARGUMENTS], section="trainer")
    check_gpu(options)

    precision = str(options.precision).replace("auto", "32-true")  # `auto` depends on the device, yet unknown
    arguments = options.lightning | {"devices": devices, "strategy": strategy, "precision": precision}
    shown_options = (
        f"trainer.accelerator={options.accelerator} trainer.devices={devices} "
        f"trainer.strategy={strategy} trainer.precision={precision}"
    )
    with naming_cause(shown_options):
        return make_trainer(arguments, label="", steps=1, loggers=loggers, callbacks=callbacks)


def check_gpu(options: TrainerOptions) -> None:
    """Raises ValueError where a GPU is asked for and torch finds none."""
    if options.accelerator not in ("gpu", "cuda") or torch.cuda.device_count() > 0:
        return
    is_cpu_build = torch.version.cuda is None and torch.version.hip is None
    build = "a build for CPUs" if is_cpu_build else "a build for GPUs"
    raise InvalidOptionError(
        "trainer.accelerator",
        options.accelerator,
        reason=f"torch {torch.__version__} ({build}) finds no GPU",
        allowed="auto, cpu",
    )


def warn_of_cpu_processes(options: TrainerOptions, trainer: Trainer) -> None:
    """Warns of several processes on CPUs that were not requested: a GPU may not have been found."""
    is_on_cpu = trainer.strategy.root_device.type == "cpu"
    if is_on_cpu and options.accelerator == "auto" and trainer.num_devices > 1 and is_first_process():
        log.warning(
            "No GPU found: starting %s on the CPU (trainer.devices=%s, %s); "
            "trainer.devices=1 is one process, trainer.accelerator=cpu omits this warning",
            count_noun(trainer.num_devices, "process", "processes"),
            format_value(options.devices),
            count_noun(count_cores(), "core"),
        )


def log_awaited_processes(world_size: int) -> None:
    """Logs that the first of several processes, which others have started, waits for the rest: a shell may
    have their variables of an earlier start, and then nothing comes."""
    if world_size == 1 or not is_one_of_several() or not is_first_process():
        return
    variables = [f"{name}={os.environ[name]}" for name in LAUNCHER_VARIABLES if name in os.environ]
    log.info(
        "Waiting for %s of this run (%s); if no launcher has started them, unset these variables",
        count_noun(world_size - 1, "further process", "further processes"),
        " ".join(variables),
    )


def check_process_start(num_processes: int, devices: str) -> None:
    """Raises ValueError if Lightning would start the other processes of a run in a job whose command line is
    not the run's: each of them would be the whole sweep, or a process of the launcher."""
    if num_processes > 1 and is_job_within_a_sweep() and not is_one_of_several():
        raise InvalidOptionError(
            "trainer.devices",
            devices,
            reason="this hydra/launcher runs jobs of one process",
            allowed=f"1; hydra/launcher=processes or slurm for {num_processes}",
        )


def check_processes(plan: Plan, world_size: int) -> None:
    """Raises ValueError for a batch or a routing that cannot be divided among several processes, and for a
    single process that was started as one of several."""
    options = plan.trainer
    num_micro_batches = options.count_micro_batches(world_size)
    share_batch(options.batch_size, accumulate=num_micro_batches, world=world_size)

    routing = getattr(plan.method.options, "routing", None)
    prior = getattr(routing, "prior", "uniform")
    if world_size > 1 and prior != "uniform":
        raise InvalidOptionError(
            "method.routing.prior",
            prior,
            context=f"with {world_size} processes",
            reason="it follows all rows of a text in turn",
            allowed="uniform, or one process",
        )

    stray_variable = find_stray_ranks() if world_size == 1 else ""
    if stray_variable:  # NAME=VALUE of the environment
        raise ValueError(
            f"{stray_variable} is invalid with one process, which would write nothing. "
            "Allowed: unset, or trainer.devices and trainer.num_nodes of all processes"
        )


def make_harness(plan: Plan, precision: Precision) -> Any:
    """The benchmark's tasks, read by the process that measures them: a Harness, or None."""
    if plan.benchmark is None or not is_first_process():
        return None
    log.info("Reading the benchmark's tasks")
    from cpt.evaluation.lm_eval import Harness

    return Harness(plan.benchmark, precision=precision)
