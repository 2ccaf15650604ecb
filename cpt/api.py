"""Finished runs in notebooks and scripts: `from cpt import load_run, load_runs`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from cpt.evaluation.scores import Scores
from cpt.reporting.frames import tidy_scores
from cpt.reporting.load_runs import MeasuredRun, find_runs, measure_runs
from cpt.reporting.sections import build_sections
from cpt.reporting.tex import measure_tables

ABOUT = ("name", "method", "mask", "replay", "variant", "model", "order", "seed", "finished")


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
        found = self.frame[self.frame["kind"] == "metric"]
        return found[["metric", "unit", "value", "low", "high"]].reset_index(drop=True)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The composed config of the run."""
        found: dict[str, Any] = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
        return found


def read_runs(folders: Iterable[str | Path]) -> list[MeasuredRun]:
    """The runs below the folders. Raises ValueError for a folder or file that cannot be read."""
    found = find_runs([Path(folder) for folder in folders])
    if found.damaged:
        raise ValueError("; ".join(found.damaged))
    return found.runs


def load_tables(*folders: str | Path, baseline: str = "ncl") -> dict[str, pd.DataFrame]:
    """The numbers of `python -m cpt.report --tex`, by table: main, endtasks, orders, matrix, settings. Rows
    have the section of comparable runs, the group, and mean, sd, n, interval, and the paired difference from
    the baseline with its p-values where they apply. Raises ValueError for a folder that cannot be read."""
    finished = [run for run in read_runs(folders) if run.scores.run["finished"]]
    sections = build_sections(measure_runs(finished), baseline=baseline)
    found: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for number, section in enumerate(sections, start=1):
        for name, table in measure_tables(section).items():
            found[name].append(table.assign(section=number))
    return {name: pd.concat(tables) for name, tables in found.items()}


def load_run(folder: str | Path) -> Run:
    """The results of a run folder. Raises FileNotFoundError without scores.json, ValueError for a damaged
    one."""
    return Run(Path(folder), Scores.load(Path(folder) / "scores.json"))


def load_runs(*folders: str | Path) -> pd.DataFrame:
    """The numbers of all runs below the folders, one per row: the columns of `Run.frame` and, before them,
    folder, name, method, mask, replay, variant, model, order (domains joined by commas), seed, finished.
    Raises ValueError for a folder or file that cannot be read."""
    frames = []
    for run in read_runs(folders):
        about = {name: run.scores.run[name] for name in ABOUT} | {"order": ",".join(run.scores.run["order"])}
        frame = tidy_scores(run.scores).rename(columns={"seed": "finetuning_seed"})
        for place, (name, value) in enumerate({"folder": str(run.folder), **about}.items()):
            frame.insert(place, name, value)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
