"""Evaluate other text while a domain is trained, and end its stage early where that is asked for."""

import logging
from functools import partial
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cpt.adapters.domain_store import Router
from cpt.core.randomness import key
from cpt.data.collate import Batch
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.sources.base import GENERAL
from cpt.evaluation.budget import BudgetOptions
from cpt.evaluation.monitor import MonitorOptions, Watched
from cpt.evaluation.perplexity import DocumentNLL
from cpt.methods.base import ContinualModule
from cpt.models.forward import in_mode
from cpt.trainer.costs import CostMonitor
from cpt.trainer.run_dir import RunDir
from cpt.trainer.steering import add_last, put_back, steer, trained

log = logging.getLogger(__name__)


class Monitor(Callback):
    """The monitoring evaluations of one stage, on validation text of its domain and of others; a resumed
    stage has them from its checkpoint. They change training only where they end it or hold a budget."""

    def __init__(
        self,
        options: MonitorOptions,
        drift: BudgetOptions,
        run: RunDir,
        data: DomainSequence,
        domain: Domain,
        compute: CostMonitor,
    ) -> None:
        self.options, self.own, self.compute = options, domain.parts, compute
        self.every = options.interval(data.steps(domain), looks=drift.looks)  # a budget needs evaluations too
        self.steering = steer(drift, run, data, domain)
        names = options.choose(domain.parts, data.past(domain), stage=domain.name)
        self.texts = {name: data.validation[name] for name in add_last(drift, names, data, domain)}
        self.rows = {
            name: text.draw_rows(options.tokens, stream=key("monitor rows", name))
            for name, text in self.texts.items()
        }
        self.watched = Watched()
        self.began: dict[str, Tensor] = {}  # at the first evaluation, by text [2, documents]
        self.best: dict[str, Tensor] = {}  # the weights of the lowest loss so far
        self.step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step
        if self.steering is not None:
            pl_module.pace = self.steering.pace
        if self.watched.ended:
            trainer.should_stop = True

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Batch, at: int) -> None:
        if not self.began:
            self.look(trainer, module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step == self.step or not self.began:  # an accumulated batch
            return
        self.step = step
        why = self.steering.steered.ended if self.steering else ""
        if step % self.every and step < trainer.max_steps and not why:
            return
        if not why:
            self.look(trainer, pl_module)
            self.log_losses(trainer, pl_module)
            spent = self.steering.steered.ended if self.steering else ""
            why = spent or self.watched.judge(self.options, own=self.own)
        if why and step < trainer.max_steps:
            self.watched.ended, trainer.should_stop = why, True
            if trainer.is_global_zero:
                log.info("%s ends after step %d: %s", trainer.datamodule.domain.name, step, why)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before the method's work after the domain.
        if self.best and self.watched.kept != trainer.global_step:
            put_back(pl_module, self.best)
        if self.steering is not None and trainer.is_global_zero:
            self.steering.save()

    def look(self, trainer: Trainer, module: ContinualModule) -> None:
        """Evaluates the model as it is now, and stores its losses."""
        now = self.measure(trainer, module)
        self.began = self.began or now
        if self.steering is not None:
            now = self.steering.see(trainer, module, now, partial(self.measure, trainer, module))
        began = {name: self.began[name].numpy() for name in now}
        found = {name: each.numpy() for name, each in now.items()}
        self.watched.add(trainer.global_step, began, found)
        if self.options.keep == "best" and self.watched.is_best(self.own):
            self.best = {name: each.detach().clone() for name, each in trained(module)}
            self.watched.kept = trainer.global_step

    @torch.no_grad()
    def measure(self, trainer: Trainer, module: ContinualModule) -> dict[str, Tensor]:
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
        return {name: torch.stack([each.view(-1) for each in metric.compute()]).cpu()
                for name, metric in losses.items()}  # fmt: skip

    def log_losses(self, trainer: Trainer, module: ContinualModule) -> None:
        """Losses for the loggers; in the bar the rise of the loss on general and on past text."""
        stage, rises = trainer.datamodule.domain.name, self.watched.rises()
        own = torch.tensor(self.compute.tokens, dtype=torch.float64, device=trainer.strategy.root_device)
        tokens = {f"train/tokens/{stage}": trainer.strategy.reduce(own, reduce_op="sum").item()}
        values = {f"monitor/{text}/{stage}": each[-1] for text, each in self.watched.nll.items()}
        values |= self.steering.series(stage) if self.steering else {}
        for logger in trainer.loggers:
            logger.log_metrics(tokens, step=trainer.global_step - 1)  # as in training
            logger.log_metrics(values, step=trainer.global_step)
        past = [rise for text, rise in rises.items() if text not in (*self.own, GENERAL)]
        for name, rise in (("past", max(past, default=None)), (GENERAL, rises.get(GENERAL))):
            if rise is not None:
                module.log(f"monitor/{name}+", rise, prog_bar=True, logger=False)

    def record(self) -> dict[str, Any]:
        """The entry of scores.json."""
        return self.watched.tell() | ({"budget": self.steering.steered.tell()} if self.steering else {})

    def state_dict(self) -> dict[str, Any]:
        own = {"watched": self.watched.tell(), "began": self.began, "best": self.best}
        return own | ({"steering": self.steering.state_dict()} if self.steering else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.watched = Watched(**state["watched"])
        self.began, self.best = dict(state["began"]), dict(state["best"])
        if self.steering is not None:
            self.steering.load_state_dict(state["steering"])
