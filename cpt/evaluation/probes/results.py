"""What probes have measured: their files in a run folder, and `probes` of scores.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cpt.core.files import replace
from cpt.core.schema import check_types

log = logging.getLogger(__name__)
FIELDS = {"harness": str, "when": str, "digest": str, "seconds": float, "tasks": dict[str, dict[str, Any]]}
FACTS = {"shots": int | None, "limit": int | float | None, "examples": int, "version": str, "truncated": int}
FACTS |= {"chance": float | None}
TASK = FACTS | {"metric": str, "higher": bool, "values": list[float | None], "errors": list[float | None]}
METRIC = {"value": float | None, "error": float | None, "higher": bool}
FILE = FACTS | {"digest": str, "harness": str, "seconds": float, "metrics": dict[str, dict[str, Any]]}


def read_metrics(found: Mapping[str, Any], higher: Mapping[str, bool | None]) -> dict[str, dict[str, Any]]:
    """{metric: {value, error, higher}} of a task's results, which are {"acc,none": …, "acc_stderr,none": …};
    the filter `none` is left out of a metric's name."""
    metrics = {}
    for key, value in found.items():
        metric, comma, kind = key.partition(",")
        if comma and not metric.endswith("_stderr") and is_numeric(value):
            error = found.get(f"{metric}_stderr,{kind}")
            metrics[metric if kind == "none" else key] = {
                "value": float(value),
                "error": float(error) if is_numeric(error) and isfinite(error) else None,
                "higher": higher.get(metric) is not False,
            }
    return metrics


def is_numeric(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def path_of(folder: Path, task: str) -> Path:
    """The results of a task in a stage's folder."""
    return folder / f"{quote(task, safe='')}.json"


def save_results(path: Path, found: Mapping[str, Any]) -> None:
    """Writes what was measured of a task; the file appears whole or not at all."""
    replace(path, json.dumps(found, indent=1) + "\n")


def read_results(path: Path, *, digest: str) -> dict[str, Any] | None:
    """What was measured of a task with the settings and data that the digest stands for; None where there is
    no such file, or a damaged one."""
    try:
        found = load_results(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.info("%s and is made again", error)
        return None
    return found if found["digest"] == digest else None


def load_results(path: Path) -> dict[str, Any]:
    """A file's content. Raises ValueError where it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        check_types({"file": found}, {"file": dict[str, Any]})
        check_types(found, FILE)
        for name, metric in found["metrics"].items():
            check_types(metric, METRIC, of=f"metrics.{name}")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from None
    return found


def pick_metric(found: Mapping[str, Any], task: str, chosen: str | None) -> str:
    """The metric that a task's column shows: the chosen one, or the first. Raises ValueError for one that
    the harness does not give."""
    if chosen is None:
        return next(iter(found["metrics"]))
    if chosen not in found["metrics"]:
        raise ValueError(f"probe.metrics.{task}={chosen}; allowed: {', '.join(found['metrics'])}")
    return chosen


def tell_task(rows: Sequence[Mapping[str, Any] | None], metric: str) -> dict[str, Any]:
    """A task of `probes`, from what each row's file says of it; None of a row that was not measured."""
    there = next(row for row in rows if row)
    cells = [row["metrics"].get(metric, {}) if row else {} for row in rows]
    return {
        **{name: there[name] for name in FACTS},
        "chance": there["chance"] if metric.startswith("acc") else None,
        "metric": metric,
        "higher": there["metrics"][metric]["higher"],
        "values": [cell.get("value") for cell in cells],
        "errors": [cell.get("error") for cell in cells],
    }


def check_probes(probes: Mapping[str, Any], *, rows: Sequence[str]) -> None:
    """Raises ValueError for what is neither empty nor the `probes` of a run with these rows."""
    if not probes:
        return
    check_types(probes, FIELDS, of="probes")
    for name, task in probes["tasks"].items():
        check_types(task, TASK, of=f"probes.tasks.{name}")
        if len(task["values"]) != len(task["errors"]) or len(task["values"]) > len(rows):
            raise ValueError(
                f"probes.tasks.{name} has {len(task['values'])} values and {len(task['errors'])} errors; "
                f"needed: as many of both, at most {len(rows)}"
            )


def describe_task(name: str, task: Mapping[str, Any]) -> str:
    """A task with what decides its numbers: `hellaswag (acc_norm, 0 shots, version 1.0)`."""
    shots = "shots differ" if task["shots"] is None else f"{task['shots']} shots"
    limit = "" if task["limit"] is None else f", limit {task['limit']:g}"
    return f"{name} ({task['metric']}, {shots}{limit}, version {task['version']})"


def last_value(task: Mapping[str, Any]) -> tuple[int, float] | None:
    """The last row in which a task was measured, and its value there; None where it never was."""
    there = [(row, value) for row, value in enumerate(task["values"]) if value is not None]
    return there[-1] if there else None
