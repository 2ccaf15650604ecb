"""Curves while a run goes on: metrics.csv in the run folder, and Weights & Biases."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from cpt.config import digest


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


@contextmanager
def tracked(
    options: Mapping[str, Any],
    folder: Path,
    *,
    group: str,
    job: str,
    tags: Sequence[str],
    config: Mapping[str, Any],
) -> Iterator[list[Logger]]:
    """The loggers of one run; its W&B run ends with it, as finished or as failed."""
    loggers: list[Logger] = [LongCSV(folder / "metrics.csv")] if options["csv"] else []
    if not options["wandb"]:
        yield loggers
        return
    tracker = wandb_logger(options, folder, group=group, job=job, tags=tags, config=config)
    failed = True
    try:
        yield [*loggers, tracker]
        failed = False
    finally:
        finish(tracker, failed=failed)


def wandb_logger(
    options: Mapping[str, Any],
    folder: Path,
    *,
    group: str,
    job: str,
    tags: Sequence[str],
    config: Mapping[str, Any],
) -> WandbLogger:
    """One W&B run per run folder: the same folder is the same run, also after a restart."""
    import wandb

    if options["mode"] not in ("online", "offline", "disabled"):
        raise ValueError(f"logger.mode={options['mode']}; allowed: online, offline, disabled")
    if rank_zero_only.rank != 0:
        return WandbLogger(save_dir=str(folder))
    # The run is made here: Lightning would hand on an option that W&B warns of, and join a run that is still
    # open.
    run = wandb.init(
        id=digest([group, folder.name]),
        name=folder.name,
        dir=str(folder),
        project=options["project"],
        entity=options["entity"],
        group=group,
        job_type=job,
        tags=list(tags),
        config=dict(config),
        mode=options["mode"],
        resume="allow" if options["mode"] == "online" else None,
        reinit="create_new",
        settings=wandb.Settings(silent=True, console="off"),
    )
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run)


@rank_zero_only
def finish(tracker: WandbLogger, *, failed: bool) -> None:
    tracker.experiment.finish(exit_code=int(failed))


@rank_zero_only
def log_row(
    loggers: Sequence[Logger],
    *,
    stage: int,
    perplexity: Mapping[str, float],
    distributions: Mapping[str, np.ndarray],
) -> None:
    """One row of the matrix, `ppl/<domain>` over `stage`, and on W&B histograms of the distributions."""
    row = {f"ppl/{name}": value for name, value in perplexity.items()}
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            run = logger.experiment
            run.define_metric("stage")
            run.define_metric("ppl/*", step_metric="stage")
            run.log({"stage": stage, **row, **histograms(distributions)})
        else:
            logger.log_metrics(row, step=stage)


def histograms(distributions: Mapping[str, np.ndarray]) -> dict[str, Any]:
    import wandb

    return {f"units/{name}": wandb.Histogram(values) for name, values in distributions.items()}


@rank_zero_only
def log_result(
    loggers: Sequence[Logger],
    *,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    picture: Callable[[], bytes],
    summary: Mapping[str, float],
) -> None:
    """The matrix as a table and an image, drawn where there is somebody to see it, and the metrics as the
    run's summary."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb
            from PIL import Image

            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            logger.experiment.log(
                {"matrix": table, "matrix_image": wandb.Image(Image.open(BytesIO(picture())))}
            )
            logger.experiment.summary.update(dict(summary))
