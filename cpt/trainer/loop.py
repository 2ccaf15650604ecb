"""The loop over stages: train, evaluate, commit. A killed run resumes from what is committed."""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor

from cpt.core import files
from cpt.core.heartbeat import set_phase
from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.row_files import is_file_of_all_rows_due
from cpt.evaluation.scores import Scores, StageCosts
from cpt.loggers.loggers import LoggedRun, log_stage, run_name, track
from cpt.loggers.wandb_environment import WandbLabels
from cpt.methods.base import ContinualMethod
from cpt.trainer import build, preflight
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import Base, make_base
from cpt.trainer.callbacks import CustomCallbacks
from cpt.trainer.chat_date import date_chats
from cpt.trainer.chat_monitor import find_chat_evaluator
from cpt.trainer.common_settings import check_same_date, check_same_settings
from cpt.trainer.costs import time_phase
from cpt.trainer.evaluator import Evaluator
from cpt.trainer.evaluators import make_evaluators
from cpt.trainer.finalize import finalize
from cpt.trainer.initial_scores import make_initial_scores
from cpt.trainer.lightning import join_for_shards, join_processes
from cpt.trainer.log_settings import log_settings
from cpt.trainer.manifest import write_manifest
from cpt.trainer.match_operations import match_operations
from cpt.trainer.matrix import MatrixEvaluator, TextScore
from cpt.trainer.micro_batch import agree_on_micro_batch, choose_micro_batch
from cpt.trainer.plan import Plan
from cpt.trainer.progress import ActivityTimer
from cpt.trainer.run_dir import RunDir
from cpt.trainer.stage import StageTrainer, load_stage_state

log = logging.getLogger(__name__)
NUM_SHOWN = 6  # texts at each end of a long row that the log names


def train_run(plan: Plan, run: RunDir) -> Scores:
    """Reads the texts, builds base and method, and trains every stage that the run's folder lacks."""
    start_seconds: dict[str, float] = {}  # by step of the start
    setup = preflight.prepare_run(plan, run)  # rejects a bad plan before hours of reading
    machine = setup.machine
    settings = plan.settings
    plan = date_chats(plan)
    if is_first_process() and plan.settings != settings:
        run.write_config(plan.settings)
    keep_num_threads(run.path / "threads", num_processes=machine.num_processes)

    set_phase("reading texts")
    with time_phase(start_seconds, "read the texts"):
        corpora = build.read_corpora(plan)

    set_phase("making the base")
    with time_phase(start_seconds, "make the base"):
        base = make_base(plan.model, corpora, accelerator=plan.trainer.accelerator)
    if plan.trainer.micro_batch is not None:
        with time_phase(start_seconds, "choose the micro-batch"):
            plan = choose_micro_batch(plan, machine, corpora, base, stored=run.micro_batch)
    if plan.trainer.match is not None:  # as many steps as give the operations of another method
        with time_phase(start_seconds, "count operations"):
            plan = match_operations(plan, machine, corpora, base, stored=run.matched)
            if is_first_process() and not run.matched.exists():
                files.write_atomically(run.matched, json.dumps(asdict(plan.budget)))
    with time_phase(start_seconds, "make the base"):
        sharding = None
        if machine.strategy == "fsdp":  # the processes load the model together, and have to want the same one
            sharding = join_for_shards(machine.lightning_arguments(plan.trainer))
            check_same_settings(plan)
        plan = agree_on_micro_batch(plan, machine, stored=run.micro_batch)
        method = build.build_method(plan, machine, base, sharding=sharding)

    set_phase("tokenizing")
    with time_phase(start_seconds, "tokenise"):
        data = build.build_data(plan, machine, corpora, base, method)
        if run.load_scores() is None:  # a run that an earlier version began continues as it is
            build.check_row_repeats(data)
        data.replay_source = method.replay.open_source(
            run.path / "generated", module=method, data=data, corpora=corpora, base=base, seed=plan.run.seed
        )
        file_evaluators = make_evaluators(
            plan, corpora, base, setup.harness, machine=machine, run=run, module=method, data=data
        )

    # From here on the run folder and all processes know what the run is made of.
    log_settings(plan, machine, method, data)
    write_manifest(plan, run, corpora, base, file_evaluators)
    join_processes(machine.lightning_arguments(plan.trainer))
    check_same_settings(plan)
    check_same_date(plan)

    scores = load_or_create_scores(plan, machine, run, corpora, base, data)
    scores.needs_domain = method.needs_domain
    scores.trains_from_base = method.trains_from_base
    for step, seconds in start_seconds.items():  # other starts of the run have added theirs
        step_seconds = scores.activity_seconds["start"]
        step_seconds[step] = step_seconds.get(step, 0.0) + seconds

    matrix = MatrixEvaluator(
        plan=plan,
        machine=machine,
        run=run,
        module=method,
        data=data,
        scores=scores,
        original_files=base.find_original_files(),
    )
    has_base_folder = Path(base.checkpoint).is_dir()  # else it is of the Hub
    logger_options = plan.logger
    with track(
        describe_run(plan, run, scores),
        csv_file=logger_options.csv,
        wandb=logger_options.wandb_place,
        custom=setup.loggers,
    ) as loggers:
        trainer = ContinualTrainer(
            plan=plan,
            machine=machine,
            run=run,
            module=method,
            data=data,
            base=base,
            has_base_folder=has_base_folder,
            matrix=matrix,
            file_evaluators=file_evaluators,
            scores=scores,
            loggers=loggers,
            custom_callbacks=CustomCallbacks(setup.callbacks, run.path / "callbacks"),
        )
        trainer.fit()
        finalize(
            plan=plan,
            machine=machine,
            run=run,
            base=base,
            has_base_folder=has_base_folder,
            module=method,
            data=data,
            scores=scores,
            evaluators=trainer.evaluators,
            loggers=loggers,
        )
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


def keep_num_threads(path: Path, *, num_processes: int) -> None:
    """Uses as many CPU threads as the run was started with, which the file at `path` stores.

    Another number of threads adds the same terms in another order, and the last bits differ. This machine is
    shared by `num_processes`. Raises ValueError for a damaged file."""
    num_threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, num_threads // num_processes)

    stored_text = str(num_threads)
    if path.exists():
        stored_text = path.read_text(errors="replace").strip()
    if not re.fullmatch("[1-9][0-9]{0,4}", stored_text):
        raise ValueError(f"{path} is damaged; write the number of threads into it that the run began with")
    if int(stored_text) != num_threads:
        thread_count = count_noun(int(stored_text), "thread")
        log.info(
            "Computing with %s, as at the first start of this run, instead of %d", thread_count, num_threads
        )
    if is_first_process() and not path.exists():
        files.write_atomically(path, stored_text)

    torch.set_num_threads(int(stored_text))
    os.environ["OMP_NUM_THREADS"] = stored_text  # for the processes that Lightning starts


def load_or_create_scores(
    plan: Plan, machine: Machine, run: RunDir, corpora: Corpora, base: Base, data: DomainSequence
) -> Scores:
    """The scores in the run's folder, with a column for each domain that was added since, or new ones.

    Raises ValueError if the losses by document of a committed row are damaged."""
    stored_scores = run.load_scores()
    new_scores = make_initial_scores(plan, machine, corpora, base, data)
    if stored_scores is None:
        return new_scores

    warn_of_versions(stored_scores.versions, new_scores.versions)
    run.check_documents(len(stored_scores.rows))
    if stored_scores.run["order"] != new_scores.run["order"]:  # domains were added
        new_scores.take_over(stored_scores)
        return new_scores
    return stored_scores


def warn_of_versions(stored_versions: Mapping[str, str], versions: Mapping[str, str]) -> None:
    """Warns if a run continues with other versions of packages."""
    changes = []
    for package, version in versions.items():
        stored_version = stored_versions.get(package, version)
        if stored_version != version:
            changes.append(f"{package} {stored_version} -> {version}")
    if changes:
        log.warning("Continuing with other versions, which may change the last bits: %s", ", ".join(changes))


@dataclass(kw_only=True, eq=False)
class ContinualTrainer:
    """Trains a method on the stages of a run, and fills the scores.

    Stages are numbered as the rows of the matrix: 0 is the base model, which is only evaluated."""

    plan: Plan
    machine: Machine
    run: RunDir
    module: ContinualMethod
    data: DomainSequence
    base: Base
    has_base_folder: bool  # whether the run has started from a base in a folder
    matrix: MatrixEvaluator
    file_evaluators: Sequence[Evaluator]
    scores: Scores
    loggers: Sequence[Logger]
    custom_callbacks: CustomCallbacks
    num_stored_rows: int = 0  # rows in scores.json as this process has written it; 0: it has not
    loaded_stage: int = 0  # the stage whose weights the module has
    latest_costs: StageCosts = StageCosts()  # of the stage trained last; the base costs nothing

    def __post_init__(self) -> None:
        self.evaluators = [self.matrix, *self.file_evaluators]
        self.timer = ActivityTimer(scores=self.scores, data=self.data)
        self.stage_trainer = StageTrainer(
            plan=self.plan,
            machine=self.machine,
            run=self.run,
            module=self.module,
            data=self.data,
            scores=self.scores,
            loggers=self.loggers,
            custom_callbacks=self.custom_callbacks,
            timer=self.timer,
            chat_evaluator=find_chat_evaluator(self.file_evaluators),
        )

    def fit(self) -> None:
        """Measures what stored rows lack, then trains and evaluates the remaining stages."""
        num_committed = len(self.scores.rows)
        for number in range(num_committed):  # a restart may ask for more than the start that committed a row
            self.evaluate(number)

        # Training continues from the last row, whatever weights were measured.
        if num_committed > 0:
            self.load_stage(num_committed - 1)
        for number in range(num_committed, len(self.data) + 1):
            if number > 0:  # the base is not trained
                self.latest_costs = self.stage_trainer.train(number, self.data.domains[number - 1])
                self.loaded_stage = number
            self.check_folders()
            self.evaluate(number)

    def check_folders(self) -> None:
        """Raises ValueError if the run's folder has been moved or deleted; restores that of the base."""
        if not is_first_process():
            return
        if not self.run.config.exists():
            raise ValueError(
                f"{self.run.path} was moved or deleted while it was trained: its config.yaml is missing; "
                "delete what is left there to start again"
            )
        if self.has_base_folder:
            self.base.restore_folder()

    def evaluate(self, number: int) -> None:
        """Measures what is missing after a stage. The first evaluator finds the losses of a new row, which is
        then committed: a restart resumes after it.

        Raises ValueError for weights that a measurement needs and that were not kept."""
        for evaluator in self.evaluators:
            if not evaluator.is_missing(number):
                continue
            if not self.has_weights(number):
                evaluator.report_lost_weights(number, self.scores)
                continue

            # Until the results are in the scores, a run that was finished is not.
            self.scores.run["finished"] = False
            self.load_stage(number)
            with self.timer.time(evaluator.KIND, number):
                evaluator.measure(number, self.machine.device)

            # The row is there before its results are collected into it, and committed with them.
            is_new_row = number == len(self.scores.rows)
            if is_new_row:
                self.append_row(number)
            evaluator.collect(number, self.scores)
            if is_new_row:
                self.commit_row(number)
            elif is_first_process():
                self.save_results(number)

    def append_row(self, number: int) -> None:
        """Adds a row to the scores, whose cells are to be collected."""
        row = self.timer.stage_names[number]
        no_losses = [None] * len(self.scores.domains)
        self.scores.append(row, nll=no_losses, modules={}, costs=self.latest_costs)

    def commit_row(self, number: int) -> None:
        """Writes the row that was appended last to the log, the loggers and the run's folder. From then on a
        restart resumes after its stage, and what only an earlier restart needed is removed."""
        row_name = self.scores.rows[number]
        row_scores = self.matrix.text_scores  # the matrix has just measured this row
        log.info("Evaluated after %s: perplexity %s", row_name, describe_perplexities(row_scores))
        diagnostics = self.module.diagnostics()  # may gather from all processes: each has to call it
        log_stage(self.loggers, self.scores)
        if not is_first_process():
            return

        if diagnostics:
            self.save_diagnostics(number, diagnostics)
        self.save_results(number)
        self.run.cleanup(number, keep_stages=self.plan.run.save_all_stages)

    def save_diagnostics(self, number: int, diagnostics: Mapping[str, Tensor]) -> None:
        """Writes the method's named tensors after a stage into the run's folder."""
        arrays = {name: to_array(values) for name, values in diagnostics.items()}
        self.run.save_arrays(self.run.path / "diagnostics" / f"{number:03d}.npz", arrays)

    def has_weights(self, number: int) -> bool:
        """Whether the module has the weights after a stage, or a file of the run's folder."""
        return number == self.loaded_stage or self.run.stage_path(number).exists()

    def load_stage(self, number: int) -> None:
        """Loads the method's state after a stage into the module, unless it has it."""
        if number == self.loaded_stage:
            return
        load_stage_state(self.module, number, plan=self.plan, run=self.run, data=self.data)
        self.loaded_stage = number
        log.info("Resuming after %s", self.scores.rows[number])

    def save_results(self, number: int) -> None:
        """Writes what was measured after stage `number`: in a long run mostly the file of its row, since
        scores.json takes longer with each row (cpt.evaluation.row_files)."""
        num_rows = len(self.scores.rows)
        if is_file_of_all_rows_due(number, num_rows=num_rows, num_stored=self.num_stored_rows):
            self.save_scores()
            self.num_stored_rows = num_rows
        else:
            self.scores.save_row(number, self.run.path)

    def save_scores(self) -> None:
        """Writes the scores with their metrics, whose intervals are computed at the end of the run."""
        self.scores.measure()
        self.scores.save(self.run.scores_file)


def describe_perplexities(text_scores: Mapping[str, TextScore]) -> str:
    """The perplexity of each text, or of the first and last ones of a long row."""
    items = [f"{text} {np.exp(score.nll):.1f}" for text, score in text_scores.items()]
    if len(items) > 2 * NUM_SHOWN:
        items = [*items[:NUM_SHOWN], "…", *items[-NUM_SHOWN:]]
    return ", ".join(items)


def to_array(values: Tensor) -> np.ndarray:
    if values.dtype == torch.bfloat16:  # which numpy does not have
        values = values.float()
    return values.cpu().numpy()
