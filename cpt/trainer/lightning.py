"""lightning.Trainer as cpt uses it: one for each stage or evaluation, resumable at every optimizer step."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from lightning import LightningModule, Trainer
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from cpt.core.distributed import barrier
from cpt.core.errors import find_reason
from cpt.core.exceptions import MessageError
from cpt.core.preemption import joining_others
from cpt.core.processes import is_distributed
from cpt.core.slurm import count_requested_tasks, is_slurm_task, is_started_by_torchrun
from cpt.models.fsdp import Sharding
from cpt.trainer.checkpoint import AtomicCheckpointIO
from cpt.trainer.fsdp_strategy import FSDP2Strategy
from cpt.trainer.preemption import Preemption
from cpt.trainer.progress_bar import ProgressBar

NOISE = (
    ".*LeafSpec.*",  # Lightning's own, on torch 2.13
    ".*dataloader is not resumable.*",  # it is: its sampler begins at the trainer's step
    ".*does not have many workers.*",  # on two cores one process is right
    ".*smaller than the logging interval.*",  # of short runs
    r"FSDP2-wrapped module \(FSDP\w+(For|LMHead)\w+\) returned a view",  # of logits, which stay as they are
    ".*in eval mode at the start of training.*",  # a teacher is
    "GPU available but not used.*",  # trainer.accelerator=cpu was asked for
    ".*was called before the ``update``.*",  # a process may have no batch of a short text
    ".*`srun` command is available on your system but is not used.*",  # one process is right, too
)


class LoaderErrors(Callback):
    """Shows why a data loader could not start: Lightning's teardown of it would raise another error."""

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        fetcher = trainer.fit_loop._data_fetcher
        loader = None if fetcher is None else fetcher._combined_loader
        if loader is not None and loader._iterator is None:
            trainer.fit_loop._data_fetcher = None


def make_trainer(
    options: Mapping[str, Any],
    *,
    label: str,
    folder: Path | None = None,
    loggers: Sequence[Logger] = (),
    steps: int | None = None,
    callbacks: Sequence[Callback] = (),
    preemption: Preemption | None = None,
) -> Trainer:
    """A Trainer with `options` of lightning.Trainer (and of FSDP2Strategy) for `steps` optimizer steps or,
    without, an evaluation; what it writes goes to a folder, or nowhere.

    `preemption` saves a stage on a signal; without it, a fit is not left between two steps. Raises ValueError
    for options that Lightning rejects."""
    silence_libraries()
    options = dict(options)
    frees_weights = options.pop("reshard_after_forward", None) is not False
    if options.get("strategy") == "fsdp":
        options["strategy"] = FSDP2Strategy(reshard=frees_weights)  # one for each Trainer
    if steps is not None and "log_every_n_steps" in options:  # a short stage has a point at its end
        options["log_every_n_steps"] = min(options["log_every_n_steps"], steps)

    try:
        trainer = Trainer(
            max_steps=1 if steps is None else steps,
            max_epochs=-1,
            limit_val_batches=1.0 if steps is None else 0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=list(loggers) or False,
            # The bar shows what the others have measured of a step, and comes after them.
            callbacks=[LoaderErrors(), *callbacks, ProgressBar(label), preemption or Preemption()],
            default_root_dir=folder or os.devnull,  # the working folder otherwise
            plugins=[AtomicCheckpointIO(), *find_slurm_environments()],
            **options,
        )
    except (MisconfigurationException, TypeError) as error:
        raise ValueError(f"trainer is invalid: {error}") from error

    # The numbers of a batch are weights and counts, which bf16-true would round to 8 bits.
    precision: Any = trainer.precision_plugin
    precision.convert_input = lambda batch: batch

    # Lightning's handlers: SIGTERM ends the program with exit code 0 and waits for other processes; on SLURM
    # SIGUSR1 writes a checkpoint into the working folder.
    connector: Any = trainer._signal_connector
    connector.register_signal_handlers = lambda: None
    return trainer


def find_slurm_environments() -> list[ClusterEnvironment]:
    """Inside a SLURM job, what counts the processes of a run: SLURM for a task that srun started, else
    Lightning, which takes a batch script or the shell of salloc for a task. Empty elsewhere: Lightning
    finds out itself."""
    if count_requested_tasks() == 0 or is_started_by_torchrun():
        return []
    if is_slurm_task():
        return [SLURMEnvironment()]
    return [LightningEnvironment()]


def join_processes(options: Mapping[str, Any]) -> None:
    """Makes the process group of torchrun, SLURM or MPI, which Lightning makes when it first fits or
    evaluates: a resumed run decides and works before. Waits until every process is here."""
    strategy: Any = make_trainer(options, label="", steps=1).strategy
    environment = getattr(strategy, "cluster_environment", None)
    if environment is None or isinstance(environment, LightningEnvironment):  # which starts them at a fit
        return
    if environment.world_size() > 1 and not is_distributed():
        with joining_others():
            strategy.setup_environment()
    barrier()


def join_for_shards(options: Mapping[str, Any]) -> Sharding | None:
    """Makes the process group with strategy=fsdp, and starts the other processes unless a launcher has:
    together they load the model. None for one process."""
    strategy: Any = make_trainer(options, label="", steps=1).strategy
    if strategy.launcher is not None:
        strategy.launcher.launch(strategy.setup_environment)
    elif not is_distributed():
        with joining_others():
            strategy.setup_environment()
    barrier()
    return strategy.make_sharding() if strategy.world_size > 1 else None


def drop_optimizer(trainer: Trainer) -> None:
    """Frees the optimizer's state of a finished phase, which the trainer keeps, as it refers to itself."""
    trainer.strategy.optimizers = []
    trainer.strategy.lr_scheduler_configs = []


def silence_libraries() -> None:
    """Silences notices of Lightning, transformers' bars, and the warnings in NOISE."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def naming_cause(section: str) -> Iterator[None]:
    """Turns any exception of a library into a one-line ValueError that begins with a config section."""
    try:
        yield
    except Exception as error:
        # The error may name the section already; its class stays, for those who handle it.
        message = f"{section} is invalid: {find_reason(error).removeprefix('trainer is invalid: ')}"
        if isinstance(error, MessageError):
            raise error.with_message(message) from error
        raise ValueError(message) from error
