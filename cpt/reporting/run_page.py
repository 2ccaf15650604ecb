"""The page of one run, from its folder alone, and its scores for a console.

`python -m cpt.report FOLDER [FOLDER...]` compares runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pandas import DataFrame

from cpt.data.sources.base import GENERAL
from cpt.evaluation import task_metrics
from cpt.evaluation.metrics import METRICS, TITLES, UNITS
from cpt.evaluation.scores import Scores, conditions, describe_conditions
from cpt.evaluation.task_metrics import describe_task, head_of, last_value
from cpt.reporting import figures, frames
from cpt.reporting.drawing import HeatMap, Picture, draw_heat_maps
from cpt.reporting.frames import Show, decimals, few, find_matrices, format_known, megabytes, percent, signed
from cpt.reporting.load_runs import find_stages, read_training
from cpt.reporting.overlap import LARGEST_ROWS, measure_overlap, read_diagnostics, read_distributions
from cpt.reporting.page import LEGENDS, TEMPLATES, Block, align_columns, show_picture, write_page

Cells = list[list[str]]
FORMATS = dict(zip(UNITS, (decimals, frames.perplexity, decimals), strict=True))
METRIC_HEAD = ("metric", "meaning", "formula", "nats", "perplexity", "bits per byte")
TILES: dict[str, list[str]] = yaml.safe_load((TEMPLATES / "tiles.yaml").read_text(encoding="utf-8"))
WHOLE, TENTH = "{:,.0f}".format, "{:,.1f}".format
CONSOLE = ("CPT", "LC", "FG", "general_drift")
TILES_HEAD = ("", "mean", "95 % interval", "", "meaning")
COST_FORMATS = {  # column: cost of cpt.reporting.frames, format
    "tokens": ("tokens", WHOLE), "FLOPs": ("flops", "{:.3g}".format), "learn, s": ("seconds_learn", TENTH),
    "score, s": ("seconds_score", TENTH), "end tasks, s": ("seconds_endtasks", TENTH),
    "peak memory": ("memory", megabytes), "trained": ("trained", WHOLE), "stored": ("stored", megabytes),
}  # fmt: skip


def write_report(folder: Path, scores: Scores | None = None) -> Path:
    """Writes report.md and report.html into a run folder, of `scores` or its scores.json."""
    folder = Path(folder)
    scores = scores or Scores.load(folder / "scores.json")
    title = f"{scores.run['name']}: {frames.label(scores.run)}"
    return write_page(build_blocks(folder, scores), title=title, stem=folder / "report")


def build_blocks(folder: Path, scores: Scores) -> list[Block]:
    """The sections of a run page: what came out first, pictures, then tables, and how the run was made."""
    answers, modules = show_tasks(scores, "answers"), Block()
    if len(scores.rows) > 1 and any(scores.modules):
        modules = show_picture("modules", figures.draw_modules(scores))
    terms = [LEGENDS["terms"] for metric in scores.metrics.values() if "terms" in metric][:1]
    about: dict[str, Any] = {"lines": [LEGENDS["metrics"], *terms], "head": METRIC_HEAD, "words": 3}
    cells = [format_metric(scores, name) for name in scores.metrics]
    blocks = [
        Block(head=TILES_HEAD, cells=list_tiles(scores), tiles=True, words=5),
        *answers[:1],
        *show_matrix(scores),
        show_training(scores, folder),
        show_monitor(scores),
        modules,
        show_similarity(scores),
        *show_overlap(scores, folder),
        Block(title="Metrics", cells=cells, chosen=(0, 1, 3, 4, 5), **about),
        *answers[1:],
        *show_tasks(scores, "endtasks"),
        show_benchmarks(scores),
        show_costs(scores),
        show_texts(scores),
        show_run(scores),
    ]
    if (config := folder / "config.yaml").exists():
        code = config.read_text(encoding="utf-8", errors="replace")
        blocks.append(Block(title="Config", code=code, folded=f"config.yaml, hash {scores.config_hash}"))
    return blocks


def list_tiles(scores: Scores) -> Cells:
    """Learned, forgot, general: the mean in nats, its interval, and a word for it."""
    cells = []
    for name, (title, meaning, above, below, around) in TILES.items():
        metric = scores.metrics.get(name, {})
        value, (low, high) = metric.get("nats"), metric.get("interval", {}).get("nats", (None, None))
        interval = frames.format_interval(low, high, frames.thousandths).strip() or "no interval"
        word = ""
        if value is None or isnan(value):
            interval, word = "", "not measured"
        elif scores.alone and name == "FG":
            word = "a model per domain"
        elif interval != "no interval":
            word = above if low > 0 else below if high < 0 else around
        shown = format_known(value, frames.thousandths) + " nats" * (word != "not measured")
        cells.append([title, shown, interval, word, meaning])
    return cells


def format_scores(scores: Scores) -> str:
    """For a console of 100 characters: tiles, perplexities, headlines; of many domains the first and last."""

    def shorten_table(table: DataFrame, cells: Cells) -> str:
        across, down = (
            list(range(size)) if size <= 9 else [*range(4), *range(size - 4, size)]
            for size in (len(table.columns), len(cells))
        )
        width = min(24, 86 // len(across) - 2)
        shown = [[frames.shorten(cells[at][0], width=12), *(cells[at][1 + x] for x in across)] for at in down]
        head = ["after", *(frames.shorten(table.columns[at], width=width) for at in across)]
        return align_columns(Block(head=head, cells=shown))

    metrics = [format_metric(scores, name) for name in CONSOLE if name in scores.metrics]
    matrices = find_matrices(scores)
    shown = min(len(scores.domains), 8 + (len(scores.domains) == 9))
    parts = [
        align_columns(Block(head=TILES_HEAD[:4], words=4, cells=[row[:4] for row in list_tiles(scores)])),
        f"Perplexity on {shown} of {len(scores.domains)} test texts:",
        shorten_table(matrices["perplexity"], format_cells(matrices["perplexity"], frames.perplexity)),
        align_columns(Block(head=["", *UNITS], cells=[[each[0], *each[3:6]] for each in metrics])),
    ]
    if found := task_metrics.summarise_endtasks(scores.endtasks, scores.rows):
        told = ", ".join(f"{name} {percent(value)} %" for name, value in found.items())
        parts.append(f"end tasks ({len(scores.endtasks['tasks'])}): {told}")
    if tasks := scores.answers.get("tasks", {}):
        told = ", ".join(f"{name} {percent(value)} %" for name, value in scores.answers["metrics"].items())
        parts.append(f"answers to {len(tasks)} tasks, in %{': ' * bool(told)}{told}")
        parts.append(shorten_table(matrices["answers"], format_answers(scores)))
    measured = []
    for name, task in scores.benchmarks.get("tasks", {}).items():
        if last := last_value(task):
            base = format_known(task["values"][0], decimals)
            measured.append(f"{describe_task(name, task)} {decimals(last[1])} (base {base})")
    parts += [f"benchmarks: {few(measured, between=', ')}"] * bool(measured)
    return "\n\n".join([*parts, f"{frames.label(scores.run)}, seed {scores.run['seed']}, {scores.state}"])


def format_cells(table: DataFrame, show: Show, sds: np.ndarray | None = None) -> Cells:
    """Each row's name and its values, with their deviations where these are known."""
    rows = zip(table.index, table.to_numpy().tolist(), strict=True)
    cells = [[name, *(format_known(value, show) for value in row)] for name, row in rows]
    if sds is not None:
        for row, column in np.argwhere(np.isfinite(sds)).tolist():
            cells[row][1 + column] += f" ± {show(sds[row, column])}"
    return cells


def format_metric(scores: Scores, name: str) -> list[str]:
    """The cells of METRIC_HEAD; dashes where no term was measured, the count of terms if some are missing."""
    metric = scores.metrics[name]
    bounds = metric.get("interval", {})
    about = [METRICS[name].meaning, METRICS[name].formula]
    measured, whole = metric.get("terms", (None, None))
    name = TITLES.get(name, name) + (f" ({measured:,} of {whole:,})" if whole else "")
    cells = []
    for unit, show in FORMATS.items():
        low, high = bounds.get(unit, (None, None))
        cells.append(format_known(metric[unit], show) + frames.format_interval(low, high, show))
    return [name, *about, *(["–"] * 3 if measured == 0 else cells)]


def show_run(scores: Scores) -> Block:
    run, growth, numerics = scores.run, scores.growth, scores.numerics
    base = {} if scores.base.get("origin") == "built" else scores.base
    stored = megabytes(scores.stored[-1] if scores.stored else 0)
    stored += "" if growth is None else f", {megabytes(growth)} more with each domain"
    steps_by_row = zip(scores.rows, scores.skipped_steps, strict=False)
    skipped = [f"{count} of {row}" for row, count in steps_by_row if count]
    inside, random = max((each for each in scores.protected_movement if each), default=(0, 0))
    moved = f"at most {inside:.2g} of a stage's squared movement; {random:.2g} of a random one"
    attention = numerics.get("attention", "").replace("auto", "default")
    cells = {
        "method": frames.label(run),
        "model": f"{run['model']} ({run['objective']})",
        "base model": "; ".join(base[each] for each in ("name", "adapted") if each in base),
        "perplexity": describe_conditions(conditions(scores)),
        "order": few(run["order"]),
        "extended after": few([scores.rows[number] for number in scores.grown]),
        "seed": str(run["seed"]),
        "state": f"{scores.state}; {scores.seconds:,.1f} seconds",
        "trained": f"{max(scores.trained, default=0):,} parameters",
        "stored by the method": stored,
        "skipped steps, non-finite loss or gradient (on_nonfinite)": ", ".join(skipped),
        "movement in the protected subspace": moved * any(scores.protected_movement),
        "numerics": numerics and f"precision {numerics['precision']}, attention {attention}",
        "domain at test time": "must be known" if scores.needs_domain else "need not be known",
        "load the model (from this folder)": scores.loading,
        "versions": ", ".join(f"{name} {version}" for name, version in scores.versions.items()),
    }
    known = [[name, text] for name, text in cells.items() if text]
    return Block(title="Run", head=["run", run["name"]], cells=known, words=2)


def show_matrix(scores: Scores) -> list[Block]:
    if not scores.rows:
        return []
    head, folded = ["after", *scores.domains], f"{len(scores.rows)} x {len(scores.domains)} perplexities"
    cells = format_cells(find_matrices(scores)["perplexity"], frames.perplexity)
    matrix = show_picture("matrix", figures.draw_matrix(scores), head=head, cells=cells, folded=folded)
    return [matrix, show_picture("stages", figures.draw_text_curves(scores))]


def show_training(scores: Scores, folder: Path) -> Block:
    """Curves over the tokens of the whole run."""
    if not (stages := read_training(folder / "metrics.csv", scores)):
        return Block()
    missing = [name for name in scores.learned if name not in stages]
    lines = [f"Without a point: {few(missing, between=', ')}."] * bool(missing)
    return show_picture("training", figures.draw_training(stages, find_stages(scores)), lines=lines)


def show_monitor(scores: Scores) -> Block:
    """What training did to other text, and what a budget of drift allowed and did."""
    if not scores.monitor:
        return Block()
    budgeted, cells = any(stage.get("budget") for stage in scores.monitor.values()), []
    for name, stage in scores.monitor.items():
        kept = figures.find_kept(stage)
        ends = {text: np.array([values[0], values[kept]], float) for text, values in stage["nll"].items()}
        rises = {text: float(last - first) for text, (first, last) in ends.items()}
        shown = {text: format_known(rise, signed) for text, rise in rises.items()}
        own = [name] if name in rises else [text for text in rises if text != GENERAL]
        past = [text for text in sorted(rises.keys() - {*own, GENERAL}) if not isnan(rises[text])]
        worst = max(past, key=rises.__getitem__, default="")
        general = "–"
        if GENERAL in rises:
            bounds = ", ".join(format_known(bound, signed) for bound in stage["rise"][GENERAL][kept])
            general = f"{shown[GENERAL]} [{bounds}]"
        mean = format_known(float(np.mean([rises[text] for text in own])), signed) if own else "–"
        most = f"{worst} {shown[worst]}" if worst else "–"
        cells.append([name, str(stage["steps"][-1]), mean, most, general, stage["ended"] or "–"])
        if budgeted and (budget := stage.get("budget")):
            at = stage["steps"].index(budget["kept"]) if budget["kept"] in stage["steps"] else -1
            drifts = {bound: drift[at][1] for bound, drift in budget["drift"].items() if drift}
            told = [f"{x} {format_known(v, signed)} of {budget['allowed'][x]:.3f}" for x, v in drifts.items()]
            back = sum("back to" in act for act in budget["acts"])
            cells[-1].append("; ".join([*told, f"kept step {budget['kept']}", f"gone back {back} times"]))
        elif budgeted:
            cells[-1].append("–")
    head = ["stage", "steps", "its own text, nats", "most risen of the past", GENERAL, "ended early"]
    head += ["Budget of drift: upper ends at the kept step, of what was allowed"] * budgeted
    table: dict[str, Any] = {"head": head, "cells": cells, "folded": f"{len(cells)} stages"}
    return show_picture("monitor", figures.draw_monitor(scores), **table)


def show_similarity(scores: Scores) -> Block:
    """The cosine of mean embeddings of the domains' texts, where it decided their order."""
    if not (given := scores.similarity):
        return Block()
    matrix, told = np.array(given["matrix"]), "One domain: there is nothing to compare it with."
    if len(matrix) > 1:
        neighbours, pairs = np.diagonal(matrix, 1).mean(), matrix[~np.eye(len(matrix), dtype=bool)].mean()
        told = f"Mean cosine of domains learned one after another: {neighbours:.2f}; of any two: {pairs:.2f}."
    values = np.column_stack([matrix, given["general"]]).astype(float)
    np.fill_diagonal(values, np.nan)
    how: dict[str, Any] = {"label": "cosine of mean embeddings, centred\n(red: alike)", "change": True}
    maps = {"": HeatMap(values, given["names"], [*given["names"], GENERAL])}
    picture = draw_heat_maps(maps, names=("domain, in the order learned",) * 2, told=told, **how)
    return show_picture("similarity", picture, caption=f"{told} Embedding: {given['embedding']}.")


def show_tasks(scores: Scores, kind: str) -> list[Block]:
    """Of `endtasks` or `answers` the matrix, the metrics over all tasks, shares of 1, and every measure of
    the last model's answers."""
    if (table := find_matrices(scores).get(kind)) is None:
        return []
    given, tasks, last = getattr(scores, kind), list(table.columns), Block()
    if kind == "endtasks":
        own, meanings = given["metric"], task_metrics.ENDTASK_MEANINGS
        spreads = task_metrics.sd_over_seeds(task_metrics.headline(given))
        cells = format_cells(table.dropna(how="all"), percent, spreads[np.isfinite(table).any(axis=1)])
        title, called, name, drawn = "End tasks", "End tasks", "endtask", len(cells) > 1
        told = f"{len(tasks)} tasks, seeds {few([*map(str, given['seeds'])], between=', ')}, "
    else:
        own = {each: head_of(task) for each, task in given["tasks"].items()}
        title, called, name = "Answers to each task (column) after each stage (row)", "Scores", "answers"
        cells, drawn, told = format_answers(scores), True, ""
        meanings = {each: told[1:] for each, told in task_metrics.ANSWER_METRICS.items()}
        known = {each for task in given["tasks"].values() for each in task["measures"]}
        final = frames.tidy_scores(scores, "answer").drop_duplicates(["text", "metric"], keep="last")
        final = final.pivot(index="text", columns="metric", values="value")
        final = final.reindex(index=tasks, columns=[each for each in task_metrics.MEASURES if each in known])
        about: dict[str, Any] = {"head": ["task", *final.columns], "cells": format_cells(final, percent)}
        last = Block(title="Answers of the last model", folded=f"{len(final)} tasks", **about)
    measures = next(iter(own.values()))  # of all tasks, or of each
    if len({*own.values()}) > 1:
        each = few([f"{task} {measure}" for task, measure in own.items()], between=", ")
        measures = f"each in its own: {each}"
    matrix: dict[str, Any] = {"title": f"{title}: {measures}", "head": ["after", *tasks], "cells": cells}
    if drawn:
        matrix |= {"picture": figures.draw_tasks(scores, kind), "caption": LEGENDS["tasked"]}
    numbers = []
    for one in frames.KINDS["task" if kind == "endtasks" else "score"](scores):
        if one.metric in meanings:
            shown = format_known(one.value, percent) + frames.format_interval(one.low, one.high, percent)
            numbers.append([one.metric, *meanings[one.metric], shown])
    lines = [LEGENDS[name], f"{told}{name}.when={given['when']}, {given['seconds']:,.1f} seconds."]
    how: dict[str, Any] = {"head": ("number", "meaning", "formula", "%"), "chosen": (0, 1, 3), "words": 3}
    return [Block(name=kind, **matrix), Block(title=called, lines=lines, cells=numbers, **how), last]


def format_answers(scores: Scores) -> Cells:
    """The rows in which tasks were evaluated, and what a guess and the most frequent answer reach."""
    cells = format_cells(find_matrices(scores)["answers"].dropna(how="all"), percent)
    for name in ("chance", "majority"):
        levels = DataFrame([[task[name] for task in scores.answers["tasks"].values()]], [name], dtype=float)
        cells += [] if levels.isna().all(axis=None) else format_cells(levels, percent)
    return cells


def show_benchmarks(scores: Scores) -> Block:
    """Each task of the harness in every row that was measured, and chance where the harness gives it."""
    if not (tasks := scores.benchmarks.get("tasks")):
        return Block()
    values, errors = (
        np.array(list(itertools.zip_longest(*(task[kind] for task in tasks.values()))), float)
        for kind in ("values", "errors")
    )
    cells = format_cells(DataFrame(values, scores.rows[: len(values)]), decimals, errors)
    cells = [row for row in cells if {*row[1:]} != {"–"}]
    cells.append(["chance", *(format_known(task["chance"], decimals) for task in tasks.values())])
    facts = []
    for name, task in tasks.items():
        cut = f", {task['truncated']:,} or more requests cut from the left" * bool(task["truncated"])
        lower = ", lower is better" * (not task["higher"])
        facts.append(f"{name}: {task['examples']:,} examples{cut}{lower}")
    lines = [LEGENDS["benchmarks"].format(**scores.benchmarks), few(facts, between="; ") + "."]
    head = ["after", *(describe_task(name, task) for name, task in tasks.items())]
    return Block(title="Benchmarks", lines=lines, head=head, cells=cells)


def show_costs(scores: Scores) -> Block:
    """What each stage cost, and the run."""
    stages: dict[str | None, dict[str, float | None]] = {}
    for each in frames.list_costs(scores):
        stages.setdefault(each.row, {})[each.metric] = each.value
    whole, needed = stages.pop(None), ("tokens", "flops", "memory", "trained", "stored")
    noted = {str(row): costs for row, costs in stages.items() if None not in map(costs.get, needed)}
    shown_as, rows = COST_FORMATS.values(), [*noted.items(), *[("whole run", whole)] * bool(noted)]
    cells = [[row, *(format_known(costs[cost], show) for cost, show in shown_as)] for row, costs in rows]
    head, folded = ["after", *COST_FORMATS], f"{len(noted)} stages" * (len(noted) > 2 * frames.FEW)
    lines = [LEGENDS["compute"]] * bool(noted)
    shown: dict[str, Any] = {"chosen": (0, 1, 2, 6, 8), "folded": folded}
    return Block(title="Compute", lines=lines, head=head, cells=cells, **shown)


def show_overlap(scores: Scores, folder: Path) -> list[Block]:
    """How far domains share what a method keeps of them, also by layer, and MIGU's product magnitudes."""
    stages = read_diagnostics(folder, scores)
    shared, distributions = measure_overlap(stages, scores), read_distributions(stages, scores)
    by_text = {title: shared.pop(title) for title in [*shared] if title.startswith(LARGEST_ROWS)}
    layered = {title: each for title, each in shared.items() if len(each.layers) > 1}
    pictures: dict[str, tuple[Mapping[str, Any], Callable[[Any], Picture]]] = {
        "overlap": (shared, figures.draw_overlap),
        "overlap_by_layer": (layered, figures.draw_layers),
        "largest_rows": (by_text, figures.draw_overlap),
        "magnitudes": (distributions, figures.draw_distributions),
    }
    return [show_picture(name, draw(given)) for name, (given, draw) in pictures.items() if given]


def show_texts(scores: Scores) -> Block:
    """The table of test texts. Near-duplicates are a column where a text has been compared for them, the
    share of unknown tokens where the tokenizer does not know all of a text."""
    is_compared = any("near_duplicates" in facts for facts in scores.texts.values())
    score_on = scores.conditions.get("score_on", "test")
    unknown = {name: facts.get("unknown", {}).get(score_on, 0) for name, facts in scores.texts.items()}
    has_unknown = any(unknown.values())

    cells = []
    for name, *sizes in zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True):
        facts = scores.texts.get(name, {})
        counts = ", ".join(f"{split} {count}" for split, count in facts.get("documents", {}).items()) or "–"
        if skipped := facts.get("skipped"):
            kinds = ", ".join(f"{count} × {kind}" for kind, count in skipped.items())
            counts += f"; skipped: {kinds}"
        row = [name, *map("{:,}".format, sizes), counts]
        if has_unknown:
            row.append(f"{unknown.get(name, 0):.2%}")
        if is_compared:
            near = facts.get("near_duplicates")
            row.append(f"{near['found']} of {near['compared']}" if near else "–")
        cells.append([*row, facts.get("hash", "–")])

    head = ["text", "tokens", "scored", "bytes", "documents"]
    if has_unknown:
        head.append("unknown tokens")
    if is_compared:
        head.append("near-duplicates")
    return Block(title="Test texts", head=[*head, "hash"], cells=cells, folded=f"{len(cells)} texts")
