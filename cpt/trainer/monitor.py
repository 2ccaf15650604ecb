"""Evaluates other text while a domain is trained, and ends its stage early if asked to."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cpt.adapters.domain_store import Router
from cpt.core.randomness import key
from cpt.data.collate import Batch
from cpt.data.datamodule import Domain, DomainSequence
from cpt.evaluation.monitor import MonitorObserver, MonitorOptions, MonitorRecord
from cpt.evaluation.perplexity import DocumentNLL
from cpt.methods.base import ContinualMethod
from cpt.models.forward import in_mode
from cpt.trainer.costs import CostMonitor

log = logging.getLogger(__name__)


class Monitor(Callback):
    """The monitoring evaluations of one stage, every few steps, on validation text of its domain and of
    others. They change training only where they end it or the observer acts."""

    def __init__(
        self,
        options: MonitorOptions,
        observer: MonitorObserver,
        data: DomainSequence,
        domain: Domain,
        compute: CostMonitor,
        *,
        every: int,
    ) -> None:
        self.options, self.observer, self.every = options, observer, every
        self.own, self.compute = domain.parts, compute
        names = [*options.choose(domain.parts, data.past(domain), stage=domain.name), *observer.texts]
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

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        step, why = trainer.global_step, self.observer.ended
        if step == self.step or not self.began:  # an accumulated batch
            return
        self.step = step
        if step % self.every and step < trainer.max_steps and not why:
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
            why = self.observer.ended or self.record.why_stop(self.options, own=self.own)
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
        matrix, but that the modules of the domain in training, which the bank does not have yet, score it."""
        losses = {name: DocumentNLL(text.documents).to(module.device) for name, text in self.texts.items()}
        names, data, router = list(self.texts), trainer.datamodule, module.router
        loader = data.shared_out(self.texts, self.rows, purpose="score")
        if router is not None:
            router.begin()
        evaluated = in_mode(module, training=False)
        with self.compute.aside(), evaluated, trainer.precision_plugin.val_step_context():
            for prepared in loader:
                batch = trainer.strategy.batch_to_device(prepared)
                name = names[int(batch["column"])]
                if name in self.own and isinstance(router, Router):
                    nll = module.objective.nll(module.model, batch)
                    count = torch.ones_like(nll)
                else:
                    nll, count = module.nll(batch, data.places.get(name, -1))
                losses[name].update(nll, count, batch["documents"])
        if router is not None:
            router.begin()
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
