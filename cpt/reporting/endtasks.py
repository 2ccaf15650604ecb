"""What a run's report says of its end tasks and of what each stage cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cpt.evaluation.endtasks import metrics as endscores
from cpt.evaluation.scores import Scores
from cpt.reporting import drawing
from cpt.reporting.frames import list_costs, megabytes, percent
from cpt.reporting.page import Block, few

NAMES = {"macro_f1": "macro-F1", "micro_f1": "micro-F1", "accuracy": "accuracy"}
FORMULAS = (
    "A[t][u]: test score on the end task of domain u after fine-tuning the model of stage t, a mean over "
    "seeds; n: the last stage in which the task was measured. All scores and shares are in %."
)
MOVED = (
    "Test predictions right after a domain's own stage and after the last one, all seeds together: 1→0 were "
    "right and no longer are, 0→1 the reverse. Beyond chance: max(0, share - (1 - a) (1 - b) / (C - 1)) for "
    "the accuracies a, b and C classes, as if each example were known or guessed (arXiv 2510.17776)."
)
COMPUTE = (
    "Tokens: read by the optimizer steps, replayed ones too. FLOPs: counted, forward, backward and extra "
    "passes; without scoring and end tasks. Memory: peak, on a GPU what is allocated, on a CPU what is "
    "resident. Stored: beside the model. The last line: the whole run, or the most of a stage."
)
MOVED_HEAD = ("task", "predictions", "accuracy then", "accuracy now")
MOVED_HEAD += ("1→0", "share", "beyond chance", "0→1", "share", "beyond chance")
COSTS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "tokens": ("tokens", "{:,}".format),
    "FLOPs": ("flops", "{:.3g}".format),
    "learn, s": ("seconds_learn", "{:,.1f}".format),
    "score, s": ("seconds_score", "{:,.1f}".format),
    "end tasks, s": ("seconds_endtasks", "{:,.1f}".format),
    "peak memory": ("memory", megabytes),
    "trained": ("trained", "{:,}".format),
    "stored": ("stored", megabytes),
}
NEEDED = ("tokens", "flops", "memory", "trained", "stored")  # of a stage that is shown


def build_endtask_blocks(scores: Scores, folder: Path) -> list[Block]:
    """The end tasks' numbers, A in each metric with a picture, and what became of the predictions."""
    if not scores.endtasks:
        return []
    given = scores.endtasks
    A = endscores.headline(given)  # noqa: N806
    measured = np.isfinite(A).reshape(len(A), -1).any(-1).sum()
    picture = draw_endtasks(scores) if measured > 1 else b""
    tables = [_show_scores(endscores.cube(given, kind), scores, folded=name) for kind, name in NAMES.items()]
    first = _show_scores(
        A, scores, title=f"End tasks: {_name_metrics(given)}", picture=picture, name="endtasks"
    )
    return [_show_summary(scores), first, *tables, _transitions(scores, folder)]


def format_endtasks(scores: Scores) -> str:
    """The headline numbers for a console; "" where there are none."""
    numbers = endscores.summarise_endtasks(scores.endtasks, scores.rows)
    told = ", ".join(f"{name} {percent(value)} %" for name, value in numbers.items())
    return f"end tasks ({len(scores.endtasks['tasks'])}): {told}" if told else ""


def build_compute_block(scores: Scores) -> Block:
    """What each stage cost, and the run; nothing where nothing was noted."""
    stages: dict[str | None, dict[str, float | None]] = {}
    for line in list_costs(scores):
        stages.setdefault(line.row, {})[line.metric] = line.value
    noted = {stage: costs for stage, costs in stages.items() if None not in map(costs.get, NEEDED)}
    cells = [_cost(stage, costs) for stage, costs in noted.items() if stage is not None]
    return Block(
        title="Compute",
        lines=[COMPUTE] if cells else [],
        head=["after", *COSTS],
        cells=[*cells, _cost("whole run", stages[None])] if cells else [],
        folded=f"{len(cells)} stages" if len(cells) > 2 * drawing.FEW else "",
    )


def _cost(stage: str, costs: Mapping[str, float | None]) -> list[str]:
    return [stage, *("–" if costs[name] is None else show(costs[name]) for name, show in COSTS.values())]


def draw_endtasks(scores: Scores) -> bytes:
    """A of the rows that were measured; a task's own row is marked."""
    A = endscores.over_seeds(endscores.headline(scores.endtasks))  # noqa: N806
    rows = [row for row in range(len(A)) if np.isfinite(A[row]).any()]
    names, tasks = [scores.rows[row] for row in rows], scores.endtasks["tasks"]
    told = _describe_last_row(A[rows], rows=names, tasks=tasks)
    return drawing.draw_scores(A[rows], rows=names, columns=tasks, across="end task of domain", told=told)


def _show_summary(scores: Scores) -> Block:
    given = scores.endtasks
    found = endscores.summarise_endtasks(given, scores.rows)
    cells = [[name, *endscores.MEANINGS[name], percent(value)] for name, value in found.items()]
    seeds = f"{len(given['tasks'])} tasks, seeds {few([*map(str, given['seeds'])], between=', ')}, "
    seeds += f"endtask.when={given['when']}, {given['seconds']:,.1f} seconds."
    head = ("number", "meaning", "formula", "%")
    return Block(
        title="End tasks", lines=[FORMULAS, seeds], head=head, cells=cells, words=3, chosen=(0, 1, 3)
    )


def _name_metrics(given: Mapping[str, Any]) -> str:
    """Each task's own metric: one for all, or by task."""
    names = {task: NAMES[given["metric"][task]] for task in given["tasks"]}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return "each in its own metric: " + few([f"{task} {name}" for task, name in names.items()], between=", ")


def _show_scores(scores: np.ndarray, run: Scores, **shown: Any) -> Block:
    """Mean ± standard deviation over seeds, of the rows that were measured."""
    means, spread = endscores.over_seeds(scores), endscores.sd_over_seeds(scores)
    cells = [
        [run.rows[row], *(map(_mean, means[row], spread[row]))]
        for row in range(len(means))
        if np.isfinite(means[row]).any()
    ]
    return Block(head=["after", *run.endtasks["tasks"]], cells=cells, **shown)


def _mean(mean: float, deviation: float) -> str:
    if not np.isfinite(mean):
        return "–"
    return percent(mean) + (f" ± {percent(deviation)}" if np.isfinite(deviation) else "")


def _transitions(scores: Scores, folder: Path) -> Block:
    """Nothing where no task was measured twice; a damaged file is told, the other blocks stand."""
    try:
        moved = endscores.transitions_of(folder, scores.rows, scores.endtasks)
    except ValueError as error:
        return Block(title="End tasks: what became of the predictions", lines=[str(error)])
    cells = [[task, *format_moved(counts)] for task, counts in moved.items()]
    lines = [MOVED] if cells else []
    return Block(title="End tasks: what became of the predictions", lines=lines, head=MOVED_HEAD, cells=cells)


def format_moved(counts: Mapping[str, float]) -> list[str]:
    """What became of examples: their number, the scores, and the counts and shares of MOVED_HEAD."""
    shown = [f"{counts['examples']:,}", percent(counts["before"]), percent(counts["after"])]
    for name in ("forgotten", "gained"):
        adjusted = counts.get(f"{name}_adjusted")
        shares = [percent(counts[f"{name}_share"]), "–" if adjusted is None else percent(adjusted)]
        shown += [f"{counts[name]:,}", *shares]
    return shown


def _describe_last_row(A: np.ndarray, *, rows: Sequence[str], tasks: Sequence[str]) -> str:  # noqa: N803
    """The last row in words."""
    known = [(task, value) for task, value in zip(tasks, A[-1], strict=True) if np.isfinite(value)]
    last = [f"{task} {100 * value:.1f} %" for task, value in known]
    return f"End-task scores of {len(rows)} models; after {rows[-1]}: {few(last, between=', ')}"
