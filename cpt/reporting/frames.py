"""The scores of a run as a tidy frame, one number a row, its tables and points, and how numbers are printed.

Run pages, comparisons, model cards and W&B take their numbers from `tidy_scores` and `summarize_scores`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import isfinite, isnan, nan
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

from cpt.evaluation import task_metrics as endtasks
from cpt.evaluation.metrics import UNITS, in_units
from cpt.evaluation.scores import Scores

COST_UNITS = {"trained": "parameters", "tokens": "tokens", "flops": "operations", "skipped": "steps"}
# `tokens_read` and `skipped_steps` of `Scores` are `tokens` and `skipped` here
COST_COLUMNS: tuple[str, ...] = ("trained", "stored", "tokens", "flops", "memory", "skipped")
COST_COLUMNS += ("seconds_learn", "seconds_score", "seconds_endtasks")
SUMMARIZED = ("metric", "perplexity", "text", "task", "score", "benchmark", "cost")  # kinds with a key
HEADLINES = (
    *("LC/perplexity", "LC/perplexity/low", "LC/perplexity/high", "LC/nats", "FG/nats", "FG/nats/low"),
    *("FG/nats/high", "CPT/perplexity", "CPT/nats", "general_drift/nats", "general_drift/perplexity"),
    *("cost/flops", "cost/tokens", "cost/seconds", "cost/memory", "cost/stored", "cost/stored_per_domain"),
    *("cost/trained", "endtask/MF1", "endtask/forget_rate", "answers/AP", "answers/BWT"),
    *("BWT_zs/nats", "FWT_zs/nats", "ZS/nats"),
)
MAX_HEADLINES = 26  # with tables and pictures at most 40 entries of a W&B summary
EQUAL = (1.01, 1.05)  # times the tokens, operations of another group up to which they are called equal
FEW = 12  # up to this number, domains are drawn or named one by one
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")  # line ends, terminal codes, bidi
Show = Callable[[float], str]


class ReportedValue(NamedTuple):
    """A measured number; None in the fields that do not apply."""

    metric: str  # LC, perplexity, macro_f1, flops, ...
    value: float | None  # None or nan: not measured, or not finite
    unit: str = ""  # nats, perplexity, bits_per_byte, share (0..1), s, bytes, tokens, parameters, ...
    key: str | None = None  # its name in summaries (W&B, CSV)
    stage: int | None = None  # index of the row of the matrix, 0: the base model
    row: str | None = None  # name of that row
    text: str | None = None  # test text or task
    module: str | None = None  # that scored the text
    seed: int | None = None  # of a fine-tuning
    low: float | None = None  # 95 % interval
    high: float | None = None


Values = Iterator[ReportedValue]


def tidy_scores(scores: Scores, *kinds: str) -> DataFrame:
    """The columns `kind` and those of `ReportedValue`, for all KINDS or the given ones."""
    rows = [(kind, *each) for kind in kinds or KINDS for each in KINDS[kind](scores)]
    frame = DataFrame(rows, columns=["kind", *ReportedValue._fields])
    return frame.astype({"stage": "Int64", "seed": "Int64", "value": float, "low": float, "high": float})


def summarize_scores(scores: Scores, kinds: Sequence[str] = SUMMARIZED) -> dict[str, float]:
    """The finite numbers by key: "LC/perplexity" with "/low" and "/high", "ppl/<text>/base", "own" (after the
    domain's own stage) and "final", "endtask/<task>/accuracy", "answers/AP", "benchmark/<task>",
    "cost/flops", "stage/<stage>/flops". Names between slashes are escaped."""
    found = {}
    for each in (each for kind in kinds for each in KINDS[kind](scores)):
        for value, end in ((each.value, ""), (each.low, "/low"), (each.high, "/high")):
            if value is not None and isfinite(value):
                found[f"{each.key}{end}"] = float(value)
    return found


def choose_headlines(scores: Scores) -> dict[str, float]:
    """At most MAX_HEADLINES numbers of a run: its optimized metric, HEADLINES, means over all tasks."""
    found = summarize_scores(scores)
    objectives = [key for key in found if key.partition("/")[0] == "optimized_metric"]
    means = [key for key in found if re.fullmatch(r"(endtask|answers)/[^/]+", key)]
    keys = dict.fromkeys([*objectives, *HEADLINES, *means])
    return {key: found[key] for key in [key for key in keys if key in found][:MAX_HEADLINES]}


def escape_name(name: str) -> str:
    """The name as one component of a key."""
    return name.replace("%", "%25").replace("/", "%2F")


def list_metrics(scores: Scores) -> Values:
    for name, metric in scores.metrics.items():
        for unit in UNITS:
            low, high = metric.get("interval", {}).get(unit, (None, None))
            yield ReportedValue(name, metric[unit], unit, f"{name}/{unit}", low=low, high=high)
    given = scores.optimized_metric
    for place, value in enumerate(np.atleast_1d(np.array(given, dtype=float)).tolist()):
        name = f"optimized_metric/{place}" if isinstance(given, list) else "optimized_metric"
        yield ReportedValue(name, value, key=name)


def list_losses(scores: Scores) -> Values:
    """Every cell of the matrix, in each of UNITS."""
    units = {unit: values.tolist() for unit, values in in_units(scores.matrix, layout=scores).items()}
    for row, stage in enumerate(scores.rows):
        for column, text in enumerate(scores.domains):
            for unit, values in units.items():
                yield ReportedValue("loss", values[row][column], unit, None, row, stage, text)


def list_perplexities(scores: Scores) -> Values:
    """Of each text: the base, the final model, and the model just after the domain."""
    perplexities = in_units(scores.matrix, layout=scores)["perplexity"].tolist() if scores.rows else []
    for column, text in enumerate(scores.domains if scores.rows else ()):
        rows = {"base": 0, "final": len(scores.rows) - 1}
        rows |= {"own": scores.rows.index(text)} if text in scores.learned else {}
        for name, row in rows.items():
            value, key = perplexities[row][column], f"ppl/{escape_name(text)}/{name}"
            yield ReportedValue(name, value, "perplexity", key, row, scores.rows[row], text)


def list_texts(scores: Scores) -> Values:
    for text, *sizes in zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True):
        for unit, size in zip(("tokens", "scored", "bytes"), sizes, strict=True):
            yield ReportedValue(unit, size, unit, f"text/{escape_name(text)}/{unit}", text=text)


def list_endtasks(scores: Scores) -> Values:
    """The score of every fine-tuning: row, task, metric, seed."""
    given = scores.endtasks
    for kind in endtasks.ENDTASK_METRICS if given else ():
        for place in np.argwhere(np.isfinite(cube := endtasks.cube(given, kind))):
            row, task, seed = place.tolist()
            where = {"stage": row, "row": scores.rows[row], "text": given["tasks"][task]}
            yield ReportedValue(kind, cube[row, task, seed], "share", seed=given["seeds"][seed], **where)


def list_task_means(scores: Scores) -> Values:
    """Over all end tasks, and of each the final and the own score: a mean over seeds."""
    if not (given := scores.endtasks):
        return
    for name, value in endtasks.summarise_endtasks(given, scores.rows).items():
        yield ReportedValue(name, value, "share", f"endtask/{name}")
    yield ReportedValue("seconds", given["seconds"], "s", "endtask/seconds")
    for kind in endtasks.ENDTASK_METRICS:
        cube = endtasks.cube(given, kind)
        means, deviations = endtasks.over_seeds(cube), endtasks.sd_over_seeds(cube)
        final, own = endtasks.pick_final(means), endtasks.forward(means, scores.rows, given["tasks"])
        for place, (task, row) in enumerate(zip(given["tasks"], endtasks.last_measured(cube), strict=True)):
            key, last = f"endtask/{escape_name(task)}/{kind}", None if row is None else scores.rows[row]
            sd = None if row is None else deviations[row, place]
            yield ReportedValue(kind, final[place], "share", key, row, last, task)
            yield ReportedValue(f"{kind}/forward", own[place], "share", f"{key}/forward", row=task, text=task)
            yield ReportedValue(f"{kind}/sd", sd, "share", f"{key}/sd", row, last, task)


def list_answers(scores: Scores) -> Values:
    """Every measure of each task in each row in which it was evaluated."""
    for task, given in scores.answers.get("tasks", {}).items():
        for measure, values in given["measures"].items():
            for row, value in enumerate(values):
                if value is not None:
                    yield ReportedValue(measure, value, "share", None, row, scores.rows[row], task)


def list_answer_means(scores: Scores) -> Values:
    """AP, LA, BWT, F, FWT, and the final value of every measure of each task."""
    for name, value in scores.answers.get("metrics", {}).items():
        low, high = scores.answers["intervals"].get(name, (None, None))
        yield ReportedValue(name, value, "share", f"answers/{name}", low=low, high=high)
    final = {(each.text or "", each.metric): each for each in list_answers(scores)}
    for (task, measure), each in final.items():
        yield each._replace(key=f"answers/{escape_name(task)}/{measure}")


def list_benchmarks(scores: Scores) -> Values:
    """Each task of the lm-evaluation-harness by row; the interval is normal, 1.96 standard errors."""
    for name, task in scores.benchmarks.get("tasks", {}).items():
        last = endtasks.last_value(task)
        for row, (value, error) in enumerate(zip(task["values"], task["errors"], strict=True)):
            if last and value is not None:
                after = scores.rows[row]
                end = "" if row == last[0] else "/base" if row == 0 else f"/after/{escape_name(after)}"
                low, high = (None, None) if error is None else (value - 1.96 * error, value + 1.96 * error)
                key = f"benchmark/{escape_name(name)}{end}"
                yield ReportedValue(task["metric"], value, "", key, row, after, name, low=low, high=high)


def list_costs(scores: Scores) -> Values:
    """Of the whole run (stored: at its end; memory, trained: the largest) and of each stage."""
    for name in COST_COLUMNS:
        noted, phase = costs_by_stage(scores, name), name.removeprefix("seconds_")
        total = sum(noted) if noted else None
        if phase != name:
            total = sum(scores.activity_seconds.get(phase, {}).values())
        elif noted and name in ("stored", "memory", "trained"):
            total = noted[-1] if name == "stored" else max(noted)
        unit = "s" if phase != name else COST_UNITS.get(name, "bytes")
        uncounted = name == "memory" or (name in ("tokens", "flops") and len(scores.rows) != 1)
        yield ReportedValue(name, None if uncounted and not any(noted) else total, unit, f"cost/{name}")
        for row, (stage, value) in enumerate(zip(scores.rows, noted, strict=False)):
            yield ReportedValue(name, value, unit, f"stage/{escape_name(stage)}/{name}", row, stage)
    yield ReportedValue("stored_per_domain", scores.growth, "bytes", "cost/stored_per_domain")
    yield ReportedValue("seconds", scores.seconds, "s", "cost/seconds")


def costs_by_stage(scores: Scores, name: str) -> Sequence[float]:
    """One of COST_COLUMNS for each row of the matrix."""
    if name.startswith("seconds_"):
        took = scores.activity_seconds.get(name.removeprefix("seconds_"), {})
        return [took.get(stage, 0.0) for stage in scores.rows]
    attributes = {"tokens": "tokens_read", "skipped": "skipped_steps"}
    return getattr(scores, attributes.get(name, name))


def list_modules(scores: Scores) -> Values:
    for row, (stage, texts) in enumerate(zip(scores.rows, scores.modules, strict=False)):
        for text, weights in texts.items():
            for module, weight in weights.items():
                yield ReportedValue("weight", weight, "share", None, row, stage, text, module)


def list_phases(scores: Scores) -> Values:
    for kind, stages in scores.activity_seconds.items():
        yield from (ReportedValue(kind, seconds, "s", row=stage) for stage, seconds in stages.items())


KINDS: dict[str, Callable[[Scores], Values]] = {
    "metric": list_metrics, "perplexity": list_perplexities, "text": list_texts, "task": list_task_means,
    "cost": list_costs, "loss": list_losses, "endtask": list_endtasks, "answer": list_answers,
    "score": list_answer_means, "benchmark": list_benchmarks, "module": list_modules, "phase": list_phases,
}  # fmt: skip


def find_matrices(scores: Scores) -> dict[str, DataFrame]:
    """The models (rows) on each text or task (columns): `perplexity`, and of `answers` and `endtasks` the
    share of each task in its own metric, a mean over seeds; nan where not measured."""
    with np.errstate(over="ignore"):
        found = {"perplexity": (np.exp(scores.matrix), scores.domains)}
    if tasks := scores.answers.get("tasks"):
        found["answers"] = endtasks.matrix_of(scores.answers), list(tasks)
    if given := scores.endtasks:
        found["endtasks"] = endtasks.over_seeds(endtasks.headline(given)), given["tasks"]
    return {kind: DataFrame(each, scores.rows[: len(each)], names) for kind, (each, names) in found.items()}


def tabulate(scores: Scores) -> dict[str, DataFrame]:
    """For W&B: `matrix` (perplexities) and `scores` (every number); None for what is not finite."""
    matrix = find_matrices(scores)["perplexity"]
    matrix.insert(0, "after", scores.rows, allow_duplicates=True)
    kinds = sorted(KINDS, key="loss".__eq__)  # the losses, of which W&B may cut some, last
    known = {"matrix": matrix, "scores": tidy_scores(scores, *kinds)}
    known = {name: table.replace([np.inf, -np.inf], np.nan) for name, table in known.items()}
    return {name: table.astype(object).where(table.notna(), None) for name, table in known.items()}


def mean_so_far(scores: Scores, row: int) -> float:
    """The mean perplexity of a row over the domains learned so far; nan without any."""
    columns = [scores.domains.index(name) for name in scores.rows[1 : row + 1] if name in scores.domains]
    with np.errstate(over="ignore"):
        return float(np.exp(scores.matrix[row, columns]).mean()) if columns else nan


def stage_points(scores: Scores, row: int) -> dict[str, float]:
    """The points of a row over `stage`: `ppl/TEXT`; of `stages/…` `learned` is the mean perplexity over the
    domains so far, `tokens`, `flops` and `seconds` are sums so far, the others of the stage itself."""
    perplexities = in_units(scores.matrix[row], layout=scores)["perplexity"].tolist()
    losses = zip(scores.domains, perplexities, strict=True)
    points = {f"ppl/{escape_name(text)}": ppl for text, ppl in losses if not isnan(ppl)}
    points |= {} if isnan(mean := mean_so_far(scores, row)) else {"stages/learned": mean}
    for name in ("tokens", "flops", "seconds_learn"):
        points[f"stages/{name.removesuffix('_learn')}"] = sum(costs_by_stage(scores, name)[: row + 1])
    for name in ("memory", "trained", "stored"):
        points |= {f"stages/{name}": value for value in costs_by_stage(scores, name)[row : row + 1]}
    moved = scores.protected_movement[row : row + 1]
    points |= {"stages/protected_movement": moved[0][0]} if any(moved) else {}
    return {"stage": row, **points}


def task_points(scores: Scores) -> list[dict[str, float]]:
    """The points of the end tasks over `stage`: `tasks/TASK` in its own metric, a mean over seeds."""
    points = []
    for row, (_, means) in enumerate(find_matrices(scores).get("endtasks", DataFrame()).iterrows()):
        if known := {f"tasks/{escape_name(task)}": float(x) for task, x in means.items() if isfinite(x)}:
            points.append({"stage": row, **known})
    return points


def perplexity(value: float) -> str:
    """A perplexity, or a difference of two, in as many digits as one reads."""
    size = abs(value)
    if size < 1000:
        return f"{value:.{2 if size < 100 else 1}f}"
    return f"{value:,.0f}" if size < 1e6 else f"{value:.1e}"


def decimals(value: float) -> str:
    return f"{value:.4f}"


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def thousandths(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def megabytes(size: float | None) -> str:
    """Bytes in units of 10^6; less than 100,000 in kB or B."""
    if size is None:
        return "–"
    if 0 <= size < 1e5:
        return f"{size:.0f} B" if size < 1e3 else f"{size / 1e3:.2f} kB"
    return f"{size / 1e6:,.{0 if size >= 1e8 else 2}f} MB"


def format_known(value: float | None, show: Show) -> str:
    """A dash where the value is missing or not a number."""
    return "–" if value is None or isnan(value) else show(value)


def format_interval(low: float | None, high: float | None, show: Show) -> str:
    """` [52.80, 53.40]`, with a leading blank; empty without an interval."""
    return "" if low is None or high is None or isnan(low) else f" [{show(low)}, {show(high)}]"


def strip_controls(text: str) -> str:
    """The text on one line, without characters that a terminal would interpret."""
    return CONTROLS.sub(" ", text)


def shorten(name: str, *, width: int) -> str:
    """The name in at most `width` characters, its middle left out: names often differ at their ends."""
    tail = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def few(names: Sequence[str], *, between: str = " → ") -> str:
    """All names; of more than FEW the first and last three."""
    shown = names if len(names) <= FEW else [*names[:3], f"… {len(names) - 6} more …", *names[-3:]]
    return between.join(shown)


def describe_fairness(costs: Mapping[str, Sequence[float]]) -> str:
    """Whether groups took as many tokens and operations per run; empty of fewer than two groups."""
    known = [each for each in costs.values() if all(each)]
    unknown = [name for name, each in costs.items() if not all(each)]
    if len(known) < 2:
        return ""
    told = []
    for unit, allowed, values in zip(("tokens", "operations"), EQUAL, zip(*known, strict=True), strict=True):
        low, high = min(values), max(values)
        is_equal = high <= allowed * low
        span = f"{low:.3g} to " * (not is_equal) + f"{high:.3g}"
        told.append(f"{'equal' if is_equal else 'different'} {unit} ({span} per run)")
    told += [f"unknown of {few(unknown, between=', ')}"] * bool(unknown)
    return f"Fairness: {', '.join(told)}."


def label(run: Mapping[str, Any], *, shared: Collection[str] = ()) -> str:
    """`das + migu + replay past (temperature=0.1)`, without the values that all runs share."""
    method, mask, replay = (run[key] for key in ("method", "mask", "replay"))
    own = ", ".join(value for value in split_variant(run) if value not in shared)
    laid = f" + {mask}" * (mask != "none") + f" + replay {replay}" * (replay != "none")
    return method + laid + f" ({own})" * bool(own)


def split_variant(run: Mapping[str, Any]) -> list[str]:
    """The values given for a run, `key=value`."""
    return [value for value in run["variant"].split("; ") if value]
