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
from cpt.core.errors import reason
from cpt.core.exceptions import format_value
from cpt.core.heartbeat import heartbeat
from cpt.core.preemption import defer_signals
from cpt.core.processes import is_first_process, is_job_within_a_sweep, is_one_of_several
from cpt.core.slurm import check_launch
from cpt.evaluation.scores import Scores
from cpt.evaluation.task_metrics import run_objective
from cpt.loggers.wandb_environment import check_environment
from cpt.trainer.domain_order import load_cached_order, order_domains
from cpt.trainer.manifest import Manifest, check_manifest, find_started, resolve_stored, resume_from_sibling
from cpt.trainer.options import count_devices
from cpt.trainer.plan import Plan, make_plan
from cpt.trainer.run_dir import RunDir, checkpoint_files

log = logging.getLogger(__name__)


def train(cfg: DictConfig, *, run_dir: Path) -> float | None:
    """Trains the method of a config on its domains, or resumes it; returns the metric that a sweep minimizes.

    With `plan`, prints the estimated cost and leaves the directory as it is. Raises ValueError for an invalid
    config, and for one that is not the directory's."""
    run = RunDir(run_dir)
    with run.removed_if_rejected(), closing_uses():
        plan = make_plan(cfg)  # the typed config: no text is read, torch is not imported
        if not plan.run.plan and not is_job_within_a_sweep():
            check_launch(count_devices(plan.trainer.devices), plan.trainer.num_nodes)
        plan.source.check_domains(plan.order)
        if plan.logger.wandb:
            check_environment()
        if (name := str(run_dir)).encode(errors="replace").decode() != name:
            raise ValueError(f"the run folder {name} is invalid: not UTF-8. Allowed: another hydra.run.dir")
        try:
            Path(plan.run.cache_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            told = f"cache_dir={plan.run.cache_dir} is invalid: {error.strerror}"
            raise ValueError(f"{told}. Allowed: a folder that can be written") from error
        if plan.run.plan:
            print_estimate(plan, run)
            return None
        check_all.set(is_full := plan.run.verify_inputs == "full")
        with open_run_dir(plan, run) as plan:
            plan = order_domains(plan)  # by their texts, if so configured
            check_manifest(plan, run)
            scores = run.load_scores() if is_complete(run.load_scores(), plan) else None
            if scores is not None and (lost := run.find_damaged_outputs(full=is_full)):
                log.info("Rebuilding %s without training: %s", run.path, "; ".join(lost[:5]))
                scores = None
            if scores is None:
                with defer_signals():  # libraries cannot be interrupted while they are imported
                    from cpt.trainer.loop import train_run
                scores = train_run(plan, run)
            else:
                log.info("Nothing to train: %s is finished", run.path)
    from cpt.reporting.run_page import format_scores  # matplotlib is not loaded to refuse a config

    log.info("Results:\n%s\n%s", format_scores(scores), run.path / "report.html")
    return run_objective(vars(scores), plan.run.optimized_metric)


@contextmanager
def closing_uses() -> Iterator[None]:
    """Within, the run counts as a user of the artifacts that it opens in a cache."""
    try:
        yield
    finally:
        end_uses()


@contextmanager
def open_run_dir(plan: Plan, run: RunDir) -> Iterator[Plan]:
    """The plan as its directory, or the sibling it continues, was started. The first process holds the lock,
    writes the config, removes incomplete files, and reports that the run is alive."""
    if not is_first_process():
        logging.getLogger("cpt").setLevel(logging.WARNING)
        yield resolve_stored(plan, find_started(plan, run))
        return
    resume_from_sibling(run, plan)
    with run.locked():
        plan = resolve_stored(plan, run)
        run.check_config(plan.settings)
        if not run.config.exists():
            run.write_config(plan.settings)
        run.clean()
        with heartbeat(run.path):
            yield plan


def print_estimate(plan: Plan, run: RunDir) -> None:
    """Prints what a run would do and cost, as a table or as JSON alone, and leaves the directory as it is."""
    if is_one_of_several():
        why = "it is made by one process, for all of trainer.devices and trainer.num_nodes"
        told = f"plan={format_value(plan.run.plan)} is invalid: {why}"
        raise ValueError(f"{told}. Allowed: without torchrun or srun")
    plan = order_domains(plan)
    plan = resolve_stored(plan, find_started(plan, run))
    as_json, is_new = plan.run.plan == "json", not run.config.exists()
    logging.disable(logging.INFO if as_json else logging.NOTSET)
    try:
        run.check_config(plan.settings)
        check_manifest(plan, run, update=False)
        with defer_signals():
            from cpt.trainer.dry_run import estimate, format_table
        cost = estimate(plan, run)
    finally:
        logging.disable(logging.NOTSET)
    print(json.dumps(cost, indent=1) if as_json else format_table(cost), flush=True)
    if is_new:
        run.remove_if_empty()


def is_complete(scores: Scores | None, plan: Plan) -> bool:
    """Whether scores are of a finished run with all that a plan measures."""
    if scores is None or not scores.run["finished"]:
        return False
    is_same = scores.policy == plan.evaluation.policy and scores.run["order"] == plan.order
    return is_same and all(
        getattr(scores, kind).get("hash") == own for kind, own in plan.evaluation_hashes.items()
    )


def is_done(cfg: DictConfig, run_dir: Path) -> bool:
    """Whether a directory has the finished run of this config; raises ValueError for unreadable ones."""
    run = RunDir(run_dir)
    if not run.config.exists():
        return False
    try:
        plan = load_cached_order(make_plan(cfg))
    except HydraException as error:
        raise ValueError(reason(error)) from error
    if plan is None or run.find_config_changes((plan := resolve_stored(plan, run)).settings):
        return False
    if not is_complete(run.load_scores(), plan) or run.find_damaged_outputs(full=False):
        return False
    then, given = Manifest.load(run), plan.model.name_or_path
    if then is None or then.order != plan.order:
        return False
    texts, base = then.touched(plan.source, checkpoint_files(given))
    return not texts and (given is None or not base)


if __name__ == "__main__":
    raise SystemExit("cpt: python -m cpt.train is invalid. Allowed: python run.py, cpt, python -m cpt")
