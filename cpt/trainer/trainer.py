"""Lightning's Trainer as cpt uses it: one per stage, resumable at every optimizer step, with a progress
bar."""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tqdm import tqdm

from cpt.core.preemption import leave_together
from cpt.core.progress import progress_bar
from cpt.trainer.checkpointing import WholeFile
from cpt.trainer.options import Fsdp
from cpt.trainer.sharding import Sharded

NOISE = (
    ".*LeafSpec.*",  # Lightning's own, on torch 2.13
    ".*dataloader is not resumable.*",  # it is: its sampler begins at the trainer's step
    ".*does not have many workers.*",  # on two cores one process is right
    ".*smaller than the logging interval.*",  # of short runs
    r"FSDP2-wrapped module \(FSDP\w+(For|LMHead)\w+\) returned a view",  # of logits, which stay as they are
    ".*in eval mode at the start of training.*",  # a teacher is
    "GPU available but not used.*",  # trainer.accelerator=cpu was asked for
    ".*was called before the ``update``.*",  # a process may have no batch of a short text
)


class Bar(Callback):
    """One bar per phase, named after it, with the time left; in a log file, a line every few seconds."""

    def __init__(self, label: str) -> None:
        self.label, self.bar = label, tqdm(disable=True)

    def open(self, trainer: Trainer, *, total: int, done: int) -> None:
        self.bar = progress_bar(self.label, total=total, done=done, hidden=not trainer.is_global_zero)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.open(trainer, total=trainer.max_steps, done=trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for name, value in trainer.progress_bar_metrics.items():
            self.bar.set_postfix({name.split("/")[1]: f"{value:.3f}"}, refresh=False)
        self.bar.update(trainer.global_step - self.bar.n)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.open(trainer, total=sum(trainer.num_val_batches), done=0)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.bar.update()

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.bar.close()

    def on_exception(self, *args: Any) -> None:
        self.bar.close()


def quiet() -> None:
    """Holds back Lightning's notices and adverts, transformers' bars, and the warnings in NOISE."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)


class Leaving(Callback):
    """Where several processes work together, all leave at the same place: where they first meet, and after a
    batch of an evaluation."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        leave_together()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        *args: Any,
    ) -> None:
        if batch_idx < trainer.val_dataloaders.sampler.common:
            leave_together("while scoring")


def make_trainer(
    options: Mapping[str, Any],
    *,
    label: str,
    folder: Path | None = None,
    loggers: Sequence[Logger] = (),
    steps: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """A Trainer with `options` of lightning.Trainer for one phase, `steps` optimizer steps or, without,
    an evaluation. What Lightning and its callbacks write on their own goes to a folder, or nowhere."""
    quiet()
    strategy = options.get("strategy", "auto")
    try:
        made = Trainer(
            max_steps=1 if steps is None else steps,
            max_epochs=-1,
            limit_val_batches=1.0 if steps is None else 0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=list(loggers) or False,
            callbacks=[Bar(label), Leaving(), *callbacks],
            default_root_dir=folder or os.devnull,  # the working folder otherwise
            plugins=[WholeFile()],
            **{**options, "strategy": make_strategy(strategy)},
        )
    except (MisconfigurationException, TypeError) as error:
        raise ValueError(f"trainer: {error}") from error
    # Lightning's handlers: SIGTERM ends the program with exit code 0 and waits for other processes; on SLURM
    # SIGUSR1 writes a checkpoint into the working folder.
    made._signal_connector.register_signal_handlers = lambda: None
    return made


def make_strategy(wanted: Any) -> Any:
    """A strategy of its own for each Trainer, or the name of one of Lightning's."""
    return Sharded(reshard=wanted.reshard) if isinstance(wanted, Fsdp) else wanted


def drop_optimizer(trainer: Trainer) -> None:
    """Frees the optimizer's state of a phase that is over: the trainer refers to itself and would keep it
    beside the next one's, twice the weights in bytes, until Python looks for such cycles."""
    trainer.strategy.optimizers = []
    trainer.strategy.lr_scheduler_configs = []
