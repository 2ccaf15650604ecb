"""The report of a tuning: what each search tried and chose, and the final runs with these values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator
from pandas import DataFrame

from cpt.core.messages import count_noun
from cpt.evaluation.scores import Scores
from cpt.reporting.compare import format_spread
from cpt.reporting.contrasts import measure_spreads
from cpt.reporting.drawing import (
    Picture,
    choose_series_style,
    escape_label,
    label_logarithm,
    list_descriptions,
    make_figure,
    make_png,
)
from cpt.reporting.findings import describe_fairness
from cpt.reporting.formats import (
    MISSING,
    Format,
    format_decimals,
    format_or_dash,
    format_perplexity,
    list_names,
)
from cpt.reporting.page import Block, align_columns, build_picture_block, write_page
from cpt.reporting.svg import add_spots
from cpt.reporting.tex import escape, escape_number

MAX_ACROSS = 3  # panels side by side
MAX_LABELLED_RATIO = 100  # of a panel's ends, up to which 1, 2 and 5 of each decade have room
MIN_WIDE_NUMBER = 10_000  # whose labels have room at whole decades only


@dataclass(frozen=True)
class Trial:
    number: int
    values: Sequence[str]  # KEY=VALUE
    score: float
    flops: int | None

    @property
    def is_finished(self) -> bool:
        """Whether it has a score: that of a failed trial is infinite."""
        return math.isfinite(self.score)

    def value(self, key: str) -> str:
        """The value of a key."""
        return dict(split_value(line) for line in self.values)[key]


@dataclass(frozen=True)
class FinalRun:
    folder: str
    score: float
    forgetting: float | None  # FG in nats
    tokens: int
    flops: int

    @classmethod
    def read(cls, folder: Path, score: float) -> FinalRun:
        scores = Scores.load(folder / "scores.json")
        return cls(
            folder=str(folder),
            score=score,
            forgetting=scores.metrics.get("FG", {}).get("nats"),
            tokens=sum(scores.tokens_read),
            flops=sum(scores.flops),
        )


@dataclass(frozen=True, kw_only=True)
class TunedMethod:
    """A method's search (no trials if nothing is tuned) and its final runs, some of which may have failed.
    `num_planned`: how many there were to be; None: as many as there are."""

    name: str
    space: Mapping[str, str]  # by key, in Hydra's grammar
    default: Mapping[str, str]
    trials: Sequence[Trial]
    runs: Sequence[FinalRun]
    num_planned: int | None = None

    @property
    def num_planned_runs(self) -> int:
        return len(self.runs) if self.num_planned is None else self.num_planned

    @property
    def finished(self) -> list[Trial]:
        """Without those that failed."""
        return [trial for trial in self.trials if trial.is_finished]

    @property
    def flops(self) -> int | None:
        """Operations of the whole search, of failed trials too; None where some are unknown."""
        total = 0
        for trial in self.trials:
            if trial.flops is None:
                return None
            total += trial.flops
        return total

    @property
    def first(self) -> Trial | None:
        """The trial of the default values, where it finished."""
        default_values = [trial.values for trial in self.trials if self.default and trial.number == 0]
        return next((trial for trial in self.finished if trial.values in default_values), None)

    def best(self, *, sign: int, limit: float = math.inf) -> Trial | None:
        """The best trial that a search of at most `limit` operations, those of failed trials too, would have
        found; None without one. `sign`: 1 if a lower score is better, -1 if a higher one is."""
        candidates = []
        flops_so_far = 0
        for trial in self.trials:
            flops_so_far += trial.flops or 0  # None is unknown
            if flops_so_far <= limit and trial.is_finished:
                candidates.append(trial)
        return min(candidates, key=lambda trial: sign * trial.score, default=None)


def write_tuning(
    methods: Sequence[TunedMethod], stem: Path, metric: str, direction: str, budget: int | None
) -> str:
    """Writes STEM.html, .md, .tex, .json and the curves of the searches. Returns the table as text."""
    sign = -1 if direction == "maximize" else 1
    limit = find_equal_compute(methods)
    table = tabulate_methods(methods, metric=metric, sign=sign, limit=limit)
    lines = describe_tuning(methods, stem, metric=metric, direction=direction, limit=limit)

    blocks = [Block(lines=lines, head=table.head, cells=table.cells, num_word_columns=table.num_word_columns)]
    if any(method.trials for method in methods):
        blocks.append(build_picture_block("searches", draw_searches(methods, metric=metric, sign=sign)))
    stem.parent.mkdir(parents=True, exist_ok=True)
    page = write_page(blocks, title="Tuned methods", stem=stem, with_vectors=True)
    stem.with_suffix(".tex").write_text(format_tex(table), encoding="utf-8")

    content = {
        "version": 1,
        "metric": metric,
        "direction": direction,
        "budget": budget,
        "equal_compute_flops": limit,
        "methods": [describe_method(method) for method in methods],
    }
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return "\n".join([align_columns(table), *lines, str(page)])


def find_equal_compute(methods: Sequence[TunedMethod]) -> int | None:
    """The operations of the cheapest search; None without a search, or where those of some are unknown."""
    cheapest = None
    for method in methods:
        if not method.trials:
            continue
        flops = method.flops
        if flops is None:
            return None
        if flops > 0 and (cheapest is None or flops < cheapest):
            cheapest = flops
    return cheapest


def describe_tuning(
    methods: Sequence[TunedMethod], stem: Path, *, metric: str, direction: str, limit: int | None
) -> list[str]:
    """What a reader must know of the searches and of the final runs."""
    num_trials = sorted(len(method.finished) for method in methods if method.trials) or [0]
    trial_count = count_noun(num_trials[-1], "finished trial")
    if num_trials[0] < num_trials[-1]:
        trial_count = f"{num_trials[0]} to {trial_count}"
    lines = [
        f"Searches: {trial_count} each on validation text, the default values first; chosen by "
        f"{metric} ({direction}). Final runs: test text, mean ± standard deviation over "
        f"{describe_runs(methods)}.",
    ]

    missing = describe_missing_runs(methods)
    if missing:
        lines.append(missing)

    costs = {}
    for method in methods:
        if method.runs:
            tokens = fmean(run.tokens for run in method.runs)
            flops = fmean(run.flops for run in method.runs)
            costs[method.name] = tokens, flops
    lines.append(describe_fairness(costs))

    if limit is not None:
        cheapest = next(method.name for method in methods if method.trials and method.flops == limit)
        lines.append(
            f"Equal compute: the best of each method's first trials whose operations together are at most "
            f"{limit:.3g}, those of the whole search of {cheapest}, the cheapest."
        )
    untuned = [method.name for method in methods if not method.space]
    if untuned:
        lines.append(f"Nothing to tune: {list_names(untuned)}.")
    lines.append(f"Compare: python -m cpt.report {stem.parent / 'final'}")
    return lines


def describe_runs(methods: Sequence[TunedMethod]) -> str:
    """`3 runs each`, or `2 to 3 runs`."""
    counts = sorted(len(method.runs) for method in methods)
    if counts[0] == counts[-1]:
        return f"{count_noun(counts[0], 'run')} each"
    return f"{counts[0]} to {counts[-1]} runs"


def describe_missing_runs(methods: Sequence[TunedMethod]) -> str:
    """How many final runs of which methods are missing; empty if all are there."""
    missing = []
    for method in methods:
        num_missing = method.num_planned_runs - len(method.runs)
        if num_missing > 0:
            missing.append(f"{method.name} ({num_missing} of {method.num_planned_runs})")
    if not missing:
        return ""
    return f"Missing final runs, which failed: {list_names(missing)}; (k): a mean over k runs."


def tabulate_methods(methods: Sequence[TunedMethod], *, metric: str, sign: int, limit: float | None) -> Block:
    """A row for each method: the values, their scores on validation text, the scores of the final runs."""
    format_score = format_perplexity if metric.endswith("perplexity") else format_decimals
    cells = []
    for method in methods:
        best = method.best(sign=sign)
        scores = [run.score for run in method.runs]
        forgetting = [run.forgetting for run in method.runs if run.forgetting is not None]
        cells.append(
            [
                method.name,
                shorten_values(best),
                shorten_values(method.best(sign=sign, limit=limit)) if limit else MISSING,
                str(len(method.finished)) if method.space else MISSING,
                format_score_of(method.first, format_score),
                format_score_of(best, format_score),
                format_score_mean(scores, format_score, num_runs=method.num_planned_runs),
                format_score_mean(forgetting, format_decimals, num_runs=method.num_planned_runs),
            ]
        )

    head = [
        "method",
        "tuned values",
        "equal compute",
        "trials",
        "valid, default",
        "valid, tuned",
        f"test {metric}",
        "test FG (nats)",
    ]
    return Block(head=head, cells=cells, num_word_columns=3)


def format_score_of(trial: Trial | None, format_score: Format) -> str:
    return format_or_dash(None if trial is None else trial.score, format_score)


def format_score_mean(values: Sequence[float], format_value: Format, *, num_runs: int) -> str:
    """`53.10 ± 0.30 (2)`: the mean of the values that some of the runs have; the last is their number, if not
    all have one."""
    if not values:
        return MISSING
    spread = measure_spreads(np.array([values]), num_runs=num_runs)[0]
    return format_spread(spread, format_value, with_interval=False)


def format_tex(table: Block) -> str:
    """The table for booktabs."""
    num_numbers = len(table.head) - table.num_word_columns
    rows = []
    for cells in table.cells:
        words = map(escape, cells[: table.num_word_columns])
        numbers = map(escape_number, cells[table.num_word_columns :])
        rows.append([*words, *numbers])
    frame = DataFrame(rows, columns=[escape(title) for title in table.head])
    column_format = "l" * table.num_word_columns + "r" * num_numbers
    text = frame.to_latex(index=False, escape=False, column_format=column_format)
    return f"% needs \\usepackage{{booktabs}}\n{text}"


def describe_method(method: TunedMethod) -> dict[str, Any]:
    """A method in the JSON file; the score of a failed trial is null, as JSON has no infinity."""
    description = asdict(method)
    description["num_planned"] = method.num_planned_runs
    description["flops"] = method.flops
    for trial in description["trials"]:
        if not math.isfinite(trial["score"]):
            trial["score"] = None
    return description


def split_value(line: str) -> tuple[str, str]:
    """A key and its value, from KEY=VALUE."""
    key, value = line.split("=", 1)
    return key, value


def shorten_values(trial: Trial | None) -> str:
    """`strength=812, lr=0.001`: the values without the sections of their keys, in three digits."""
    if trial is None:
        return MISSING
    shortened = []
    for line in trial.values:
        key, value = split_value(line)
        try:
            text = f"{float(value):.3g}"
        except ValueError:  # a word
            text = value
        shortened.append(f"{key.rpartition('.')[2]}={text}")
    return ", ".join(shortened)


def draw_searches(methods: Sequence[TunedMethod], *, metric: str, sign: int) -> Picture:
    """A panel for each searched value: the score of each trial over it."""
    searched = [method for method in methods if method.trials]
    panels = []
    for method in searched:
        for key in method.space:
            panels.append((method, key))
    across = min(MAX_ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    figure = make_figure((3.4 * across, 2.9 * down + 0.3))
    grid = figure.subplots(down, across, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)

    for axes, (method, key) in zip(grid, panels, strict=False):
        draw_search(axes, method, key, best=method.best(sign=sign))
    for axes in grid[::across]:
        axes.set_ylabel(f"{metric}, validation", fontsize=8)
    chosen = list_descriptions(
        f"{method.name} {shorten_values(method.best(sign=sign))}" for method in searched
    )
    return make_png(
        figure, description=f"{metric} on validation text over the searched values. Chosen: {chosen}"
    )


def draw_search(axes: Axes, method: TunedMethod, key: str, *, best: Trial | None) -> None:
    """The score of each trial over the values of a key, joined if it alone was searched."""
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7)
    positions = place_values(axes, method, key)
    scores = np.array([trial.score for trial in method.finished])
    by_position = np.argsort(positions, kind="stable")
    style = choose_series_style(0)
    axes.plot(
        positions[by_position],
        scores[by_position],
        color=style.colour,
        linestyle=style.dashes,
        marker="o",
        markersize=5,
        linewidth=1 if len(method.space) == 1 else 0,
    )

    texts = [f"{key} {trial.value(key)}: {trial.score:.4g}" for trial in method.finished]
    add_spots(axes, positions, scores, texts)
    mark_trial(axes, method, positions, method.first, marker="s", size=70, colour="none")
    mark_trial(axes, method, positions, best, marker="*", size=160, colour="#D55E00")
    axes.set_title(escape_label(method.name, width=30), fontsize=9)
    axes.set_xlabel(escape_label(key, width=34), fontsize=8)


def place_values(axes: Axes, method: TunedMethod, key: str) -> np.ndarray:
    """The position of each finished trial on the x axis, [trials]: its value, or the number of its choice."""
    values = [trial.value(key) for trial in method.finished]
    space = method.space[key]
    if "choice" in space:
        choices = list(dict.fromkeys(values))
        axes.set_xticks(range(len(choices)), [escape_label(choice, width=12) for choice in choices])
        return np.array([choices.index(value) for value in values], float)

    interval = re.search(r"interval\(([^(),]+),([^(),]+)\)", space)
    if interval:
        low = float(interval[1])
        high = float(interval[2])
        axes.set_xlim(low, high)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        if "log" in space:
            axes.set_xscale("log")
            label_logarithm(axes.xaxis, np.array([low, high]))
            if high > MAX_LABELLED_RATIO * low or high >= MIN_WIDE_NUMBER:
                axes.xaxis.set_major_locator(LogLocator())
    return np.array([float(value) for value in values])


def mark_trial(
    axes: Axes,
    method: TunedMethod,
    positions: np.ndarray,
    trial: Trial | None,
    *,
    marker: str,
    size: int,
    colour: str,
) -> None:
    """A mark around the point of a trial."""
    if trial is None:
        return
    position = positions[method.finished.index(trial)]
    axes.scatter(position, trial.score, s=size, c=colour, marker=marker, edgecolors="black", zorder=3)
