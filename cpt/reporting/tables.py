"""The tables of one run and its curves over the stages, as dashboards show them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pandas import DataFrame

from cpt.evaluation.metrics import METRICS, UNITS
from cpt.evaluation.scores import Scores
from cpt.reporting.frames import (
    COST_COLUMNS,
    costs_by_stage,
    escape_name,
    list_endtasks,
    list_losses,
    tidy_scores,
)

COLUMNS = {
    "metrics": "metric meaning formula unit value low high",
    "endtasks": "stage after task seed metric own_metric value",
    "answers": "stage after task measure value chance majority",
    "probes": "stage after task metric value low high chance shots limit version",
    "parts": "stage after text part weight",
    "seconds": "phase stage seconds",
}
SUMMED = {
    "tokens": "tokens",
    "flops": "flops",
    "seconds_learn": "seconds",
}  # cost of the run so far: its curve


def tabulate(scores: Scores) -> dict[str, DataFrame]:
    """Every table that has lines, with None for what is missing or not finite: `matrix` (perplexities, a
    column per text), `losses` (a line per cell), COLUMNS, `costs`, `texts`. The last stages come first."""
    frame = tidy_scores(scores).rename(columns={"row": "after"})
    kinds, tables = {kind: lines.copy() for kind, lines in frame.groupby("kind")}, {}

    def widen(lines: DataFrame, index: list[str], names: str, columns: Sequence[str]) -> DataFrame:
        cells = lines.set_index([*index, names])["value"].unstack(sort=False)
        return cells.reindex(columns=columns).reset_index()

    if "loss" in kinds:
        lines, rows = kinds["loss"], {name: row for row, name in enumerate(scores.rows) if row}
        tables["matrix"] = widen(lines[lines["unit"] == "perplexity"], ["after"], "text", scores.domains)
        losses = tables["losses"] = widen(lines, ["stage", "after", "text"], "unit", UNITS)
        losses.insert(3, "learned", losses["text"].map(rows).fillna(np.inf) <= losses["stage"].astype(int))
    if "metric" in kinds:
        lines = kinds["metric"][kinds["metric"]["metric"].isin(METRICS)]
        about = [METRICS[name][:2] for name in lines["metric"]]
        lines = lines.assign(meaning=[each[0] for each in about], formula=[each[1] for each in about])
        tables["metrics"] = lines
    if "endtask" in kinds:
        lines = kinds["endtask"].rename(columns={"text": "task"})
        own = lines["task"].map(scores.endtasks["metric"]) == lines["metric"]
        tables["endtasks"] = lines.assign(own_metric=own)
    for kind, name, given in (("answer", "answers", scores.answers), ("probe", "probes", scores.probes)):
        if kind in kinds:
            lines = kinds[kind].rename(columns={"text": "task"}).assign(measure=kinds[kind]["metric"])
            about = DataFrame([given["tasks"][task] for task in lines["task"]], index=lines.index)
            tables[name] = lines.join(about[[fact for fact in COLUMNS[name].split() if fact not in lines]])
    if "part" in kinds:
        tables["parts"] = kinds["part"].rename(columns={"value": "weight"})
    if "cost" in kinds:
        staged = kinds["cost"][kinds["cost"]["stage"].notna()]
        tables["costs"] = widen(staged, ["stage", "after"], "metric", COST_COLUMNS)
    if "phase" in kinds:
        lines = kinds["phase"].drop(columns="stage")
        tables["seconds"] = lines.rename(columns={"metric": "phase", "after": "stage", "value": "seconds"})
    if "text" in kinds:
        texts = tables["texts"] = widen(kinds["text"], ["text"], "metric", ("tokens", "scored", "bytes"))
        for fact in ("documents", "digest"):
            texts[fact] = [str(scores.texts.get(text, {}).get(fact, "")) for text in texts["text"]]
    for name, lines in tables.items():
        lines = lines[COLUMNS[name].split()] if name in COLUMNS else lines
        if name in ("losses", "endtasks", "answers", "probes", "parts"):
            lines = lines.sort_values("stage", ascending=False, kind="stable")
        known = lines.replace([np.inf, -np.inf], np.nan)
        tables[name] = known.astype(object).where(known.notna(), None)
    return {name: lines for name, lines in tables.items() if len(lines)}


def stage_points(scores: Scores, row: int) -> dict[str, float]:
    """The points of a row over `stage`: `ppl/TEXT`; of `stages/…` `learned` is the mean perplexity over the
    domains so far, `tokens`, `flops` and `seconds` are sums so far, the others of the stage itself."""
    losses = {each.text: each.value for each in list_losses(scores, [row]) if each.unit == "perplexity"}
    points = {
        "stage": row,
        **{f"ppl/{escape_name(t)}": ppl for t, ppl in losses.items() if not np.isnan(ppl)},
    }
    so_far = [losses[name] for name in scores.rows[1 : row + 1] if name in losses]
    if so_far and not np.isnan(so_far).any():
        points["stages/learned"] = float(np.mean(so_far))
    for name, shown in SUMMED.items():
        points[f"stages/{shown}"] = sum(costs_by_stage(scores, name)[: row + 1])
    for name in ("memory", "trained", "stored"):
        points |= {f"stages/{name}": value for value in costs_by_stage(scores, name)[row : row + 1]}
    return points | ({"stages/leak": scores.leak[row][0]} if any(scores.leak[row : row + 1]) else {})


def task_points(scores: Scores) -> list[dict[str, float]]:
    """The points of the end tasks over `stage`: `tasks/TASK` in its own metric, a mean over seeds."""
    frame = DataFrame(list_endtasks(scores))
    if frame.empty:
        return []
    own = frame[frame["metric"] == frame["text"].map(scores.endtasks["metric"])]
    means = own.groupby(["stage", "text"], sort=False)["value"].mean()
    rows = means.unstack().sort_index()
    return [
        {"stage": stage, **{f"tasks/{escape_name(task)}": each for task, each in row.dropna().items()}}
        for stage, row in zip(rows.index.tolist(), (row for _, row in rows.iterrows()), strict=True)
    ]
