"""The loop over stages: train, evaluate, commit; a killed run resumes from what is committed."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch.distributed.fsdp import FSDPModule

from cpt.adapters.domain_store import map_stored
from cpt.core.distributed import barrier
from cpt.core.files import writing
from cpt.core.heartbeat import set_phase
from cpt.core.preemption import check_signals, defer_signals, leave_together
from cpt.core.processes import is_first_process
from cpt.core.tensors import check_state
from cpt.data.datamodule import Domain, DomainSequence
from cpt.evaluation.metrics import objective_value
from cpt.evaluation.monitor import MonitorObserver
from cpt.evaluation.scores import Scores, gather_documents
from cpt.loggers.loggers import WandbCurves, log_scores, log_stage
from cpt.methods.base import ContinualMethod
from cpt.models.memory import draw_quickly
from cpt.models.weights import measure_movement
from cpt.optim.nan_guard import NanGuard, RollbackError, check_finite
from cpt.reporting import run_page
from cpt.reporting.model_card import write_model_card
from cpt.trainer.base_model import Base
from cpt.trainer.build import build_method
from cpt.trainer.callbacks import CustomCallbacks, ProtectedMovement
from cpt.trainer.checkpoint import StepCheckpoint, check_stage, restore_stage, save_stage
from cpt.trainer.costs import CostMonitor, stored_beside, trained_parameters
from cpt.trainer.eta import RunETA
from cpt.trainer.evaluators import Evaluator
from cpt.trainer.extend import why_end_is_final
from cpt.trainer.lightning import drop_optimizer, make_trainer
from cpt.trainer.monitor import Monitor
from cpt.trainer.plan import Plan
from cpt.trainer.run_dir import RunDir
from cpt.trainer.score import ScoreJournal, Scorer

log = logging.getLogger(__name__)
ENDS = 6  # texts at both ends of those that a line names


@dataclass(kw_only=True, eq=False)
class ContinualTrainer:
    """A run at work: trains a method on its stages, and fills the scores."""

    plan: Plan
    run: RunDir
    module: ContinualMethod
    data: DomainSequence
    evaluators: Sequence[Evaluator]
    scores: Scores
    loggers: Sequence[Logger]
    callbacks: CustomCallbacks
    device: torch.device
    at: int = 0  # the stage whose weights the module has

    def __post_init__(self) -> None:
        plan, given = self.plan, {"module": self.module, "data": self.data, "scores": self.scores}
        self.scorer = Scorer(plan.evaluation, plan.trainer, **given, place=self.run)
        self.journal = ScoreJournal(self.scores, self.run.scores_file, digests=plan.digests)
        self.to_disk = plan.parts.keep == "disk"  # the modules of earlier domains
        self.eta = RunETA(self.data, self.scorer, self.scores, self.evaluators)
        self.scores.needs_domain, self.scores.alone = self.module.needs_domain, self.module.alone

    def fit(self) -> None:
        """Trains and evaluates every stage that is not committed yet, and measures what earlier rows lack."""
        if not self.scores.rows:
            self.commit_row("base")
        done = len(self.scores.rows)
        for number in range(done):
            self.backfill(number)
            self.run_evaluators(number)
        self.restore(done - 1)
        for number, domain in list(enumerate(self.data, start=1))[done - 1 :]:
            costs = self.fit_stage(number, domain)
            self.at = number
            self.commit_row(domain.name, **costs)
            self.run_evaluators(number)

    def restore(self, number: int) -> None:
        """Loads the module's state after a stage, if it has another."""
        if number == self.at:
            return
        path = self.run.stage(number)
        check_stage(path, instead=f"delete {self.run.path} to start again")
        for domain in self.data.domains[:number]:
            self.module.expand_to(domain)
        restore_stage(self.module, path, rests=self.to_disk)
        self.at = number
        log.info("going on after %s", self.scores.rows[number])

    def fit_stage(self, number: int, domain: Domain) -> dict[str, Any]:
        """Trains one stage, from its checkpoint if it has one; gives its costs, by their names in Scores."""
        checkpoint = self.run.checkpoint(number, domain.name)
        if checkpoint.exists():
            remedy = f"delete it to learn {domain.name} again; what came before is kept"
            check_state(checkpoint, instead=remedy)
            log.info("going on within %s", domain.name)
        if self.data.replay_source is not None:
            with self.eta.timed("generate", number):
                self.data.replay_source.prepare(number, domain, self.device)
        self.data.enter(domain)
        self.module.setup_stage(domain)
        self.module.train()
        costs, movement, monitors = CostMonitor(), ProtectedMovement(), []
        if self.plan.watches:
            watcher = self.plan.observer
            observer = watcher.open(self.run, self.data, domain) if watcher.given else MonitorObserver()
            default = -(-self.data.steps(domain) // watcher.evaluations)
            every = int(self.plan.monitor.every or default)
            monitors = [Monitor(self.plan.monitor, observer, self.data, domain, costs, every=every)]
        guard = NanGuard(policy=self.plan.run.on_nonfinite)
        parts = self.run.stage(number - 1) if self.to_disk else None
        every = self.plan.trainer.checkpoint_every
        saving = StepCheckpoint(checkpoint, every=every, guard=guard, parts=parts)
        for logger in self.loggers:
            if isinstance(logger, WandbCurves):
                logger.curves.enter(domain.name, tokens=sum(self.scores.seen))
        # Monitors know the tokens of their step; a checkpoint, last, has the state of the others at its step.
        callbacks = [costs, *monitors, movement, guard, *self.callbacks.entering(number), saving]
        fitting = None
        with self.eta.timed("learn", number):
            while fitting is None:
                fitting = make_trainer(
                    self.plan.trainer.lightning,
                    label=f"{domain.name} ({number}/{len(self.data)})",
                    folder=self.run.path / "lightning",
                    loggers=self.loggers,
                    steps=self.data.steps(domain),
                    callbacks=callbacks,
                )
                path = str(checkpoint) if checkpoint.exists() else None
                try:
                    with defer_signals(), draw_quickly(self.plan.trainer.quick_dropout):
                        fitting.fit(self.module, datamodule=self.data, ckpt_path=path, weights_only=True)
                except RollbackError:
                    drop_optimizer(fitting)
                    self.module.train()
                    fitting = None
        drop_optimizer(fitting)
        for each in monitors:
            observed = each.observer.record()
            entry = asdict(each.record) | ({"budget": observed} if observed else {})
            self.scores.monitor[domain.name] = entry
        check_finite(self.module.state_dict(), domain.name)
        path = self.run.stage(number)
        state = save_stage(self.module, path)
        if self.to_disk:
            barrier()  # until the first process has written it
            map_stored(self.module, path)
        return {
            "trained": trained_parameters(self.module),
            "stored": stored_beside(self.module, state),
            **costs.costs(fitting),
            **{"rates": costs.rates, "leak": movement.noted, "spikes": guard.spikes.noted},
            "skipped": len(guard.left_out),
        }

    def commit_row(self, row: str, **costs: Any) -> None:
        """Evaluates, and writes the row: a restart resumes after it."""
        number, options = len(self.scores.rows), self.plan.run
        with self.eta.timed("score", number):
            cells = self.scorer.score(number, row, self.scorer.wanted(number))
        leave_together(f"before {row} was committed")
        nll = [cells.means.get(text) for text in self.scores.domains]
        self.scores.append(row, nll=nll, parts=cells.parts, **costs)
        shown = [f"{name} {np.exp(value):.1f}" for name, value in cells.means.items()]
        few = shown if len(shown) <= 2 * ENDS else [*shown[:ENDS], "…", *shown[-ENDS:]]
        log.info("after %s, perplexity: %s", row, ", ".join(few))
        diagnostics = {
            name: (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()
            for name, values in self.module.diagnostics().items()
        }
        log_stage(self.loggers, self.scores, distributions=diagnostics)
        if is_first_process():
            self.run.save_documents(number, cells.documents)
            if diagnostics:
                self.run.save_arrays(self.run.path / "diagnostics" / f"{number:03d}.npz", diagnostics)
            self.journal.keep_row(number)
            end = options.keep_end and not why_end_is_final(self.plan)
            self.run.cleanup(number, keep=options.keep_stages, end=end)

    def backfill(self, number: int) -> None:
        """Scores the texts that a row lacks, where the weights of its stage are there."""
        missing = self.scorer.missing(number)
        if not missing or (number != self.at and not self.run.stage(number).exists()):
            return
        self.scores.run["finished"] = False
        self.restore(number)
        row = self.scores.rows[number]
        with self.eta.timed("score", number):
            cells = self.scorer.score(number, row, missing)
        leave_together(f"before {row} was committed")
        self.scores.fill(number, cells.means, cells.parts)
        log.info("after %s, %d more texts are scored", row, len(missing))
        if is_first_process():
            (before,) = self.run.load_documents([number])
            self.run.save_documents(number, before | {**cells.documents})
            self.journal.keep_row(number)

    def run_evaluators(self, number: int) -> None:
        """Measures the end tasks, answers and benchmarks that are due after a stage and missing."""
        for each in self.evaluators:
            if not each.missing(number):
                continue
            row, group = self.scores.rows[number], each.GROUP
            if number != self.at and not self.run.stage(number).exists():
                if number <= max(self.scores.grown, default=0):
                    log.info("%s of %s is missing of what was added: its weights were not kept", group, row)
                    continue
                told = f"{group}.when={each.when} needs the weights after {row}, which were not kept"
                allowed = f"{group}.when=last, or a new name=… (keep_stages=true keeps them for later)"
                raise ValueError(f"{told}; allowed: {allowed}")
            self.scores.run["finished"] = False
            self.restore(number)
            with self.eta.timed(each.KIND, number):
                each.measure(number, self.device)
            if is_first_process():
                self.journal.note(each, number)

    def finalize(self, start: Base) -> None:
        """Intervals, the exported model, the report and the run's summary, by the first process."""
        scores, run = self.scores, self.run
        if not is_first_process():
            return
        if self.journal.behind:
            self.journal.keep_rows()
        check_signals("before the model was exported")
        set_phase("exporting the model")
        if isinstance(self.module.model, FSDPModule):  # another module has all weights in this process
            self.module, self.at = build_method(self.plan, start), 0
            self.restore(len(scores.rows) - 1)
        with writing(run.model):
            loading = self.module.export(run.model, [domain.name for domain in self.data])
            start.tokenizer.save_pretrained(run.model)
        scores.loading = loading.replace(f"{run.path}/", "")  # the folder may be moved
        if len(scores.rows) > 1:
            scores.moved = measure_movement(start.model(), run.model)
        check_signals("before the report was written")
        set_phase("writing the report")
        sums, counts = gather_documents(run.load_documents(range(len(scores.rows))), scores)
        scores.measure(nll_sums=sums, counts=counts)
        scores.policy = self.plan.evaluation.policy
        left = {row: len(self.scorer.missing(number)) for number, row in enumerate(scores.rows)}
        if rows := [row for row, count in left.items() if count]:
            told = (
                "%d cells of the matrix are missing, in the rows %s: the weights after these stages were not "
            )
            told += "kept (keep_stages=true keeps them for later)"
            log.info(told, sum(left.values()), ", ".join(rows[:3]) + ", …" * (len(rows) > 3))
        for each in self.evaluators:
            self.journal.collect(each)
        scores.objective = objective_value(scores.metrics, self.plan.run.objective)
        scores.run["finished"] = True
        run_page.write_report(run.path, scores)
        if len(scores.rows) > 1:
            write_model_card(run.path, scores)
        run.write_checksums()
        log_scores(self.loggers, scores, folder=run.path, summary=self.plan.logger.summary)
        self.journal.keep()  # last: a finished run has all of its outputs
