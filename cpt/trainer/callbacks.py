"""The user's callbacks and loggers, from the config, and a callback for movement in the protected subspace.

A user's callback is one instance for the whole run and sees the training of every stage; not the base's
pre-training, evaluation, or end tasks. Its state_dict is in the checkpoint within a stage, and at a stage's
end in RUN/callbacks, so that a run resumes with it after any kill."""

import inspect
import logging
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from lightning import LightningModule, Trainer
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cpt.core.distributed import is_sharded
from cpt.core.errors import reason
from cpt.core.randomness import key
from cpt.core.sections import check_arguments, load_target
from cpt.core.tensors import load_tensors, save_state
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod
from cpt.trainer.monitor import Monitor

log = logging.getLogger(__name__)
# Callbacks that would change what a stage trains; one that stops it early is noticed when it does.
CHANGES_RESULT = (
    *(theirs.EarlyStopping, theirs.Timer, theirs.GradientAccumulationScheduler, theirs.BatchSizeFinder),
    *(theirs.LearningRateFinder, theirs.StochasticWeightAveraging),
)
PLAIN = (Tensor, str, bytes, int, float, bool, type(None))


def make_callbacks(entries: Mapping[str, Mapping[str, Any]], *, logged: bool) -> dict[str, Callback]:
    """The callbacks of the config by name; `logged` says whether there is a logger. Raises ValueError for one
    that cannot be made or would change what a stage trains."""
    built = {name: make_entry(f"callbacks.{name}", entry, Callback) for name, entry in entries.items()}
    for name, each in built.items():
        why, allowed = "", "the options of trainer, optim and lr_scheduler; method=ema averages weights"
        if isinstance(each, CHANGES_RESULT):
            why = "it changes how a domain is trained"
        elif isinstance(each, (theirs.LearningRateMonitor, theirs.DeviceStatsMonitor)) and not logged:
            why, allowed = "it needs a logger, and the run has none", "logger=csv or another"
        if why:
            told = f"callbacks.{name}={type(each).__name__}"
            raise ValueError(f"{told} is invalid: {why}. Allowed: {allowed}")
    return built


def make_entry(section: str, entry: Mapping[str, Any], kind: type, save_dir: Path | None = None) -> Any:
    """The object of an entry of the config, with a `save_dir` if it takes one and none is given. Raises
    ValueError for one that cannot be made: its package may be missing."""
    check_arguments(section, entry)
    found = load_target(entry["_target_"], place=section)
    try:
        if save_dir is not None and "save_dir" in inspect.signature(found).parameters:
            entry = {"save_dir": str(save_dir), **entry}
        built = instantiate(entry, _convert_="all")
    except Exception as error:  # whatever a foreign class raises
        raise ValueError(f"{section} is invalid: {reason(error)}") from error
    if not isinstance(built, kind):
        allowed = f"a {kind.__module__}.{kind.__name__}"
        raise ValueError(f"{section}._target_={entry['_target_']} is invalid. Allowed: {allowed}")
    return built


def is_plain(value: Any) -> bool:
    """Whether torch.load(weights_only=True) restores it."""
    if type(value) in (dict, OrderedDict):
        return all(is_plain(each) for pair in value.items() for each in pair)
    return all(map(is_plain, value)) if type(value) in (list, tuple, set) else type(value) in PLAIN


class CustomCallbacks(Callback):
    """The user's callbacks of a run, with their state between stages; it comes after them in a trainer."""

    def __init__(self, callbacks: Mapping[str, Callback], folder: Path) -> None:
        self.callbacks, self.folder = dict(callbacks), folder
        self.at = 0  # the stage after which they have their state

    def entering(self, number: int) -> list[Callback]:
        """The callbacks for a stage, counted from 1, with their state after the one before."""
        if not self.callbacks:
            return []
        path = self.folder / f"{number - 1:03d}.pt"
        if self.at != number - 1 and path.exists():
            for name, state in load_tensors(path, mapped=False).items():
                if name in self.callbacks:
                    self.callbacks[name].load_state_dict(state)
        self.at = number - 1
        return [*self.callbacks.values(), self]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict) -> None:
        for name, each in self.callbacks.items():
            if not is_plain(state := each.state_dict()):
                allowed = "tensors, numbers, texts, and lists and mappings of them"
                raise ValueError(f"callbacks.{name}: its state_dict is {state}. Allowed: {allowed}")

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        monitors = [each for each in trainer.callbacks if isinstance(each, Monitor)]
        if trainer.global_step < trainer.max_steps and not any(each.record.ended for each in monitors):
            told = f"the stage was ended at step {trainer.global_step} of {trainer.max_steps}"
            names = ", ".join(self.callbacks)
            raise ValueError(f"{told} by one of the callbacks {names}. Allowed: trainer.steps=…, monitor=…")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stores their state. That of the stage before stays: this one is not committed yet."""
        self.at += 1
        states = {name: each.state_dict() for name, each in self.callbacks.items()}
        if trainer.is_global_zero and any(states.values()):
            save_state(states, self.folder / f"{self.at:03d}.pt")
            for old in self.folder.glob("*.pt"):
                if old.stem.isdigit() and int(old.stem) < self.at - 1:
                    old.unlink()


class ProtectedMovement(Callback):
    """The share of a stage's movement that lies in the subspace that a method or a mask protects,

        ||P (theta_end - theta_begin)||^2 / ||theta_end - theta_begin||^2

    over the parameters with a projection P (`protected_subspace`), and that of a random movement: with
    masked gradients an optimizer still moves protected directions, by its division by entry, momentum and
    weight decay."""

    def __init__(self) -> None:
        self.began: dict[str, Tensor] = {}
        self.noted: list[float] = []  # the share, and that of a random movement

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Batch, at: int) -> None:
        if trainer.global_step or self.began:
            return
        protected = module.protected_subspace()
        names = {name: each for name, each in module.model.named_parameters() if each in protected}
        if any(map(is_sharded, names.values())):
            log.info("Movement in the protected subspace is not measured with strategy=fsdp")
        else:
            self.began = {name: each.detach().cpu().clone() for name, each in names.items()}

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.began:  # before the method's work after the domain, which protects more
            self.noted = protected_shares(pl_module, self.began, seed=key(pl_module.seed, "leak") % 2**63)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self.began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.began = dict(state["began"])


@torch.no_grad()
def protected_shares(module: ContinualMethod, began: Mapping[str, Tensor], *, seed: int) -> list[float]:
    """The protected share of the movement from `began`, and of a random one; empty if nothing moved."""
    protected, draw = module.protected_subspace(), torch.Generator().manual_seed(seed)
    sums = torch.zeros(2, 2, dtype=torch.float64)  # [actual or random, protected or all]
    for name, old in began.items():
        parameter = module.model.get_parameter(name)
        inside, way = protected[parameter], parameter.detach() - old.to(parameter.device)
        for row, each in ((0, way), (1, torch.randn(old.shape, generator=draw).to(way))):
            norms = torch.stack([torch.linalg.vector_norm(part) for part in (inside(each), each)])
            sums[row] += norms.double().square().cpu()
    return [float(inside / whole) for inside, whole in sums] if sums[0, 1] else []
