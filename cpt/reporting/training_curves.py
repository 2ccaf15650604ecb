"""The curves of a run's training over the tokens of the whole run, from its metrics.csv."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
from pandas import DataFrame

from cpt.evaluation.scores import Scores

Borders = tuple[float, float]  # where a stage begins and ends, in tokens


def find_stages(scores: Scores) -> dict[str, Borders]:
    """Where each learned stage begins and ends; all are equally long where their tokens are unknown."""
    lengths = scores.tokens_read
    if not any(lengths):
        lengths = [0] + [1] * (len(scores.rows) - 1)
    ends = np.cumsum(lengths).tolist()
    stages = {}
    for row, name in enumerate(scores.rows):
        if name in scores.learned:
            stages[name] = ends[row - 1], ends[row]
    return stages


def read_training(path: Path, scores: Scores) -> dict[str, DataFrame]:
    """`train/TERM/STAGE` of metrics.csv: by stage a column per term over the tokens of the whole run. The
    later of two lines with one step counts; a damaged line is left out. Where a step's tokens are unknown,
    the stage's are spread over its steps."""
    try:
        lines = pandas.read_csv(
            path,
            encoding_errors="replace",
            names=["step", "name", "value"],
            on_bad_lines="skip",
            dtype=str,
        )
    except (OSError, ValueError):
        return {}
    for column in ("step", "value"):
        lines[column] = pandas.to_numeric(lines[column], errors="coerce")
    lines[["term", "stage"]] = lines["name"].str.extract(r"(?s)^train/([^/]+)/(.+)$")
    lines = lines.dropna().drop_duplicates(["stage", "step", "term"], keep="last")
    table = lines.pivot(index=["stage", "step"], columns="term", values="value")

    training = {}
    for name, (begin, end) in find_stages(scores).items():
        if name not in table.index:
            continue
        curves = table.loc[name].dropna(axis="columns", how="all")
        steps = curves.index.to_series()
        tokens = (end - begin) * (steps + 1) / (steps.max() + 1)
        if "tokens" in curves:
            tokens = curves.pop("tokens").fillna(tokens)
        if len(curves.columns) > 0:
            training[name] = curves.set_index(begin + tokens)
    return training
