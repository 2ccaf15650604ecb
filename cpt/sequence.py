"""One run: a checked config and its folder, from the first domain to the report."""

import logging
from pathlib import Path

from omegaconf import DictConfig

from cpt.folder import RunFolder
from cpt.plan import Plan, endtask_digest, is_first_process, objective_value, planned
from cpt.report import table

log = logging.getLogger(__name__)


def run(cfg: DictConfig, *, folder: Path) -> float | list[float | None] | None:
    """Learns the sequence of a config in a run folder, or goes on with it; gives the objective, for sweepers.

    Raises ValueError for a config that cannot be run, or that is not the folder's.
    """
    plan = planned(cfg)
    place = RunFolder(folder)
    if not is_first_process():
        logging.getLogger("cpt").setLevel(logging.WARNING)
        return learned(plan, place)
    place.claim(cfg)
    with place.locked():
        return learned(plan, place)


def learned(plan: Plan, place: RunFolder) -> float | list[float | None] | None:
    if is_done(plan.cfg, place.path):
        log.info("%s is finished already", place.path)
        scores = place.scores()
    else:
        from cpt.learner import fold  # torch and lightning: seconds that a wrong config need not wait for

        scores = fold(plan, place)
    log.info("\n%s\n%s", table(scores), place.path / "report.html")
    return objective_value(scores.metrics, plan.cfg.objective)


def is_done(cfg: DictConfig, folder: Path) -> bool:
    """Whether a folder holds the finished run of this config, with the end tasks that it asks for. Raises
    ValueError where its scores cannot be read."""
    place = RunFolder(folder)
    scores = place.scores() if place.is_of(cfg) else None
    if scores is None or not scores.run["finished"]:
        return False
    return cfg.endtask.name == "none" or scores.endtasks.get("digest") == endtask_digest(cfg)
