"""The numbers of a run as tables with one fact per line, which a dashboard can plot, and as curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from cpt.evaluation.endtasks import metrics as endscores
from cpt.evaluation.metrics import METRICS, UNITS, described, in_units
from cpt.evaluation.scores import Scores
from cpt.reporting.summary import PHASES, SHOWN, escaped, seconds

Rows = Iterator[list[Any]]
LATEST_FIRST = ("losses", "endtasks", "parts")  # by stage: W&B shows the first 10,000 lines of a table


class Table(NamedTuple):
    """Lines of numbers and words; None where there is no number."""

    columns: list[str]
    rows: list[list[Any]]


def tables(scores: Scores) -> dict[str, Table]:
    """Every table that has lines, by name. `matrix` is the report's perplexities (row: after a stage, column:
    test text), `losses` the same with one line per cell in every unit."""
    made = {
        "matrix": Table(["after", *scores.domains], _matrix(scores)),
        **{name: Table(columns, list(rows(scores))) for name, (columns, rows) in LONG.items()},
    }
    for name in LATEST_FIRST:
        made[name].rows.sort(key=itemgetter(0), reverse=True)
    return {
        name: Table(t.columns, [list(map(plain, row)) for row in t.rows])
        for name, t in made.items()
        if t.rows
    }


def plain(value: Any) -> Any:
    """A table's cell: a number that is not finite is none."""
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return value


def stage_row(scores: Scores, row: int) -> dict[str, float]:
    """The points over `stage` after so many stages: `ppl/<text>`, the perplexity on each test text; of
    `stages/…`, `learned` is its mean over the domains learned so far, `tokens`, `flops` and `seconds` (of
    learning) are what the run has taken up to here, `memory`, `trained` and `stored` are the stage's own."""
    perplexity = dict(zip(scores.domains, _units(scores)["perplexity"][row].tolist(), strict=True))
    so_far = [perplexity[name] for name in scores.rows[1 : row + 1] if name in perplexity]
    points = {f"ppl/{escaped(text)}": value for text, value in perplexity.items()}
    points |= {"stages/learned": float(np.mean(so_far))} if so_far else {}
    return {"stage": row, **points, **{f"stages/{name}": value for name, value in _costs_so_far(scores, row)}}


def task_rows(scores: Scores) -> list[dict[str, float]]:
    """The points of the end tasks over `stage`: `tasks/<task>` in its own metric, a mean over seeds."""
    if not scores.endtasks:
        return []
    points = []
    for row, values in enumerate(endscores.over_seeds(endscores.headline(scores.endtasks)).tolist()):
        named = zip(scores.endtasks["tasks"], values, strict=True)
        measured = {f"tasks/{escaped(task)}": value for task, value in named if np.isfinite(value)}
        points += [{"stage": row, **measured}] if measured else []
    return points


def _costs_so_far(scores: Scores, row: int) -> Iterator[tuple[str, float]]:
    for cost in ("seen", "flops"):
        yield SHOWN[cost], sum(getattr(scores, cost)[: row + 1])
    for cost in ("memory", "trained", "stored"):
        yield from ((SHOWN[cost], value) for value in getattr(scores, cost)[row : row + 1])
    yield "seconds", sum(seconds(scores, "learn", stage) for stage in scores.rows[: row + 1])


def _units(scores: Scores) -> Mapping[str, np.ndarray]:
    return in_units(scores.matrix, layout=scores)


def _matrix(scores: Scores) -> list[list[Any]]:
    return [
        [row, *values] for row, values in zip(scores.rows, _units(scores)["perplexity"].tolist(), strict=True)
    ]


def _losses(scores: Scores) -> Rows:
    units = [_units(scores)[unit].tolist() for unit in UNITS]
    for row, stage in enumerate(scores.rows):
        so_far = set(scores.rows[1 : row + 1])
        for column, text in enumerate(scores.domains):
            yield [row, stage, text, text in so_far, *(values[row][column] for values in units)]


def _metrics(scores: Scores) -> Rows:
    for name, metric in scores.metrics.items():
        for unit in UNITS:
            low, high = metric.get("interval", {}).get(unit, (None, None))
            yield [name, *described(METRICS[name].compute), unit, metric[unit], low, high]


def _endtasks(scores: Scores) -> Rows:
    given = scores.endtasks
    for kind in endscores.KINDS if given else ():
        for place in np.argwhere(np.isfinite(cube := endscores.cube(given, kind))):
            row, task, seed = place.tolist()
            name = given["tasks"][task]
            own = given["metric"][name] == kind
            yield [row, scores.rows[row], name, given["seeds"][seed], kind, own, cube[row, task, seed]]


def _parts(scores: Scores) -> Rows:
    for row, (stage, texts) in enumerate(zip(scores.rows, scores.parts, strict=False)):
        for text, weights in texts.items():
            yield from ([row, stage, text, part, float(weight)] for part, weight in weights.items())


def _costs(scores: Scores) -> Rows:
    for row, stage in enumerate(scores.rows):
        noted = [next(iter(getattr(scores, cost)[row : row + 1]), None) for cost in SHOWN]
        yield [row, stage, *noted, *(seconds(scores, kind, stage) for kind in PHASES)]


def _seconds(scores: Scores) -> Rows:
    for kind, stages in scores.phases.items():
        yield from ([kind, stage, float(value)] for stage, value in stages.items())


def _texts(scores: Scores) -> Rows:
    for text, *sizes in zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True):
        facts = scores.texts.get(text, {})
        yield [text, *sizes, str(facts.get("documents", "")), str(facts.get("digest", ""))]


LONG: Mapping[str, tuple[list[str], Callable[[Scores], Rows]]] = {
    "losses": (["stage", "after", "text", "learned", *UNITS], _losses),
    "metrics": (["metric", "meaning", "formula", "unit", "value", "low", "high"], _metrics),
    "endtasks": (["stage", "after", "task", "seed", "metric", "own_metric", "value"], _endtasks),
    "parts": (["stage", "after", "text", "part", "weight"], _parts),
    "costs": (["stage", "after", *SHOWN.values(), *(f"seconds_{kind}" for kind in PHASES)], _costs),
    "seconds": (["phase", "stage", "seconds"], _seconds),
    "texts": (["text", "tokens", "scored", "bytes", "documents", "digest"], _texts),
}
