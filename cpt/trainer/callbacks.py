"""Custom callbacks and loggers, from the groups `callbacks` and `logger` of the config.

A callback is one instance for the whole run and sees the fit of every stage; not the base's pre-training, the
scoring, or end tasks. Its state_dict stands in the checkpoint within a stage, and at a stage's end in
RUN/callbacks, so that a run goes on with it after any kill. What it computes with, it has to keep there."""

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning import LightningModule, Trainer
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor

from cpt.core.errors import reason
from cpt.core.signatures import check_arguments, target
from cpt.core.tensors import load_tensors, save_state
from cpt.trainer.monitoring import Monitor

BUDGET = "trainer.steps, trainer.epochs or trainer.tokens say how long a domain is learned"
KEPT = "trainer.checkpoint_every says how often a checkpoint is kept, keep_stages=true keeps each stage"
RATE = "optim.lr and schedule=… say the rate"
# Callbacks that would change without a word how much is learned, or what cpt does itself.
REFUSED: dict[type[Callback], str] = {
    theirs.EarlyStopping: BUDGET,
    theirs.Timer: BUDGET,
    theirs.Checkpoint: KEPT,
    theirs.ProgressBar: "cpt has a bar of its own",
    theirs.GradientAccumulationScheduler: "trainer.accumulate_grad_batches splits a batch",
    theirs.BatchSizeFinder: "trainer.batch_size and trainer.accumulate_grad_batches say it",
    theirs.LearningRateFinder: RATE,
    theirs.StochasticWeightAveraging: f"{RATE}; method=ema averages",
}
NEED_LOGGER = (theirs.LearningRateMonitor, theirs.DeviceStatsMonitor)
PLAIN = (Tensor, str, bytes, int, float, bool, type(None))


def make_loggers(entries: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Logger]:
    """The loggers of the config beside metrics.csv and W&B; those that write files do so in the run's folder
    unless they are told where. Raises ValueError for what cannot be made: its package may be missing."""
    return [
        make_entry(f"logger.{name}", entry, Logger, save_dir=str(folder)) for name, entry in entries.items()
    ]


def make_callbacks(entries: Mapping[str, Mapping[str, Any]], *, logged: bool) -> dict[str, Callback]:
    """The callbacks of the config by name; `logged` says whether there is a logger. Raises ValueError for
    what cannot be made, and for one that would change what a stage is."""
    built = {name: make_entry(f"callbacks.{name}", entry, Callback) for name, entry in entries.items()}
    for name, each in built.items():
        told = f"callbacks.{name}={type(each).__name__}"
        for kind, instead in REFUSED.items():
            if isinstance(each, kind):
                raise ValueError(f"{told} is not taken: {instead}")
        if isinstance(each, NEED_LOGGER) and not logged:
            raise ValueError(f"{told} writes to loggers, but there is none; allowed: logger=csv, …")
        check_callback_state(name, each)
    return built


def make_entry(place: str, entry: Mapping[str, Any], kind: type, **defaults: Any) -> Any:
    """What an entry of the config stands for, with `defaults` for the arguments that it takes and that are
    not given."""
    found = target(place, entry)
    if isinstance(found, type) and not issubclass(found, kind):
        raise ValueError(refused(place, entry, kind))
    check_arguments(place, entry)
    taken = inspect.signature(found).parameters if defaults else {}
    missing = {name: value for name, value in defaults.items() if name in taken and name not in entry}
    try:
        built = instantiate(entry, **missing, _convert_="all")
    except Exception as error:  # whatever a class that is not ours raises
        raise ValueError(f"{place}: {reason(error)}") from error
    if not isinstance(built, kind):
        raise ValueError(refused(place, entry, kind))
    return built


def refused(place: str, entry: Mapping[str, Any], kind: type) -> str:
    """What is said of an entry that is of another kind."""
    return f"{place}._target_={entry['_target_']}; allowed: a {kind.__module__}.{kind.__name__}"


def check_callback_state(name: str, callback: Callback) -> None:
    """Raises ValueError for a state that a checkpoint does not give back."""
    if not is_plain(state := callback.state_dict()):
        raise ValueError(
            f"callbacks.{name}: its state_dict is {state}; allowed: tensors, numbers, texts, and lists and "
            "mappings of them, which a killed run can read again"
        )


def is_plain(value: Any) -> bool:
    """Whether torch.load(weights_only=True) gives it back."""
    if type(value) in (dict, OrderedDict):
        return all(is_plain(each) for pair in value.items() for each in pair)
    if type(value) in (list, tuple, set):
        return all(map(is_plain, value))
    return type(value) in PLAIN


class CustomCallbacks:
    """The callbacks of a run at work, in a run folder."""

    def __init__(self, callbacks: Mapping[str, Callback], folder: Path) -> None:
        self.callbacks, self.folder = dict(callbacks), folder
        self.at = 0  # the stage whose state they have

    def entering(self, number: int) -> list[Callback]:
        """The callbacks for the fit of a stage, counted from 1, with their state after the one before."""
        if not self.callbacks:
            return []
        if self.at != number - 1:
            self.restore(number - 1)
        return [*self.callbacks.values(), Keeper(self, number)]

    def path(self, number: int) -> Path:
        """Their state after so many stages."""
        return self.folder / f"{number:03d}.pt"

    def restore(self, number: int) -> None:
        if self.path(number).exists():
            for name, state in load_tensors(self.path(number), mapped=False).items():
                if name in self.callbacks:
                    self.callbacks[name].load_state_dict(state)
        self.at = number

    def keep(self, number: int, *, writes: bool) -> None:
        """Their state after a stage. That after the stage before it stays: this one is not committed yet."""
        self.at = number
        states = {name: each.state_dict() for name, each in self.callbacks.items()}
        if writes and any(states.values()):
            save_state(states, self.path(number))
            for old in self.folder.glob("*.pt"):
                if old.stem.isdigit() and int(old.stem) < number - 1:
                    old.unlink()


class Keeper(Callback):
    """Stands behind the callbacks of a stage: looks that none ended it early, and keeps their state."""

    def __init__(self, run: CustomCallbacks, number: int) -> None:
        self.run, self.number = run, number

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for name, each in self.run.callbacks.items():
            check_callback_state(name, each)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitors = [each for each in trainer.callbacks if isinstance(each, Monitor)]
        if trainer.global_step < trainer.max_steps and not any(each.watched.ended for each in monitors):
            names = ", ".join(self.run.callbacks)
            raise ValueError(
                f"the stage was ended at step {trainer.global_step} of {trainer.max_steps} by one of the "
                f"callbacks {names}; allowed: callbacks that let it end. {BUDGET}"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.run.keep(self.number, writes=trainer.is_global_zero)
