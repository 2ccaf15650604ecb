"""Makes W&B runs of run folders, with the identifiers that the runs themselves would have used."""

from __future__ import annotations

import csv
import logging
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml
from filelock import FileLock, Timeout
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from cpt.core.config import digest
from cpt.core.errors import reason
from cpt.core.files import check_archive
from cpt.evaluation.scores import Scores
from cpt.tracking.wandb_run import AXES, TRAINING, Curves, open_run, publish, publish_stage, run_name

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)
MODES = ("online", "offline")
REBUILT = "rebuilt"  # in a run folder: W&B's files under mode=offline
ENOUGH = 3  # so many runs that W&B did not take, and none that it did: it will take no other
WANDB_FOLDER = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")
STAGES = tuple(names.removesuffix("*") for names in AXES["stage"])
# The machine that sends a run is not the one that made it.
SETTINGS = {
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "disable_git": True,
}

Points = list[tuple[str, int, dict[str, float]]]  # domain, step, values by name


class Record(NamedTuple):
    """What a run folder holds beside its scores."""

    path: Path
    config: dict[str, Any]
    curves: Points
    distributions: list[dict[str, np.ndarray]]  # [row], by name


def sync_runs(runs: Mapping[Path, Scores], *, project: str | None, entity: str | None, mode: str) -> int:
    """Sends the runs to W&B (`online`), or writes RUN/rebuilt/wandb for `wandb sync` (`offline`).

    A run that W&B knows keeps its curves and gets what is missing. One that is at work is left out. What
    cannot be read or sent is named in the log and the rest is done; gives how many those were. ValueError if
    W&B refuses, or takes none.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode}; allowed: {', '.join(MODES)}")
    failed, sent = 0, 0
    with logging_redirect_tqdm():
        for path, scores in tqdm(runs.items(), desc="W&B", unit="run", disable=None):
            try:
                sent += _send(path.resolve(), scores, project=project, entity=entity, mode=mode)
            except (UnreadableError, ConnectionError) as error:
                failed += 1
                log.error("%s: %s", path, reason(error))
                if failed >= ENOUGH and not sent and isinstance(error, ConnectionError):
                    raise ValueError(f"W&B took none of {failed} runs; {reason(error)}") from None
    return failed


class UnreadableError(Exception):
    """A run folder whose files cannot be read."""


def _send(path: Path, scores: Scores, *, mode: str, **place: str | None) -> bool:
    """Whether the run was sent: not while it is at work."""
    if at_work(path, scores):
        log.warning("%s: is at work; left out", path)
        return False
    record = read_folder(path, scores)
    with _files(path, mode) as folder:
        rebuild(record, scores, folder=folder, mode=mode, **place)
    return True


def at_work(path: Path, scores: Scores) -> bool:
    """Whether a process holds the folder of a run that is not finished."""
    lock = path / ".lock"
    if scores.run["finished"] or not lock.exists():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turns what can be wrong with files into UnreadableError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UnreadableError(f"{type(error).__name__}: {reason(error)}") from error


def read_folder(path: Path, scores: Scores) -> Record:
    """The files of a run, none of which has to be there; UnreadableError if one is damaged."""
    with translate_errors():
        distributions = [_arrays(path, row) for row in range(len(scores.rows))]
        curves = read_curves(path / "metrics.csv", {*scores.rows, *scores.run["order"]})
        return Record(path, _config(path / "config.yaml"), curves, distributions)


def _config(path: Path) -> dict[str, Any]:
    told = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(told, dict):
        raise ValueError(f"{path.name} is no mapping")
    return told


def _arrays(path: Path, row: int) -> dict[str, np.ndarray]:
    """What a method let one see after a stage."""
    archive = path / "diagnostics" / f"{row:03d}.npz"
    if not archive.exists():
        return {}
    check_archive(archive, instead="bring it back from a copy, or delete it to go without")
    with np.load(archive) as arrays:
        return dict(arrays)


def read_curves(path: Path, domains: Collection[str]) -> Points:
    """The curves of training in metrics.csv, a dictionary per domain and step; what is over stages is in the
    scores.

    Of two lines with one step and name the later counts; a line that a kill cut off is left out.
    """
    if not path.exists():
        return []
    found, domain = dict[tuple[str, int], dict[str, float]](), ""
    with path.open(newline="", encoding="utf-8") as file:
        for step, name, value in filter(None, map(_point, csv.reader(file))):
            kind, _, rest = name.partition("/")
            if kind in TRAINING:
                known = [each for each in domains if rest.endswith(f"/{each}")]
                domain = max(known, key=len, default=rest.partition("/")[2])
            # A look is written with the number of steps so far, a loss with the index of its step.
            found.setdefault((domain, step - (kind in TRAINING[1:])), {})[name] = value
    return [(*where, points) for where, points in found.items()]


def _point(line: list[str]) -> tuple[int, str, float] | None:
    try:
        step, name, value = line
        return None if name.startswith(STAGES) else (int(step), name, float(value))
    except ValueError:
        return None


def identifier(path: Path, scores: Scores) -> str:
    """That of the run's last start with W&B, also within a sweep of W&B's; else what a start would take."""
    names = [WANDB_FOLDER.fullmatch(each.name) for each in (path / "wandb").glob("*")]
    starts = [name.groups() for name in names if name]
    return max(starts)[1] if starts else digest([scores.run["name"], path.name])


@contextmanager
def _files(path: Path, mode: str) -> Iterator[Path]:
    """Where W&B puts its files: of an earlier rebuild nothing is left, so that it is not sent twice."""
    if mode == "online":
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
    else:
        shutil.rmtree(path / REBUILT, ignore_errors=True)
        (path / REBUILT).mkdir()
        yield path / REBUILT


def rebuild(record: Record, scores: Scores, *, folder: Path, **place: str | None) -> None:
    """The W&B run of one folder, ended as the run itself ended."""
    name = run_name(scores.run, record.config.get("order", scores.run["order"]))
    about = {"name": name, "group": scores.run["name"], "job_type": scores.run["method"]}
    about["tags"] = [str(tag) for tag in record.config.get("tags") or []]
    own = identifier(record.path, scores)
    run = open_run(own, folder, config=record.config, settings=SETTINGS, **about, **place)
    failed = True
    try:
        with translate_errors():
            fill_run(run, record, scores)
        failed = not scores.run["finished"]
    finally:
        run.finish(exit_code=int(failed))


def fill_run(run: wandb.Run, record: Record, scores: Scores) -> None:
    """What the W&B run has not yet: curves if it is new, the stages after its last, the result."""
    known = int(run.summary.get("stage", -1)) if run.resumed else -1
    options = record.config.get("logger") or {}
    if not run.resumed:
        log_curves(Curves(run, per_domain=bool(options.get("per_domain"))), record.curves, scores)
    for row in range(known + 1, len(scores.rows)):
        shown = record.distributions[row] if options.get("histograms") else {}
        publish_stage(run, scores, row=row, distributions=shown)
    publish(run, scores, folder=record.path, summary=options.get("summary", "headlines"))


def log_curves(curves: Curves, points: Points, scores: Scores) -> None:
    """The points of metrics.csv as the run itself would have logged them."""
    rows = {name: row for row, name in enumerate(scores.rows) if row}
    for domain, lines in groupby(points, key=itemgetter(0)):
        curves.enter(domain, tokens=sum(scores.seen[: rows.get(domain, len(scores.seen))]))
        for _, step, values in lines:
            curves.log(values, step)
