"""The end of a run: its exported model, its metrics with intervals, its report and model card."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from lightning.pytorch.loggers import Logger
from torch.distributed.fsdp import FSDPModule

from cpt.core import files
from cpt.core.errors import find_reason
from cpt.core.heartbeat import set_phase
from cpt.core.memory import trim_heap
from cpt.core.preemption import check_signals
from cpt.core.processes import is_first_process
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.scores import Scores, gather_documents
from cpt.evaluation.task_metrics import run_objective
from cpt.loggers.loggers import log_scores
from cpt.methods.base import ContinualMethod
from cpt.models.vocabulary import count_entries
from cpt.models.weights import measure_movement
from cpt.reporting import run_page
from cpt.reporting.model_card import write_model_card
from cpt.trainer import build
from cpt.trainer.auto import Machine
from cpt.trainer.base_files import copy_generation_config, save_tokenizer
from cpt.trainer.base_model import Base
from cpt.trainer.evaluator import Evaluator
from cpt.trainer.export_check import HeldOutSample, check_export, draw_sample
from cpt.trainer.export_dtype import convert_files, find_export_dtype, name_dtype
from cpt.trainer.linked_weights import link_weights
from cpt.trainer.plan import Plan
from cpt.trainer.run_dir import RunDir
from cpt.trainer.stage import load_stage_state

log = logging.getLogger(__name__)


def finalize(
    *,
    plan: Plan,
    machine: Machine,
    run: RunDir,
    base: Base,
    has_base_folder: bool,
    module: ContinualMethod,
    data: DomainSequence,
    scores: Scores,
    evaluators: Sequence[Evaluator],
    loggers: Sequence[Logger],
) -> None:
    """Writes the outputs of a run whose stages are all committed; only the first process does so.

    A run that `has_base_folder` has started from a folder, which may have been removed since. Raises
    ValueError for an exported model that does not score as the run does."""
    if not is_first_process():
        return

    # Export and report take minutes: a signal is obeyed before each, and the next start begins there.
    check_signals("before the model was exported")
    set_phase("exporting the model")
    log.info("Exporting the model to %s", run.model)
    if has_base_folder:
        base.restore_folder()  # its tokenizer is copied
    export_and_check(plan, machine, run, base, module, data, scores)

    check_signals("before the report was written")
    set_phase("writing the report")
    log.info("Computing intervals and writing the report")
    document_losses = run.load_documents(range(len(scores.rows)))
    nll_sums, num_tokens = gather_documents(document_losses, scores)
    scores.measure(nll_sums=nll_sums, counts=num_tokens)
    scores.policy = plan.evaluation.policy
    for evaluator in evaluators:
        evaluator.finish(scores)
    scores.optimized_metric = run_objective(vars(scores), plan.run.optimized_metric)
    scores.run["finished"] = True

    # Checksums are of the pages, too. The last stage's file then shares the exported weights on disk.
    write_pages(run.path, scores)
    run.write_checksums()
    last_stage_path = run.stage_path(len(scores.rows) - 1)
    if last_stage_path.exists():
        with files.writing(last_stage_path):
            link_weights(last_stage_path, run.model)
    log_scores(loggers, scores, folder=run.path)
    scores.save(run.scores_file)  # last: a run counts as finished when all of its outputs are there


def export_and_check(
    plan: Plan,
    machine: Machine,
    run: RunDir,
    base: Base,
    module: ContinualMethod,
    data: DomainSequence,
    scores: Scores,
) -> None:
    """Writes the exported model, and into the scores how it is loaded, what it scores and how far training
    moved its weights. The weights of the module are given up. Raises ValueError for an exported model that
    does not score as the run does."""
    if isinstance(module.model, FSDPModule):  # this process has a shard of the weights
        module = build_whole_module(plan, machine, run, base, data, scores)

    # Scored before the export, which may change the module, to compare with the reloaded model.
    num_entries = count_entries(base.tokenizer)
    sample = draw_sample(module, data, num_entries=num_entries, precision=machine.precision)
    loading = export_model(run, base, module, data)
    release_weights(module)  # the files have them: base and exported model need the memory

    # Before weights are rounded: what is measured is the movement of training.
    has_stages = len(scores.rows) > 1  # method=none evaluates the base alone
    if has_stages and module.has_base_blocks:
        scores.moved = measure_movement(base.model(machine.base_dtype), run.model)
    dtype = find_export_dtype(plan.export, plan.model.name_or_path, machine.precision)
    with files.writing(run.model):
        convert_files(run.model, dtype)
    exported = check_export(
        run.model,
        loading,
        sample,
        module,
        recorded=find_recorded_losses(run, scores, sample),
        precision=machine.precision,
    )
    scores.loading = loading.replace(f"{run.path}/", "")  # the run's folder may be moved
    scores.exported = {
        "requested": plan.export.dtype,
        "dtype": name_dtype(dtype),
        "text": sample.text,
        "tokens": exported.num_tokens,
        "nll": exported.nll,
        "run_nll": exported.run_nll,
    }


def build_whole_module(
    plan: Plan, machine: Machine, run: RunDir, base: Base, data: DomainSequence, scores: Scores
) -> ContinualMethod:
    """The method after the last stage, built a second time: FSDP has sharded the module that was trained, and
    this one has all weights in this process."""
    module = build.build_method(plan, machine, base)
    last_number = len(scores.rows) - 1
    if last_number > 0:  # else the base, as which the module is built
        load_stage_state(module, last_number, plan=plan, run=run, data=data)
        log.info("Resuming after %s", scores.rows[last_number])
    return module


def export_model(run: RunDir, base: Base, module: ContinualMethod, data: DomainSequence) -> str:
    """Writes model and tokenizer; returns the Python expression that loads the model."""
    with files.writing(run.model):
        # An earlier export may share its files with the last stage by hard links: writing into them would
        # change the stage.
        for path in run.model.rglob("*.safetensors"):
            path.unlink()

        loading = module.export(run.model, [domain.name for domain in data])
        save_tokenizer(base.tokenizer, base=base.tokenizer_files, folder=run.model)
        copy_generation_config(base=base.checkpoint, folder=run.model)

        # safetensors makes its files readable by their owner alone.
        for path in run.model.rglob("*.safetensors"):
            path.chmod(run.config.stat().st_mode)
    return loading


def release_weights(module: ContinualMethod) -> None:
    """Frees the memory of a method's weights and state, with which nothing is computed any more."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.new_empty(0)
    trim_heap()


def find_recorded_losses(run: RunDir, scores: Scores, sample: HeldOutSample) -> np.ndarray | None:
    """The losses by document [2, documents] of a sample's text in the last row.

    None if that row does not have the text, or if other modules than its own have scored it: their mixture is
    not exported."""
    number = len(scores.rows) - 1
    modules: set[str] = set()
    if scores.modules:
        modules.update(scores.modules[number].get(sample.text, {}))
    is_scored_by_others = bool(modules - {sample.text})
    if is_scored_by_others or sample.text not in scores.measured(number):
        return None
    (losses,) = run.load_documents([number])
    return losses.get(sample.text)


def write_pages(folder: Path, scores: Scores) -> None:
    """Writes the report of a finished run and the card of its model. They do not decide whether the run is
    finished: a failure is a warning."""
    try:
        run_page.write_report(folder, scores)
    except Exception as error:  # of a font, a picture, a template
        cause = f"{type(error).__name__}: {find_reason(error)}"
        log.warning("The report could not be made (%s); the same command makes it again", cause)

    has_stages = len(scores.rows) > 1
    if not has_stages:
        return
    try:
        write_model_card(folder, scores)
    except Exception as error:
        cause = f"{type(error).__name__}: {find_reason(error)}"
        log.warning(
            "The model card could not be made (%s); python -m cpt.card %s makes it again", cause, folder
        )
