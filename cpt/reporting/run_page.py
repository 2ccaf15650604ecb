"""The page of one run, from its folder alone, and its scores for a console.

`python -m cpt.report FOLDER [FOLDER...]` compares runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from cpt.data.sources.base import GENERAL
from cpt.evaluation import task_metrics
from cpt.evaluation.metrics import METRICS, UNITS
from cpt.evaluation.predictions import Moved, follow_answers, transitions_of
from cpt.evaluation.scores import Scores, conditions, describe_conditions
from cpt.evaluation.task_metrics import describe_task, head_of, last_value, matrix_of
from cpt.reporting import figures, frames
from cpt.reporting.compare import measure_overlap
from cpt.reporting.drawing import HeatMap, draw_heat_maps
from cpt.reporting.frames import Show, decimals, few, format_known, megabytes, percent, perplexity, signed
from cpt.reporting.page import LEGENDS, Block, align_columns, write_page

Cells = list[list[str]]
FORMATS = dict(zip(UNITS, (decimals, perplexity, decimals), strict=True))
METRIC_HEAD = ("metric", "meaning", "formula", "nats", "perplexity", "bits per byte")
METRIC_HEAD += ("medians: nats, perplexity, bits per byte",)
ENDTASK_NAMES = {"macro_f1": "macro-F1", "micro_f1": "micro-F1", "accuracy": "accuracy"}
MEASURE_NAMES = {
    "accuracy_ranked": "accuracy of the likeliest choice", "exact_match": "exact match of what is written",
    "invalid": "written, but none of the choices", "accuracy_valid": "exact match of those that are",
    "accuracy_ranked_mean": "likeliest choice by its mean token", "rouge_l": "ROUGE-L",
    "edit_similarity": "edit similarity", "sari": "SARI",
    "first_character": "first character of what is written",
}  # fmt: skip
MOVED_HEAD = ("1→0", "share", "beyond chance", "0→1", "share", "beyond chance")
WHOLE, TENTH = "{:,.0f}".format, "{:,.1f}".format
COST_FORMATS = {  # column: cost of cpt.reporting.frames, format
    "tokens": ("tokens", WHOLE), "FLOPs": ("flops", "{:.3g}".format), "learn, s": ("seconds_learn", TENTH),
    "score, s": ("seconds_score", TENTH), "end tasks, s": ("seconds_endtasks", TENTH),
    "peak memory": ("memory", megabytes), "trained": ("trained", WHOLE), "stored": ("stored", megabytes),
}  # fmt: skip


def write_report(folder: Path, scores: Scores | None = None) -> Path:
    """Writes report.md and report.html into a run folder, of `scores` or its scores.json."""
    folder = Path(folder)
    scores = scores or Scores.load(folder / "scores.json")
    answers = show_answers(scores, folder)
    blocks = [
        show_run(scores),
        *answers[:1],
        *show_matrix(scores),
        show_training(scores, folder),
        show_monitor(scores),
        show_parts(scores),
        show_similarity(scores),
        show_overlap(scores, folder),
        show_metrics(scores),
        *answers[1:],
        show_generated(folder),
        *show_endtasks(scores, folder),
        show_probes(scores),
        show_costs(scores),
        show_texts(scores),
    ]
    if (config := folder / "config.yaml").exists():
        code = config.read_text(encoding="utf-8", errors="replace")
        blocks.append(Block(title="Config", code=code, folded=f"config.yaml, digest {scores.config_digest}"))
    title = f"{scores.run['name']}: {frames.label(scores.run)}"
    return write_page(blocks, title=title, stem=folder / "report")


def format_scores(scores: Scores) -> str:
    """For a console of 100 characters: perplexities and headlines; of many domains the first and last."""

    def pick_ends(size: int) -> list[int]:
        return list(range(size)) if size <= 9 else [*range(4), *range(size - 4, size)]

    def shorten_table(names: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
        columns = pick_ends(len(names))
        width = min(24, 86 // len(columns) - 2)
        rows = [cells[row] for row in pick_ends(len(cells))]
        rows = [[frames.shorten(row[0], width=12), *(row[1 + column] for column in columns)] for row in rows]
        head = ["after", *(frames.shorten(names[column], width=width) for column in columns)]
        return align_columns(Block(head=head, cells=rows))

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
    about = f"{frames.label(scores.run)}, seed {scores.run['seed']}, {scores.state}"
    return "\n\n".join([f"{about}; {texts}", *tables])


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
    cells, middles = [], []
    for unit, show in FORMATS.items():
        interval = frames.format_interval(*bounds.get(unit, (None, None)), show)
        cells.append(format_known(metric[unit], show) + interval)
        middles += [format_known(medians[unit], show)] if medians else []
    return [name, *about, *cells, ", ".join(middles) or "–"]


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
    leak, random = max((each for each in scores.leak if each), default=(0, 0))
    cells = {
        "method": frames.label(run),
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
        "moved inside what is protected": any(scores.leak)
        and f"at most {leak:.2g} of a stage's squared movement; {random:.2g} of a random one",
        "computed": numerics
        and f"in {numerics['precision']}, attention by {numerics['attention'].replace('auto', 'default')}",
        "domain at test time": "must be known" if scores.needs_domain else "need not be known",
        "load the model (from this folder)": scores.loading,
        "versions": ", ".join(f"{name} {version}" for name, version in scores.versions.items()),
    }
    known = [[name, text] for name, text in cells.items() if text]
    return Block(head=["run", run["name"]], cells=known, words=2)


def show_matrix(scores: Scores) -> list[Block]:
    if not scores.rows:
        return []
    cells, picture = format_matrix(scores), figures.draw_text_curves(scores)
    matrix = Block(
        title="Perplexity on each test text (column) after each stage (row)",
        lines=[LEGENDS["matrix"]],
        picture=figures.draw_matrix(scores),
        name="matrix",
        head=["after", *scores.domains],
        cells=cells,
        folded=f"{len(cells)} x {len(scores.domains)} perplexities",
    )
    return [matrix, Block(title="Perplexity over the stages", picture=picture, name="stages")]


def show_training(scores: Scores, folder: Path) -> Block:
    """Curves over the tokens of the whole run, and a line for each stage."""
    begins, stages = find_begins(scores), read_training(folder / "metrics.csv", scores)
    if not stages:
        return Block()
    cells = []
    for name, curves in stages.items():
        losses = curves["lm"].dropna() if "lm" in curves else pandas.Series(dtype=float)
        ends = [f"{losses.iloc[place]:.4f}" for place in (0, -1)] if len(losses) else ["–"] * 2
        norm, speed = (
            curves[term].median() if term in curves else None for term in ("grad_norm", "tokens_per_s")
        )
        medians = [format_known(norm, "{:.3g}".format), format_known(speed, WHOLE)]
        cells.append([name, str(len(losses)), *ends, *medians])
    missing = [name for name in scores.learned if name not in stages]
    lines = [LEGENDS["training"], *[f"Without a point: {few(missing, between=', ')}."] * bool(missing)]
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
    budgeted, cells = any(stage.get("budget") for stage in scores.monitor.values()), []
    for name, stage in scores.monitor.items():
        rises = {text: values[-1] - values[0] for text, values in stage["nll"].items()}
        own = [name] if name in rises else [text for text in rises if text != GENERAL]
        worst = max(sorted(rises.keys() - {*own, GENERAL}), key=rises.__getitem__, default="")
        general = "–"
        if GENERAL in rises:
            bounds = ", ".join(format_known(bound, signed) for bound in stage["rise"][GENERAL][-1])
            general = f"{format_known(rises[GENERAL], signed)} [{bounds}]"
        mean = format_known(float(np.mean([rises[text] for text in own])), signed) if own else "–"
        most = f"{worst} {format_known(rises[worst], signed)}" if worst else "–"
        cells.append([name, str(stage["steps"][-1]), mean, most, general, stage["ended"] or "–"])
        if budget := stage.get("budget"):
            at = stage["steps"].index(budget["kept"]) if budget["kept"] in stage["steps"] else -1
            drifts = []
            for bound, drift in ((bound, drift) for bound, drift in budget["drift"].items() if drift):
                rise = format_known(drift[at][1], signed)
                drifts.append(f"{bound} {rise} of {budget['allowed'][bound]:.3f}")
            back = sum("back to" in act for act in budget["acts"])
            cells[-1].append("; ".join([*drifts, f"kept step {budget['kept']}", f"gone back {back} times"]))
        elif budgeted:
            cells[-1].append("–")
    head = ["stage", "steps", "its own text, nats", "most risen of the past", GENERAL, "ended early"]
    head += ["Budget of drift: upper ends at the kept step, of what was allowed"] * budgeted
    how = {"name": "monitor", "lines": [LEGENDS["monitor"]], "picture": figures.draw_monitor(scores)}
    how |= {"title": "Other text while each domain is learned", "folded": f"{len(cells)} stages"}
    return Block(head=head, cells=cells, **how)


def show_parts(scores: Scores) -> Block:
    """Which parts of the model scored each text, by their mean weights."""
    if not any(scores.parts):
        return Block()

    def mix(weights: Mapping[str, float]) -> str:
        told = [f"{name} {w:.2f}" for name, w in sorted(weights.items(), key=lambda each: -each[1])[:3]]
        return ", ".join(told if len(weights) > 1 else weights) + ", …" * (len(weights) > 3)

    rows = zip(scores.rows, scores.parts, strict=True)
    cells = [[row, *(mix(parts.get(text, {})) for text in scores.domains)] for row, parts in rows]
    how = {"head": ["after", *scores.domains], "cells": cells, "words": 1 + len(scores.domains)}
    how |= {"folded": f"{len(cells)} x {len(scores.domains)} texts", "name": "parts"}
    how["picture"] = figures.draw_parts(scores) if len(scores.rows) > 1 else b""
    return Block(title="Parts of the model that scored each text", lines=[LEGENDS["parts"]], **how)


def show_metrics(scores: Scores) -> Block:
    some = any("terms" in metric for metric in scores.metrics.values())
    cells = [format_metric(scores, name) for name in scores.metrics]
    how = {"head": METRIC_HEAD, "cells": cells, "words": 3, "chosen": (0, 1, 3, 4, 5)}
    return Block(title="Metrics", lines=[LEGENDS["metrics"], *[LEGENDS["terms"]] * some], **how)


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
    cells = []
    for path in sorted(folder.glob("generated/*/facts.json")):
        for text, facts in json.loads(path.read_text(encoding="utf-8")).items():
            tokens, real, texts, left = (f"{facts[n]:,}" for n in ("tokens", "real", "texts", "left_out"))
            nats = ("nll", "nll_left_out")
            own, theirs = (format_known(facts[n], lambda x: perplexity(exp(x))) for n in nats)
            stage = path.parent.name.partition("-")[2]
            cells.append([stage, text, facts["excerpt"], tokens, real, texts, own, left, theirs])
    head = ["stage", "in place of", "begins", "tokens", "real", "texts", "perplexity", "left out", "theirs"]
    how = {"head": head, "cells": cells, "words": 3, "folded": f"{len(cells)} texts of past domains"}
    return Block(title="Generated text", lines=[LEGENDS["generated"]], **how) if cells else Block()


def show_endtasks(scores: Scores, folder: Path) -> list[Block]:
    """The end tasks' scores, their metrics, and what became of the predictions."""
    if not (given := scores.endtasks):
        return []
    tasks, tables = given["tasks"], []
    cubes = {name: task_metrics.cube(given, kind) for kind, name in ENDTASK_NAMES.items()}
    for cube in (task_metrics.headline(given), *cubes.values()):
        means, spreads = task_metrics.over_seeds(cube), task_metrics.sd_over_seeds(cube)
        measured = np.flatnonzero(np.isfinite(means).any(1))
        rows = [scores.rows[row] for row in measured]
        tables.append(format_rows(rows, means[measured], percent, spreads[measured]))
    try:
        changes, failed = [], []
        for task, counts in transitions_of(folder, scores.rows, given).items():
            changes.append([task, *format_moved(counts)])
    except ValueError as error:
        failed.append(str(error))
    names, head = {task: ENDTASK_NAMES[given["metric"][task]] for task in tasks}, ["after", *tasks]
    own = {"name": "endtasks", "cells": tables[0], "head": head}
    own["picture"] = figures.draw_endtasks(scores) if len(tables[0]) > 1 else b""
    own["title"] = f"End tasks: {name_measures(names)}"
    moved = {"title": "End tasks: what became of the predictions", "cells": changes}
    moved |= {"head": ["task", "predictions", "accuracy then", "accuracy now", *MOVED_HEAD]}
    moved |= {"lines": [LEGENDS["moved"]] * bool(changes) + failed}
    found = task_metrics.summarise_endtasks(given, scores.rows)
    told = f"{len(tasks)} tasks, seeds {few([*map(str, given['seeds'])], between=', ')}, "
    return [
        Block(**own),
        *(Block(folded=name, head=head, cells=cells) for name, cells in zip(cubes, tables[1:], strict=True)),
        show_task_metrics("End tasks", "endtask", given, found, told=told),
        Block(**moved),
    ]


def show_answers(scores: Scores, folder: Path) -> list[Block]:
    """The matrix of the answers' scores, its metrics, every measure of the last model, and what became of the
    examples."""
    if not (tasks := scores.answers.get("tasks")):
        return []
    names = name_measures({name: MEASURE_NAMES[head_of(task)] for name, task in tasks.items()})
    there = [name for name in MEASURE_NAMES if any(name in task["measures"] for task in tasks.values())]
    final = {
        (each.text, each.metric): each.value for each in frames.list_answers(scores)
    }  # the last row counts
    last = [[task, *(format_known(final.get((task, name)), percent) for name in there)] for task in tasks]
    found, changes = list(follow_answers(folder, scores.rows, scores.answers)), []
    for each in (each for each in found if isinstance(each, Moved)):
        stayed = each.counts["examples"] - each.counts["forgotten"] - each.counts["gained"]
        changes.append([each.task, each.since, *format_moved(each.counts), f"{stayed:,}"])
    gone = [str(each) for each in found if isinstance(each, FileNotFoundError)]
    about = [LEGENDS["moved"]] * bool(changes)
    about += [f"Files of answers that are missing: {len(gone)}, like {gone[0]}."] if gone else []
    about += [str(each) for each in found if isinstance(each, ValueError)]
    matrix = {"title": f"Answers to each task (column) after each stage (row): {names}", "name": "answers"}
    matrix["picture"] = figures.draw_tasks(matrix_of(scores.answers), scores.rows, list(tasks), kind="Scores")
    matrix |= {"lines": ["Framed: a task's own stage."], "head": ["after", *tasks]}
    head = ["task", *(MEASURE_NAMES[name] for name in there)]
    moved = {"title": "Answers: what became of the examples", "lines": about, "cells": changes, "words": 2}
    moved["head"] = ["task", "since", "examples", "score then", "score now", *MOVED_HEAD, "stayed"]
    moved["folded"] = f"{len(changes)} comparisons" if len(changes) > 2 * frames.FEW else ""
    return [
        Block(cells=format_answers(scores), **matrix),
        show_task_metrics("Scores", "answers", scores.answers, scores.answers["metrics"]),
        Block(title="Answers of the last model", head=head, cells=last, folded=f"{len(last)} tasks"),
        Block(**moved),
    ]


def name_measures(measures: Mapping[str, str]) -> str:
    """The measure of all tasks, or of each."""
    each = few([f"{task} {name}" for task, name in measures.items()], between=", ")
    return f"each in its own: {each}" if len(set(measures.values())) > 1 else next(iter(measures.values()))


def show_task_metrics(
    title: str, kind: str, given: Mapping[str, Any], found: Mapping[str, float], *, told: str = ""
) -> Block:
    """Metrics over all tasks, shares of 1, of `endtask` or `answers`."""
    lines = [LEGENDS[kind], f"{told}{kind}.when={given['when']}, {given['seconds']:,.1f} seconds."]
    answers = {name: told[1:] for name, told in task_metrics.ANSWER_METRICS.items()}
    meanings, cells = task_metrics.ENDTASK_MEANINGS | answers, []
    for name, value in found.items():
        bounds = given.get("intervals", {}).get(name, (None, None))
        cells.append([name, *meanings[name], percent(value) + frames.format_interval(*bounds, percent)])
    head = ("number", "meaning", "formula", "%")
    return Block(title=title, lines=lines, head=head, cells=cells, words=3, chosen=(0, 1, 3))


def format_moved(counts: Mapping[str, float]) -> list[str]:
    """The number of examples, both scores, and MOVED_HEAD."""
    cells = [f"{counts['examples']:,}", percent(counts["before"]), percent(counts["after"])]
    for name in ("forgotten", "gained"):
        shares = counts[f"{name}_share"], counts.get(f"{name}_adjusted")
        cells += [f"{counts[name]:,}", *(format_known(share, percent) for share in shares)]
    return cells


def format_answers(scores: Scores) -> Cells:
    """The rows in which tasks were evaluated, and what a guess and the most frequent answer reach."""
    tasks, matrix = scores.answers["tasks"], matrix_of(scores.answers)
    asked = np.flatnonzero(np.isfinite(matrix).any(1))
    cells = format_rows([scores.rows[row] for row in asked], matrix[asked], percent)
    for name in ("chance", "majority"):
        levels = np.array([[task[name] for task in tasks.values()]], float)
        cells += format_rows([name], levels, percent) if np.isfinite(levels).any() else []
    return cells


def show_probes(scores: Scores) -> Block:
    """Each task of the harness in every row that was measured, and chance where the harness gives it."""
    if not scores.probes:
        return Block()
    tasks = scores.probes["tasks"]
    values, errors = (
        np.array(list(itertools.zip_longest(*(task[kind] for task in tasks.values()))), float)
        for kind in ("values", "errors")
    )
    cells = format_rows(scores.rows[: len(values)], values, decimals, errors)
    cells = [row for row in cells if set(row[1:]) != {"–"}]
    cells.append(["chance", *(format_known(task["chance"], decimals) for task in tasks.values())])
    facts = []
    for name, task in tasks.items():
        cut = f", {task['truncated']:,} or more requests cut from the left" * bool(task["truncated"])
        facts.append(
            f"{name}: {task['examples']:,} examples{cut}{', lower is better' * (not task['higher'])}"
        )
    lines = [LEGENDS["probes"].format(harness=scores.probes["harness"]), few(facts, between="; ") + "."]
    head = ["after", *(describe_task(name, task) for name, task in tasks.items())]
    return Block(title="Probes", lines=lines, head=head, cells=cells)


def show_costs(scores: Scores) -> Block:
    """What each stage cost, and the run."""
    stages: dict[str | None, dict[str, float | None]] = {}
    for each in frames.list_costs(scores):
        stages.setdefault(each.row, {})[each.metric] = each.value
    whole, needed = stages.pop(None), ("tokens", "flops", "memory", "trained", "stored")
    noted = {str(row): costs for row, costs in stages.items() if None not in map(costs.get, needed)}
    if not noted:
        return Block()
    cells = [
        [row, *(format_known(costs[cost], show) for cost, show in COST_FORMATS.values())]
        for row, costs in [*noted.items(), ("whole run", whole)]
    ]
    how = {
        "head": ["after", *COST_FORMATS],
        "folded": f"{len(noted)} stages" if len(noted) > 2 * frames.FEW else "",
    }
    return Block(title="Compute", lines=[LEGENDS["compute"]], cells=cells, **how)


def show_overlap(scores: Scores, folder: Path) -> Block:
    """How far domains share what a method keeps of them."""
    shared = measure_overlap(folder, scores)
    maps = {title: HeatMap(values, names, names) for title, (names, values) in shared.items()}
    picture = draw_heat_maps(maps, label="similarity of two domains") if maps else b""
    how = {"title": "What domains share inside the model", "name": "overlap", "lines": [LEGENDS["inside"]]}
    return Block(picture=picture, **how) if maps else Block()


def show_texts(scores: Scores) -> Block:
    cells = []
    for name, *sizes in zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True):
        facts = scores.texts.get(name, {})
        count = facts.get("documents", "–")
        split = [f"{k} {v}" for k, v in count.items()] if isinstance(count, Mapping) else [str(count)]
        cells.append([name, *map("{:,}".format, sizes), ", ".join(split), str(facts.get("digest", "–"))])
    head = ["text", "tokens", "scored", "bytes", "documents", "digest"]
    return Block(title="Test texts", head=head, cells=cells, folded=f"{len(cells)} texts")
