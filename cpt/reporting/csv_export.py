"""The runs of a comparison as CSV: one row for each run, with every number of its report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from cpt.core.files import replacing
from cpt.evaluation.scores import RUN_KEYS
from cpt.reporting.frames import summarize_scores
from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.sections import RunSection

FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")  # a spreadsheet runs such a cell (OWASP, CSV injection)


def export_csv(sections: Sequence[RunSection], path: Path) -> None:
    """Writes the file; columns `compared/…` are the values of the comparison."""
    rows = []
    for number, section in enumerate(sections, start=1):
        for group in section.groups:
            for run in group.runs:
                folder = Path(os.path.relpath(run.folder, path.parent)).as_posix()
                facts = {"folder": folder, **list_run_columns(run), "section": number, "group": group.name}
                rows.append({**facts, **list_numbers(run)})

    table = DataFrame(rows, dtype=object).map(quote_formula).rename(columns=quote_formula)
    with replacing(path) as partial:
        table.to_csv(partial, index=False, lineterminator="\n", encoding="utf-8")


def list_run_columns(run: MeasuredRun) -> dict[str, Any]:
    """What was run: method, model, seed, ..., and the order of the domains."""
    columns = {key: run.scores.run[key] for key in RUN_KEYS if key not in ("order", "finished")}
    columns["order"] = " ".join(run.scores.run["order"])
    return columns


def list_numbers(run: MeasuredRun) -> dict[str, Any]:
    """The conditions of a run, the values it is compared by, and the numbers of its report."""
    columns: dict[str, Any] = {name: value for name, value in run.conditions.items() if name != "domains"}
    for key, value in run.values.items():
        columns[f"compared/{key}"] = value
    for key, value in summarize_scores(run.scores).items():
        column = f"{key}/value" if key in RUN_KEYS else key  # a number may be called like a fact of the run
        columns[column] = value
    return columns


def quote_formula(value: Any) -> Any:
    """The value, with an apostrophe before a text that a spreadsheet would run."""
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return f"'{value}"
    return value
