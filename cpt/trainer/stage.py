"""Training of one stage: from its data to the stored state of the method, and back from that state."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor

from cpt.core.distributed import barrier
from cpt.core.messages import count_noun
from cpt.core.preemption import defer_signals
from cpt.core.processes import is_first_process
from cpt.core.tensors import check_state
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Domain
from cpt.evaluation.scores import Scores, StageCosts
from cpt.loggers.loggers import enter_domain
from cpt.methods.base import ContinualMethod
from cpt.models.fast_kernels import use_quick_dropout
from cpt.optim.nan_guard import NanGuard, RollbackError, check_finite
from cpt.trainer.auto import Machine
from cpt.trainer.callbacks import CustomCallbacks
from cpt.trainer.chat_evaluator import ChatEvaluator
from cpt.trainer.chat_monitor import ChatMonitor, make_chat_monitor
from cpt.trainer.checkpoint import check_stage, map_stored, restore_stage, save_stage
from cpt.trainer.costs import CostMonitor, count_added_state_bytes, count_trained_parameters
from cpt.trainer.lightning import drop_optimizer, make_trainer
from cpt.trainer.mixture_monitor import MixtureMonitor
from cpt.trainer.monitor import Monitor
from cpt.trainer.plan import Plan
from cpt.trainer.preemption import Preemption
from cpt.trainer.progress import ActivityTimer
from cpt.trainer.protected_movement import ProtectedMovement
from cpt.trainer.run_dir import RunDir
from cpt.trainer.step_checkpoint import StepCheckpoint

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class StageCallbacks:
    """What runs along with the training of a stage."""

    cost_monitor: CostMonitor
    monitor: Monitor | None  # None: nothing is evaluated during the stage
    mixture: MixtureMonitor | None  # None: no sources are mixed in
    movement: ProtectedMovement
    nan_guard: NanGuard
    custom: list[Callback]  # of the config
    step_checkpoint: StepCheckpoint

    def in_order(self) -> list[Callback]:
        """The callbacks in the order in which Lightning has to call them: costs count the tokens of a step
        before the monitor reads them; the checkpoint, last, stores the state of all others after the step."""
        callbacks: list[Callback] = [self.cost_monitor]
        if self.monitor is not None:
            callbacks.append(self.monitor)
        if self.mixture is not None:
            callbacks.append(self.mixture)
        return [*callbacks, self.movement, self.nan_guard, *self.custom, self.step_checkpoint]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTrainer:
    """Trains the stages of a run, one per call of `train`. Every process has to call each method.

    Stages are numbered from 1: stage 0, the base model, is not trained."""

    plan: Plan
    machine: Machine
    run: RunDir
    module: ContinualMethod
    data: DomainSequence
    scores: Scores
    loggers: Sequence[Logger]
    custom_callbacks: CustomCallbacks
    timer: ActivityTimer
    chat_evaluator: ChatEvaluator | None  # None: the run measures no chats

    def train(self, number: int, domain: Domain) -> StageCosts:
        """Trains one stage, from its checkpoint if there is one, and stores the state after it.

        Raises ValueError for a damaged checkpoint, and for a state that is not finite."""
        checkpoint_path = self.run.checkpoint_path(number, domain.name)
        if checkpoint_path.exists():
            check_state(
                checkpoint_path,
                remedy=f"delete it to train on {domain.name} again; what came before is kept",
                required_key="pytorch-lightning_version",  # which Lightning writes into each of its files
            )
            log.info("Resuming within %s", domain.name)

        self.prepare(number, domain)
        callbacks = self.make_callbacks(number, domain, checkpoint_path)
        with self.timer.time("learn", number):
            lightning_trainer = self.fit(number, domain, checkpoint_path, callbacks)
        drop_optimizer(lightning_trainer)  # evaluation needs its memory

        if callbacks.monitor is not None:
            self.store_monitoring(domain, callbacks.monitor)
        if callbacks.mixture is not None:
            self.store_mixture(domain, callbacks.mixture)
        # A state that is not finite is not stored: the next start continues from the stage before.
        check_finite(self.module.state_dict(), domain.name)
        state = self.store_state(number)
        return replace(
            callbacks.cost_monitor.stage_costs(lightning_trainer),
            trained=count_trained_parameters(self.module),
            stored=count_added_state_bytes(self.module, state),
            skipped_steps=len(callbacks.nan_guard.skipped_steps),
            protected_movement=callbacks.movement.shares,
        )

    def prepare(self, number: int, domain: Domain) -> None:
        """Makes the stage the current one of data, method and loggers."""
        if self.data.replay_source is not None:
            with self.timer.time("generate", number):
                self.data.replay_source.prepare(number, domain, self.machine.device)

        self.data.enter(domain)
        self.module.setup_stage(domain)
        self.module.train()
        tokens_before = sum(self.scores.tokens_read)
        enter_domain(self.loggers, domain.name, stage=number, tokens=tokens_before)

    def make_callbacks(self, number: int, domain: Domain, checkpoint_path: Path) -> StageCallbacks:
        cost_monitor = CostMonitor(earlier_steps=self.data.cumulative_steps[number - 1])
        monitor = self.make_monitor(domain, cost_monitor) if self.plan.has_monitor else None
        nan_guard = NanGuard(policy=self.plan.run.on_nonfinite)

        # Modules of earlier domains that stay on disk are mapped from the state before this stage.
        stage_path = self.run.stage_path(number - 1) if stores_on_disk(self.plan) else None
        step_checkpoint = StepCheckpoint(
            checkpoint_path,
            interval=self.plan.trainer.checkpoint_every_n_steps,
            guard=nan_guard,
            stage_path=stage_path,
        )
        return StageCallbacks(
            cost_monitor=cost_monitor,
            monitor=monitor,
            mixture=MixtureMonitor(self.data.mixture.part_names) if self.data.mixed else None,
            movement=ProtectedMovement(),
            nan_guard=nan_guard,
            custom=self.custom_callbacks.enter_stage(number),
            step_checkpoint=step_checkpoint,
        )

    def make_monitor(self, domain: Domain, cost_monitor: CostMonitor) -> Monitor:
        """The monitor of a stage, with the observer of the config if one is active."""
        observer_options = self.plan.observer
        observer = observer_options.open(self.run, self.data, domain)

        interval = self.plan.monitor.every
        if interval is None:  # the observer says how many evaluations of a stage it needs
            interval = math.ceil(self.data.steps(domain) / observer_options.evaluations)

        options = replace(self.plan.monitor, every=int(interval))
        chats: ChatMonitor | None = None
        if options.chats:
            chats = make_chat_monitor(self.chat_evaluator, max_tokens=options.max_tokens)
        return Monitor(options, observer, self.data, cost_monitor, chats=chats)

    def fit(self, number: int, domain: Domain, checkpoint_path: Path, callbacks: StageCallbacks) -> Trainer:
        """Trains with Lightning, after each rollback again from the last checkpoint."""
        while True:
            lightning_trainer = make_trainer(
                self.machine.lightning_arguments(self.plan.trainer),
                label=f"{domain.name} ({number}/{len(self.data)})",
                folder=self.run.path / "lightning",
                loggers=self.loggers,
                steps=self.data.steps(domain),
                callbacks=callbacks.in_order(),
                preemption=Preemption(callbacks.step_checkpoint),
            )

            # Also in the first round, after a kill. With rollback there is one of the stage's beginning.
            resume_from = str(checkpoint_path) if checkpoint_path.exists() else None
            try:
                with defer_signals(), use_quick_dropout(self.machine.quick_dropout):
                    lightning_trainer.fit(
                        self.module, datamodule=self.data, ckpt_path=resume_from, weights_only=True
                    )
                return lightning_trainer
            except RollbackError:  # the guard knows which steps the next attempt skips
                drop_optimizer(lightning_trainer)
                self.module.train()

    def store_monitoring(self, domain: Domain, monitor: Monitor) -> None:
        """Adds the evaluations during a stage to the scores."""
        record = asdict(monitor.record)
        if not record["divergence"]:
            del record["divergence"]
        observer_record = monitor.observer.record(monitor.record.steps)
        if observer_record:
            record["budget"] = observer_record
        self.scores.monitor[domain.name] = record

    def store_mixture(self, domain: Domain, monitor: MixtureMonitor) -> None:
        """Adds what a stage has read of each part of the mixture to the scores, and logs it."""
        uses = {use.name: use for use in self.data.find_uses(domain)}
        asked_shares = self.data.find_asked_shares(domain)
        rows, tokens, scored = monitor.counts.tolist()

        record = {}
        parts = []
        for index, name in enumerate(self.data.mixture.part_names):
            record[name] = {
                "asked_share": asked_shares[name],
                "rows": rows[index],
                "tokens": tokens[index],
                "scored": scored[index],
                "epochs": uses[name].epochs if name in uses else None,
            }
            if asked_shares[name] or tokens[index]:
                token_share = tokens[index] / max(1, sum(tokens))
                row_share = rows[index] / max(1, sum(rows))
                parts.append(describe_part(name, token_share, row_share, asked_share=asked_shares[name]))

        self.scores.mixture[domain.name] = record
        if is_first_process():
            log.info("Shares of the tokens read in %s: %s", domain.name, ", ".join(parts))
            for name in find_unread(record):
                if name in uses and uses[name].limit_step is not None:
                    log.warning(
                        "Nothing of %s was read in %s: replay.sources.%s.max_epochs allows no further row of "
                        "it. Raise it, or add documents",
                        name,
                        domain.name,
                        name,
                    )
                    continue
                log.warning(
                    "Nothing of %s was read in %s: its share of %s is %.3g. Raise its ratio, or train "
                    "more steps or larger batches",
                    name,
                    domain.name,
                    count_noun(sum(rows), "row"),
                    asked_shares[name],
                )

    def store_state(self, number: int) -> dict[str, Tensor]:
        """Writes the method's state after a stage, and returns it."""
        path = self.run.stage_path(number)
        state = save_stage(self.module, path)

        # From now on the stored modules, those of this domain too, are mapped from the file.
        if stores_on_disk(self.plan):
            barrier()  # until the first process has written the file
            map_stored(self.module, path)
        return state


def describe_part(name: str, token_share: float, row_share: float, *, asked_share: float) -> str:
    """What a stage has read of a part of the mixture. Options ask for shares of the rows; rows of short texts
    have fewer tokens than others.

    >>> describe_part("chat", 0.023, 0.1, asked_share=0.1)
    'chat 2.3% (10.0% of rows)'
    >>> describe_part("chat", 0.023, 0.09, asked_share=0.1)
    'chat 2.3% (9.0% of rows, asked 10.0%)'
    """
    rows = f"{row_share:.1%} of rows"
    asked_text = f"{asked_share:.1%}"
    if f"{row_share:.1%}" != asked_text:
        rows += f", asked {asked_text}"
    return f"{name} {token_share:.1%} ({rows})"


def load_stage_state(
    module: ContinualMethod, number: int, *, plan: Plan, run: RunDir, data: DomainSequence
) -> None:
    """Loads the stored state after a stage into a module. Every process of a sharded module has to call it.

    Raises ValueError for damaged files, and for the state of another model or method."""
    path = run.stage_path(number)
    check_stage(path, remedy=f"delete {run.path} to start again")

    # The state has the shapes of a model that has grown for each stage so far.
    for domain in data.domains[:number]:
        module.expand_to(domain)
    restore_stage(module, path, stores_on_disk=stores_on_disk(plan))


def stores_on_disk(plan: Plan) -> bool:
    """Whether the modules of earlier domains stay on disk, mapped into memory."""
    return plan.modules.storage == "disk"


def find_unread(record: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The requested parts of a mixture, as `store_mixture` records them, of which a stage has read no row.

    >>> find_unread({"new": {"asked_share": 0.99, "rows": 96}, "chat": {"asked_share": 0.01, "rows": 0}})
    ['chat']
    """
    return [name for name, part in record.items() if part["asked_share"] and not part["rows"]]
