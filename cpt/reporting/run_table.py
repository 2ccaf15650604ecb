"""A run's numbers as one tidy table, a number per line: pages, exports, comparisons, W&B read from here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cpt.evaluation import task_metrics as endscores
from cpt.evaluation.metrics import UNITS, in_units
from cpt.evaluation.scores import COSTS, Scores
from cpt.evaluation.task_metrics import last_value

if TYPE_CHECKING:
    import pandas

COST_NAMES = {"seen": "tokens"}  # of COSTS, those that are called otherwise than in scores.json
COST_UNITS = {"trained": "parameters", "seen": "tokens", "flops": "operations", "skipped": "steps"}
TIMED = ("learn", "score", "endtasks")  # what a stage takes seconds for
COST_COLUMNS = (*(COST_NAMES.get(cost, cost) for cost in COSTS), *(f"seconds_{kind}" for kind in TIMED))

SUMMARISED = (
    "metric",
    "perplexity",
    "text",
    "task",
    "score",
    "probe",
    "cost",
)  # the kinds of which all lines have a key


HEADLINES = (
    *("LC/perplexity", "LC/perplexity/low", "LC/perplexity/high", "LC/nats", "FG/nats", "FG/nats/low"),
    *("FG/nats/high", "CPT/perplexity", "CPT/nats", "general_drift/nats", "general_drift/perplexity"),
    *("cost/flops", "cost/tokens", "cost/seconds", "cost/memory", "cost/stored", "cost/stored_per_domain"),
    *("cost/trained", "endtask/MF1", "endtask/forget_rate", "answers/AP", "answers/BWT"),
    *("BWT_zs/nats", "FWT_zs/nats", "ZS/nats"),
)
MOST = 26  # numbers; with tables and pictures no more than 40 entries of a W&B summary


class Line(NamedTuple):
    """A number: the columns of the table beside `kind`. What a line has no use for is None."""

    name: str  # what is measured: LC, macro_f1, flops, ...
    value: float | None  # None or nan: not measured, or not finite
    unit: str = ""  # nats, perplexity, bits_per_byte, share (0..1), s, bytes, tokens, parameters, ...
    key: str | None = None  # its name in a summary; None: a summary does without
    stage: int | None = None  # the row of the matrix that it is of, 0: the base; None: of the whole run
    after: str | None = None  # the name of that row
    on: str | None = None  # test text or end task
    part: str | None = None  # of a model that has several
    seed: int | None = None  # of a fine-tuning
    low: float | None = None  # 95 % interval
    high: float | None = None


Lines = Iterator[Line]


def run_table(scores: Scores, *kinds: str) -> pandas.DataFrame:
    """The columns `kind` and those of `Line`; a line per number, of these kinds alone if any are named.

    - metric: every metric in every unit, and what a sweep minimises; value, low and high.
    - perplexity: on each text of the base, the last model, and the model right after the domain.
    - text: sizes of the test texts.
    - task: the end tasks over all tasks, and the last and own score of each, a mean over seeds.
    - score: metrics of the answers to tasks, and the last value of each measure of a task.
    - probe: each task of the harness in each row that was measured; low and high by the standard error.
    - cost: what the whole run took and, with a stage, what each of them took.
    - loss: every cell of the matrix in every unit.
    - endtask: the score of every fine-tuning.
    - answer: every measure of each task in each row in which it was asked.
    - part: the weights of parts in the scores of texts.
    - phase: seconds by what they were taken for.
    """
    import pandas  # not at the start of every run

    lines = [(kind, *line) for kind in kinds or KINDS for line in KINDS[kind](scores)]
    table = pandas.DataFrame(lines, columns=["kind", *Line._fields])
    return table.astype({"stage": "Int64", "seed": "Int64", "value": float, "low": float, "high": float})


def summarise_run(scores: Scores, kinds: Sequence[str] = SUMMARISED) -> dict[str, float]:
    """The numbers that have a key, by it: names that a dashboard can sort by. Without what is not finite.

    "LC/perplexity", "LC/nats/low" and "/high": a metric in a unit, and its interval. "ppl/<text>/base", "own"
    (after the domain's own stage) and "final". "endtask/MF1", "endtask/<task>/accuracy" (final; "/sd" over
    seeds) and "/forward". "answers/AP", "answers/<task>/exact_match" (final). "probe/<task>" (final), "/base"
    and "/after/<stage>". "cost/flops": the whole run's; "stage/<stage>/flops": one stage's. Seconds, bytes,
    tokens, floating-point operations, parameters. A name between slashes is escaped, so that no two keys are
    alike whatever domains are called.
    """
    lines = [line for kind in kinds for line in KINDS[kind](scores)]
    named = [(line.key + end, getattr(line, column)) for line in lines for column, end in ENDS.items()]
    numbers = {key: float(value) for key, value in named if value is not None}
    return {key: value for key, value in numbers.items() if isfinite(value)}


def choose_headlines(scores: Scores) -> dict[str, float]:
    """Of a run's numbers those that a table of runs has room for, MOST at most, by their keys: what a sweep
    minimises, HEADLINES, and what was measured over all tasks."""
    found = summarise_run(scores)
    objectives = [key for key in found if key.partition("/")[0] == "objective"]
    over_all = [key for key in found if re.fullmatch(r"(endtask|answers)/[^/]+", key)]
    keys = dict.fromkeys([*objectives, *HEADLINES, *over_all])
    return {key: found[key] for key in [key for key in keys if key in found][:MOST]}


def escape_name(name: str) -> str:
    """The name as a part of a key: a slash would begin another part."""
    return name.replace("%", "%25").replace("/", "%2F")


def _list_metrics(scores: Scores) -> Lines:
    for name, metric in scores.metrics.items():
        for unit in UNITS:
            low, high = metric.get("interval", {}).get(unit, (None, None))
            yield Line(name, metric[unit], unit, f"{name}/{unit}", low=low, high=high)
    for place, value in enumerate(np.atleast_1d(np.array(scores.objective, dtype=float))):
        name = f"objective/{place}" if isinstance(scores.objective, list) else "objective"
        yield Line(name, value, key=name)


def _list_perplexities(scores: Scores) -> Lines:
    if not scores.rows:
        return
    perplexity = in_units(scores.matrix, layout=scores)["perplexity"]
    for column, text in enumerate(scores.domains):
        rows = {"base": 0, "final": len(scores.rows) - 1}
        rows |= {"own": scores.rows.index(text)} if text in scores.learned else {}
        for name, row in rows.items():
            key = f"ppl/{escape_name(text)}/{name}"
            yield Line(name, perplexity[row, column], "perplexity", key, row, scores.rows[row], text)


def list_losses(scores: Scores, rows: Sequence[int] | None = None) -> Lines:
    """The matrix in every unit, or these rows of it."""
    numbers = range(len(scores.rows)) if rows is None else rows
    losses = scores.matrix if rows is None else np.array([scores.nll[row] for row in rows], dtype=float)
    units = in_units(losses, layout=scores)
    for place, row in enumerate(numbers):
        values = zip(*(units[unit][place].tolist() for unit in UNITS), strict=True)
        for text, cell in zip(scores.domains, values, strict=True):
            for unit, loss in zip(UNITS, cell, strict=True):
                yield Line("loss", loss, unit, stage=row, after=scores.rows[row], on=text)


def _list_texts(scores: Scores) -> Lines:
    for text, *sizes in zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True):
        for name, size in zip(("tokens", "scored", "bytes"), sizes, strict=True):
            yield Line(name, size, name, f"text/{escape_name(text)}/{name}", on=text)


def _list_tasks(scores: Scores) -> Lines:
    given, rows = scores.endtasks, scores.rows
    if not given:
        return
    for name, value in endscores.summarise_endtasks(given, rows).items():
        yield Line(name, value, "share", f"endtask/{name}")
    yield Line("seconds", given["seconds"], "s", "endtask/seconds")
    for kind in endscores.ENDTASK_METRICS:
        cube = endscores.cube(given, kind)
        means, deviations = endscores.over_seeds(cube), endscores.sd_over_seeds(cube)
        final, own = endscores.pick_final(means), endscores.forward(means, rows, given["tasks"])
        for place, (task, row) in enumerate(zip(given["tasks"], endscores.last_measured(cube), strict=True)):
            key, last = f"endtask/{escape_name(task)}/{kind}", rows[row] if row is not None else None
            deviation = None if row is None else deviations[row, place]
            yield Line(kind, final[place], "share", key, row, last, task)
            yield Line(f"{kind}/forward", own[place], "share", f"{key}/forward", after=task, on=task)
            yield Line(f"{kind}/sd", deviation, "share", f"{key}/sd", row, last, task)


def list_endtasks(scores: Scores) -> Lines:
    """A line per row, task, metric and seed that was measured."""
    given = scores.endtasks
    for kind in endscores.ENDTASK_METRICS if given else ():
        for place in np.argwhere(np.isfinite(cube := endscores.cube(given, kind))):
            row, task, seed = place.tolist()
            where = {"stage": row, "after": scores.rows[row], "on": given["tasks"][task]}
            yield Line(kind, cube[row, task, seed], "share", seed=given["seeds"][seed], **where)


def list_scores(scores: Scores) -> Lines:
    """The metrics of the matrix of scores, and the last value of every measure of each task."""
    given = scores.answers
    for name, value in given.get("metrics", {}).items():
        low, high = given["intervals"].get(name, (None, None))
        yield Line(name, value, "share", f"answers/{name}", low=low, high=high)
    last = {(line.on, line.name): line for line in list_answers(scores)}
    for (task, measure), line in last.items():
        yield line._replace(key=f"answers/{escape_name(task)}/{measure}")


def list_answers(scores: Scores) -> Lines:
    """A line per task, measure and row in which it was asked."""
    for task, given in scores.answers.get("tasks", {}).items():
        for measure, values in given["measures"].items():
            for row, value in enumerate(values):
                if value is not None:
                    where = {"stage": row, "after": scores.rows[row], "on": task}
                    yield Line(measure, value, "share", **where)


def list_probes(scores: Scores) -> Lines:
    """A line per task and row that was measured; the interval is normal, of 1.96 standard errors."""
    for name, task in scores.probes.get("tasks", {}).items():
        last = last_value(task)
        for row, (value, error) in enumerate(zip(task["values"], task["errors"], strict=True)):
            if value is not None:
                stage = scores.rows[row]
                end = "" if row == last[0] else "/base" if row == 0 else f"/after/{escape_name(stage)}"
                bounds = (None, None) if error is None else (value - 1.96 * error, value + 1.96 * error)
                where = {"stage": row, "after": stage, "on": name, "low": bounds[0], "high": bounds[1]}
                yield Line(task["metric"], value, key=f"probe/{escape_name(name)}{end}", **where)


def _list_parts(scores: Scores) -> Lines:
    for row, (stage, texts) in enumerate(zip(scores.rows, scores.parts, strict=False)):
        for text, weights in texts.items():
            for part, weight in weights.items():
                yield Line("weight", weight, "share", stage=row, after=stage, on=text, part=part)


def list_costs(scores: Scores) -> Lines:
    """Of the whole run, where stored is what is kept at the end, and of each stage."""
    for cost in COSTS:
        name, unit = COST_NAMES.get(cost, cost), COST_UNITS.get(cost, "bytes")
        yield Line(name, _total_cost(scores, cost), unit, f"cost/{name}")
        yield from _list_stages(scores, name, unit)
    for kind in TIMED:
        name, took = f"seconds_{kind}", scores.phases.get(kind, {})
        yield Line(name, sum(took.values()), "s", f"cost/{name}")
        yield from _list_stages(scores, name, "s")
    yield Line("stored_per_domain", scores.growth, "bytes", "cost/stored_per_domain")
    yield Line("seconds", scores.seconds, "s", "cost/seconds")


def costs_by_stage(scores: Scores, name: str) -> Sequence[float]:
    """What was noted of each stage, by the name that it has in tables; nothing of what an earlier cpt did not
    note."""
    if name.startswith("seconds_"):
        took = scores.phases.get(name.removeprefix("seconds_"), {})
        return [took.get(stage, 0.0) for stage in scores.rows]
    return getattr(scores, {shown: cost for cost, shown in COST_NAMES.items()}.get(name, name))


def _list_stages(scores: Scores, name: str, unit: str) -> Lines:
    for row, (stage, value) in enumerate(zip(scores.rows, costs_by_stage(scores, name), strict=False)):
        yield Line(name, value, unit, f"stage/{escape_name(stage)}/{name}", row, stage)


def _total_cost(scores: Scores, cost: str) -> float | None:
    """One of COSTS over a run: the sum of tokens, operations and steps left out, the last of stored bytes,
    else the largest. An earlier cpt noted 0 of every stage for what it did not count: None."""
    noted = getattr(scores, cost)
    if cost in ("seen", "flops"):
        return sum(noted) if any(noted) or len(scores.rows) == 1 else None
    if cost == "memory":
        return max(noted) if any(noted) else None
    over = {"skipped": sum, "stored": itemgetter(-1)}.get(cost, max)
    return over(noted) if noted else None


def _list_phases(scores: Scores) -> Lines:
    for kind, stages in scores.phases.items():
        yield from (Line(kind, seconds, "s", after=stage) for stage, seconds in stages.items())


ENDS = {"value": "", "low": "/low", "high": "/high"}  # of a key
KINDS: dict[str, Callable[[Scores], Lines]] = {
    "metric": _list_metrics,
    "perplexity": _list_perplexities,
    "text": _list_texts,
    "task": _list_tasks,
    "cost": list_costs,
    "loss": list_losses,
    "endtask": list_endtasks,
    "answer": list_answers,
    "score": list_scores,
    "probe": list_probes,
    "part": _list_parts,
    "phase": _list_phases,
}
