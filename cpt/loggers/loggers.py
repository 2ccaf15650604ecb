"""The loggers of a run: metrics.csv in the run folder, Weights & Biases, and custom ones.

Loggers observe: whatever goes wrong in one of them is a line in the log, and the run continues."""

import csv
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only

from cpt.core.messages import count_noun
from cpt.core.preemption import Preempted
from cpt.core.processes import is_first_process
from cpt.evaluation.metrics import UNITS
from cpt.evaluation.scores import Scores
from cpt.loggers.guard import guard_logger, report_failures, warn_of_failure
from cpt.loggers.metric_names import MetricNames
from cpt.loggers.stage_logger import StageLogger
from cpt.loggers.wandb_environment import WandbLabels, WandbPlace, choose_identifier, files_in
from cpt.reporting.formats import label_run, list_names, split_variant
from cpt.reporting.frames import list_stage_points, summarize_scores

log = logging.getLogger(__name__)
LONGEST_NAME = 80  # characters of a run's name
LONGEST_ORDER = 30  # characters of an order in it


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What loggers get of a run at its start."""

    folder: Path
    labels: WandbLabels
    config: Mapping[str, Any]
    texts: Sequence[str]  # the columns of the matrix


class LongCSV(Logger):
    """metrics.csv with the columns step, name, value, which a resumed run appends to, other than Lightning's
    CSVLogger. Where two lines have one step and name, the later one counts."""

    name = "csv"
    version = ""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.is_first_call = True

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """They are in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        is_new = not self.path.exists()
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            if self.is_first_call and not is_new and not ends_with_newline(self.path):
                file.write("\n")  # a killed process was writing a line
            self.is_first_call = False
            if is_new:
                writer.writerow(("step", "name", "value"))
            writer.writerows((step, name, value) for name, value in metrics.items() if name != "epoch")


def ends_with_newline(path: Path) -> bool:
    """Whether the last byte of a file is a line feed; also of an empty file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")


@contextmanager
def track(
    run: LoggedRun, *, csv_file: bool, wandb: WandbPlace | None, custom: Mapping[str, Logger]
) -> Iterator[list[Logger]]:
    """The loggers of one run, which do not raise: metrics.csv with `csv_file`, W&B's where it has a place,
    and `custom` ones by their names in the config. At the end they are finalized with how the run ended; a
    W&B run of a preempted one is marked so."""
    with ExitStack() as stack:
        loggers = []
        if csv_file:
            loggers.append(guard_logger(LongCSV(run.folder / "metrics.csv"), "logger.csv"))
        if wandb is not None:
            stack.enter_context(files_in(run.folder))
            loggers.append(make_wandb_logger(wandb, run))
        loggers += prepare_custom(custom, run)

        status = "failed"
        try:
            yield loggers
            status = "success"
        except Preempted:
            for logger in loggers:
                if isinstance(logger, StageLogger):
                    logger.mark_preempted()
            raise
        finally:
            for logger in loggers:
                if isinstance(logger, StageLogger):
                    logger.close(is_failed=status == "failed")
                else:
                    logger.finalize(status)
                report_failures(logger)


def make_wandb_logger(destination: WandbPlace, run: LoggedRun) -> Logger:
    """W&B's logger in the first process; one that ignores every call in others, and where W&B cannot be
    opened, with a warning."""
    if getattr(rank_zero_only, "rank", 0):
        return DummyLogger()
    try:
        # Imported here, as an installation may be broken.
        from cpt.loggers.wandb_run import Curves, WandbCurves, describe_place, open_wandb

        identifier = choose_identifier(run.folder)
        labels = run.labels.obey_environment()
        opened = open_wandb(identifier, run.folder, destination=destination, labels=labels, config=run.config)
        log.info("W&B: %s", describe_place(opened))
        logger = WandbCurves(Curves(opened, progress=run.folder / "wandb" / "tokens"))
    except (Exception, SystemExit) as error:  # whatever W&B raises
        warn_of_failure("logger.wandb", error, "the run continues without it")
        return DummyLogger()
    return guard_logger(logger, "logger.wandb")


def prepare_custom(custom: Mapping[str, Logger], run: LoggedRun) -> list[Logger]:
    """The custom loggers, guarded and with the config of the run."""
    names = MetricNames(run.texts)
    renamed_texts = names.changes(run.texts)
    if custom and renamed_texts and is_first_process():
        changes = list_names([f"{text} is {name}" for text, name in renamed_texts.items()])
        text_count = count_noun(len(renamed_texts), "text")
        log.info("Renaming %s in %s: %s", text_count, ", ".join(custom), changes)

    prepared = []
    for name, logger in custom.items():
        guarded = guard_logger(logger, f"logger.{name}", names)
        guarded.log_hyperparams(dict(run.config))
        prepared.append(guarded)
    return prepared


def enter_domain(loggers: Sequence[Logger], domain: str, *, stage: int, tokens: float) -> None:
    """The points that follow are of this domain, which is trained in this stage (1: the first); before it the
    run had read this number of tokens."""
    for logger in loggers:
        if isinstance(logger, StageLogger):
            logger.enter(domain, stage=stage, tokens=tokens)


@rank_zero_only
def log_stage(loggers: Sequence[Logger], scores: Scores) -> None:
    """Logs the last row of the matrix and the costs of the run so far, by `stage`."""
    row = len(scores.rows) - 1
    points = {name: value for name, value in list_stage_points(scores, row).items() if name != "stage"}
    for logger in loggers:
        if isinstance(logger, StageLogger):
            logger.log_row(scores, row)
        else:
            logger.log_metrics(points, step=row)
            logger.save()


@rank_zero_only
def log_scores(loggers: Sequence[Logger], scores: Scores, *, folder: Path) -> None:
    """Logs all values of the report to W&B, and METRIC/UNIT to custom loggers."""
    numbers = summarize_scores(scores, ["metric"])
    metrics = {key: value for key, value in numbers.items() if key.rpartition("/")[2] in UNITS}
    for logger in loggers:
        if isinstance(logger, StageLogger):
            logger.log_result(scores, folder=folder)
        elif not isinstance(logger, LongCSV):
            logger.log_metrics(metrics, step=len(scores.rows) - 1)


def run_name(run: Mapping[str, Any], order: Any) -> str:
    """`das + migu order=0 seed=1 (temperature=0.1)`; run: as in scores.json, order: as given."""
    order_name = str(order)
    if isinstance(order, Sequence) and not isinstance(order, str):
        order_name = ",".join(map(str, order))
        if len(order_name) > LONGEST_ORDER:
            order_name = count_noun(len(order), "domain")
    name = f"{label_run({**run, 'variant': ''})} order={order_name} seed={run['seed']}"
    values = ", ".join(split_variant(run))
    if values:
        name += f" ({values})"
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
