"""One run: a checked config and its folder, from the first domain to the report."""

import logging
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig

from cpt.core.errors import reason
from cpt.core.preemption import deferred
from cpt.core.processes import is_first_process
from cpt.evaluation.objective import objective_value
from cpt.evaluation.scores import Scores
from cpt.reporting.run_report import format_scores
from cpt.training.identity import check, is_same
from cpt.training.plan import Plan, endtask_digest, planned
from cpt.training.run_folder import RunFolder
from cpt.training.verdict import explained

log = logging.getLogger(__name__)


def run(cfg: DictConfig, *, folder: Path) -> float | list[float | None] | None:
    """Learns the sequence of a config in a run folder, or goes on with it; gives the objective, for sweepers.

    Raises ValueError for a config that cannot be run, or that is not the folder's.
    """
    plan = planned(cfg)
    plan.source.check(plan.order)
    place = RunFolder(folder)
    if not is_first_process():
        logging.getLogger("cpt").setLevel(logging.WARNING)
        return learned(plan, place)
    place.claim(cfg)
    with place.locked():
        place.clean()
        return learned(plan, place)


def learned(plan: Plan, place: RunFolder) -> float | list[float | None] | None:
    check(plan, place)
    scores = place.scores()
    if is_finished(scores, plan) and not is_partial(plan, place):
        log.info("%s is finished already", place.path)
    else:
        with deferred():  # libraries do not bear to be left while they are read in
            from cpt.training.loop import fold  # seconds that a wrong config need not wait for

        with explained(place):
            scores = fold(plan, place)
    log.info("\n%s\n%s", format_scores(scores), place.path / "report.html")
    return objective_value(scores.metrics, plan.cfg.objective)


def is_partial(plan: Plan, place: RunFolder) -> bool:
    """Whether a finished run's model or report is not whole; says so."""
    lost = place.lost(full=plan.cfg.check == "full")
    if lost:
        log.info("%s was finished, but %s: made again, without learning", place.path, "; ".join(lost[:5]))
    return bool(lost)


def is_done(cfg: DictConfig, folder: Path) -> bool:
    """Whether a folder holds the finished run of this config, of these texts, with the end tasks that it asks
    for, as far as sizes and times tell. Raises ValueError where that cannot be read."""
    place = RunFolder(folder)
    scores = place.scores() if place.is_of(cfg) else None
    if scores is None or not scores.run["finished"] or place.lost(full=False):
        return False
    try:
        plan = planned(cfg)
    except HydraException as error:
        raise ValueError(reason(error)) from error
    return is_finished(scores, plan) and is_same(plan, place)


def is_finished(scores: Scores | None, plan: Plan) -> bool:
    """Whether nothing is left to learn or to measure."""
    if scores is None or not scores.run["finished"]:
        return False
    asked = endtask_digest(plan.cfg, plan.endtasks)
    return plan.cfg.endtask.name == "none" or scores.endtasks.get("digest") == asked
