"""The domain loop: learn, evaluate, commit; and what a killed run needs to go on with it."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch.distributed.fsdp import FSDPModule

from cpt.adapters.domain_store import map_stored
from cpt.core.collectives import wait_for_others
from cpt.core.files import writing
from cpt.core.heartbeat import set_phase
from cpt.core.preemption import check_signals, defer_signals, leave_together
from cpt.core.processes import is_first_process
from cpt.core.tensors import check_state
from cpt.data.datamodule import Domain, DomainSequence
from cpt.evaluation.metrics import objective_value
from cpt.evaluation.scores import Scores, gather_documents
from cpt.loggers.loggers import enter_domain, log_scores, log_stage
from cpt.methods.base import ContinualModule
from cpt.models.memory import draw_quickly
from cpt.models.weights import measure_movement
from cpt.optim.nan_guard import NanGuard, RollbackError, check_finite
from cpt.reporting import run_report
from cpt.reporting.model_card import write_model_card
from cpt.trainer.assembly import make_method, tell_resting
from cpt.trainer.callbacks import CustomCallbacks
from cpt.trainer.checkpointing import Checkpoint, Resting
from cpt.trainer.costs import Compute, stored_beside, trained_parameters
from cpt.trainer.eta import RunETA
from cpt.trainer.evaluators import Evaluator
from cpt.trainer.generation import Generation
from cpt.trainer.leaks import Leak
from cpt.trainer.monitoring import watch
from cpt.trainer.plan import Plan
from cpt.trainer.pretraining import Base
from cpt.trainer.raising import say_why_never
from cpt.trainer.rates import Rates
from cpt.trainer.run_folder import RunFolder
from cpt.trainer.score import Cells, ScoreJournal, Scorer, tell_row
from cpt.trainer.stages import check_stage, restore_stage, save_stage
from cpt.trainer.trainer import drop_optimizer, make_trainer

log = logging.getLogger(__name__)


class Learner:
    """A run at work: its method, its data and its scores so far."""

    def __init__(
        self,
        plan: Plan,
        place: RunFolder,
        *,
        module: ContinualModule,
        data: DomainSequence,
        examinations: Sequence[Evaluator],
        generation: Generation | None,
        scores: Scores,
        loggers: Sequence[Logger],
        callbacks: CustomCallbacks,
        device: torch.device,
    ) -> None:
        self.plan, self.place, self.module, self.data = plan, place, module, data
        self.examinations, self.scores, self.loggers = examinations, scores, loggers
        self.callbacks, self.device, self.generation = callbacks, device, generation
        self.scorer = Scorer(
            plan.evaluation, plan.trainer, module=module, data=data, scores=scores, place=place
        )
        self.keeper = ScoreJournal(scores, place.scores_file, digests=plan.digests)
        self.at = 0  # the stage whose weights the module has
        self.rests = plan.parts.keep == "disk"  # what a method keeps of learned domains
        self.eta = RunETA(data, self.scorer, scores, examinations, generation is not None)
        tell_resting(plan, module, device)
        scores.needs_domain, scores.alone = module.needs_domain, module.alone

    def learn(self) -> None:
        """Every stage that is not committed yet, and every end task and probe that is missing."""
        if not self.scores.rows:
            self.commit("base")
        done = len(self.scores.rows)
        for number in range(done):
            self.fill(number)
            self.examine(number)
        self.restore(done - 1)
        for number, domain in list(enumerate(self.data, start=1))[done - 1 :]:
            costs = self.fit(number, domain)
            self.at = number
            self.commit(domain.name, **costs)
            self.examine(number)

    def restore(self, number: int) -> None:
        """Gives the module its state after so many stages, if it has another."""
        if number == self.at:
            return
        path = self.place.stage(number)
        check_stage(path, instead=f"delete {self.place.path} to start again")
        for domain in self.data.domains[:number]:
            self.module.take_shape(domain)
        restore_stage(self.module, path, rests=self.rests)
        self.at = number
        log.info("going on after %s", self.scores.rows[number])

    def rest(self, number: int) -> None:
        """Has what a method keeps of learned domains lie in the file of a stage, where that is asked for."""
        if self.rests:
            wait_for_others()  # until the first process has written it
            map_stored(self.module, self.place.stage(number))

    def examine(self, number: int) -> None:
        """The end tasks, the answers and the probe that are due after a stage and not measured yet."""
        for each in self.examinations:
            if each.missing(number):
                self.carry_out(each, number)

    def carry_out(self, examination: Evaluator, number: int) -> None:
        """Measures what is missing of an examination after a stage."""
        row, group = self.scores.rows[number], examination.GROUP
        if number != self.at and not self.place.stage(number).exists():
            if number <= max(self.scores.grown, default=0):
                log.info("%s of %s is missing of what was added: its weights were not kept", group, row)
                return
            raise ValueError(
                f"{group}.when={examination.when} needs the weights after {row}, which were not kept; "
                f"allowed: {group}.when=last, or a new name=… (keep_stages=true keeps them for later)"
            )
        self.scores.run["finished"] = False
        self.restore(number)
        with self.eta.timed(examination.KIND, number):
            examination.measure(number, self.device)
        if is_first_process():
            self.keeper.note(examination, number)

    def fit(self, number: int, domain: Domain) -> dict[str, Any]:
        """Learns one domain, from its checkpoint if it has one; gives the costs and rates of the stage, as
        the scores take them."""
        checkpoint = self.place.checkpoint(number, domain.name)
        if checkpoint.exists():
            check_state(
                checkpoint, instead=f"delete it to learn {domain.name} again; what came before is kept"
            )
            log.info("going on within %s", domain.name)
        if self.generation is not None:
            with self.eta.timed("generate", number):
                self.generation.prepare(number, domain, self.device)
        self.data.enter(domain)
        self.module.enter(domain)
        self.module.train()
        compute, rates, leak = Compute(), Rates(), Leak()
        guard = NanGuard(policy=self.plan.run.on_nonfinite)
        saving = Checkpoint(checkpoint, every=self.plan.trainer.checkpoint_every, guard=guard)
        enter_domain(self.loggers, domain.name, tokens=sum(self.scores.seen))
        # Last, so that a checkpoint has what the others did at its step.
        resting = [Resting(self.place.stage(number - 1))] * self.rests
        watching = watch(self.plan, self.place, self.data, domain, compute)
        ours = [*resting, compute, *watching, rates, leak, guard]  # a look knows the tokens of its step
        callbacks = [*ours, *self.callbacks.entering(number), saving]
        with self.eta.timed("learn", number):
            fitting = self.fitted(number, domain, checkpoint, callbacks)
        drop_optimizer(fitting)
        self.scores.monitor.update((domain.name, each.tell()) for each in watching)
        check_finite(self.module.state_dict(), domain.name)
        state = save_stage(self.module, self.place.stage(number))
        self.rest(number)
        kept = {"trained": trained_parameters(self.module), "stored": stored_beside(self.module, state)}
        noted = {"rates": rates.noted, "leak": leak.noted, "spikes": guard.spikes.noted}
        return kept | compute.costs(fitting) | noted | {"skipped": len(guard.left_out)}

    def fitted(self, number: int, domain: Domain, checkpoint: Path, callbacks: Sequence[Callback]) -> Trainer:
        """The trainer that has learned a domain to its end, however often it was rolled back."""
        while True:
            fitting = make_trainer(
                self.plan.trainer.lightning,
                label=f"{domain.name} ({number}/{len(self.data)})",
                folder=self.place.path / "lightning",
                loggers=self.loggers,
                steps=self.data.steps(domain),
                callbacks=callbacks,
            )
            path = str(checkpoint) if checkpoint.exists() else None
            try:
                with defer_signals(), draw_quickly(self.plan.trainer.quick_dropout):
                    fitting.fit(self.module, datamodule=self.data, ckpt_path=path, weights_only=True)
                return fitting
            except RollbackError:
                drop_optimizer(fitting)
                self.module.train()

    def commit(self, row: str, **costs: Any) -> None:
        """Evaluates, and writes the row: what a restart finds is the run up to here."""
        number = len(self.scores.rows)
        cells = self.score(number, row, self.scorer.wanted(number))
        means = cells.means
        nll = [means.get(text) for text in self.scores.domains]
        self.scores.append(row, nll=nll, parts=cells.parts, **costs)
        tell_row(row, means)
        looked_at = {name: array(values) for name, values in self.module.diagnostics().items()}
        log_stage(self.loggers, self.scores, distributions=looked_at)
        if is_first_process():
            self.place.save_documents(number, {**cells.documents})
            self.place.save_diagnostics(number, looked_at)
            self.keeper.keep_row(number)
            run = self.plan.run
            self.place.tidy(number, keep=run.keep_stages, end=run.keep_end and not say_why_never(self.plan))

    def fill(self, number: int) -> None:
        """Measures what a row lacks of what is asked for now, where the weights of its stage are there."""
        missing = self.scorer.missing(number)
        if not missing or (number != self.at and not self.place.stage(number).exists()):
            return
        self.scores.run["finished"] = False
        self.restore(number)
        row = self.scores.rows[number]
        cells = self.score(number, row, missing)
        self.scores.fill(number, cells.means, cells.parts)
        log.info("after %s, %d more texts are scored", row, len(missing))
        if is_first_process():
            (before,) = self.place.load_documents([number])
            self.place.save_documents(number, before | {**cells.documents})
            self.keeper.keep_row(number)

    def score(self, number: int, row: str, texts: Sequence[str]) -> Cells:
        with self.eta.timed("score", number):
            cells = self.scorer.score(number, row, texts)
        leave_together(f"before {row} was committed")
        return cells

    def whole(self, start: Base) -> ContinualModule:
        """The method with all of its weights in this process: itself, or where they are shared out another
        one, made as it was and with the state of its last stage."""
        if not isinstance(self.module.model, FSDPModule):
            return self.module
        self.module, self.at = make_method(self.plan, start), 0
        self.restore(len(self.scores.rows) - 1)
        return self.module

    def conclude(self, start: Base) -> None:
        """Intervals, the exported model, the report and the run's summary, by the first process; then the run
        is finished."""
        if not is_first_process():
            return
        if self.keeper.behind:
            self.keeper.keep_rows()
        check_signals("before the model was exported")
        set_phase("exporting the model")
        self.place.make_room()
        with writing(self.place.model):
            loading = self.whole(start).export(self.place.model, [domain.name for domain in self.data])
            start.tokenizer.save_pretrained(self.place.model)
        self.scores.loading = loading.replace(f"{self.place.path}/", "")  # the folder may be moved
        if len(self.scores.rows) > 1:
            self.scores.moved = measure_movement(start.model(), self.place.model)
        check_signals("before the report was written")
        set_phase("writing the report")
        sums, counts = gather_documents(self.place.load_documents(range(len(self.scores.rows))), self.scores)
        self.scores.measure(nll_sums=sums, counts=counts)
        self.scores.policy = self.plan.evaluation.policy
        if told := self.scorer.tell_missing():
            log.info(told)
        for each in self.examinations:
            self.keeper.collect(each)
        self.scores.objective = objective_value(self.scores.metrics, self.plan.run.objective)
        self.scores.run["finished"] = True
        run_report.write_report(self.place.path, self.scores)
        if len(self.scores.rows) > 1:
            write_model_card(self.place.path, self.scores)
        self.place.seal()
        log_scores(self.loggers, self.scores, folder=self.place.path, summary=self.plan.logger.summary)
        self.keeper.keep()  # last: a run that says that it is finished has all that it leaves


def array(values: torch.Tensor) -> np.ndarray:
    """The same for numpy, which has no bfloat16."""
    return (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()
