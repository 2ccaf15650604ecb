"""The scores of a run as a tidy frame, one number a row, and how numbers and names are printed.

Run pages, comparisons, model cards and W&B take their numbers from `tidy_scores` and `summarize_scores`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

from cpt.evaluation import task_metrics as endtasks
from cpt.evaluation.metrics import UNITS, in_units
from cpt.evaluation.scores import COSTS, Scores
from cpt.evaluation.task_metrics import last_value

COST_NAMES = {"seen": "tokens"}  # of COSTS, those with another name here than in scores.json
COST_UNITS = {"trained": "parameters", "seen": "tokens", "flops": "operations", "skipped": "steps"}
TIMED = ("learn", "score", "endtasks")  # phases of a stage that take time
COST_COLUMNS = (*(COST_NAMES.get(cost, cost) for cost in COSTS), *(f"seconds_{kind}" for kind in TIMED))
SUMMARIZED = ("metric", "perplexity", "text", "task", "score", "probe", "cost")  # kinds with a key
HEADLINES = (
    *("LC/perplexity", "LC/perplexity/low", "LC/perplexity/high", "LC/nats", "FG/nats", "FG/nats/low"),
    *("FG/nats/high", "CPT/perplexity", "CPT/nats", "general_drift/nats", "general_drift/perplexity"),
    *("cost/flops", "cost/tokens", "cost/seconds", "cost/memory", "cost/stored", "cost/stored_per_domain"),
    *("cost/trained", "endtask/MF1", "endtask/forget_rate", "answers/AP", "answers/BWT"),
    *("BWT_zs/nats", "FWT_zs/nats", "ZS/nats"),
)
MAX_HEADLINES = 26  # with tables and pictures at most 40 entries of a W&B summary
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")  # line ends, terminal codes, bidi


class Record(NamedTuple):
    """A measured number; None in the fields that do not apply."""

    metric: str  # LC, perplexity, macro_f1, flops, ...
    value: float | None  # None or nan: not measured, or not finite
    unit: str = ""  # nats, perplexity, bits_per_byte, share (0..1), s, bytes, tokens, parameters, ...
    key: str | None = None  # its name in summaries (W&B, CSV)
    stage: int | None = None  # index of the row of the matrix, 0: the base model
    row: str | None = None  # name of that row
    text: str | None = None  # test text or task
    part: str | None = None  # module that scored the text
    seed: int | None = None  # of a fine-tuning
    low: float | None = None  # 95 % interval
    high: float | None = None


def tidy_scores(scores: Scores, *kinds: str) -> DataFrame:
    """The columns `kind` and those of `Record`, for all KINDS or the given ones."""
    rows = [(kind, *record) for kind in kinds or KINDS for record in KINDS[kind](scores)]
    frame = DataFrame(rows, columns=["kind", *Record._fields])
    return frame.astype({"stage": "Int64", "seed": "Int64", "value": float, "low": float, "high": float})


def summarize_scores(scores: Scores, kinds: Sequence[str] = SUMMARIZED) -> dict[str, float]:
    """The finite numbers by key: "LC/perplexity" with "/low" and "/high", "ppl/<text>/base", "own" (after the
    domain's own stage) and "final", "endtask/<task>/accuracy", "answers/AP", "probe/<task>", "cost/flops",
    "stage/<stage>/flops". Names between slashes are escaped."""
    found = {}
    for record in (record for kind in kinds for record in KINDS[kind](scores)):
        for value, end in ((record.value, ""), (record.low, "/low"), (record.high, "/high")):
            if value is not None and isfinite(value):
                found[f"{record.key}{end}"] = float(value)
    return found


def choose_headlines(scores: Scores) -> dict[str, float]:
    """The numbers for a table of runs, at most MAX_HEADLINES: the optimized metric, HEADLINES, and means over
    all tasks."""
    found = summarize_scores(scores)
    objectives = [key for key in found if key.partition("/")[0] == "objective"]
    means = [key for key in found if re.fullmatch(r"(endtask|answers)/[^/]+", key)]
    keys = dict.fromkeys([*objectives, *HEADLINES, *means])
    return {key: found[key] for key in [key for key in keys if key in found][:MAX_HEADLINES]}


def escape_name(name: str) -> str:
    """The name as one component of a key."""
    return name.replace("%", "%25").replace("/", "%2F")


def list_metrics(scores: Scores) -> Iterator[Record]:
    for name, metric in scores.metrics.items():
        for unit in UNITS:
            low, high = metric.get("interval", {}).get(unit, (None, None))
            yield Record(name, metric[unit], unit, f"{name}/{unit}", low=low, high=high)
    for place, value in enumerate(np.atleast_1d(np.array(scores.objective, dtype=float)).tolist()):
        name = f"objective/{place}" if isinstance(scores.objective, list) else "objective"
        yield Record(name, value, key=name)


def list_losses(scores: Scores, rows: Sequence[int] | None = None) -> Iterator[Record]:
    """Every cell of the matrix, or of the given rows, in each of UNITS."""
    rows = range(len(scores.rows)) if rows is None else rows
    cells = np.array([scores.nll[row] for row in rows], dtype=float).reshape(-1, len(scores.domains))
    units = {unit: values.tolist() for unit, values in in_units(cells, layout=scores).items()}
    for place, row in enumerate(rows):
        for column, text in enumerate(scores.domains):
            for unit in UNITS:
                yield Record("loss", units[unit][place][column], unit, None, row, scores.rows[row], text)


def list_perplexities(scores: Scores) -> Iterator[Record]:
    """Of each text: the base, the final model, and the model just after the domain."""
    if scores.rows:
        perplexities = in_units(scores.matrix, layout=scores)["perplexity"].tolist()
        for column, text in enumerate(scores.domains):
            rows = {"base": 0, "final": len(scores.rows) - 1}
            rows |= {"own": scores.rows.index(text)} if text in scores.learned else {}
            for name, row in rows.items():
                key = f"ppl/{escape_name(text)}/{name}"
                yield Record(name, perplexities[row][column], "perplexity", key, row, scores.rows[row], text)


def list_texts(scores: Scores) -> Iterator[Record]:
    for text, *sizes in zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True):
        for unit, size in zip(("tokens", "scored", "bytes"), sizes, strict=True):
            yield Record(unit, size, unit, f"text/{escape_name(text)}/{unit}", text=text)


def list_endtasks(scores: Scores) -> Iterator[Record]:
    """The score of every fine-tuning: row, task, metric, seed."""
    given = scores.endtasks
    for kind in endtasks.ENDTASK_METRICS if given else ():
        for place in np.argwhere(np.isfinite(cube := endtasks.cube(given, kind))):
            row, task, seed = place.tolist()
            where = {"stage": row, "row": scores.rows[row], "text": given["tasks"][task]}
            yield Record(kind, cube[row, task, seed], "share", seed=given["seeds"][seed], **where)


def list_task_means(scores: Scores) -> Iterator[Record]:
    """Over all end tasks, and of each the final and the own score: a mean over seeds."""
    if not (given := scores.endtasks):
        return
    for name, value in endtasks.summarise_endtasks(given, scores.rows).items():
        yield Record(name, value, "share", f"endtask/{name}")
    yield Record("seconds", given["seconds"], "s", "endtask/seconds")
    for kind in endtasks.ENDTASK_METRICS:
        cube = endtasks.cube(given, kind)
        means, deviations = endtasks.over_seeds(cube), endtasks.sd_over_seeds(cube)
        final, own = endtasks.pick_final(means), endtasks.forward(means, scores.rows, given["tasks"])
        for place, (task, row) in enumerate(zip(given["tasks"], endtasks.last_measured(cube), strict=True)):
            key, last = f"endtask/{escape_name(task)}/{kind}", None if row is None else scores.rows[row]
            sd = None if row is None else deviations[row, place]
            yield Record(kind, final[place], "share", key, row, last, task)
            yield Record(f"{kind}/forward", own[place], "share", f"{key}/forward", row=task, text=task)
            yield Record(f"{kind}/sd", sd, "share", f"{key}/sd", row, last, task)


def list_answers(scores: Scores) -> Iterator[Record]:
    """Every measure of each task in each row in which it was evaluated."""
    for task, given in scores.answers.get("tasks", {}).items():
        for measure, values in given["measures"].items():
            for row, value in enumerate(values):
                if value is not None:
                    yield Record(measure, value, "share", None, row, scores.rows[row], task)


def list_answer_means(scores: Scores) -> Iterator[Record]:
    """AP, LA, BWT, F, FWT, and the final value of every measure of each task."""
    for name, value in scores.answers.get("metrics", {}).items():
        low, high = scores.answers["intervals"].get(name, (None, None))
        yield Record(name, value, "share", f"answers/{name}", low=low, high=high)
    final = {(record.text, record.metric): record for record in list_answers(scores)}
    for (task, measure), record in final.items():
        yield record._replace(key=f"answers/{escape_name(task)}/{measure}")


def list_probes(scores: Scores) -> Iterator[Record]:
    """Each task of the lm-evaluation-harness by row; the interval is normal, 1.96 standard errors."""
    for name, task in scores.probes.get("tasks", {}).items():
        last = last_value(task)
        for row, (value, error) in enumerate(zip(task["values"], task["errors"], strict=True)):
            if value is not None:
                after = scores.rows[row]
                end = "" if row == last[0] else "/base" if row == 0 else f"/after/{escape_name(after)}"
                low, high = (None, None) if error is None else (value - 1.96 * error, value + 1.96 * error)
                key = f"probe/{escape_name(name)}{end}"
                yield Record(task["metric"], value, "", key, row, after, name, low=low, high=high)


def list_costs(scores: Scores) -> Iterator[Record]:
    """Of the whole run (stored: at its end; memory, trained: the largest) and of each stage."""
    for name in COST_COLUMNS:
        noted = costs_by_stage(scores, name)
        cost = next((cost for cost, shown in COST_NAMES.items() if shown == name), name)
        unit = "s" if name.startswith("seconds_") else COST_UNITS.get(cost, "bytes")
        if unit == "s":
            total = sum(scores.phases.get(name.removeprefix("seconds_"), {}).values())
        elif cost == "stored":
            total = noted[-1] if noted else None
        elif cost in ("memory", "trained"):
            total = max(noted, default=None)
        else:
            total = sum(noted) if noted else None
        uncounted = cost == "memory" or (cost in ("seen", "flops") and len(scores.rows) != 1)
        yield Record(name, None if uncounted and not any(noted) else total, unit, f"cost/{name}")
        for row, (stage, value) in enumerate(zip(scores.rows, noted, strict=False)):
            yield Record(name, value, unit, f"stage/{escape_name(stage)}/{name}", row, stage)
    yield Record("stored_per_domain", scores.growth, "bytes", "cost/stored_per_domain")
    yield Record("seconds", scores.seconds, "s", "cost/seconds")


def costs_by_stage(scores: Scores, name: str) -> Sequence[float]:
    """One of COST_COLUMNS for each row of the matrix."""
    if name.startswith("seconds_"):
        took = scores.phases.get(name.removeprefix("seconds_"), {})
        return [took.get(stage, 0.0) for stage in scores.rows]
    return getattr(scores, "seen" if name == "tokens" else name)


def list_parts(scores: Scores) -> Iterator[Record]:
    for row, (stage, texts) in enumerate(zip(scores.rows, scores.parts, strict=False)):
        for text, weights in texts.items():
            for part, weight in weights.items():
                yield Record("weight", weight, "share", None, row, stage, text, part)


def list_phases(scores: Scores) -> Iterator[Record]:
    for kind, stages in scores.phases.items():
        yield from (Record(kind, seconds, "s", row=stage) for stage, seconds in stages.items())


KINDS: dict[str, Callable[[Scores], Iterator[Record]]] = {
    "metric": list_metrics,
    "perplexity": list_perplexities,
    "text": list_texts,
    "task": list_task_means,
    "cost": list_costs,
    "loss": list_losses,
    "endtask": list_endtasks,
    "answer": list_answers,
    "score": list_answer_means,
    "probe": list_probes,
    "part": list_parts,
    "phase": list_phases,
}


def perplexity(value: float | None) -> str:
    """A perplexity, or a difference of two, in as many digits as one reads."""
    if value is None or np.isnan(value):
        return "nan"
    size = abs(value)
    if size < 1000:
        return f"{value:.{2 if size < 100 else 1}f}"
    return f"{value:,.0f}" if size < 1e6 else f"{value:.1e}"


def decimals(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4f}"


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def megabytes(size: float | None) -> str:
    """Bytes in units of 10^6; less than 100,000 in kB or B."""
    if size is None:
        return "–"
    if 0 <= size < 1e5:
        return f"{size:.0f} B" if size < 1e3 else f"{size / 1e3:.2f} kB"
    return f"{size / 1e6:,.{0 if size >= 1e8 else 2}f} MB"


def format_interval(low: float | None, high: float | None, show: Callable[[float], str]) -> str:
    """` [52.80, 53.40]`, with a leading blank; empty where there is none."""
    known = low is not None and high is not None and not np.isnan(low)
    return f" [{show(low)}, {show(high)}]" if known else ""


def strip_controls(text: str) -> str:
    """The text on one line, without characters that a terminal would interpret."""
    return CONTROLS.sub(" ", text)


def shorten(name: str, *, width: int) -> str:
    """The name in at most `width` characters, its middle left out: names often differ at their ends."""
    tail = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def pick_ends(size: int) -> list[int]:
    """The places of the first and last four; all where there are at most nine."""
    return list(range(size)) if size <= 9 else [*range(4), *range(size - 4, size)]


def label(run: Mapping[str, Any], *, shared: Collection[str] = ()) -> str:
    """`das + migu + replay past (temperature=0.1)`, without the values that all runs share."""
    method, mask, replay = (run[key] for key in ("method", "mask", "replay"))
    own = ", ".join(value for value in split_variant(run) if value not in shared)
    laid = f" + {mask}" * (mask != "none") + f" + replay {replay}" * (replay != "none")
    return method + laid + f" ({own})" * bool(own)


def split_variant(run: Mapping[str, Any]) -> list[str]:
    """The values given for a run, `key=value`."""
    return [value for value in run["variant"].split("; ") if value]
