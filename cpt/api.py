"""Finished runs in notebooks and scripts: `from cpt import load_run, load_runs`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from cpt.evaluation.run_folders import choose_run
from cpt.evaluation.scores import Scores
from cpt.reporting.frames import tidy_scores
from cpt.reporting.load_runs import MeasuredRun, find_runs, measure_runs
from cpt.reporting.sections import BASELINE, build_sections, check_baseline
from cpt.reporting.tex import measure_tables

RUN_COLUMNS = ("name", "method", "mask", "replay", "variant", "model", "order", "seed", "finished")


@dataclass(frozen=True, eq=False)
class Run:
    """The results of a run folder."""

    folder: Path
    scores: Scores

    @cached_property
    def matrix(self) -> pd.DataFrame:
        """Losses in nats per scored token [1 + stages, test sets]: row `base` is the base model, row i the
        model after stage i; NaN where a cell was not evaluated. `numpy.exp(run.matrix)` are perplexities,
        `run.matrix.to_numpy()` is the array."""
        return pd.DataFrame(self.scores.matrix, index=self.scores.rows, columns=self.scores.domains)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Every number of the run page, one per row, with its 95 % interval where it has one: columns kind,
        metric, value, unit, key, stage, row, text, module, seed, low, high."""
        return tidy_scores(self.scores)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The metrics (LC, FG, …) by unit: columns metric, unit, value, low, high."""
        rows = self.frame[self.frame["kind"] == "metric"]
        return rows[["metric", "unit", "value", "low", "high"]].reset_index(drop=True)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The composed config of the run."""
        config: dict[str, Any] = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
        return config


class NoRunError(ValueError):
    """Folders without a run of the kind that is asked for."""

    def __init__(self, folders: Sequence[Path], kind: str) -> None:
        names = ", ".join(map(str, folders)) or "no folder"
        super().__init__(f"{names}: no {kind} below. Allowed: run folders, or folders that hold them")


def read_runs(folders: Iterable[str | Path]) -> list[MeasuredRun]:
    """The runs below the folders. Raises ValueError for a folder or file that cannot be read."""
    paths = [Path(folder) for folder in folders]
    search = find_runs(paths)
    if search.damaged:
        raise ValueError("; ".join(search.damaged))
    if paths and not search.runs:
        raise NoRunError(paths, "run with scores.json")
    return search.runs


def load_tables(*folders: str | Path, baseline: str = BASELINE) -> dict[str, pd.DataFrame]:
    """The numbers of `python -m cpt.report --tex`, by table: main, endtasks, orders, matrix, settings. Rows
    have the section of comparable runs, the group, and mean, sd, n, interval, and the paired difference from
    the baseline with its p-values where they apply. Raises ValueError for a folder that cannot be read, where
    no run is finished, and for a baseline other than `ncl` that is the name of no group."""
    finished = [run for run in read_runs(folders) if run.scores.run["finished"]]
    if not finished:
        raise NoRunError([Path(folder) for folder in folders], "finished run")
    sections = build_sections(measure_runs(finished), baseline=baseline)
    if baseline != BASELINE:
        check_baseline(baseline, sections, given=f"baseline={baseline}")

    tables: dict[str, list[pd.DataFrame]] = defaultdict(list)  # by name, one of each section
    for number, section in enumerate(sections, start=1):
        for name, table in measure_tables(section).items():
            tables[name].append(table.assign(section=number))
    return {name: pd.concat(section_tables) for name, section_tables in tables.items()}


def load_run(folder: str | Path) -> Run:
    """The results of a run folder, or of the only finished run below a folder. Raises FileNotFoundError
    without scores.json, ValueError for a damaged one and for a folder of several runs."""
    run_folder = choose_run(Path(folder))
    return Run(run_folder, Scores.load(run_folder / "scores.json"))


def load_runs(*folders: str | Path) -> pd.DataFrame:
    """The numbers of all runs below the folders, one per row: the columns of `Run.frame` and, before them,
    folder, name, method, mask, replay, variant, model, order (domains joined by commas), seed, finished.
    Raises ValueError for a folder or file that cannot be read, and for folders without a run."""
    frames = []
    for run in read_runs(folders):
        facts = {name: run.scores.run[name] for name in RUN_COLUMNS}
        facts["order"] = ",".join(run.scores.run["order"])

        # A frame has a column `seed` already, of fine-tuning; here `seed` is that of the run.
        frame = tidy_scores(run.scores).rename(columns={"seed": "finetuning_seed"})
        frame.insert(0, "folder", str(run.folder))
        for column, (name, value) in enumerate(facts.items(), start=1):
            frame.insert(column, name, value)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
