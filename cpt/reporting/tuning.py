"""The report of a tuning: what each search tried and chose, and the final runs with these values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame

from cpt.evaluation.scores import Scores
from cpt.reporting.compare import format_spread, measure_spreads
from cpt.reporting.drawing import Picture, figure, list_few, literal, plain_logarithm, png, style
from cpt.reporting.frames import Show, decimals, describe_fairness, few, format_known, perplexity
from cpt.reporting.page import Block, align_columns, show_picture, write_page
from cpt.reporting.tex import escape

ACROSS = 3  # panels side by side


@dataclass(frozen=True)
class Trial:
    number: int
    values: Sequence[str]  # KEY=VALUE
    score: float
    flops: int | None


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
        forgetting = scores.metrics.get("FG", {}).get("nats")
        return cls(str(folder), score, forgetting, sum(scores.tokens_read), sum(scores.flops))


@dataclass(frozen=True, kw_only=True)
class TunedMethod:
    """A method's search (no trials where nothing is tuned) and its final runs, of which some may have failed.
    `num_planned`: how many there were to be; None: as many as there are."""

    name: str
    space: Mapping[str, str]  # by key, in Hydra's grammar
    default: Mapping[str, str]
    trials: Sequence[Trial]
    runs: Sequence[FinalRun]
    num_planned: int | None = None

    @property
    def finished(self) -> list[Trial]:
        """Without those that failed, whose score is infinite."""
        return [trial for trial in self.trials if math.isfinite(trial.score)]

    @property
    def flops(self) -> int | None:
        """Operations of the whole search, of failed trials too."""
        counts = [trial.flops for trial in self.trials]
        return None if None in counts else sum(filter(None, counts))

    @property
    def first(self) -> Trial | None:
        """The trial of the default values, where it finished."""
        given = [trial.values for trial in self.trials if self.default and trial.number == 0]
        return next((trial for trial in self.finished if trial.values in given), None)

    def best(self, *, sign: int, limit: float = math.inf) -> Trial | None:
        """The best of the first trials whose operations, those of failed ones too, are within the limit."""
        within, spent = [], 0
        for trial in self.trials:
            spent += trial.flops or 0
            if spent <= limit and math.isfinite(trial.score):
                within.append(trial)
        return min(within, key=lambda trial: sign * trial.score, default=None)


def write_tuning(
    methods: Sequence[TunedMethod], stem: Path, metric: str, direction: str, budget: int | None
) -> str:
    """Writes STEM.html, .md, .tex, .json and the curves of the searches. Gives the table as text."""
    sign = -1 if direction == "maximize" else 1
    searches = {each.name: each.flops for each in methods if each.trials}
    limit = None if None in searches.values() else min(filter(None, searches.values()), default=None)
    table = tabulate_methods(methods, metric=metric, sign=sign, limit=limit)
    fixed = [each.name for each in methods if not each.space]
    ended = sorted(len(each.finished) for each in methods if each.trials) or [0]
    costs = {}
    for each in (each for each in methods if each.runs):
        costs[each.name] = [fmean(run.tokens for run in each.runs), fmean(run.flops for run in each.runs)]
    count = f"{ended[0]} to {ended[-1]}" if ended[0] < ended[-1] else str(ended[0])
    lines = [
        f"Searches: {count} finished trials each on validation text, the default values first; chosen by "
        f"{metric} ({direction}). Final runs: test text, mean ± standard deviation over "
        f"{describe_runs(methods)}.",
    ]
    lost = describe_lost_runs(methods)
    if lost:
        lines.append(lost)
    lines.append(describe_fairness(costs))
    if limit is not None:
        cheapest = min(filter(searches.get, searches), key=lambda name: searches[name] or 0)
        lines.append(
            f"Equal compute: the best of each method's first trials whose operations together are at most "
            f"{limit:.3g}, those of the whole search of {cheapest}, the cheapest."
        )
    lines += [f"Nothing to tune: {few(fixed, between=', ')}."] if fixed else []
    lines += [f"Compare: python -m cpt.report {stem.parent / 'final'}"]
    blocks = [Block(lines=lines, head=table.head, cells=table.cells, words=table.words)]
    if searches:
        blocks.append(show_picture("searches", draw_searches(methods, metric=metric, sign=sign)))
    stem.parent.mkdir(parents=True, exist_ok=True)
    page = write_page(blocks, title="Tuned methods", stem=stem, vectors=True)
    frame = DataFrame(table.cells, columns=[*map(escape, table.head)]).map(escape)
    text = frame.to_latex(index=False, escape=False, column_format="l" * 3 + "r" * 5)
    stem.with_suffix(".tex").write_text("% needs \\usepackage{booktabs}\n" + text, encoding="utf-8")
    planned = count_planned(methods)
    described = [asdict(each) | {"flops": each.flops, "num_planned": planned[each.name]} for each in methods]
    for trial in (trial for each in described for trial in each["trials"]):
        trial["score"] = trial["score"] if math.isfinite(trial["score"]) else None  # JSON has no infinity
    about = {"metric": metric, "direction": direction, "budget": budget, "equal_compute_flops": limit}
    whole = {"version": 1, **about, "methods": described}
    stem.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return "\n".join([align_columns(table), *lines, str(page)])


def count_planned(methods: Sequence[TunedMethod]) -> dict[str, int]:
    """The number of final runs that each method was to have, by its name."""
    counts = {}
    for method in methods:
        counts[method.name] = len(method.runs) if method.num_planned is None else method.num_planned
    return counts


def describe_runs(methods: Sequence[TunedMethod]) -> str:
    """`3 runs each`, or `2 to 3 runs`."""
    counts = sorted(len(method.runs) for method in methods)
    if counts[0] == counts[-1]:
        return f"{counts[0]} runs each"
    return f"{counts[0]} to {counts[-1]} runs"


def describe_lost_runs(methods: Sequence[TunedMethod]) -> str:
    """How many final runs of which methods are missing; empty if all are there."""
    planned = count_planned(methods)
    missing = [
        f"{method.name} ({planned[method.name] - len(method.runs)} of {planned[method.name]})"
        for method in methods
        if len(method.runs) < planned[method.name]
    ]
    if not missing:
        return ""
    return f"Missing final runs, which failed: {few(missing, between=', ')}; (k): a mean over k runs."


def tabulate_methods(methods: Sequence[TunedMethod], *, metric: str, sign: int, limit: float | None) -> Block:
    """A row per method: the values, their scores on validation text, the scores of the final runs."""
    show = perplexity if metric.endswith("perplexity") else decimals
    planned = count_planned(methods)
    cells = []
    for method in methods:
        best, within = method.best(sign=sign), method.best(sign=sign, limit=limit or 0)
        scores = [run.score for run in method.runs]
        forgetting = [run.forgetting for run in method.runs if run.forgetting is not None]
        cells.append(
            [
                method.name,
                shorten_values(best),
                shorten_values(within) if limit else "–",
                str(len(method.finished)) if method.space else "–",
                format_known(getattr(method.first, "score", None), show),
                format_known(getattr(best, "score", None), show),
                format_mean(scores, show, num_runs=planned[method.name]),
                format_mean(forgetting, decimals, num_runs=planned[method.name]),
            ]
        )
    head = ["method", "tuned values", "equal compute", "trials", "valid, default", "valid, tuned"]
    return Block(head=[*head, f"test {metric}", "test FG (nats)"], cells=cells, words=3)


def format_mean(values: Sequence[float], show: Show, *, num_runs: int) -> str:
    """`53.10 ± 0.30 (2)`: the mean of the values that some of the runs have; the last is their number, if not
    all have one."""
    spread = measure_spreads(np.array([values]), runs=num_runs)[0] if values else None
    return format_spread(spread, show, bounds=False)


def shorten_values(trial: Trial | None) -> str:
    """`strength=812, lr=0.001`: the values without the sections of their keys, in three digits."""
    if trial is None:
        return "–"
    shown = []
    for key, value in (line.split("=", 1) for line in trial.values):
        with suppress(ValueError):
            value = f"{float(value):.3g}"
        shown.append(f"{key.rpartition('.')[2]}={value}")
    return ", ".join(shown)


def draw_searches(methods: Sequence[TunedMethod], *, metric: str, sign: int) -> Picture:
    """A panel per searched value: the score of each trial over it, joined where it alone was searched."""
    panels = [(each, key) for each in methods if each.trials for key in each.space]
    chosen = {each.name: each.best(sign=sign) for each in methods if each.trials}
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    drawn = figure((3.4 * across, 2.9 * down + 0.3))
    grid = drawn.subplots(down, across, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, (method, key) in zip(grid, panels, strict=False):
        values = [dict(line.split("=", 1) for line in trial.values)[key] for trial in method.finished]
        scores = np.array([trial.score for trial in method.finished])
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        if "choice" in method.space[key]:
            names = list(dict.fromkeys(values))
            places = np.array([names.index(value) for value in values], float)
            axes.set_xticks(range(len(names)), [literal(name, width=12) for name in names])
        else:
            places = np.array(list(map(float, values)))
        if bounds := re.search(r"interval\(([^(),]+),([^(),]+)\)", method.space[key]):
            low, high = map(float, bounds.groups())
            axes.set_xlim(low, high)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            if "log" in method.space[key]:
                axes.set_xscale("log")
                plain_logarithm(axes.xaxis, np.array([low, high]))
        by_place = np.argsort(places, kind="stable")
        line = {"linewidth": 1 if len(method.space) == 1 else 0, "markersize": 5}
        axes.plot(places[by_place], scores[by_place], **style(0) | {"marker": "o"} | line)
        for marker, size, color, trial in (
            ("s", 70, "none", method.first),
            ("*", 160, "#D55E00", chosen[method.name]),
        ):
            if trial is not None:
                at = places[method.finished.index(trial)], trial.score
                axes.scatter(*at, s=size, c=color, marker=marker, edgecolors="black", zorder=3)
        axes.set_title(literal(method.name, width=30), fontsize=9)
        axes.set_xlabel(literal(key, width=34), fontsize=8)
    for axes in grid[::across]:
        axes.set_ylabel(f"{metric}, validation", fontsize=8)
    told = list_few(f"{name} {shorten_values(trial)}" for name, trial in chosen.items())
    return png(drawn, told=f"{metric} on validation text over the searched values. Chosen: {told}")
