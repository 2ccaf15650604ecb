"""Every number of a run's report under a flat name that a dashboard can sort by."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cpt.evaluation.endtasks import metrics as endscores
from cpt.evaluation.metrics import UNITS
from cpt.evaluation.scores import COSTS, Scores

SHOWN = {
    "trained": "trained",
    "stored": "stored",
    "seen": "tokens",
    "flops": "flops",
    "memory": "memory",
    "skipped": "skipped",
}
PHASES = ("learn", "score", "endtasks")  # what a stage takes seconds for


def everything(scores: Scores) -> dict[str, float]:
    """{name: number}, without what is not finite.

    "LC/perplexity", "LC/nats/low" and "/high": a metric in a unit, and its interval. "ppl/<text>/base", "own"
    (after the domain's own stage) and "final". "endtask/MF1", "endtask/<task>/accuracy" (final; "/sd" over
    seeds) and "/forward". "cost/flops": the whole run's; "stage/<stage>/flops": one stage's. Seconds, bytes,
    tokens, floating-point operations, parameters. A name between slashes is escaped, so that no two keys are
    alike whatever domains are called.
    """
    parts = (_metrics, _perplexities, _texts, _endtasks, _costs, _stages)
    pairs = [(name, float(value)) for part in parts for name, value in part(scores) if value is not None]
    return {name: value for name, value in pairs if np.isfinite(value)}


def escaped(name: str) -> str:
    """The name as a part of a key: a slash would begin another part."""
    return name.replace("%", "%25").replace("/", "%2F")


def seconds(scores: Scores, kind: str, stage: str) -> float:
    """Wall seconds that a stage took to learn, score or fine-tune; 0 where it did not."""
    return scores.phases.get(kind, {}).get(stage, 0.0)


def total(scores: Scores, cost: str) -> int | None:
    """One of COSTS over a run: the sum of tokens, operations and steps left out, the last of stored bytes,
    else the largest; None where nothing was noted."""
    noted = getattr(scores, cost)
    over = {"seen": sum, "flops": sum, "skipped": sum, "stored": lambda sizes: sizes[-1]}.get(cost, max)
    return over(noted) if noted else None


Pairs = Iterator[tuple[str, float | None]]


def _metrics(scores: Scores) -> Pairs:
    for name, metric in scores.metrics.items():
        for unit in UNITS:
            yield f"{name}/{unit}", metric[unit]
            low, high = metric.get("interval", {}).get(unit, (None, None))
            yield from ((f"{name}/{unit}/low", low), (f"{name}/{unit}/high", high))
    for place, value in enumerate(np.atleast_1d(np.array(scores.objective, dtype=float))):
        yield f"objective/{place}" if isinstance(scores.objective, list) else "objective", value


def _perplexities(scores: Scores) -> Pairs:
    if not scores.rows:
        return
    with np.errstate(over="ignore"):
        perplexity = np.exp(scores.matrix)
    for column, text in enumerate(scores.domains):
        yield f"ppl/{escaped(text)}/base", perplexity[0, column]
        yield f"ppl/{escaped(text)}/final", perplexity[-1, column]
        if text in scores.learned:
            yield f"ppl/{escaped(text)}/own", perplexity[scores.rows.index(text), column]


def _texts(scores: Scores) -> Pairs:
    for text, *sizes in zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True):
        for name, size in zip(("tokens", "scored", "bytes"), sizes, strict=True):
            yield f"text/{escaped(text)}/{name}", size


def _endtasks(scores: Scores) -> Pairs:
    given, rows = scores.endtasks, scores.rows
    if not given:
        return
    yield from ((f"endtask/{name}", value) for name, value in endscores.summary(given, rows).items())
    yield "endtask/seconds", given["seconds"]
    for kind in endscores.KINDS:
        cube = endscores.cube(given, kind)
        means, spread = endscores.over_seeds(cube), endscores.spread(cube)
        last, own = endscores.final(means), endscores.forward(means, rows, given["tasks"])
        for place, (task, row) in enumerate(zip(given["tasks"], endscores.last_measured(cube), strict=True)):
            key = f"endtask/{escaped(task)}/{kind}"
            yield from ((key, last[place]), (f"{key}/forward", own[place]))
            yield f"{key}/sd", None if row is None else spread[row, place]


def _costs(scores: Scores) -> Pairs:
    """Of the whole run; stored is what is kept at the end."""
    yield from ((f"cost/{SHOWN[cost]}", total(scores, cost)) for cost in COSTS)
    yield "cost/stored_per_domain", scores.growth
    yield "cost/seconds", scores.seconds
    for kind in PHASES:
        yield f"cost/seconds_{kind}", sum(scores.phases.get(kind, {}).values())


def _stages(scores: Scores) -> Pairs:
    for row, stage in enumerate(scores.rows):
        for cost in COSTS:
            noted = dict(enumerate(getattr(scores, cost)))
            yield f"stage/{escaped(stage)}/{SHOWN[cost]}", noted.get(row)
        for kind in PHASES:
            yield f"stage/{escaped(stage)}/seconds_{kind}", seconds(scores, kind, stage)
