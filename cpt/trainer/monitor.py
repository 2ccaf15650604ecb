"""Evaluations during a stage, on validation text of its domain and of others, which may end it early."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cpt.adapters.domain_store import BASE, Router
from cpt.core.randomness import key
from cpt.data.collate import Batch
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.divergence import Documents
from cpt.evaluation.monitor import CHAT_LOSSES, MonitorObserver, MonitorOptions, MonitorRecord
from cpt.evaluation.perplexity import DocumentDivergence, DocumentNLL
from cpt.methods.base import ContinualMethod
from cpt.models.forward import set_mode
from cpt.trainer.chat_monitor import ChatMonitor
from cpt.trainer.costs import CostMonitor

log = logging.getLogger(__name__)


class Monitor(Callback):
    """The monitoring evaluations of a stage, every few steps. They change training only where they end it or
    the observer acts."""

    def __init__(
        self,
        options: MonitorOptions,
        observer: MonitorObserver,
        data: DomainSequence,
        cost_monitor: CostMonitor,
        *,
        chats: ChatMonitor | None = None,
    ) -> None:
        domain = data.domain
        self.options = options
        self.observer = observer
        self.cost_monitor = cost_monitor
        self.chats = chats
        self.stage_texts = domain.texts
        names = [
            *options.choose(domain.texts, data.earlier_texts(domain), stage=domain.name),
            *observer.texts,
        ]
        self.texts = {name: data.validation[name] for name in names}
        self.rows = {}  # of each text, those that are evaluated
        for name, text in self.texts.items():
            self.rows[name] = text.draw_rows(options.max_tokens, stream=key("monitor rows", name))

        self.record = MonitorRecord()
        self.initial_losses: dict[str, Tensor] = {}  # of the first evaluation, by text [2, documents]
        self.best_weights: dict[str, Tensor] = {}  # of the lowest loss so far
        self.step = 0  # the last optimizer step that was seen

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.step = trainer.global_step
        if self.record.ended:
            trainer.should_stop = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        if self.initial_losses:
            return
        self.evaluate(trainer, pl_module)
        if self.observer.end_reason:  # the step that is still made is taken back at the stage's end
            self.keep_weights(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        step = trainer.global_step
        is_within_step = step == self.step  # after a micro-batch
        if is_within_step or not self.initial_losses:
            return
        self.step = step

        reason = self.observer.end_reason  # since an earlier evaluation
        if not reason:
            interval = int(self.options.every or 1)
            is_due = step % interval == 0 or step >= trainer.max_steps
            if not is_due:
                return
            self.evaluate(trainer, pl_module)
            self.log_losses(trainer, step)
            reason = self.observer.end_reason
            if not reason:
                reason = self.record.why_stop(self.options, stage_texts=self.stage_texts)

        if reason and step < trainer.max_steps:
            self.record.ended = reason
            trainer.should_stop = True
            if trainer.is_global_zero:
                log.info("Ending %s after step %d: %s", trainer.datamodule.domain.name, step, reason)

    def log_losses(self, trainer: Any, step: int) -> None:
        """Sends the last losses to the loggers, after the tokens that the stage has read by then."""
        stage = trainer.datamodule.domain.name
        local_tokens = torch.tensor(
            self.cost_monitor.tokens, dtype=torch.float64, device=trainer.strategy.root_device
        )
        tokens = {f"train/tokens/{stage}": trainer.strategy.reduce(local_tokens, reduce_op="sum").item()}
        losses = {f"monitor/{text}/{stage}": values[-1] for text, values in self.record.nll.items()}
        for text, estimates in self.record.divergence.items():
            mean = estimates[-1][0]
            if mean is not None:
                losses[f"divergence/{text}/{stage}"] = mean
        for logger in trainer.loggers:
            logger.log_metrics(tokens, step=step - 1)  # as in training
            logger.log_metrics(losses | self.observer.series(stage), step=step)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        # Before the method's work after the domain.
        if self.best_weights and self.record.kept != trainer.global_step:
            load_trained(pl_module, self.best_weights)
        if trainer.is_global_zero:
            self.observer.finish()

    def evaluate(self, trainer: Trainer, module: ContinualMethod) -> None:
        """Evaluates the current model, lets the observer act, and stores the losses."""
        measured: Mapping[str, Tensor] = self.measure(trainer, module)
        is_first = not self.initial_losses
        if is_first:
            self.initial_losses = dict(measured)
        measured = self.observer.on_evaluation(
            trainer, module, measured, partial(self.measure, trainer, module)
        )

        # The observer may change the weights. It decides by texts, so chats are evaluated after it.
        if self.chats is not None:
            with self.evaluation_mode(trainer, module):
                chat_losses = self.chats.measure(module)
            if is_first:
                self.initial_losses.update(chat_losses)
            measured = {**measured, **chat_losses}

        initial_losses = {name: self.initial_losses[name].numpy() for name in measured}
        losses = {name: values.numpy() for name, values in measured.items()}
        self.record.add(trainer.global_step, initial_losses, losses)
        if module.base_weights is not None:
            divergences = self.measure_divergences(trainer, module)
            self.record.add_divergences(divergences)
            self.observer.on_divergence(trainer.global_step, divergences)

        is_best = self.options.keep == "best" and self.record.since_best(self.stage_texts) == 0
        if is_best or self.observer.keeps_weights:
            self.keep_weights(trainer, module)

    def keep_weights(self, trainer: Trainer, module: ContinualMethod) -> None:
        """Keeps the current weights: the stage ends with them, unless later ones are better."""
        self.best_weights = copy_trained(module)
        self.record.kept = trainer.global_step

    @torch.no_grad()
    def measure(self, trainer: Any, module: ContinualMethod) -> dict[str, Tensor]:
        """Nats and scored tokens by text and document [2, documents], of all processes, on the CPU. As in the
        matrix, but that the modules of the domain in training, which are not stored yet, score it."""
        metrics = {name: DocumentNLL(text.documents).to(module.device) for name, text in self.texts.items()}
        data = trainer.datamodule
        router = module.router

        if router is not None:
            router.start_evaluation()
        with self.evaluation_mode(trainer, module):
            for name, batch in self.read_batches(trainer, list(self.texts)):
                if name in self.stage_texts and isinstance(router, Router):
                    nll = module.objective.nll(module.model, batch)
                    num_tokens = torch.ones_like(nll)
                else:
                    nll, num_tokens = module.nll(batch, data.domain_indices.get(name, BASE))
                metrics[name].update(nll, num_tokens, batch["documents"])
        if router is not None:
            router.start_evaluation()

        losses = {}
        for name, metric in metrics.items():
            nll, num_tokens = metric.compute()
            losses[name] = torch.stack([nll.view(-1), num_tokens.view(-1)]).cpu()
        return losses

    @torch.no_grad()
    def measure_divergences(self, trainer: Any, module: ContinualMethod) -> dict[str, Documents]:
        """KL(base || model) on the texts of the stage's domain, by text and document, of all processes."""
        names = [name for name in self.texts if name in self.stage_texts]
        metrics = {}
        for name in names:
            metrics[name] = DocumentDivergence(self.texts[name].documents).to(module.device)

        base_weights = module.base_parameters()
        with self.evaluation_mode(trainer, module):
            for name, batch in self.read_batches(trainer, names):
                # The model as it is: the modules of the domain in training are not stored yet.
                divergence = module.find_divergence(batch, base_weights=base_weights, weights={})
                metrics[name].update(divergence.kl, divergence.base_nll, divergence.nll, batch["documents"])
        return {name: metric.compute().view(4, -1).cpu().numpy() for name, metric in metrics.items()}

    @contextmanager
    def evaluation_mode(self, trainer: Any, module: ContinualMethod) -> Iterator[None]:
        """A context for passes outside of training, which sets the mode and the precision and measures their
        time."""
        mode = set_mode(module, training=False)
        with self.cost_monitor.excluded(), mode, trainer.precision_plugin.val_step_context():
            yield

    def read_batches(self, trainer: Any, names: Sequence[str]) -> Iterator[tuple[str, Batch]]:
        """The batches of monitored texts on the device of this process, each with the name of its text."""
        texts = {name: self.texts[name] for name in names}
        rows = {name: self.rows[name] for name in names}
        for cpu_batch in trainer.datamodule.make_sharded_loader(texts, rows, purpose="score"):
            batch = trainer.strategy.batch_to_device(cpu_batch)
            yield names[int(batch["column"])], batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "record": asdict(self.record),
            "began": self.initial_losses,
            "best": self.best_weights,
            "observer": self.observer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.record = MonitorRecord(**state["record"])
        self.initial_losses = dict(state["began"])
        self.best_weights = dict(state["best"])
        self.observer.load_state_dict(state["observer"])
        self.keep_chats_of_stage()

    def keep_chats_of_stage(self) -> None:
        """Makes all evaluations of a resumed stage alike: if it began without chats it ends without them, and
        if chats are not monitored any more its earlier losses on them are dropped."""
        if self.chats is not None and not set(self.chats.names) <= set(self.initial_losses):
            self.chats = None
            log.info("Monitoring no chats in the rest of this stage, which began without monitor.chats")
        if self.chats is None:
            for name in CHAT_LOSSES:
                self.initial_losses.pop(name, None)
                self.record.nll.pop(name, None)
                self.record.rise.pop(name, None)


def copy_trained(module: ContinualMethod) -> dict[str, Tensor]:
    """A copy of the weights that a stage trains, by name."""
    weights = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            weights[name] = parameter.detach().clone()
    return weights


@torch.no_grad()
def load_trained(module: ContinualMethod, weights: Mapping[str, Tensor]) -> None:
    """Loads weights that `copy_trained` has copied."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name in weights:
            parameter.copy_(weights[name].to(parameter.device))


@torch.no_grad()
def load_interpolated(
    module: ContinualMethod,
    weights: Mapping[str, Tensor],
    other_weights: Mapping[str, Tensor],
    *,
    share: float,
) -> None:
    """Loads what lies at a `share` of the way from weights to others."""
    load_trained(module, weights)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name in weights:
            parameter.lerp_(other_weights[name], share)
