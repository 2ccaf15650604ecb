"""The loggers of a run: metrics.csv in the run folder, Weights & Biases, and custom ones."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from cpt.core.config import digest
from cpt.core.preemption import Preempted
from cpt.evaluation.metrics import UNITS
from cpt.evaluation.scores import Scores
from cpt.loggers.wandb import Curves, open_wandb, publish, publish_stage
from cpt.reporting.frames import stage_points, summarize_scores


class LongCSV(Logger):
    """metrics.csv with the columns step, name, value, which a resumed run appends to, other than Lightning's
    CSVLogger. Of two lines with one step and name, the later one counts."""

    name, version = "csv", ""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """They are in config.yaml."""

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
        self.curves.log(metrics)


@contextmanager
def track(
    options: Mapping[str, Any], folder: Path, *, about: Mapping[str, Any], custom: Sequence[Logger] = ()
) -> Iterator[list[Logger]]:
    """The loggers of one run, `custom` ones among them, finalized with how it ended; a W&B run of a preempted
    one is marked so. `about`: name, group, job_type, tags and config, as wandb.init takes them."""
    loggers: list[Logger] = [LongCSV(folder / "metrics.csv")] if options.get("csv") else []
    loggers += custom
    for logger in custom:
        logger.log_hyperparams(dict(about["config"]))
    run, status = None, "failed"
    try:
        if options.get("wandb") and getattr(rank_zero_only, "rank", 0):
            loggers.append(WandbLogger(save_dir=str(folder)))
        elif options.get("wandb"):
            # Lightning would pass an option that W&B warns of, and join a run that is still open. One run
            # folder is one W&B run, also after a restart.
            place: dict[str, Any] = {name: options.get(name) for name in ("project", "entity", "mode")}
            run = open_wandb(digest([about["group"], folder.name]), folder, **about, **place)
            curves = Curves(run, high=folder / "wandb" / "tokens")
            loggers.append(WandbCurves(curves, histograms=bool(options.get("histograms"))))
        yield loggers
        status = "success"
    except Preempted:
        if run is not None:
            run.mark_preempting()
        raise
    finally:
        if run is not None:
            run.finish(exit_code=int(status == "failed"))
        for logger in custom:
            logger.finalize(status)


@rank_zero_only
def log_stage(loggers: Sequence[Logger], scores: Scores, *, distributions: Mapping[str, np.ndarray]) -> None:
    """The last row of the matrix and what the run has cost, over `stage`; on W&B histograms if asked for."""
    row = len(scores.rows) - 1
    for logger in loggers:
        if isinstance(logger, WandbCurves):
            shown = distributions if logger.histograms else {}
            publish_stage(logger.experiment, scores, row=row, distributions=shown)
        else:
            points = {name: x for name, x in stage_points(scores, row).items() if name != "stage"}
            logger.log_metrics(points, step=row)
            logger.save()


@rank_zero_only
def log_scores(loggers: Sequence[Logger], scores: Scores, *, folder: Path, summary: str) -> None:
    """All that the report contains for W&B, METRIC/UNIT for custom loggers."""
    for logger in loggers:
        if isinstance(logger, WandbCurves):
            publish(logger.experiment, scores, folder=folder, summary=summary)
        elif not isinstance(logger, LongCSV):
            found = summarize_scores(scores, ["metric"])
            known = {key: x for key, x in found.items() if key.rpartition("/")[2] in UNITS}
            logger.log_metrics(known, step=len(scores.rows) - 1)
