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
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tqdm import tqdm

from cpt.core.errors import reason
from cpt.core.preemption import leave_together
from cpt.core.progress import progress_bar
from cpt.trainer.checkpoint import AtomicCheckpointIO
from cpt.trainer.fsdp import FSDP2Strategy
from cpt.trainer.options import Fsdp

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


class ProgressBar(Callback):
    """One bar for each phase, with its name and the time left; in a log file, a line every few seconds."""

    def __init__(self, label: str) -> None:
        self.label, self.bar = label, tqdm(disable=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sizes = {"total": trainer.max_steps, "done": trainer.global_step}
        self.bar = progress_bar(self.label, **sizes, hidden=not trainer.is_global_zero)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sizes = {"total": sum(trainer.num_val_batches), "done": 0}
        self.bar = progress_bar(self.label, **sizes, hidden=not trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for name, value in trainer.progress_bar_metrics.items():
            self.bar.set_postfix({name.split("/")[1]: f"{value:.3f}"}, refresh=False)
        self.bar.update(trainer.global_step - self.bar.n)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.bar.update()

    def close(self, *args: Any, **kwargs: Any) -> None:
        self.bar.close()

    teardown = on_exception = close


class LeaveTogether(Callback):
    """Has all processes leave on a signal at the same place: at first, and after a batch that all have."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        leave_together()

    def on_validation_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, at: int, *args: Any
    ) -> None:
        if at < trainer.val_dataloaders.sampler.common:
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
    """A Trainer with `options` of lightning.Trainer for `steps` optimizer steps or, without, an evaluation;
    what it writes goes to a folder, or nowhere. Raises ValueError for options that Lightning rejects."""
    quiet()
    strategy = options.get("strategy", "auto")
    if isinstance(strategy, Fsdp):  # one for each Trainer
        strategy = FSDP2Strategy(reshard=strategy.reshard)
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
            callbacks=[ProgressBar(label), LeaveTogether(), *callbacks],
            default_root_dir=folder or os.devnull,  # the working folder otherwise
            plugins=[AtomicCheckpointIO()],
            **{**options, "strategy": strategy},
        )
    except (MisconfigurationException, TypeError) as error:
        raise ValueError(f"trainer: {error}") from error
    # Lightning's handlers: SIGTERM ends the program with exit code 0 and waits for other processes; on SLURM
    # SIGUSR1 writes a checkpoint into the working folder.
    made._signal_connector.register_signal_handlers = lambda: None
    return made


def try_trainer(options: Mapping[str, Any], **how: Any) -> Trainer:
    """A trainer on this machine, of 32 bits for `auto`; raises ValueError where Lightning rejects it."""
    options = {**options, "precision": str(options["precision"]).replace("auto", "32-true")}
    given = {name: options[name] for name in ("accelerator", "devices", "strategy", "precision")}
    given["strategy"] = "fsdp" if isinstance(given["strategy"], Fsdp) else given["strategy"]
    with naming_cause(" ".join(f"trainer.{name}={value}" for name, value in given.items())):
        return make_trainer(options, label="", steps=1, **how)


def drop_optimizer(trainer: Trainer) -> None:
    """Frees the optimizer's state of a finished phase, which the trainer keeps, as it refers to itself."""
    trainer.strategy.optimizers = []
    trainer.strategy.lr_scheduler_configs = []


def quiet() -> None:
    """Silences Lightning's notices, transformers' bars, and the warnings in NOISE."""
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
        raise ValueError(f"{section}: {reason(error).removeprefix('trainer: ')}") from error
