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
from contextlib import contextmanager, nullcontext
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import wandb
import yaml
from filelock import FileLock, Timeout
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from cpt.core.errors import readable, reason
from cpt.core.output import run_program
from cpt.evaluation.scores import Scores
from cpt.loggers.loggers import run_name
from cpt.loggers.wandb_environment import (
    WandbLabels,
    WandbPlace,
    draw_identifier,
    files_in,
    read_identifier,
    store_identifier,
)
from cpt.loggers.wandb_run import AXES, TRAINING, Curves, init_wandb, publish
from cpt.reporting.frames import stage_points
from cpt.reporting.load_runs import find_runs

log = logging.getLogger(__name__)
MODES = ("online", "offline")
REBUILT = "rebuilt"  # in a run folder: W&B's files under mode=offline
ENOUGH = 3  # refused runs, and none accepted: W&B will accept no other
STAGES = tuple(names.removesuffix("*") for names in AXES["stage"])
# The machine that sends a run is not the one that made it.
SETTINGS = {f"x_disable_{name}": True for name in ("stats", "meta", "machine_info")} | {"disable_git": True}

Points = list[tuple[str, int, dict[str, float]]]  # domain, step, values by name


class UnreadableError(Exception):
    """A run folder whose files cannot be read."""


def build_parser() -> argparse.ArgumentParser:
    about = "Makes W&B runs from run folders."
    parser = argparse.ArgumentParser(prog="python -m cpt.contrib.wandb_tools.rebuild", description=about)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="where runs are, at any depth")
    add("--project", help="W&B project (default: the one of each run's config)")
    add("--entity", help="W&B user or team")
    how = f"offline: write RUN/{REBUILT}/wandb for wandb sync"
    add("--mode", choices=MODES, default="online", help=how)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Sends the runs below folders; gives the exit code: 1 if one could not be read or sent."""
    given = build_parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with readable():
        found, damaged, _ = find_runs(given.folders)
        runs = {run.folder: run.scores for run in found}
        print(*damaged, sep="\n", end="\n" * bool(damaged), file=sys.stderr)
        if not runs:
            raise ValueError(f"no readable scores.json below {', '.join(map(str, given.folders))}")
        failed = sync_runs(runs, project=given.project, entity=given.entity, mode=given.mode)
    return int(bool(damaged or failed))


def sync_runs(runs: Mapping[Path, Scores], *, project: str | None, entity: str | None, mode: str) -> int:
    """Sends the runs to W&B (`online`), or writes RUN/rebuilt/wandb for `wandb sync` (`offline`); a run that
    W&B knows gets what is missing, one that is still training is skipped. Gives the number of failures, which
    are logged. Raises ValueError if W&B refuses, or accepts none."""
    failed, sent = 0, 0
    with logging_redirect_tqdm():
        for path, scores in tqdm(runs.items(), desc="W&B", unit="run", disable=None):
            whole = path.resolve()
            if (path / ".lock").exists() and not scores.run["finished"]:
                try:
                    with FileLock(path / ".lock", timeout=0):
                        pass
                except Timeout:
                    log.warning("Skipping %s, which is running", whole)
                    continue
            try:
                with translate_errors():
                    curves = read_curves(whole / "metrics.csv", {*scores.rows, *scores.run["order"]})
                    file = whole / "config.yaml"
                    config = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
                    if not isinstance(config, dict):
                        raise ValueError(f"{file.name} is no mapping")
                if mode == "offline":
                    folder = whole / REBUILT  # of an earlier rebuild nothing is to be sent twice
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir()
                    output = nullcontext(folder)
                else:
                    output = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
                place = choose_place(config, project=project, entity=entity, mode=mode)
                with output as folder, files_in(Path(folder)):
                    rebuild(whole, scores, config, curves, folder=Path(folder), place=place)
                sent += 1
            except (UnreadableError, ConnectionError) as error:
                failed += 1
                log.error("Failed to send %s: %s", path, reason(error))
                if failed >= ENOUGH and not sent and isinstance(error, ConnectionError):
                    raise ValueError(f"W&B took none of {failed} runs; {reason(error)}") from None
    return failed


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turns what can be wrong with files into UnreadableError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, csv.Error, yaml.YAMLError) as error:
        raise UnreadableError(f"{type(error).__name__}: {reason(error)}") from error


def read_curves(path: Path, domains: Collection[str]) -> Points:
    """The curves of training in metrics.csv by domain and step, without those over stages, which are in the
    scores. Of two lines with one step and name the later counts; a line that a kill cut off is left out."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    domain = ""
    with path.open(newline="", encoding="utf-8") if path.exists() else nullcontext([]) as file:
        for line in csv.reader(file):
            try:
                step, name, value = int(line[0]), line[1], float(line[2])
            except (ValueError, IndexError):  # the header, or a line that a kill cut off
                continue
            kind, _, rest = name.partition("/")
            if name.startswith(STAGES) or len(line) != 3:
                continue
            if kind in TRAINING:
                known = [each for each in domains if rest.endswith(f"/{each}")]
                domain = max(known, key=len, default=rest.partition("/")[2])
            # A monitoring evaluation is written with the count of steps so far, a loss with its step.
            found.setdefault((domain, step - (kind in TRAINING[1:])), {})[name] = value
    return [(*where, points) for where, points in found.items()]


def choose_place(
    config: Mapping[str, Any], *, project: str | None, entity: str | None, mode: str
) -> WandbPlace:
    """Where on W&B a run goes: as the command says, else as the run's config."""
    logger = config.get("logger") or {}
    return WandbPlace(
        mode=mode, project=project or logger.get("project"), entity=entity or logger.get("entity")
    )


def find_identifier(path: Path) -> str:
    """The identifier of a run folder's W&B run; a new one, which the folder stores, of a run without W&B."""
    identifier = read_identifier(path)
    if not identifier:
        identifier = draw_identifier()
        try:
            store_identifier(path, identifier)
        except OSError as error:
            message = "%s cannot store its W&B identifier (%s): another rebuild will make another W&B run"
            log.warning(message, path, reason(error))
    return identifier


def rebuild(
    path: Path, scores: Scores, config: dict[str, Any], curves: Points, *, folder: Path, place: WandbPlace
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
        folder,
        mode=place.mode,
        destination=place,
        labels=labels,
        config=config,
        settings=wandb.Settings(**SETTINGS),
    )
    failed = True
    try:
        with translate_errors():
            known = int(run.summary.get("stage", -1)) if run.resumed else -1
            if not run.resumed:  # the points of metrics.csv as the run itself would have logged them
                live = Curves(run)
                rows = {name: row for row, name in enumerate(scores.rows) if row}
                for domain, lines in groupby(curves, key=itemgetter(0)):
                    row = rows.get(domain, len(scores.tokens_read))
                    live.enter(domain, tokens=sum(scores.tokens_read[:row]))
                    for *_, values in lines:
                        live.log(values)
            for row in range(known + 1, len(scores.rows)):
                run.log(stage_points(scores, row))
            publish(run, scores, folder=path)
        failed = not scores.run["finished"]
    finally:
        run.finish(exit_code=int(failed))


if __name__ == "__main__":
    run_program(main)
