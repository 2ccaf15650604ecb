"""The loop over stages: train, evaluate, commit; a killed run resumes from what is committed."""

import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from heapq import nlargest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch.distributed.fsdp import FSDPModule

from cpt.adapters.domain_store import BASE
from cpt.core import files
from cpt.core.config import digest, identity
from cpt.core.distributed import barrier, gather_objects, leave_together
from cpt.core.errors import reason
from cpt.core.exceptions import format_value
from cpt.core.heartbeat import HEARTBEAT, Phase, set_phase
from cpt.core.preemption import check_signals, defer_signals
from cpt.core.processes import is_first_process
from cpt.core.secrets import redact
from cpt.core.tensors import check_state
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Domain
from cpt.evaluation.monitor import MonitorObserver
from cpt.evaluation.scores import Scores, StageCosts, gather_documents
from cpt.evaluation.task_metrics import run_objective
from cpt.loggers.loggers import LoggedRun, enter_domain, log_scores, log_stage, run_name, track
from cpt.loggers.wandb_environment import WandbLabels
from cpt.methods.base import ContinualMethod
from cpt.models.memory import use_quick_dropout
from cpt.models.weights import measure_movement
from cpt.optim.nan_guard import ADVICE, NanGuard, RollbackError, check_finite
from cpt.reporting import run_page
from cpt.reporting.model_card import write_model_card
from cpt.trainer import build, preflight
from cpt.trainer.auto import Machine
from cpt.trainer.base_files import copy_generation_config, save_tokenizer
from cpt.trainer.base_model import Base, make_base
from cpt.trainer.callbacks import CustomCallbacks, Monitor, ProtectedMovement
from cpt.trainer.chat_date import date_chats
from cpt.trainer.checkpoint import (
    check_stage,
    map_stored,
    restore_stage,
    save_stage,
)
from cpt.trainer.costs import CostMonitor, stored_beside, time_phase, trained_parameters
from cpt.trainer.evaluators import Evaluator, make_evaluators
from cpt.trainer.export_check import HeldOutSample, check_export, draw_sample
from cpt.trainer.lightning import drop_optimizer, join_processes, make_trainer
from cpt.trainer.linked_weights import link_weights
from cpt.trainer.manifest import write_manifest
from cpt.trainer.match_operations import match_operations
from cpt.trainer.plan import Plan
from cpt.trainer.preemption import Preemption
from cpt.trainer.run_dir import BY_CONTENT, RunDir
from cpt.trainer.step_checkpoint import StepCheckpoint

log = logging.getLogger(__name__)
HEAVIEST = 20  # modules that a text's row names, of more
ENDS = 6  # texts at both ends of those that a line names
KINDS = {  # the work of a stage in its order, as in scores.json, and its name in progress.json
    "generate": "writing texts before",
    "learn": "training",
    "score": "scoring after",
    "endtasks": "end tasks after",
    "answers": "answers after",
    "benchmarks": "benchmark after",
}


def train_run(plan: Plan, run: RunDir) -> Scores:
    """Reads the texts, builds base and method, and trains every stage that the run directory lacks."""
    ready = preflight.prepare(plan, run)  # before hours of reading
    machine = ready.machine
    settings = plan.settings
    plan = date_chats(plan)
    if is_first_process() and plan.settings != settings:
        run.write_config(plan.settings)
    took: dict[str, float] = {}
    keep_threads(run.path / "threads", processes=machine.num_processes)
    set_phase("reading texts")
    with time_phase(took, "read the texts"):
        corpora = build.read_corpora(plan)
    set_phase("making the base")
    with time_phase(took, "make the base"):
        base = make_base(plan.model, corpora, accelerator=plan.trainer.accelerator)
    if plan.trainer.match is not None:
        with time_phase(took, "count operations"):
            plan = match_operations(plan, machine, corpora, base, stored=run.matched)
            if is_first_process() and not run.matched.exists():
                files.replace(run.matched, json.dumps(asdict(plan.budget)))
    with time_phase(took, "make the base"):
        method = build.build_method(plan, machine, base)
    set_phase("tokenising")
    with time_phase(took, "tokenise"):
        data = build.build_data(plan, machine, corpora, base, method)
        pieces: dict[str, Any] = {"module": method, "data": data}
        data.replay_source = method.replay.open_source(
            run.path / "generated", **pieces, corpora=corpora, base=base, seed=plan.run.seed
        )
        evaluators = make_evaluators(plan, corpora, base, ready.harness, place=run, **pieces)
    build.log_settings(plan, machine, method, data)
    write_manifest(plan, run, corpora, base, evaluators)
    join_processes(machine.lightning_arguments(plan.trainer))
    check_same_settings(plan)
    check_same_date(plan)
    scores, new = run.load_scores(), build.empty_scores(plan, machine, corpora, base, data)
    then = {} if scores is None else scores.versions
    if other := [
        f"{name} {then[name]} -> {now}" for name, now in new.versions.items() if then.get(name, now) != now
    ]:
        log.warning("Continuing with other versions, which may change the last bits: %s", ", ".join(other))
    if scores is None or scores.run["order"] != new.run["order"]:  # domains were added
        scores = new if scores is None else new.take_over(scores)
    run.check_documents(len(scores.rows))
    scores.activity_seconds["start"] = dict(Counter(scores.activity_seconds["start"]) + Counter(took))
    logged = describe_run(plan, run, scores)
    options = plan.logger
    with track(logged, csv_file=options.csv, wandb=options.wandb_place, custom=ready.loggers) as loggers:
        trainer = ContinualTrainer(
            plan=plan,
            machine=machine,
            run=run,
            **pieces,
            base=base,
            evaluators=evaluators,
            scores=scores,
            loggers=loggers,
            callbacks=CustomCallbacks(ready.callbacks, run.path / "callbacks"),
        )
        trainer.fit()  # for each stage: train, save, evaluate, commit
        trainer.finalize()  # model, report, model card
    return scores


def describe_run(plan: Plan, run: RunDir, scores: Scores) -> LoggedRun:
    """What loggers get of a run at its start."""
    labels = WandbLabels(
        name=run_name(scores.run, plan.resolved["order"]),
        group=str(plan.run.name),
        job_type=plan.names["method"],
        tags=plan.run.tags,
    )
    return LoggedRun(folder=run.path, labels=labels, config=dict(plan.settings), texts=scores.domains)


def write_pages(folder: Path, scores: Scores) -> None:
    """The report of a finished run and the card of its model. They show the results and do not decide whether
    the run is finished: one that cannot be made is a warning."""
    try:
        run_page.write_report(folder, scores)
    except Exception as error:  # of a font, a picture, a template
        cause = f"{type(error).__name__}: {reason(error)}"
        log.warning("The report could not be made (%s); the same command makes it again", cause)
    if len(scores.rows) < 2:
        return
    try:
        write_model_card(folder, scores)
    except Exception as error:
        cause = f"{type(error).__name__}: {reason(error)}"
        advice = f"python -m cpt.card {folder} makes it again"
        log.warning("The model card could not be made (%s); %s", cause, advice)


def check_same_settings(plan: Plan) -> None:
    """Raises ValueError where processes resolved options that decide the result to different values, as of a
    resolver of the user's own that draws one. Folders of texts and bases may differ from node to node."""
    leaves = identity(redact(plan.settings))
    settings = {key: value for key, value in leaves.items() if not is_node_local(key)}
    if len(set(gather_objects(digest(settings)))) == 1:
        return

    first, *others = gather_objects(settings)
    for key in sorted(first):
        for other in others:
            if other.get(key) != first[key]:
                first_value = format_value(first[key])
                other_value = format_value(other.get(key))
                message = f"it is {first_value} in one process and {other_value} in another"
                raise ValueError(f"{key} is invalid: {message}. Allowed: the same value in all of them")


def is_node_local(key: str) -> bool:
    """Whether an option may name another folder on each node: texts and bases are known by their contents."""
    return key in BY_CONTENT or key == "model.name_or_path" or key.endswith(".path")


def check_same_date(plan: Plan) -> None:
    """Raises ValueError where processes started on different days and chats print the day."""
    encoding = plan.source.encoding
    if plan.source.chats and encoding is not None and encoding.date is not None:
        dates = sorted({str(date) for date in gather_objects(encoding.date)})
        if len(dates) > 1:
            message = f"the processes started on {' and '.join(dates)}, and the chat template prints the date"
            raise ValueError(f"domains.date=null is invalid: {message}. Allowed: domains.date={dates[0]}")


def keep_threads(path: Path, *, processes: int) -> None:
    """Uses as many CPU threads as the run began with, which a file of its folder remembers: with others the
    same sums are added in another order, and the last bits differ. `processes` share this machine."""
    given = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        given = max(1, given // processes)
    begun = path.read_text(errors="replace").strip() if path.exists() else str(given)
    if not re.fullmatch("[1-9][0-9]{0,4}", begun):
        raise ValueError(f"{path} is damaged; write the number of threads into it that the run began with")
    if int(begun) != given:
        log.info("Computing with %s threads, as this run began, not with %d", begun, given)
    if is_first_process() and not path.exists():
        files.replace(path, begun)
    torch.set_num_threads(int(begun))
    os.environ["OMP_NUM_THREADS"] = begun  # for the processes that Lightning starts


@dataclass(kw_only=True, eq=False)
class ContinualTrainer:
    """Trains a method on the stages of a run, and fills the scores."""

    plan: Plan
    machine: Machine
    run: RunDir
    module: ContinualMethod
    data: DomainSequence
    base: Base
    evaluators: Sequence[Evaluator]
    scores: Scores
    loggers: Sequence[Logger]
    callbacks: CustomCallbacks
    at: int = 0  # the stage whose weights the module has

    def __post_init__(self) -> None:
        self.to_disk = self.plan.modules.storage == "disk"  # the modules of earlier domains
        self.has_base_folder = Path(self.base.checkpoint).is_dir()  # else it is of the Hub, or not built yet
        self.scores.needs_domain, self.scores.alone = self.module.needs_domain, self.module.alone

    @contextmanager
    def timed(self, kind: str, number: int) -> Iterator[None]:
        """Reports a kind of work in a stage (0: the base), and adds its seconds to the scores."""
        names = ["base", *(domain.name for domain in self.data)]
        if HEARTBEAT.folder is not None:
            set_phase(self.phase(kind, number, names))
        with time_phase(self.scores.activity_seconds[kind], names[number]):
            yield

    def phase(self, kind: str, number: int, names: Sequence[str]) -> Phase:
        """What follows this work: training at the pace of the stages that are done (in steps before the
        first), and of each further row the mean of what the rows so far took besides."""
        steps, done = [0, *map(self.data.steps, self.data)], len(self.scores.rows)
        done_s = {
            work: sum(self.scores.activity_seconds[work].get(name, 0.0) for name in names[:done])
            for work in KINDS
        }
        trained, left = sum(steps[:done]), sum(steps[max(number + (kind != "generate"), done) :])
        row_s = (sum(done_s.values()) - done_s["learn"]) / max(1, done)
        rows = len(names) - max(number + (kind not in ("generate", "learn")), done)
        step_s = done_s["learn"] / trained if trained else 0.0
        return Phase(
            name=f"{KINDS[kind]} {names[number]}",
            stage=number,
            stages=len(self.data),
            trains=kind == "learn",
            done=sum(steps[: number + (kind not in ("generate", "learn"))]),
            total=sum(steps),
            remaining_s=rows * row_s + left * step_s if trained or kind == "learn" else None,
            remaining_steps=0 if trained else left,
        )

    def fit(self) -> None:
        """Trains and evaluates every stage that is not committed yet. First measures what earlier rows lack,
        where the weights of their stages are there."""
        if not self.scores.rows:
            self.commit_row("base", StageCosts())
        done = len(self.scores.rows)
        for number, row in enumerate(list(self.scores.rows)):
            missing = self.missing(number)
            if missing and (number == self.at or self.run.stage_path(number).exists()):
                self.scores.run["finished"] = False
                self.restore(number)
                log.info("Scoring %d more texts after %s", len(missing), row)
                self.scores.fill(number, *self.score_row(number, row, missing))
                if is_first_process():
                    self.save_scores()
            self.run_evaluators(number)
        self.restore(done - 1)
        for number, domain in list(enumerate(self.data, start=1))[done - 1 :]:
            costs = self.fit_stage(number, domain)
            self.at = number
            self.commit_row(domain.name, costs)
            self.run_evaluators(number)

    def restore(self, number: int) -> None:
        """Loads the module's state after a stage, if it has another."""
        if number == self.at:
            return
        path = self.run.stage_path(number)
        check_stage(path, instead=f"delete {self.run.path} to start again")
        for domain in self.data.domains[:number]:
            self.module.expand_to(domain)
        restore_stage(self.module, path, rests=self.to_disk)
        self.at = number
        log.info("Resuming after %s", self.scores.rows[number])

    def fit_stage(self, number: int, domain: Domain) -> StageCosts:
        """Trains one stage, from its checkpoint if it has one."""
        plan, checkpoint = self.plan, self.run.checkpoint_path(number, domain.name)
        if checkpoint.exists():
            instead = f"delete it to train on {domain.name} again; what came before is kept"
            check_state(checkpoint, instead=instead, key="pytorch-lightning_version")
            log.info("Resuming within %s", domain.name)
        if self.data.replay_source is not None:
            with self.timed("generate", number):
                self.data.replay_source.prepare(number, domain, self.machine.device)
        self.data.enter(domain)
        self.module.setup_stage(domain)
        self.module.train()
        costs, movement, monitors = CostMonitor(), ProtectedMovement(), list[Monitor]()
        if plan.has_monitor:
            watcher = plan.observer
            observer = watcher.open(self.run, self.data, domain) if watcher.given else MonitorObserver()
            every = int(plan.monitor.every or -(-self.data.steps(domain) // watcher.evaluations))
            monitors = [Monitor(replace(plan.monitor, every=every), observer, self.data, costs)]
        guard = NanGuard(policy=plan.run.on_nonfinite)
        parts = self.run.stage_path(number - 1) if self.to_disk else None
        saving = StepCheckpoint(
            checkpoint, every=plan.trainer.checkpoint_every, guard=guard, stage_path=parts
        )
        enter_domain(self.loggers, domain.name, tokens=sum(self.scores.tokens_read))
        # Monitors know the tokens of their step; a checkpoint, last, has the state of the others at its step.
        callbacks = [costs, *monitors, movement, guard, *self.callbacks.entering(number), saving]
        fitting = None
        with self.timed("learn", number):
            while fitting is None:
                fitting = make_trainer(
                    self.machine.lightning_arguments(plan.trainer),
                    label=f"{domain.name} ({number}/{len(self.data)})",
                    folder=self.run.path / "lightning",
                    loggers=self.loggers,
                    steps=self.data.steps(domain),
                    callbacks=callbacks,
                    preemption=Preemption(saving),
                )
                begun = str(checkpoint) if checkpoint.exists() else None
                try:
                    with defer_signals(), use_quick_dropout(self.machine.quick_dropout):
                        fitting.fit(self.module, datamodule=self.data, ckpt_path=begun, weights_only=True)
                except RollbackError:
                    drop_optimizer(fitting)
                    self.module.train()
                    fitting = None
        drop_optimizer(fitting)
        for each in monitors:
            observed = each.observer.record()
            budget = {"budget": observed} if observed else {}
            self.scores.monitor[domain.name] = asdict(each.record) | budget
        check_finite(self.module.state_dict(), domain.name)
        path = self.run.stage_path(number)
        state = save_stage(self.module, path)
        if self.to_disk:
            barrier()  # until the first process has written it
            map_stored(self.module, path)
        return replace(
            costs.stage_costs(fitting),
            trained=trained_parameters(self.module),
            stored=stored_beside(self.module, state),
            skipped_steps=len(guard.skipped_steps),
            protected_movement=movement.noted,
        )

    def missing(self, number: int) -> list[str]:
        """The texts that the model after a stage is to be scored on, without those that its row has."""
        there = set(self.scores.measured(number)) if number < len(self.scores.rows) else ()
        stages, texts = [domain.texts for domain in self.data], self.scores.domains
        wanted = self.plan.evaluation.choose_columns(number, stages=stages, texts=texts)
        return [text for text in wanted if text not in there]

    def score_row(self, number: int, row: str, texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Scores texts after a stage and keeps their losses by document; gives mean losses in nats, and the
        heaviest modules. Where the module that scores a text has not changed since a row, its losses are
        those of the last such row. Raises ValueError where one is not finite."""
        scores, places, first = self.scores, self.data.domain_indices, is_first_process()
        means, modules, losses = dict[str, Any](), dict[str, Any](), dict[str, np.ndarray]()
        known, column = dict[str, int](), {name: at for at, name in enumerate(scores.domains)}
        for text in texts:
            constant = self.module.constant_part(places.get(text, BASE))
            rows = range(number - 1, constant, -1) if constant is not None else ()
            earlier = next((each for each in rows if scores.nll[each][column[text]] is not None), None)
            if earlier is not None:
                known[text] = earlier
        with self.timed("score", number):
            if changed := [text for text in texts if text not in known]:
                self.data.asked, self.data.by_length = changed, not self.module.in_sequence
                arguments = self.machine.lightning_arguments(self.plan.trainer)
                evaluating = make_trainer(arguments, label=f"scoring after {row}")
                evaluating.validate(self.module, datamodule=self.data, verbose=False)
                self.data.asked = None
                names = {place: name for name, place in places.items()} | {BASE: "base"}
                for text, (nll, count) in self.module.document_losses().items():
                    used = self.module.routing_weights(places.get(text, BASE))
                    heaviest = nlargest(HEAVIEST, used, used.__getitem__)
                    modules[text] = {names[place]: round(used[place], 4) for place in heaviest}
                    losses[text] = np.stack([nll.cpu(), count.cpu()])
                    means[text] = (nll.sum() / count.sum()).item()
            if bad := [f"{text}: {mean}" for text, mean in means.items() if not math.isfinite(mean)]:
                advice = "allowed: a model whose losses are numbers (model.name_or_path, trainer.precision)"
                advice = advice if row == "base" else ADVICE
                raise ValueError(f"the loss after {row} is not finite ({', '.join(bad)}); {advice}")
            for done in sorted({*known.values()}):
                (stored,) = self.run.load_documents([done]) if first else ({},)
                for text in (text for text in known if known[text] == done):
                    means[text] = scores.nll[done][column[text]]
                    modules[text] = scores.modules[done].get(text, {})
                    losses |= {text: stored[text]} if text in stored else {}
        leave_together(f"before {row} was committed")
        if first:
            before = self.run.load_documents([number])[0] if number < len(scores.rows) else {}
            self.run.save_documents(number, before | losses)
        return means, modules

    def commit_row(self, row: str, costs: StageCosts) -> None:
        """Evaluates, and writes the row: a restart resumes after it. Raises ValueError where the run's folder
        has been moved or deleted."""
        number = len(self.scores.rows)
        if is_first_process() and not self.run.config.exists():
            told = f"{self.run.path} was moved or deleted while it was trained: its config.yaml is missing"
            raise ValueError(f"{told}; delete what is left there to start again")
        if is_first_process() and self.has_base_folder:
            self.base.restore_folder()
        self.module.observes = number in (0, len(self.data))
        means, modules = self.score_row(number, row, self.missing(number))
        self.module.observes = False
        nll = [means.get(text) for text in self.scores.domains]
        self.scores.append(row, nll=nll, modules=modules, costs=costs)
        shown = [f"{text} {np.exp(mean):.1f}" for text, mean in means.items()]
        few = shown if len(shown) <= 2 * ENDS else [*shown[:ENDS], "…", *shown[-ENDS:]]
        log.info("Evaluated after %s: perplexity %s", row, ", ".join(few))
        found = self.module.diagnostics()  # numpy has no bfloat16
        found = {name: v.float() if v.dtype == torch.bfloat16 else v for name, v in found.items()}
        log_stage(self.loggers, self.scores)
        if is_first_process():
            if found:
                arrays = {name: values.cpu().numpy() for name, values in found.items()}
                self.run.save_arrays(self.run.path / "diagnostics" / f"{number:03d}.npz", arrays)
            self.save_scores()
            self.run.cleanup(number, keep=self.plan.run.save_all_stages)

    def run_evaluators(self, number: int) -> None:
        """Measures the end tasks, answers and benchmarks that are due after a stage and missing."""
        for each in self.evaluators:
            if not each.missing(number):
                continue
            row, group = self.scores.rows[number], each.GROUP
            if number != self.at and not self.run.stage_path(number).exists():
                if number <= max(self.scores.grown, default=0):
                    log.info("Skipping %s after %s: its weights were not kept", group, row)
                    continue
                told = f"{group}.when={each.when} is invalid: the weights after {row} were not kept"
                allowed = f"{group}.when=last, or a new name=… (save_all_stages=true keeps them for later)"
                raise ValueError(f"{told}. Allowed: {allowed}")
            self.scores.run["finished"] = False
            self.restore(number)
            with self.timed(each.KIND, number):
                each.measure(number, self.machine.device)
            if is_first_process():
                self.collect(each)
                self.save_scores()

    def collect(self, evaluator: Evaluator) -> None:
        """Takes over the results of an evaluator so far."""
        results = evaluator.results(len(self.scores.rows)) | {
            "hash": self.plan.evaluation_hashes[evaluator.KIND]
        }
        self.scores.set_results(evaluator.KIND, results)

    def save_scores(self) -> None:
        """Writes the scores with their metrics, without intervals."""
        self.scores.measure()
        self.scores.save(self.run.scores_file)

    def recorded_losses(self, sample: HeldOutSample) -> np.ndarray | None:
        """The losses by document [2, documents] of a sample's text in the last row, if they are of its own
        modules alone: a mixture is not exported."""
        number = len(self.scores.rows) - 1
        used = self.scores.modules[number].get(sample.text, {}) if self.scores.modules else {}
        if set(used) - {sample.text} or sample.text not in self.scores.measured(number):
            return None
        (losses,) = self.run.load_documents([number])
        return losses.get(sample.text)

    def finalize(self) -> None:
        """Intervals, the exported model, the report and the run's summary, by the first process."""
        scores, run, start = self.scores, self.run, self.base
        if not is_first_process():
            return
        check_signals("before the model was exported")
        set_phase("exporting the model")
        if self.has_base_folder:
            start.restore_folder()  # its tokenizer is copied
        if isinstance(self.module.model, FSDPModule):  # another module has all weights in this process
            self.module, self.at = build.build_method(self.plan, self.machine, start), 0
            self.restore(len(scores.rows) - 1)
        sample = draw_sample(self.module, self.data)
        with files.writing(run.model):
            for path in run.model.rglob("*.safetensors"):  # its files are those of the last stage, too
                path.unlink()
            loading = self.module.export(run.model, [domain.name for domain in self.data])
            save_tokenizer(start.tokenizer, base=start.checkpoint, folder=run.model)
            copy_generation_config(base=start.checkpoint, folder=run.model)
            for path in run.model.rglob("*.safetensors"):  # which safetensors makes for their owner alone
                path.chmod(run.config.stat().st_mode)
        check_export(
            run.model,
            loading,
            sample,
            self.module,
            recorded=self.recorded_losses(sample),
            precision=str(self.machine.precision),
        )
        scores.loading = loading.replace(f"{run.path}/", "")  # the folder may be moved
        if len(scores.rows) > 1:
            scores.moved = measure_movement(start.model(), run.model)
        check_signals("before the report was written")
        set_phase("writing the report")
        sums, counts = gather_documents(run.load_documents(range(len(scores.rows))), scores)
        scores.measure(nll_sums=sums, counts=counts)
        scores.policy = self.plan.evaluation.policy
        left = {row: len(self.missing(number)) for number, row in enumerate(scores.rows)}
        if rows := [row for row, count in left.items() if count]:
            why = "the weights after these stages were not kept (save_all_stages=true keeps them for later)"
            few = ", ".join(rows[:3]) + ", …" * (len(rows) > 3)
            log.info("Missing cells of the matrix: %d, in the rows %s: %s", sum(left.values()), few, why)
        for each in self.evaluators:
            self.collect(each)
        scores.optimized_metric = run_objective(vars(scores), self.plan.run.optimized_metric)
        scores.run["finished"] = True
        write_pages(run.path, scores)
        run.write_checksums()
        if (last := run.stage_path(len(scores.rows) - 1)).exists():
            with files.writing(last):
                link_weights(last, run.model)
        log_scores(self.loggers, scores, folder=run.path)
        scores.save(run.scores_file)  # last: a finished run has all of its outputs
