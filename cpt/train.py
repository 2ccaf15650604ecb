"""One run, from its config to its report: `train` is what `cpt`, `python -m cpt` and `python run.py` do."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig

from cpt.core.cache import check_all
from cpt.core.cache_use import end_uses
from cpt.core.errors import find_reason
from cpt.core.exceptions import InvalidOptionError
from cpt.core.heartbeat import heartbeat
from cpt.core.messages import find_similar_path, log_once
from cpt.core.preemption import defer_signals
from cpt.core.processes import is_first_process, is_job_within_a_sweep, is_one_of_several
from cpt.core.slurm import check_launch
from cpt.evaluation.scores import Scores
from cpt.evaluation.task_metrics import run_objective
from cpt.loggers.wandb_environment import check_environment
from cpt.trainer.domain_order import load_cached_order, order_domains
from cpt.trainer.extension import check_extension, extend_run, find_extended
from cpt.trainer.manifest import Manifest, check_manifest
from cpt.trainer.options import count_devices
from cpt.trainer.plan import Plan, make_plan
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
LOADING_LIBRARIES = "Loading torch and transformers"  # seconds, and minutes the first time
MAX_SHOWN = 5  # damaged files that the log names


def train(cfg: DictConfig, *, run_dir: Path) -> float | None:
    """Trains the method of a config on its domains, or resumes it; returns the metric that a sweep minimizes.

    With `plan`, prints the estimated cost and leaves the directory as it is. Raises ValueError for an invalid
    config, and for one that is not the directory's."""
    run = RunDir(run_dir)
    log_once.cache_clear()  # a process may train several runs, each with a log of its own
    if not is_first_process():
        quiet_logs()
    with run.removed_if_rejected(), closing_uses():
        plan = make_plan(cfg, run=run)  # the typed config: no text is read, torch is not imported
        check_start(plan, run)
        if plan.run.plan:
            print_estimate(cfg, plan, run)
            return None
        scores = train_unless_finished(plan, run)

    from cpt.reporting.console import format_scores  # matplotlib is not loaded to refuse a config

    log.info("Results:\n%s\n%s", format_scores(scores), run.path / "report.html")
    return run_objective(vars(scores), plan.run.optimized_metric)


def quiet_logs() -> None:
    """Leaves it to the first process to log and to warn of what config and files give in all of them. Only
    damage of a cache may be that of this process's node alone."""
    logging.getLogger("cpt").setLevel(logging.ERROR)
    logging.getLogger("cpt.core.cache").setLevel(logging.WARNING)


@contextmanager
def closing_uses() -> Iterator[None]:
    """Inside the context the run counts as a user of the artifacts that it opens in a cache."""
    try:
        yield
    finally:
        end_uses()


def check_start(plan: Plan, run: RunDir) -> None:
    """Raises ValueError for a plan that cannot be run here: processes, domains, environment and folders."""
    if not plan.run.plan and not is_job_within_a_sweep():
        check_launch(count_devices(plan.trainer.devices), plan.trainer.num_nodes)
    if not run.config.exists():
        check_base_folder(plan)
    plan.source.check_domains(plan.order)
    if plan.logger.wandb:
        check_environment()
    check_encoding(plan, run)
    try:
        Path(plan.run.cache_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidOptionError(
            "cache_dir",
            plan.run.cache_dir,
            reason=str(error.strerror),
            allowed="a folder that can be written",
        ) from error


def check_base_folder(plan: Plan) -> None:
    """Raises ValueError for a checkpoint that is given by a path, and is not there."""
    checkpoint = plan.model.name_or_path
    if checkpoint is None or not checkpoint.startswith(("/", "./", "../")) or Path(checkpoint).exists():
        return
    raise InvalidOptionError(
        "model.name_or_path",
        checkpoint,
        reason="no such folder",
        meant=find_similar_path(Path(checkpoint)),
        allowed="an existing folder, or a name on the Hub",
    )


def check_encoding(plan: Plan, run: RunDir) -> None:
    """Raises ValueError where the path of the run, its cache or a model is not UTF-8: safetensors and
    tokenizers take no other names."""
    if not is_utf8(run.path):
        raise ValueError(f"the run folder {run.path} is invalid: not UTF-8. Allowed: another hydra.run.dir")
    # With init_from, model.name_or_path is the model of that run.
    path_by_key = {
        "cache_dir": plan.run.cache_dir,
        "init_from": plan.settings["init_from"],
        "model.name_or_path": plan.model.name_or_path,
        "model.tokenizer": plan.model.tokenizer,
        "loss.reference": plan.reference_folder,
    }
    for key, path in path_by_key.items():
        if path is not None and not is_utf8(Path(path)):
            raise InvalidOptionError(key, path, reason="it is not UTF-8", allowed="a path in UTF-8")


def is_utf8(path: Path) -> bool:
    """Whether a path can be written into files."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def train_unless_finished(plan: Plan, run: RunDir) -> Scores:
    """Trains what the directory lacks of a run, and returns its scores."""
    verifies_all = plan.run.verify_inputs == "full"
    check_all.set(verifies_all)  # cached texts and models are verified in the same way

    with open_run_dir(plan, run):
        plan = order_domains(plan)  # by their texts, if so configured
        check_manifest(plan, run)

        scores = load_complete_scores(plan, run)
        if scores is not None and not has_damaged_outputs(run, full=verifies_all):
            log.info("Nothing to train: %s is finished", run.path)
        else:
            log.info(LOADING_LIBRARIES)
            with defer_signals():  # libraries cannot be interrupted while they are imported
                from cpt.trainer.loop import train_run
            scores = train_run(plan, run)
    return scores


@contextmanager
def open_run_dir(plan: Plan, run: RunDir) -> Iterator[None]:
    """Opens the directory of a run, which a run that it extends is copied into. The first process holds the
    lock, writes the config, removes incomplete files, and reports that the run is alive."""
    if not is_first_process():
        yield
        return

    with run.locked():
        extended = find_extended(plan, run)
        if extended is not None:
            extend_run(plan, run, extended)
        run.check_config(plan.settings)
        if not run.config.exists():
            run.write_config(plan.settings)
        run.clean()
        with heartbeat(run.path):
            yield


def load_complete_scores(plan: Plan, run: RunDir) -> Scores | None:
    """The scores of a run that has nothing left to train or to measure; None of another run."""
    scores = run.load_scores()
    if scores is None or not is_complete(scores, plan):
        return None
    return scores


def has_damaged_outputs(run: RunDir, *, full: bool) -> bool:
    """Whether files of the model or the report are missing or damaged. If `full`, every file is read."""
    damaged_outputs = run.find_damaged_outputs(full=full)
    if damaged_outputs:
        log.info("Rebuilding %s without training: %s", run.path, "; ".join(damaged_outputs[:MAX_SHOWN]))
    return bool(damaged_outputs)


def is_complete(scores: Scores, plan: Plan) -> bool:
    """Whether scores are of a finished run with all that a plan measures."""
    if not scores.run["finished"]:
        return False
    if scores.policy != plan.evaluation.policy or scores.run["order"] != plan.order:
        return False

    # Exported in another type than is asked for now; a run of 0.1.0 in 32 bits.
    exported = scores.exported or {"requested": "auto", "dtype": "float32"}
    if plan.export.dtype not in (exported["requested"], exported["dtype"]):
        return False

    # End tasks, answers, benchmarks: measured with the same options and data.
    for evaluation, expected_hash in plan.evaluation_hashes.items():
        if getattr(scores, evaluation).get("hash") != expected_hash:
            return False
    return True


def print_estimate(cfg: DictConfig, plan: Plan, run: RunDir) -> None:
    """Prints what a run would do and cost, as a table or as JSON, and leaves the directory as it is. Raises
    ValueError in one of several processes."""
    if is_one_of_several():
        raise InvalidOptionError(
            "plan",
            plan.run.plan,
            reason="it is made by one process, for all of trainer.devices and trainer.num_nodes",
            allowed="without torchrun or srun",
        )
    is_json = plan.run.plan == "json"
    is_new = not run.config.exists()
    try:
        extended = find_extended(plan, run)
        if extended is not None:
            check_extension(plan, extended)
        run.check_config(plan.settings)
        log.info(LOADING_LIBRARIES)
        with defer_signals():
            from cpt.trainer.computed_plan import compute_plan, format_computed, why_computed
        cause = why_computed(plan)
        if cause:
            cost = compute_plan(cfg, plan, cause=cause)
            table = format_computed(cost)
        else:
            plan = order_domains(plan)
            check_manifest(plan, run, update=False)
            with defer_signals():
                from cpt.trainer.dry_run import estimate, format_table
            cost = estimate(plan, run, extended)
            table = format_table(cost)
    finally:
        if is_new:
            run.remove_if_empty()  # that Hydra has made, also if a signal ends the plan

    print(json.dumps(cost, indent=1) if is_json else table, flush=True)


def is_done(cfg: DictConfig, run_dir: Path) -> bool:
    """Whether a directory has the finished run of this config; raises ValueError for unreadable ones."""
    run = RunDir(run_dir)
    if not run.config.exists():
        return False
    try:
        plan = load_cached_order(make_plan(cfg, run=run))
    except HydraException as error:
        raise ValueError(find_reason(error)) from error
    if plan is None:  # the order depends on texts that have not been read yet
        return False

    # The sizes and times of files are compared, and no text is read: a sweep asks this of each of its jobs.
    if run.find_config_changes(plan.settings):
        return False
    if load_complete_scores(plan, run) is None or run.find_damaged_outputs(full=False):
        return False
    manifest = Manifest.load(run)
    if manifest is None or manifest.order != plan.order:
        return False
    touched_texts, touched_files = manifest.find_touched(plan)
    if plan.model.name_or_path is None:  # the base was made by the run
        return not touched_texts
    return not touched_texts and not touched_files


if __name__ == "__main__":
    raise SystemExit("cpt: python -m cpt.train is invalid. Allowed: python run.py, cpt, python -m cpt")
