"""Callbacks of a stage: the user's and loggers, from the config; evaluations on other text, which may end a
stage early; movement in the protected subspace.

A user's callback is one instance for the whole run and sees the training of every stage; not the base's
pre-training, evaluation, or end tasks. Its state_dict is in the checkpoint within a stage, and at a stage's
end in RUN/callbacks, so that a run resumes with it after any kill."""

import inspect
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning import LightningModule, Trainer
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from cpt.adapters.domain_store import Router
from cpt.core.distributed import is_sharded
from cpt.core.randomness import key
from cpt.core.sections import check_arguments, load_target
from cpt.core.tensors import check_state, load_tensors, save_state
from cpt.data.collate import Batch
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.monitor import MonitorObserver, MonitorOptions, MonitorRecord
from cpt.evaluation.perplexity import DocumentNLL
from cpt.loggers.guard import warn_of_failure
from cpt.methods.base import ContinualMethod
from cpt.models.forward import set_mode
from cpt.trainer.costs import CostMonitor
from cpt.trainer.lightning import naming_cause

log = logging.getLogger(__name__)
# Callbacks that would change what a stage trains; one that stops it early is noticed when it does.
CHANGES_RESULT = (
    *(theirs.EarlyStopping, theirs.Timer, theirs.GradientAccumulationScheduler, theirs.BatchSizeFinder),
    *(theirs.LearningRateFinder, theirs.StochasticWeightAveraging, theirs.WeightAveraging),
    *(theirs.BaseFinetuning, theirs.ModelPruning),
)
# What a class raises for an option that it does not take; anything else is a failure of its surroundings.
REFUSALS = (TypeError, ValueError, MisconfigurationException)
PLAIN = (Tensor, str, bytes, int, float, bool, type(None))


def make_callbacks(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Callback]:
    """The callbacks of the config by name. Raises ValueError for one that cannot be made or would change what
    a stage trains."""
    built = {name: make_entry(f"callbacks.{name}", entry, Callback) for name, entry in entries.items()}
    for name, each in built.items():
        if isinstance(each, CHANGES_RESULT):
            told = f"callbacks.{name}={type(each).__name__} is invalid: it changes how a domain is trained"
            allowed = "the options of trainer, optim and lr_scheduler; method=ema averages weights"
            raise ValueError(f"{told}. Allowed: {allowed}")
    return built


def make_loggers(entries: Mapping[str, Mapping[str, Any]], *, folder: Path) -> dict[str, Logger]:
    """The custom loggers of the config by name, with the run's folder as `save_dir` where they take one.

    Raises ValueError for a class that does not exist and for options that it refuses. Whatever else happens
    in it (a package, a server or a folder is missing) is a warning, and an empty logger takes its place."""
    loggers: dict[str, Logger] = {}
    for name, entry in entries.items():
        section = f"logger.{name}"
        check_arguments(section, entry)
        load_target(entry["_target_"], place=section)
        try:
            loggers[name] = make_entry(section, entry, Logger, save_dir=folder)
        except ValueError as error:
            cause = find_cause(error)
            if isinstance(cause, REFUSALS):
                raise
            warn_of_failure(section, cause, "the run continues without it")
            loggers[name] = DummyLogger()
    return loggers


def find_cause(error: BaseException) -> BaseException:
    """The exception of a library that `naming_cause` and Hydra have wrapped; the error itself where none
    is."""
    cause = error if error.__cause__ is None else error.__cause__
    while isinstance(cause, HydraException) and cause.__cause__ is not None:
        cause = cause.__cause__
    return cause


def make_entry(section: str, entry: Mapping[str, Any], kind: type, save_dir: Path | None = None) -> Any:
    """The object of an entry of the config, with a `save_dir` if it takes one and none is given. Raises
    ValueError for one that cannot be made: its package may be missing."""
    check_arguments(section, entry)
    found = load_target(entry["_target_"], place=section)
    with naming_cause(section):  # whatever a foreign class raises
        if save_dir is not None and "save_dir" in inspect.signature(found).parameters:
            entry = {"save_dir": str(save_dir), **entry}
        built = instantiate(entry, _convert_="all")
    if not isinstance(built, kind):
        allowed = f"a {kind.__module__}.{kind.__name__}"
        raise ValueError(f"{section}._target_={entry['_target_']} is invalid. Allowed: {allowed}")
    return built


def is_plain(value: Any) -> bool:
    """Whether torch.load(weights_only=True) restores it."""
    if type(value) in (dict, OrderedDict):
        return all(is_plain(each) for pair in value.items() for each in pair)
    return all(map(is_plain, value)) if type(value) in (list, tuple, set) else type(value) in PLAIN


class Monitor(Callback):
    """The monitoring evaluations of a stage, every few steps, on validation text of its domain and
    of others. They change training only where they end it or the observer acts."""

    def __init__(
        self, options: MonitorOptions, observer: MonitorObserver, data: DomainSequence, compute: CostMonitor
    ) -> None:
        domain = data.domain
        self.options, self.observer, self.own, self.compute = options, observer, domain.texts, compute
        names = [
            *options.choose(domain.texts, data.earlier_texts(domain), stage=domain.name),
            *observer.texts,
        ]
        self.texts = {name: data.validation[name] for name in names}
        self.rows = {
            name: text.draw_rows(options.max_tokens, stream=key("monitor rows", name))
            for name, text in self.texts.items()
        }
        self.record = MonitorRecord()
        self.began: Mapping[str, Tensor] = {}  # at the first evaluation, by text [2, documents]
        self.best: dict[str, Tensor] = {}  # the weights of the lowest loss so far
        self.step = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.step = trainer.global_step
        if self.record.ended:
            trainer.should_stop = True

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Batch, at: int) -> None:
        if not self.began:
            self.evaluate(trainer, module)
            if self.observer.ended:  # the step that is still made is taken back at the stage's end
                self.best, self.record.kept = copy_trained(module), trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        step, why = trainer.global_step, self.observer.ended
        if step == self.step or not self.began:  # an accumulated batch
            return
        self.step = step
        if step % int(self.options.every or 1) and step < trainer.max_steps and not why:
            return
        if not why:
            self.evaluate(trainer, pl_module)
            stage, nll, device = trainer.datamodule.domain.name, self.record.nll, trainer.strategy.root_device
            own = torch.tensor(self.compute.tokens, dtype=torch.float64, device=device)
            tokens = {f"train/tokens/{stage}": trainer.strategy.reduce(own, reduce_op="sum").item()}
            values = {f"monitor/{text}/{stage}": each[-1] for text, each in nll.items()}
            for logger in trainer.loggers:
                logger.log_metrics(tokens, step=step - 1)  # as in training
                logger.log_metrics(values | self.observer.series(stage), step=step)
            why = self.observer.ended or self.record.why_stop(self.options, stage_texts=self.own)
        if why and step < trainer.max_steps:
            self.record.ended, trainer.should_stop = why, True
            if trainer.is_global_zero:
                log.info("Ending %s after step %d: %s", trainer.datamodule.domain.name, step, why)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.best and self.record.kept != trainer.global_step:  # before the method's work after it
            put_back(pl_module, self.best)
        if trainer.is_global_zero:
            self.observer.finish()

    def evaluate(self, trainer: Trainer, module: ContinualMethod) -> None:
        """Evaluates the model as it is now, has the observer act, and stores the losses."""
        now: Mapping[str, Tensor] = self.measure(trainer, module)
        self.began = self.began or now
        now = self.observer.see(trainer, module, now, partial(self.measure, trainer, module))
        began, losses = ({name: each[name].numpy() for name in now} for each in (self.began, now))
        self.record.add(trainer.global_step, began, losses)
        if self.options.keep == "best" and self.record.since_best(self.own) == 0:
            self.best, self.record.kept = copy_trained(module), trainer.global_step

    @torch.no_grad()
    def measure(self, trainer: Any, module: ContinualMethod) -> dict[str, Tensor]:
        """Nats and scored tokens by text and document [2, documents], of all processes, on the CPU. As in the
        matrix, but that the modules of the domain in training, which are not stored yet, score it."""
        losses = {name: DocumentNLL(text.documents).to(module.device) for name, text in self.texts.items()}
        names, data, router = list(self.texts), trainer.datamodule, module.router
        loader = data.make_sharded_loader(self.texts, self.rows, purpose="score")
        if router is not None:
            router.start_evaluation()
        evaluated = set_mode(module, training=False)
        with self.compute.excluded(), evaluated, trainer.precision_plugin.val_step_context():
            for prepared in loader:
                batch = trainer.strategy.batch_to_device(prepared)
                name = names[int(batch["column"])]
                if name in self.own and isinstance(router, Router):
                    nll = module.objective.nll(module.model, batch)
                    count = torch.ones_like(nll)
                else:
                    nll, count = module.nll(batch, data.domain_indices.get(name, -1))
                losses[name].update(nll, count, batch["documents"])
        if router is not None:
            router.start_evaluation()
        found = {name: torch.stack([each.view(-1) for each in m.compute()]) for name, m in losses.items()}
        return {name: each.cpu() for name, each in found.items()}

    def state_dict(self) -> dict[str, Any]:
        own = {"record": asdict(self.record), "began": self.began, "best": self.best}
        return own | {"observer": self.observer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.record = MonitorRecord(**state["record"])
        self.began, self.best = dict(state["began"]), dict(state["best"])
        self.observer.load_state_dict(state["observer"])


def copy_trained(module: ContinualMethod) -> dict[str, Tensor]:
    """A copy of the weights that a stage trains, by name."""
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def put_back(
    module: ContinualMethod, weights: Mapping[str, Tensor], *, towards: Any = None, way: float = 0.0
) -> None:
    """Puts kept weights back, or what lies at a share of the way from these `towards` others."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name in weights:
            parameter.copy_(weights[name].to(parameter.device))
            if towards is not None:
                parameter.lerp_(towards[name], way)


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
            instead = "restore it from a backup, or delete the run's folder to train again"
            check_state(path, instead=instead)
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
