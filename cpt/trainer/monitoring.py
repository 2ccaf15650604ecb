"""Looks at other text while a domain is learned, and ends the stage where that is asked for."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cpt.adapters.domain_store import Router
from cpt.core.randomness import key
from cpt.data.batch import Batch
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.packing import Packed
from cpt.data.sources.base import GENERAL
from cpt.evaluation.monitor import MonitorOptions, Watched
from cpt.evaluation.perplexity import DocumentNLL
from cpt.methods.base import ContinualModule
from cpt.models.forward import in_mode
from cpt.trainer.costs import Compute
from cpt.trainer.plan import Plan
from cpt.trainer.run_folder import RunFolder
from cpt.trainer.steering import Steering, add_last, put_back, steer, trained

log = logging.getLogger(__name__)


class Monitor(Callback):
    """The looks of one stage, at the validation text of the domain and of others; a stage that is gone on
    with has them from its checkpoint. They change no bit of what is learned, but where they end it or hold a
    budget."""

    def __init__(
        self,
        options: MonitorOptions,
        texts: Mapping[str, Packed],
        *,
        every: int,
        own: Sequence[str],
        compute: Compute,
        steering: Steering | None,
    ) -> None:
        self.options, self.texts, self.own, self.compute = options, texts, own, compute
        self.every, self.steering = every, steering
        self.rows = {
            name: text.draw_rows(options.tokens, stream=key("monitor rows", name))
            for name, text in texts.items()
        }
        self.watched = Watched()
        self.began: dict[str, Tensor] = {}  # at the first look, by text [2, documents]
        self.best: dict[str, Tensor] = {}  # the weights of the lowest loss so far
        self.step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step
        if self.steering is not None:
            pl_module.pace = self.steering.pace
        if self.watched.ended:
            trainer.should_stop = True

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if self.began:
            return
        if trainer.global_step:
            log.info("%s is looked at from step %d on", trainer.datamodule.domain.name, trainer.global_step)
        self.look(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step == self.step or not self.began:  # within the parts of a step
            return
        self.step = step
        why = self.steering.steered.ended if self.steering else ""
        if step % self.every and step < trainer.max_steps and not why:
            return
        if not why:
            self.look(trainer, pl_module)
            self.show(trainer, pl_module)
            why = self.judge()
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

    def judge(self) -> str:
        """Why the stage is to end now, in words; nothing where it goes on."""
        spent = self.steering.steered.ended if self.steering else ""
        return spent or self.watched.judge(self.options, own=self.own)

    def look(self, trainer: Trainer, module: ContinualModule) -> None:
        """Notes the losses of the model as it is now."""
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
        """Nats and scored tokens by document, of all processes, on the CPU."""
        losses = {name: DocumentNLL(text.documents).to(module.device) for name, text in self.texts.items()}
        names, data = list(self.texts), trainer.datamodule
        loader = data.shared_out(self.texts, self.rows, purpose="score")
        if module.router is not None:
            module.router.begin()
        evaluated = in_mode(module, training=False)
        with self.compute.aside(), evaluated, trainer.precision_plugin.val_step_context():
            for prepared in loader:
                batch = trainer.strategy.batch_to_device(prepared)
                name = names[int(batch["column"])]
                nll, count = self.score(module, batch, place=data.places.get(name, -1), own=name in self.own)
                losses[name].update(nll, count, batch["documents"])
        if module.router is not None:
            module.router.begin()
        return {name: torch.stack([each.view(-1) for each in metric.compute()]).cpu()
                for name, metric in losses.items()}  # fmt: skip

    def score(self, module: ContinualModule, batch: Batch, *, place: int, own: bool) -> tuple[Tensor, Tensor]:
        """As the matrix is scored; the domain that is being learned with the part that is in the model, which
        the bank has not got yet."""
        if own and isinstance(module.router, Router):
            nll = module.objective.nll(module.model, batch)
            return nll, torch.ones_like(nll)
        return module.nll(batch, place)

    def show(self, trainer: Trainer, module: ContinualModule) -> None:
        """The losses for the loggers; in the bar by how much the general text and past ones have risen."""
        stage, rises = trainer.datamodule.domain.name, self.watched.rises()
        own = torch.tensor(self.compute.tokens, dtype=torch.float64, device=trainer.strategy.root_device)
        read = trainer.strategy.reduce(own, reduce_op="sum").item()
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"train/tokens/{stage}": read}, step=trainer.global_step - 1
            )  # as in training
            told = {f"monitor/{text}/{stage}": values[-1] for text, values in self.watched.nll.items()}
            told |= self.steering.series(stage) if self.steering else {}
            logger.log_metrics(told, step=trainer.global_step)
        past = [rise for text, rise in rises.items() if text not in (*self.own, GENERAL)]
        shown = {"past": max(past, default=None), GENERAL: rises.get(GENERAL)}
        for name, rise in shown.items():
            if rise is not None:
                module.log(f"monitor/{name}+", rise, prog_bar=True, logger=False)

    def tell(self) -> dict[str, Any]:
        """What was seen and done, as scores.json has it."""
        return self.watched.tell() | ({"budget": self.steering.steered.tell()} if self.steering else {})

    def state_dict(self) -> dict[str, Any]:
        own = {"watched": self.watched.tell(), "began": self.began, "best": self.best}
        return own | ({"steering": self.steering.state_dict()} if self.steering else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.watched = Watched.read(state["watched"])
        self.began, self.best = dict(state["began"]), dict(state["best"])
        if self.steering is not None:
            self.steering.load_state_dict(state["steering"])


def watch(
    plan: Plan, place: RunFolder, data: DomainSequence, domain: Domain, compute: Compute
) -> list[Monitor]:
    """What looks at other text while a domain is learned, where that is asked for."""
    if not plan.watches:
        return []
    options, every = plan.monitor, plan.monitor.interval(data.steps(domain), looks=plan.drift.looks)
    if options.every is None:
        log.info("%s is looked at every %d steps, for its budget (monitor.every=null)", domain.name, every)
    names = options.choose(domain.parts, data.past(domain), stage=domain.name)
    texts = {name: data.validation[name] for name in add_last(plan.drift, names, data, domain)}
    steering = steer(plan.drift, place, data, domain)
    return [Monitor(options, texts, every=every, own=domain.parts, compute=compute, steering=steering)]
