"""Curves while a run goes on: metrics.csv in the run folder, and Weights & Biases."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from cpt.core.config import digest
from cpt.core.preemption import Preempted
from cpt.evaluation.scores import Scores
from cpt.loggers.wandb_run import Curves, open_run, publish, publish_stage
from cpt.reporting.tables import stage_row


class LongCSV(Logger):
    """metrics.csv with the columns step, name, value. Lines are only ever added: Lightning's own CSVLogger
    deletes the file of a run that is resumed. Of two lines with one step and name, the later one counts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The config stands in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([("step", "name", "value")] if new else [])
            writer.writerows((step, name, value) for name, value in metrics.items() if name != "epoch")


class WandbCurves(WandbLogger):
    """W&B's run, with its curves over the tokens of the whole run; `histograms`: of diagnostics too."""

    def __init__(self, curves: Curves, *, histograms: bool) -> None:
        super().__init__(experiment=curves.run)
        self.curves, self.histograms = curves, histograms

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.curves.log(metrics, step)


@dataclass(frozen=True)
class About:
    """A run's name on W&B, the runs that it belongs to, what kind of job it is, its tags and its config."""

    name: str
    group: str
    job: str
    tags: Sequence[str]
    config: Mapping[str, Any]


@contextmanager
def track(
    options: Mapping[str, Any], folder: Path, *, about: About, custom: Sequence[Logger] = ()
) -> Iterator[list[Logger]]:
    """The loggers of one run, with `custom` ones among them; its W&B run ends with it, as finished or as
    failed."""
    loggers: list[Logger] = [LongCSV(folder / "metrics.csv")] if options.get("csv") else []
    loggers += custom
    for logger in custom:
        logger.log_hyperparams(dict(about.config))
    with finishing(custom):
        if options.get("wandb"):
            with tracked(options, folder, about) as tracker:
                yield [*loggers, tracker]
        else:
            yield loggers


@contextmanager
def finishing(loggers: Sequence[Logger]) -> Iterator[None]:
    """Tells loggers how a run has ended; some write only then what they have been given last."""
    status = "failed"
    try:
        yield
        status = "success"
    finally:
        for logger in loggers:
            logger.finalize(status)


@contextmanager
def tracked(options: Mapping[str, Any], folder: Path, about: About) -> Iterator[WandbLogger]:
    """The W&B run of a run, while it lasts."""
    tracker = wandb_logger(options, folder, about)
    failed = True
    try:
        yield tracker
        failed = False
    except Preempted:
        tracker.experiment.mark_preempting()  # W&B's state `preempted`, not `failed`
        raise
    finally:
        finish(tracker, failed=failed)


def wandb_logger(options: Mapping[str, Any], folder: Path, about: About) -> WandbLogger:
    """One W&B run per run folder: the same folder is the same run, also after a restart."""
    if rank_zero_only.rank != 0:
        return WandbLogger(save_dir=str(folder))
    # The run is made here: Lightning would hand on an option that W&B warns of, and join a run that is still
    # open.
    told = {"name": about.name, "group": about.group, "job_type": about.job, "tags": list(about.tags)}
    places = {name: options.get(name) for name in ("project", "entity", "mode")}
    own = digest([about.group, folder.name])
    run = open_run(own, folder, config=dict(about.config), **told, **places)
    high = folder / "wandb" / "tokens"
    curves = Curves(run, per_domain=bool(options.get("per_domain")), high=high)
    return WandbCurves(curves, histograms=bool(options.get("histograms")))


@rank_zero_only
def finish(tracker: WandbLogger, *, failed: bool) -> None:
    tracker.experiment.finish(exit_code=int(failed))


def enter_domain(loggers: Sequence[Logger], domain: str, *, tokens: float) -> None:
    """Tells W&B's curves which domain they are of, and how many tokens the run had read before it."""
    for logger in loggers:
        if isinstance(logger, WandbCurves):
            logger.curves.enter(domain, tokens=tokens)


@rank_zero_only
def log_stage(loggers: Sequence[Logger], scores: Scores, *, distributions: Mapping[str, np.ndarray]) -> None:
    """The last row of the matrix, `ppl/<text>` over `stage`, what the run has cost, and on W&B, with
    `logger.histograms`, histograms of the distributions."""
    row = len(scores.rows) - 1
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            shown = distributions if getattr(logger, "histograms", False) else {}
            publish_stage(logger.experiment, scores, row=row, distributions=shown)
        else:
            logger.log_metrics(without_stage(stage_row(scores, row)), step=row)
            logger.save()


@rank_zero_only
def log_scores(loggers: Sequence[Logger], scores: Scores, *, folder: Path, summary: str) -> None:
    """Everything that the report in the folder says, for W&B, whose summary has the headlines or all numbers;
    every metric, for custom loggers."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            publish(logger.experiment, scores, folder=folder, summary=summary)
        elif not isinstance(logger, LongCSV):
            logger.log_metrics(flatten_metrics(scores), step=len(scores.rows) - 1)


def flatten_metrics(scores: Scores) -> dict[str, float]:
    """The metrics of a run, METRIC/UNIT."""
    return {
        f"{metric}/{unit}": value
        for metric, units in scores.metrics.items()
        for unit, value in units.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def without_stage(points: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in points.items() if name != "stage"}
