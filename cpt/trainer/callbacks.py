"""Callbacks and loggers of the config.

A user's callback is one instance for the whole run and sees the training of every stage; not the base's
pre-training, evaluation, or end tasks. Its state_dict is in the checkpoint within a stage, and at a stage's
end in RUN/callbacks, so that a run resumes with it after any kill."""

import inspect
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from cpt.core.exceptions import InvalidOptionError
from cpt.core.sections import check_arguments, load_target
from cpt.core.tensors import check_state, load_tensors, save_state
from cpt.loggers.guard import warn_of_failure
from cpt.reporting.formats import shorten
from cpt.trainer.lightning import naming_cause
from cpt.trainer.monitor import Monitor

# Callbacks that would change the training of a stage. Early stopping is detected when it happens.
CHANGES_RESULT = (
    lightning_callbacks.EarlyStopping,
    lightning_callbacks.Timer,
    lightning_callbacks.GradientAccumulationScheduler,
    lightning_callbacks.BatchSizeFinder,
    lightning_callbacks.LearningRateFinder,
    lightning_callbacks.StochasticWeightAveraging,
    lightning_callbacks.WeightAveraging,
    lightning_callbacks.BaseFinetuning,
    lightning_callbacks.ModelPruning,
)
# What a class raises for an option that it does not take; anything else is a failure of its surroundings.
REFUSALS = (TypeError, ValueError, MisconfigurationException)
MAX_SHOWN_STATE = 200  # characters of a state in a message
PLAIN = (Tensor, str, bytes, int, float, bool, type(None))


def make_callbacks(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Callback]:
    """The callbacks of the config by name. Raises ValueError for one that cannot be made or would change what
    a stage trains."""
    callbacks = {name: make_entry(f"callbacks.{name}", entry, Callback) for name, entry in entries.items()}
    for name, callback in callbacks.items():
        if isinstance(callback, CHANGES_RESULT):
            raise InvalidOptionError(
                f"callbacks.{name}",
                type(callback).__name__,
                reason="it changes how a domain is trained",
                allowed="the options of trainer, optim and lr_scheduler; method=ema averages weights",
            )
    return callbacks


def make_loggers(entries: Mapping[str, Mapping[str, Any]], *, folder: Path) -> dict[str, Logger]:
    """The custom loggers of the config by name, with the run's folder as `save_dir` where they take one.

    Raises ValueError for a class that does not exist and for options that it refuses. Whatever else happens
    in it (a package, a server or a folder is missing) is a warning, and an empty logger takes its place."""
    loggers: dict[str, Logger] = {}
    for name, entry in entries.items():
        section = f"logger.{name}"
        check_arguments(section, entry)
        load_target(entry["_target_"], section=section)
        try:
            loggers[name] = make_entry(section, entry, Logger, save_dir=folder)
        except ValueError as error:
            cause = find_cause(error)
            if isinstance(cause, REFUSALS):
                raise
            warn_of_failure(section, shorten_requirements(cause), "the run continues without it")
            loggers[name] = DummyLogger()
    return loggers


def shorten_requirements(error: BaseException) -> BaseException:
    """The error for a package that is not installed, with the package alone: Lightning adds a hint for
    each."""
    packages = re.findall(r"Requirement '([^']+)' not met", str(error))
    if not packages:
        return error
    return ModuleNotFoundError(f"{packages[-1]} is not installed: pip install {packages[-1]}")


def find_cause(error: BaseException) -> BaseException:
    """The exception of a library that `naming_cause` and Hydra have wrapped; the error itself if there is no
    such exception."""
    cause = error if error.__cause__ is None else error.__cause__
    while isinstance(cause, HydraException) and cause.__cause__ is not None:
        cause = cause.__cause__
    return cause


def make_entry(section: str, entry: Mapping[str, Any], kind: type, save_dir: Path | None = None) -> Any:
    """The object of an entry of the config, with a `save_dir` if it takes one and the config gives no other.
    Raises ValueError for one that cannot be made: its package may be missing."""
    check_arguments(section, entry)
    target = load_target(entry["_target_"], section=section)
    with naming_cause(section):  # whatever a foreign class raises
        if save_dir is not None and "save_dir" in inspect.signature(target).parameters:
            entry = {"save_dir": str(save_dir), **entry}
        instance = instantiate(entry, _convert_="all")
    if not isinstance(instance, kind):
        allowed = f"a {kind.__module__}.{kind.__name__}"
        raise InvalidOptionError(f"{section}._target_", entry["_target_"], allowed=allowed)
    return instance


def is_plain(value: Any) -> bool:
    """Whether torch.load(weights_only=True) restores it."""
    if type(value) in (dict, OrderedDict):
        return is_plain(list(value.keys())) and is_plain(list(value.values()))
    if type(value) in (list, tuple, set):
        return all(map(is_plain, value))
    return type(value) in PLAIN


class CustomCallbacks(Callback):
    """The user's callbacks of a run, with their state between stages; it comes after them in a trainer."""

    def __init__(self, callbacks: Mapping[str, Callback], folder: Path) -> None:
        self.callbacks = dict(callbacks)
        self.folder = folder
        self.finished_stage = 0  # after which they have their state

    def enter_stage(self, number: int) -> list[Callback]:
        """The callbacks for a stage, counted from 1, with their state after the one before."""
        if not self.callbacks:
            return []
        path = self.folder / f"{number - 1:03d}.pt"
        if self.finished_stage != number - 1 and path.exists():
            check_state(path, remedy="restore it from a backup, or delete the run's folder to train again")
            for name, state in load_tensors(path, mapped=False).items():
                if name in self.callbacks:
                    self.callbacks[name].load_state_dict(state)
        self.finished_stage = number - 1
        return [*self.callbacks.values(), self]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises ValueError for a state that cannot be stored."""
        self.read_states()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict) -> None:
        """Raises ValueError for a state that a checkpoint cannot hold."""
        self.read_states()

    def read_states(self) -> dict[str, dict[str, Any]]:
        """The states of the callbacks by name. Raises ValueError for one that could not be loaded again."""
        states = {}
        for name, callback in self.callbacks.items():
            state = callback.state_dict()
            if not is_plain(state):
                raise ValueError(
                    f"callbacks.{name}: its state_dict is {shorten(str(state), width=MAX_SHOWN_STATE)}. "
                    "Allowed: tensors, numbers, texts, and lists and mappings of them"
                )
            states[name] = state
        return states

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Raises ValueError where one of the callbacks has ended the stage: only the monitor may."""
        if trainer.global_step >= trainer.max_steps:
            return
        monitors = [callback for callback in trainer.callbacks if isinstance(callback, Monitor)]
        is_ended_by_monitor = any(monitor.record.ended for monitor in monitors)
        if not is_ended_by_monitor:
            names = ", ".join(self.callbacks)
            raise ValueError(
                f"the stage was ended at step {trainer.global_step} of {trainer.max_steps} by one of the "
                f"callbacks {names}. Allowed: trainer.steps=…, monitor=…"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stores their state. That of the stage before stays: this one is not committed yet. Raises
        ValueError for a state that cannot be stored."""
        self.finished_stage += 1
        states = self.read_states()
        if not trainer.is_global_zero or not any(states.values()):
            return
        save_state(states, self.folder / f"{self.finished_stage:03d}.pt")
        for path in self.folder.glob("*.pt"):
            if path.stem.isdigit() and int(path.stem) < self.finished_stage - 1:
                path.unlink()
