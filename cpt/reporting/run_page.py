"""The page of one run, from its folder alone, and its scores for a console.

`python -m cpt.report FOLDER [FOLDER...]` compares runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import exp, isnan
from pathlib import Path

import numpy as np
import pandas

from cpt.data.sources.base import GENERAL
from cpt.evaluation import task_metrics
from cpt.evaluation.metrics import METRICS, UNITS
from cpt.evaluation.predictions import Moved, follow_answers, transitions_of
from cpt.evaluation.scores import Scores, conditions, describe_conditions
from cpt.evaluation.task_metrics import describe_task, head_of, last_value, matrix_of
from cpt.reporting import figures
from cpt.reporting.drawing import FEW
from cpt.reporting.frames import (
    decimals,
    format_interval,
    label,
    list_answers,
    list_costs,
    megabytes,
    percent,
    perplexity,
    pick_ends,
    shorten,
)
from cpt.reporting.overlap import measure_overlap, read_stage
from cpt.reporting.page import Block, align_columns, few, write_page
from cpt.reporting.plots import HeatMap, draw_heat_maps

Show, Cells = Callable[[float], str], list[list[str]]
ANSWER_MEANINGS = {name: told[1:] for name, told in task_metrics.ANSWER_METRICS.items()}
FORMATS = dict(zip(UNITS, (decimals, perplexity, decimals), strict=True))
METRIC_HEAD = ("metric", "meaning", "formula", "nats", "perplexity", "bits per byte")
METRIC_HEAD += ("medians: nats, perplexity, bits per byte",)
ENDTASK_NAMES = {"macro_f1": "macro-F1", "micro_f1": "micro-F1", "accuracy": "accuracy"}
MEASURE_NAMES = {
    "accuracy_ranked": "accuracy of the likeliest choice",
    "exact_match": "exact match of what is written",
    "invalid": "written, but none of the choices",
    "accuracy_valid": "exact match of those that are",
    "accuracy_ranked_mean": "likeliest choice by its mean token",
    "rouge_l": "ROUGE-L",
    "edit_similarity": "edit similarity",
    "sari": "SARI",
    "first_character": "first character of what is written",
}
MOVED = (
    "From a task's own stage, or the base, to the last model. 1→0: right before and no longer, 0→1: the "
    "reverse. Beyond chance: max(0, share - (1 - a) (1 - b) / (C - 1)) for accuracies a, b and C classes, as "
    "if each example were known or guessed (arXiv 2510.17776)."
)
MOVED_HEAD = ("1→0", "share", "beyond chance", "0→1", "share", "beyond chance")
COST_FORMATS = {  # column: cost of cpt.reporting.frames, format
    "tokens": ("tokens", "{:,.0f}".format),
    "FLOPs": ("flops", "{:.3g}".format),
    "learn, s": ("seconds_learn", "{:,.1f}".format),
    "score, s": ("seconds_score", "{:,.1f}".format),
    "end tasks, s": ("seconds_endtasks", "{:,.1f}".format),
    "peak memory": ("memory", megabytes),
    "trained": ("trained", "{:,.0f}".format),
    "stored": ("stored", megabytes),
}
DIAGNOSTICS = {  # by prefix of the arrays' names
    "importance": "Importance, accumulated",
    "measured": "Importance of each domain",
    "chosen": "Share of steps in which a row was updated",
}
MAX_PARTS = 30


def write_report(folder: Path, scores: Scores | None = None) -> Path:
    """Writes report.md and report.html into a run folder, of `scores` or its scores.json."""
    folder = Path(folder)
    scores = scores or Scores.load(folder / "scores.json")
    blocks = [
        show_run(scores),
        *show_answers(scores, folder),
        *show_matrix(scores),
        show_training(scores, folder),
        show_monitor(scores),
        show_parts(scores),
        show_metrics(scores),
        show_similarity(scores),
        show_generated(folder),
        *show_endtasks(scores, folder),
        show_probes(scores),
        show_costs(scores),
        *show_diagnostics(scores, folder),
        show_texts(scores),
    ]
    if (config := folder / "config.yaml").exists():
        code = config.read_text(encoding="utf-8", errors="replace")
        blocks.append(Block(title="Config", code=code, folded=f"config.yaml, digest {scores.config_digest}"))
    return write_page(blocks, title=f"{scores.run['name']}: {label(scores.run)}", stem=folder / "report")


def format_scores(scores: Scores) -> str:
    """For a console of 100 characters: perplexities and headlines; of many domains the first and last."""
    tables = [shorten_table(scores.domains, format_matrix(scores))]
    shown = [name for name in ("LC", "FG", "general_drift") if name in scores.metrics]
    cells = [[each[0], *each[3:6]] for each in (format_metric(scores, name) for name in shown)]
    tables.append(align_columns(Block(head=["", *UNITS], cells=cells)))
    if found := task_metrics.summarise_endtasks(scores.endtasks, scores.rows):
        told = ", ".join(f"{name} {percent(value)} %" for name, value in found.items())
        tables.append(f"end tasks ({len(scores.endtasks['tasks'])}): {told}")
    if tasks := scores.answers.get("tasks", {}):
        told = ", ".join(f"{name} {percent(value)} %" for name, value in scores.answers["metrics"].items())
        tables.append(f"answers to {len(tasks)} tasks, in %{': ' * bool(told)}{told}")
        tables.append(shorten_table(list(tasks), format_answers(scores)))
    probes = [
        f"{describe_task(name, task)} {decimals(found[1])} (base {format_known(task['values'][0], decimals)})"
        for name, task in scores.probes.get("tasks", {}).items()
        if (found := last_value(task))
    ]
    tables += [f"probes: {few(probes, between=', ')}"] * bool(probes)
    texts = f"perplexity on {len(pick_ends(len(scores.domains)))} of {len(scores.domains)} test texts:"
    return "\n\n".join([f"{label(scores.run)}, seed {scores.run['seed']}, {scores.state}; {texts}", *tables])


def shorten_table(names: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table with a column per name as text; of many rows and columns the first and last."""
    columns = pick_ends(len(names))
    head = ["after", *(shorten(names[column], width=min(24, 86 // len(columns) - 2)) for column in columns)]
    rows = [cells[row] for row in pick_ends(len(cells))]
    rows = [[shorten(row[0], width=12), *(row[1 + column] for column in columns)] for row in rows]
    return align_columns(Block(head=head, cells=rows))


def format_known(value: float | None, show: Show) -> str:
    """A dash where the value is missing."""
    return "–" if value is None or isnan(value) else show(value)


def format_rows(names: Sequence[str], values: np.ndarray, show: Show, sds: np.ndarray | None = None) -> Cells:
    """Each row's name and its values [row, column], with their deviations where these are known."""
    rows = zip(names, values.tolist(), strict=True)
    cells = [[name, *(format_known(value, show) for value in row)] for name, row in rows]
    for row, column in np.argwhere(np.isfinite(sds)).tolist() if sds is not None else ():
        cells[row][1 + column] += f" ± {show(sds[row, column])}"
    return cells


def format_matrix(scores: Scores) -> Cells:
    """The rows of the matrix, as perplexities."""
    with np.errstate(over="ignore"):
        return format_rows(scores.rows, np.exp(scores.matrix), perplexity)


def format_metric(scores: Scores, name: str) -> list[str]:
    """The cells of METRIC_HEAD; dashes where no term was measured, the count of terms if some are missing."""
    metric, about = scores.metrics[name], METRICS[name][:2]
    terms, bounds, medians = metric.get("terms"), metric.get("interval", {}), metric.get("median")
    name += f" ({terms[0]:,} of {terms[1]:,})" if terms else ""
    if terms and not terms[0]:
        return [name, *about, *["–"] * 4]
    cells = [
        show(metric[unit]) + format_interval(*bounds.get(unit, (None, None)), show)
        for unit, show in FORMATS.items()
    ]
    middle = ", ".join(show(medians[unit]) for unit, show in FORMATS.items()) if medians else "–"
    return [name, *about, *cells, middle]


def show_run(scores: Scores) -> Block:
    run, growth, numerics = scores.run, scores.growth, scores.numerics
    stored = megabytes(scores.stored[-1] if scores.stored else 0)
    stored += "" if growth is None else f", {megabytes(growth)} more with each domain"
    skipped = [f"{count} of {row}" for row, count in zip(scores.rows, scores.skipped, strict=False) if count]
    spikes = [
        f"{row}: {each[0]:.0f}, first at step {each[1]:.0f}, {each[2]:.4g} against a median of {each[3]:.4g}"
        for row, each in zip(scores.rows, scores.spikes, strict=False)
        if each
    ]
    cells = {
        "method": label(run),
        "model": f"{run['model']} ({run['objective']})",
        "perplexity": describe_conditions(conditions(scores)),
        "order": few(run["order"]),
        "domains were added after": few([scores.rows[number] for number in scores.grown]),
        "seed": str(run["seed"]),
        "state": f"{scores.state}; {scores.seconds:,.1f} seconds",
        "trained": f"{max(scores.trained, default=0):,} parameters",
        "stored beside the model": stored,
        "steps left out, loss or gradient not finite (on_nonfinite)": ", ".join(skipped),
        "losses that jumped": "; ".join(spikes),
        "domain at test time": "must be known" if scores.needs_domain else "need not be known",
        "load the model (from this folder)": scores.loading,
        "versions": ", ".join(f"{name} {version}" for name, version in scores.versions.items()),
    }
    if any(scores.leak):
        leak, random = max(each for each in scores.leak if each)
        told = f"at most {leak:.2g} of a stage's squared movement; {random:.2g} of a random one"
        cells["moved inside what is protected"] = told
    if numerics:
        attention = numerics["attention"].replace("auto", "default")
        cells["computed"] = f"in {numerics['precision']}, attention by {attention}"
    known = [[name, text] for name, text in cells.items() if text]
    return Block(head=["run", run["name"]], cells=known, words=2)


def show_matrix(scores: Scores) -> list[Block]:
    title = "Perplexity on each test text (column) after each stage (row)"
    line = "Framed: a domain's own stage. Colour: change against the base model."
    head, cells = ["after", *scores.domains], format_matrix(scores)
    folded, picture = f"{len(cells)} x {len(scores.domains)} perplexities", b""
    curves = Block()
    if scores.rows:
        picture = figures.draw_matrix(scores)
        drawn = figures.draw_text_curves(scores)
        curves = Block(title="Perplexity over the stages", picture=drawn, name="stages")
    how = {"title": title, "lines": [line], "head": head, "cells": cells, "folded": folded}
    return [Block(picture=picture, name="matrix", **how), curves]


def show_training(scores: Scores, folder: Path) -> Block:
    """Curves over the tokens of the whole run, and a line for each stage."""
    begins, stages = find_begins(scores), read_training(folder / "metrics.csv", scores)
    if not stages:
        return Block()
    cells = []
    for name, curves in stages.items():
        losses = curves["lm"].dropna() if "lm" in curves else pandas.Series(dtype=float)
        ends = [f"{losses.iloc[place]:.4f}" for place in (0, -1)] if len(losses) else ["–"] * 2
        medians = [
            show(curves[term].median()) if term in curves else "–"
            for term, show in (("grad_norm", "{:.3g}".format), ("tokens_per_s", "{:,.0f}".format))
        ]
        cells.append([name, str(len(losses)), *ends, *medians])
    lines = [
        "From metrics.csv, a point each `trainer.log_every_n_steps`; gradient norm: before clipping. Upright "
        "lines: a stage begins."
    ]
    missing = [name for name in scores.learned if name not in stages]
    lines += [f"Without a point: {few(missing, between=', ')}."] if missing else []
    head = ["stage", "points", "first loss", "last loss", "gradient norm, median", "tokens/s, median"]
    picture, folded = figures.draw_training(stages, begins), f"{len(stages)} stages"
    return Block(title="Training", lines=lines, picture=picture, head=head, cells=cells, folded=folded)


def find_begins(scores: Scores) -> dict[str, tuple[float, float]]:
    """Where each learned stage begins and ends, in tokens; all are equally long where these are unknown."""
    ends = np.cumsum(scores.seen if any(scores.seen) else [0, *[1] * (len(scores.rows) - 1)]).tolist()
    return {row: tuple(ends[at - 1 : at + 1]) for at, row in enumerate(scores.rows) if row in scores.learned}


def read_training(path: Path, scores: Scores) -> dict[str, pandas.DataFrame]:
    """`train/TERM/STAGE` of metrics.csv: by stage a column per term over the tokens of the whole run. Of two
    lines with one step the later counts, a damaged line is left out. Where a step's tokens are unknown, the
    stage's are spread over its steps."""
    how = {"names": ["step", "name", "value"], "on_bad_lines": "skip", "dtype": str}
    try:
        lines = pandas.read_csv(path, encoding_errors="replace", **how)
    except (OSError, ValueError):
        return {}
    for column in ("step", "value"):
        lines[column] = pandas.to_numeric(lines[column], errors="coerce")
    lines[["term", "stage"]] = lines["name"].str.extract(r"(?s)^train/([^/]+)/(.+)$")
    lines = lines.dropna().drop_duplicates(["stage", "step", "term"], keep="last")
    table, found = lines.pivot(index=["stage", "step"], columns="term", values="value"), {}
    for name, (begin, end) in find_begins(scores).items():
        if name in table.index:
            curves = table.loc[name].dropna(axis="columns", how="all")
            steps = curves.index.to_series()
            spread = (end - begin) * (steps + 1) / (steps.max() + 1)
            tokens = curves.pop("tokens").fillna(spread) if "tokens" in curves else spread
            found |= {name: curves.set_index(begin + tokens)} if len(curves.columns) else {}
    return found


def show_monitor(scores: Scores) -> Block:
    """What training did to other text, and what a budget of drift allowed and did."""
    if not scores.monitor:
        return Block()
    signed = partial(format_known, show=lambda value: f"{value:+.3f}".replace("-", "−"))
    head = ["stage", "steps", "its own text, nats", "most risen of the past", GENERAL, "ended early"]
    budgeted, cells = any(stage.get("budget") for stage in scores.monitor.values()), []
    for name, stage in scores.monitor.items():
        rises = {text: values[-1] - values[0] for text, values in stage["nll"].items()}
        own = [name] if name in rises else [text for text in rises if text != GENERAL]
        worst = max(sorted(rises.keys() - {*own, GENERAL}), key=rises.__getitem__, default="")
        general, ended = "–", stage["ended"] or "–"
        if GENERAL in rises:
            general = f"{signed(rises[GENERAL])} [{', '.join(map(signed, stage['rise'][GENERAL][-1]))}]"
        mean = signed(float(np.mean([rises[text] for text in own]))) if own else "–"
        most = f"{worst} {signed(rises[worst])}" if worst else "–"
        cells.append([name, str(stage["steps"][-1]), mean, most, general, ended])
        if budget := stage.get("budget"):
            at = stage["steps"].index(budget["kept"]) if budget["kept"] in stage["steps"] else -1
            drifts = [
                f"{bound} {signed(drift[at][1])} of {budget['allowed'][bound]:.3f}"
                for bound, drift in budget["drift"].items()
                if drift
            ]
            back = sum("back to" in act for act in budget["acts"])
            cells[-1].append("; ".join([*drifts, f"kept step {budget['kept']}", f"gone back {back} times"]))
        elif budgeted:
            cells[-1].append("–")
    head += ["Budget of drift: upper ends at the kept step, of what was allowed"] * budgeted
    lines = [
        "Change of validation losses since the first evaluation of each stage; of the general text with its "
        "95 % interval (bootstrap over documents)."
    ]
    picture, folded = figures.draw_monitor(scores), f"{len(cells)} stages"
    how = {"title": "Other text while each domain is learned", "name": "monitor", "picture": picture}
    return Block(lines=lines, head=head, cells=cells, folded=folded, **how)


def show_parts(scores: Scores) -> Block:
    """Which parts of the model scored each text, by their mean weights."""
    if not any(scores.parts):
        return Block()

    def mix(weights: Mapping[str, float]) -> str:
        heaviest = sorted(weights, key=lambda name: weights[name], reverse=True)[:3]
        told = (f"{name} {weights[name]:.2f}" if len(weights) > 1 else name for name in heaviest)
        return ", ".join(told) + ", …" * (len(weights) > 3)

    title = "Parts of the model that scored each text"
    line = "The part of which domain, or the base; with their mean weights where several were mixed."
    picture = figures.draw_parts(scores) if len(scores.rows) > 1 else b""
    cells = [
        [row, *(mix(parts.get(text, {})) for text in scores.domains)]
        for row, parts in zip(scores.rows, scores.parts, strict=True)
    ]
    head, folded = ["after", *scores.domains], f"{len(cells)} x {len(scores.domains)} texts"
    how = {"head": head, "cells": cells, "words": len(head), "folded": folded}
    return Block(title=title, lines=[line], picture=picture, name="parts", **how)


def show_metrics(scores: Scores) -> Block:
    lines = [
        "L[i][j]: loss on test text j after i stages (0: the base), N domains, n stages learned, g general "
        "text. In brackets: 95 % bootstrap over documents."
    ]
    if any("terms" in metric for metric in scores.metrics.values()):
        lines.append("(n of m): the mean of the n terms that were measured (eval.rows, eval.columns).")
    cells = [format_metric(scores, name) for name in scores.metrics]
    return Block(title="Metrics", lines=lines, head=METRIC_HEAD, cells=cells, words=3, chosen=(0, 1, 3, 4, 5))


def show_similarity(scores: Scores) -> Block:
    """The similarity of the domains' texts, where it decided their order."""
    if not (given := scores.similarity):
        return Block()
    matrix, told = np.array(given["matrix"]), "One domain: there is nothing to compare it with."
    if len(matrix) > 1:
        neighbours, pairs = np.diagonal(matrix, 1).mean(), matrix[~np.eye(len(matrix), dtype=bool)].mean()
        told = f"Mean cosine of domains learned one after another: {neighbours:.2f}; of any two: {pairs:.2f}."
    title = "Similarity of the domains' texts, in the order learned"
    cells = format_rows(given["names"], np.column_stack([matrix, given["general"]]), "{:.2f}".format)
    lines, picture = [f"{told} Embedding: {given['embedding']}."], figures.draw_similarity(scores, told)
    how = {"picture": picture, "name": "similarity", "folded": f"{len(cells)} x {len(cells)} cosines"}
    return Block(title=title, lines=lines, head=["", *given["names"], GENERAL], cells=cells, **how)


def show_generated(folder: Path) -> Block:
    """How much text was generated before each stage, and how it begins."""
    cells, show = [], lambda nats: perplexity(exp(nats))
    for path in sorted(folder.glob("generated/*/facts.json")):
        for text, facts in json.loads(path.read_text(encoding="utf-8")).items():
            counts = [f"{facts[name]:,}" for name in ("tokens", "real", "texts")]
            own, theirs = (format_known(facts[name], show) for name in ("nll", "nll_left_out"))
            stage = path.parent.name.partition("-")[2]
            cells.append([stage, text, facts["excerpt"], *counts, own, f"{facts['left_out']:,}", theirs])
    line = (
        "Written by the model before the stage and replayed in it (generated/STAGE/TEXT.jsonl). Real: tokens "
        "of kept beginnings. Left out: the highest perplexities, and what is no example of its task."
    )
    head = ["stage", "in place of", "begins", "tokens", "real", "texts", "perplexity", "left out", "theirs"]
    how = {"head": head, "cells": cells, "words": 3, "folded": f"{len(cells)} texts of past domains"}
    return Block(title="Generated text", lines=[line] * bool(cells), **how)


def show_endtasks(scores: Scores, folder: Path) -> list[Block]:
    """The end tasks' metrics, their scores in each metric, and what became of the predictions."""
    if not (given := scores.endtasks):
        return []
    tasks, seeds = given["tasks"], few([*map(str, given["seeds"])], between=", ")
    lines = [
        "A[t][u]: test score on the end task of domain u after fine-tuning the model of stage t, a mean over "
        "seeds; n: the last stage in which the task was measured. All scores and shares are in %.",
        f"{len(tasks)} tasks, seeds {seeds}, endtask.when={given['when']}, {given['seconds']:,.1f} seconds.",
    ]
    found = task_metrics.summarise_endtasks(given, scores.rows)
    cubes = {name: task_metrics.cube(given, kind) for kind, name in ENDTASK_NAMES.items()}
    own, tables = task_metrics.headline(given), []
    for cube in (own, *cubes.values()):
        means, spreads = task_metrics.over_seeds(cube), task_metrics.sd_over_seeds(cube)
        measured = np.flatnonzero(np.isfinite(means).any(1))
        rows = [scores.rows[row] for row in measured]
        tables.append(format_rows(rows, means[measured], percent, spreads[measured]))
    picture, head = figures.draw_endtasks(scores) if len(tables[0]) > 1 else b"", ["after", *tasks]
    names = name_measures({task: ENDTASK_NAMES[given["metric"][task]] for task in tasks})
    try:
        moved = transitions_of(folder, scores.rows, given)
        changes = [[task, *format_moved(counts)] for task, counts in moved.items()]
        about = [MOVED] * bool(moved)
    except ValueError as error:
        changes, about = [], [str(error)]
    title = "End tasks: what became of the predictions"
    moved_head = ["task", "predictions", "accuracy then", "accuracy now", *MOVED_HEAD]
    return [
        summarize_tasks("End tasks", lines, found, task_metrics.ENDTASK_MEANINGS, {}),
        Block(title=f"End tasks: {names}", picture=picture, name="endtasks", head=head, cells=tables[0]),
        *(Block(folded=name, head=head, cells=cells) for name, cells in zip(cubes, tables[1:], strict=True)),
        Block(title=title, lines=about, head=moved_head, cells=changes),
    ]


def name_measures(measures: Mapping[str, str]) -> str:
    """The measure of all tasks, or of each."""
    if len(set(measures.values())) == 1:
        return next(iter(measures.values()))
    return f"each in its own: {few([f'{task} {name}' for task, name in measures.items()], between=', ')}"


def summarize_tasks(
    title: str,
    lines: Sequence[str],
    found: Mapping[str, float],
    meanings: Mapping[str, tuple[str, str]],
    intervals: Mapping[str, Sequence[float]],
) -> Block:
    """Metrics over all tasks, shares of 1."""
    cells = [
        [name, *meanings[name], percent(value) + format_interval(*intervals.get(name, (None, None)), percent)]
        for name, value in found.items()
    ]
    head = ("number", "meaning", "formula", "%")
    return Block(title=title, lines=lines, head=head, cells=cells, words=3, chosen=(0, 1, 3))


def format_moved(counts: Mapping[str, float]) -> list[str]:
    """The number of examples, both scores, and MOVED_HEAD."""
    cells = [f"{counts['examples']:,}", percent(counts["before"]), percent(counts["after"])]
    for name in ("forgotten", "gained"):
        shares = counts[f"{name}_share"], counts.get(f"{name}_adjusted")
        cells += [f"{counts[name]:,}", *(format_known(share, percent) for share in shares)]
    return cells


def show_answers(scores: Scores, folder: Path) -> list[Block]:
    """The matrix of the answers' scores, its metrics, every measure of the last model, and what became of the
    examples."""
    if not (tasks := scores.answers.get("tasks")):
        return []
    names = name_measures({name: MEASURE_NAMES[head_of(task)] for name, task in tasks.items()})
    lines = [
        "a[i][j]: score on the held-out examples of task j after i stages, without fine-tuning, in %. [95 % "
        "bootstrap over the examples of each task].",
        f"answers.when={scores.answers['when']}, {scores.answers['seconds']:,.1f} seconds.",
    ]
    there = [name for name in MEASURE_NAMES if any(name in task["measures"] for task in tasks.values())]
    final = {(each.text, each.metric): each.value for each in list_answers(scores)}  # the last row counts
    last = [[task, *(format_known(final.get((task, name)), percent) for name in there)] for task in tasks]
    found = list(follow_answers(folder, scores.rows, scores.answers))
    moves = [each for each in found if isinstance(each, Moved)]
    changes = [
        [each.task, each.since, *format_moved(each.counts), f"{each.counts['examples'] - changed:,}"]
        for each in moves
        for changed in [each.counts["forgotten"] + each.counts["gained"]]
    ]
    gone = [str(each) for each in found if isinstance(each, FileNotFoundError)]
    about = [MOVED] * bool(moves)
    about += [f"Files of answers that are missing: {len(gone)}, like {gone[0]}."] if gone else []
    about += [str(each) for each in found if isinstance(each, ValueError)]
    title = f"Answers to each task (column) after each stage (row): {names}"
    matrix = {
        "title": title,
        "lines": ["Framed: a task's own stage."],
        "picture": figures.draw_answers(scores),
    }
    found, measures = scores.answers["metrics"], ["task", *(MEASURE_NAMES[name] for name in there)]
    moved = {"title": "Answers: what became of the examples"}
    moved["head"] = ["task", "since", "examples", "score then", "score now", *MOVED_HEAD, "stayed"]
    moved["folded"] = f"{len(moves)} comparisons" if len(moves) > 2 * FEW else ""
    return [
        Block(name="answers", head=["after", *tasks], cells=format_answers(scores), **matrix),
        summarize_tasks(
            "Scores",
            lines,
            found,
            {name: told[1:] for name, told in task_metrics.ANSWER_METRICS.items()},
            scores.answers["intervals"],
        ),
        Block(title="Answers of the last model", head=measures, cells=last, folded=f"{len(last)} tasks"),
        Block(lines=about, cells=changes, words=2, **moved),
    ]


def format_answers(scores: Scores) -> Cells:
    """The rows in which tasks were evaluated, and what a guess and the most frequent answer reach."""
    tasks, matrix = scores.answers["tasks"], matrix_of(scores.answers)
    asked = np.flatnonzero(np.isfinite(matrix).any(1))
    cells = format_rows([scores.rows[row] for row in asked], matrix[asked], percent)
    levels = {name: [task[name] for task in tasks.values()] for name in ("chance", "majority")}
    known = {name: values for name, values in levels.items() if any(value is not None for value in values)}
    shares = np.array([*known.values()], float).reshape(-1, len(tasks))
    return cells + format_rows(list(known), shares, percent)


def show_probes(scores: Scores) -> Block:
    """Each task of the harness in every row that was measured, and chance where the harness gives it."""
    if not scores.probes:
        return Block()
    tasks = scores.probes["tasks"]
    values, errors = (
        pandas.DataFrame({name: pandas.Series(task[kind], dtype=float) for name, task in tasks.items()})
        for kind in ("values", "errors")
    )
    cells = format_rows(scores.rows[: len(values)], values.to_numpy(), decimals, errors.to_numpy())
    cells = [row for row in cells if set(row[1:]) != {"–"}]
    cells.append(["chance", *(format_known(task["chance"], decimals) for task in tasks.values())])
    facts = [
        f"{name}: {task['examples']:,} examples"
        + f", {task['truncated']:,} or more requests cut from the left" * bool(task["truncated"])
        + ", lower is better" * (not task["higher"])
        for name, task in tasks.items()
    ]
    line = (
        f"Tasks of the lm-evaluation-harness {scores.probes['harness']}, in its own units; ± standard error "
        "over the examples. Last row: what a guess reaches."
    )
    head = ["after", *(describe_task(name, task) for name, task in tasks.items())]
    return Block(title="Probes", lines=[line, few(facts, between="; ") + "."], head=head, cells=cells)


def show_costs(scores: Scores) -> Block:
    """What each stage cost, and the run."""
    stages: dict[str | None, dict[str, float | None]] = {}
    for record in list_costs(scores):
        stages.setdefault(record.row, {})[record.metric] = record.value
    whole, needed = stages.pop(None), ("tokens", "flops", "memory", "trained", "stored")
    noted = {str(row): costs for row, costs in stages.items() if None not in map(costs.get, needed)}
    if not noted:
        return Block()
    cells = [
        [row, *(format_known(costs[cost], show) for cost, show in COST_FORMATS.values())]
        for row, costs in [*noted.items(), ("whole run", whole)]
    ]
    line = (
        "Tokens: with replayed ones. FLOPs: counted, of all passes but those of scoring and end tasks. "
        "Memory: peak, on a GPU allocated, on a CPU resident. Last line: the whole run, or the largest."
    )
    folded = f"{len(noted)} stages" if len(noted) > 2 * FEW else ""
    return Block(title="Compute", lines=[line], head=["after", *COST_FORMATS], cells=cells, folded=folded)


def show_diagnostics(scores: Scores, folder: Path) -> list[Block]:
    """What a method keeps of each domain: means by part of the model, and how far domains share it."""
    stages = {row: read_stage(folder, number) for number, row in enumerate(scores.rows) if number}
    blocks = []
    for kind, title in DIAGNOSTICS.items():
        means = pandas.DataFrame(
            {
                row: {
                    name.partition("/")[2]: float(values.mean())
                    for name, values in arrays.items()
                    if name.startswith(f"{kind}/") and values.size and np.isfinite(values).all()
                }
                for row, arrays in stages.items()
            }
        ).dropna(axis="columns", how="all")
        if means.size:
            more, picture = len(means) - MAX_PARTS, figures.draw_diagnostics(means[:MAX_PARTS], title)
            lines = [f"{more} more parts are not shown."] if more > 0 else []
            blocks.append(Block(title=title, lines=lines, picture=picture, name=f"inside_{kind}"))
    if shared := measure_overlap(folder, scores):
        maps = {title: HeatMap(values, names, names) for title, (names, values) in shared.items()}
        picture = draw_heat_maps(maps, label="similarity of two domains")
        blocks.append(Block(title="What domains share inside the model", picture=picture, name="overlap"))
    line = (
        "Means over the units of each part of the model, from `diagnostics/`. Similarity of two domains: the "
        "soft Jaccard index of what the method chose for each."
    )
    return [Block(title="Inside the model", lines=[line]), *blocks] if blocks else []


def show_texts(scores: Scores) -> Block:
    cells = []
    for name, *sizes in zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True):
        facts = [scores.texts.get(name, {}).get(fact, "–") for fact in ("documents", "digest")]
        told = [
            ", ".join(f"{k} {v}" for k, v in f.items()) if isinstance(f, Mapping) else str(f) for f in facts
        ]
        cells.append([name, *map("{:,}".format, sizes), *told])
    head = ["text", "tokens", "scored", "bytes", "documents", "digest"]
    return Block(title="Test texts", head=head, cells=cells, folded=f"{len(cells)} texts")
