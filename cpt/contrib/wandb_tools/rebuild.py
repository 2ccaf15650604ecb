"""Make W&B runs from run folders: `python -m cpt.contrib.wandb_tools.rebuild FOLDER…`.

A rebuilt run has the identifier that the run folder stores: a run that logged to W&B itself is continued."""

from __future__ import annotations

import argparse
import csv
import logging
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import wandb
import yaml
from filelock import FileLock, Timeout
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from cpt.core.errors import find_reason, readable_errors
from cpt.core.messages import count_noun
from cpt.core.output import run_program
from cpt.evaluation.scores import Scores
from cpt.loggers.loggers import run_name
from cpt.loggers.wandb_environment import (
    WandbLabels,
    WandbPlace,
    draw_identifier,
    files_in,
    read_run_identifier,
    store_identifier,
)
from cpt.loggers.wandb_run import AXES, TRAINING, Curves, init_wandb, publish
from cpt.reporting.frames import list_stage_points
from cpt.reporting.load_runs import find_runs

log = logging.getLogger(__name__)
MODES = ("online", "offline")
REBUILT = "rebuilt"  # in a run folder: W&B's files under mode=offline
MAX_REFUSALS = 3  # refused runs: if none was accepted until then, W&B will accept no other
MAX_FIELD_LENGTH = 131_072  # characters of a value in metrics.csv; a longer one is damage
STAGE_PREFIXES = tuple(names.removesuffix("*") for names in AXES["stage"])  # of curves over stages
# Curves of a monitoring evaluation: metrics.csv has them with the count of steps so far, which is one more
# than the step of the last training loss.
EVALUATION_KINDS = ("monitor", "budget")
# The machine that sends a run is not the one that made it.
SETTINGS = {f"x_disable_{name}": True for name in ("stats", "meta", "machine_info")} | {"disable_git": True}


class TrackedPoint(NamedTuple):
    """The values of metrics.csv at one step of a domain."""

    domain: str
    step: int
    values: dict[str, float]  # by the name of the curve


class CurveLine(NamedTuple):
    """A line of metrics.csv: one value of a curve."""

    step: int
    name: str  # KIND/SERIES/DOMAIN; some curves have no domain
    value: float

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


class UnreadableError(Exception):
    """A run folder whose files cannot be read."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cpt.contrib.wandb_tools.rebuild", description="Makes W&B runs from run folders."
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="where runs are, at any depth"
    )
    parser.add_argument("--project", help="W&B project (default: the one of each run's config)")
    parser.add_argument("--entity", help="W&B user or team")
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="online",
        help=f"offline: write RUN/{REBUILT}/wandb for wandb sync",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Sends the runs below folders; returns the exit code: 1 if one could not be read or sent."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with readable_errors():
        runs, damaged, _ = find_runs(options.folders)
        for line in damaged:
            print(line, file=sys.stderr)
        if not runs:
            raise ValueError(f"no readable scores.json below {', '.join(map(str, options.folders))}")
        num_failed = sync_runs(
            {run.folder: run.scores for run in runs},
            project=options.project,
            entity=options.entity,
            mode=options.mode,
        )
    return int(bool(damaged or num_failed))


def sync_runs(runs: Mapping[Path, Scores], *, project: str | None, entity: str | None, mode: str) -> int:
    """Sends the runs to W&B (`online`), or writes RUN/rebuilt/wandb for `wandb sync` (`offline`); a run that
    W&B has already is completed, one that is still training is skipped. Returns the number of failures, which
    are logged. Raises ValueError if W&B refuses, or accepts none."""
    num_failed = 0
    num_sent = 0
    with logging_redirect_tqdm():
        for path, scores in tqdm(runs.items(), desc="W&B", unit="run", disable=None):
            if is_running(path, scores):
                log.warning("Skipping %s, which is running", path.resolve())
                continue

            try:
                send_run(path.resolve(), scores, project=project, entity=entity, mode=mode)
            except (UnreadableError, ConnectionError) as error:
                num_failed += 1
                log.error("Failed to send %s: %s", path, find_reason(error))
                # A refusal may concern this run alone, or a moment without network: so the first ones do not
                # end the program.
                if num_failed >= MAX_REFUSALS and not num_sent and isinstance(error, ConnectionError):
                    run_count = count_noun(num_failed, "run")
                    raise ValueError(f"W&B took none of {run_count}; {find_reason(error)}") from None
            else:
                num_sent += 1
    return num_failed


def is_running(path: Path, scores: Scores) -> bool:
    """Whether a process holds the lock of a run folder that is not finished."""
    # The lock of a run that was killed is still a file: only taking it says whether somebody holds it.
    lock_path = path / ".lock"
    if not lock_path.exists() or scores.run["finished"]:
        return False
    try:
        with FileLock(lock_path, timeout=0):
            return False
    except Timeout:
        return True


def send_run(path: Path, scores: Scores, *, project: str | None, entity: str | None, mode: str) -> None:
    """Sends one run folder, or writes its RUN/rebuilt/wandb. Raises UnreadableError if it is damaged."""
    # All files are read before W&B is asked, so that a damaged folder leaves no run without points there.
    with translate_errors():
        curves = read_curves(path / "metrics.csv", {*scores.rows, *scores.run["order"]})
        config = read_config(path / "config.yaml")
    with open_output_folder(path, mode=mode) as output_folder, files_in(output_folder):
        destination = choose_destination(config, project=project, entity=entity, mode=mode)
        rebuild(path, scores, config, curves, output_folder=output_folder, destination=destination)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turns what can be wrong with files into UnreadableError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, csv.Error, yaml.YAMLError) as error:
        raise UnreadableError(f"{type(error).__name__}: {find_reason(error)}") from error


def read_config(path: Path) -> dict[str, Any]:
    """The config of a run, empty without the file. Raises ValueError if it is not a mapping."""
    if not path.exists():
        return {}
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} is no mapping")
    return config


def read_curves(path: Path, domains: Collection[str]) -> list[TrackedPoint]:
    """The curves of training in metrics.csv, in the order of the file: a point for each domain and step.
    Curves over stages are left out, as the scores have them. Where two lines have one step and name, the
    later one counts."""
    if not path.exists():
        return []
    points: dict[tuple[str, int], TrackedPoint] = {}
    domain = ""
    with path.open(newline="", encoding="utf-8") as file, limit_field_size(MAX_FIELD_LENGTH):
        for cells in csv.reader(file):
            line = parse_line(cells)
            if line is None or line.name.startswith(STAGE_PREFIXES):
                continue

            # The name of another curve has no domain: it is of the one that was trained at that moment.
            if line.kind in TRAINING:
                domain = find_domain(line.name, domains)
            # Training logs the first step as 0. Evaluations after it are logged by the number of steps: 1.
            step = line.step - 1 if line.kind in EVALUATION_KINDS else line.step
            point = points.setdefault((domain, step), TrackedPoint(domain=domain, step=step, values={}))
            point.values[line.name] = line.value
    return list(points.values())


def parse_line(cells: Sequence[str]) -> CurveLine | None:
    """A line of metrics.csv; None for the header, and for a line that a kill cut off."""
    if len(cells) != 3:
        return None
    step, name, value = cells
    try:
        return CurveLine(step=int(step), name=name, value=float(value))
    except ValueError:
        return None


def find_domain(name: str, domains: Collection[str]) -> str:
    """The domain of a curve KIND/SERIES/DOMAIN. Series and domain may have slashes themselves, so the longest
    of `domains` that the name ends with is taken; without one, all that follows the second slash."""
    _, _, series_and_domain = name.partition("/")
    matching_domains = [domain for domain in domains if series_and_domain.endswith(f"/{domain}")]
    if matching_domains:
        return max(matching_domains, key=len)
    _, _, domain = series_and_domain.partition("/")
    return domain


@contextmanager
def limit_field_size(size: int) -> Iterator[None]:
    """Inside the context csv.reader raises csv.Error for a longer field. The limit belongs to the whole
    process, and the readers of text raise it."""
    limit_before = csv.field_size_limit(size)
    try:
        yield
    finally:
        csv.field_size_limit(limit_before)


@contextmanager
def open_output_folder(path: Path, *, mode: str) -> Iterator[Path]:
    """The folder for W&B's files of a run: RUN/rebuilt for `offline`, else one that is removed afterwards."""
    if mode == "offline":
        folder = path / REBUILT
        # `wandb sync` would send the files of an earlier rebuild a second time.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary_folder:
            yield Path(temporary_folder)


def choose_destination(
    config: Mapping[str, Any], *, project: str | None, entity: str | None, mode: str
) -> WandbPlace:
    """The project and entity on W&B of a run: those of the command line, else those of the run's config."""
    logger = config.get("logger") or {}
    return WandbPlace(
        mode=mode, project=project or logger.get("project"), entity=entity or logger.get("entity")
    )


def find_identifier(path: Path) -> str:
    """The identifier of a run folder's W&B run; a new one, which the folder stores, of a run without W&B."""
    identifier = read_run_identifier(path)
    if not identifier:
        identifier = draw_identifier()
        try:
            store_identifier(path, identifier)
        except OSError as error:  # a folder that may only be read can still be sent
            message = "%s cannot store its W&B identifier (%s): another rebuild will make another W&B run"
            log.warning(message, path, find_reason(error))
    return identifier


def rebuild(
    path: Path,
    scores: Scores,
    config: dict[str, Any],
    curves: Sequence[TrackedPoint],
    *,
    output_folder: Path,
    destination: WandbPlace,
) -> None:
    """Sends one folder: its curves if W&B does not know the run, the stages after the last that it knows, and
    the result. The W&B run ends as the run itself ended."""
    labels = WandbLabels(
        name=run_name(scores.run, config.get("order", scores.run["order"])),
        group=scores.run["name"],
        job_type=scores.run["method"],
        tags=tuple(str(tag) for tag in config.get("tags") or []),
    )
    run = init_wandb(
        find_identifier(path),
        output_folder,
        mode=destination.mode,
        destination=destination,
        labels=labels,
        config=config,
        settings=wandb.Settings(**SETTINGS),
        way_out=f"--mode=offline writes RUN/{REBUILT}/wandb for wandb sync",
    )

    # Whatever happens from here on, W&B's run has to end: one that is left open is shown as running.
    is_failed = True
    try:
        with translate_errors():
            if run.resumed:
                last_row = int(run.summary.get("stage", -1))
            else:
                last_row = -1
                log_curves(run, scores, curves)
            for row in range(last_row + 1, len(scores.rows)):
                run.log(list_stage_points(scores, row))
            publish(run, scores, folder=path)
        is_failed = not scores.run["finished"]
    finally:
        run.finish(exit_code=int(is_failed))


def log_curves(run: wandb.Run, scores: Scores, curves: Sequence[TrackedPoint]) -> None:
    """Logs the points of metrics.csv as the run itself would have logged them."""
    live_curves = Curves(run)
    rows = {name: row for row, name in enumerate(scores.rows) if row > 0}
    for domain, points in groupby(curves, key=attrgetter("domain")):
        # A stage that was not finished has no row yet: it began after all that have one.
        row = rows.get(domain, len(scores.tokens_read))
        live_curves.enter(domain, stage=row, tokens=sum(scores.tokens_read[:row]))
        for point in points:
            live_curves.log(point.values)


if __name__ == "__main__":
    run_program(main)
