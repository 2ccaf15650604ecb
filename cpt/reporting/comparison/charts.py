"""The pictures over many runs, as PNG bytes that say in words what they show: see cpt.reporting.drawing.

A group is what is drawn with one mark: runs that differ in their seed, say. Up to 54 marks differ. `places`
gives each group its own, the same in every picture; without, marks follow the order within the picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas

from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores
from cpt.reporting import drawing
from cpt.reporting.drawing import FEW, literal, png
from cpt.reporting.figures import perplexities
from cpt.reporting.frames import perplexity
from cpt.reporting.outliers import find_window, hold
from cpt.reporting.vectors import name_marks

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = Sequence[float | None]
Places = Mapping[str, int]
Marks = Mapping[str, str]  # by group, what its marks stand for
Styles = Mapping[str, Mapping[str, str]]
HIGHLIGHTED = 6  # of more than FEW curves, so many are told apart: those that end lowest


def trade_off(
    groups: Mapping[str, tuple[Values, Values]], *, places: Places | None = None, marks: Marks | None = None
) -> bytes:
    """Forgetting (nats) against average perplexity, a point per run; large: the mean of a group.

    A group is two sequences, forgetting and perplexity by run. One without forgetting (joint training,
    zero-shot) is a line at its mean perplexity.
    """
    figure, axes = _open_plane(len(groups))
    styles, levels, there = assign_styles(groups, places), {}, {}
    for name, values in groups.items():
        pairs, y_alone = _pair_known(values), _to_array(values[1])
        if pairs[0].size:
            there[name] = pairs
        elif np.isfinite(y_alone).any():
            levels[name] = float(y_alone[np.isfinite(y_alone)].mean())
    off = _scatter(axes, there, styles, logarithmic=False)
    _draw_levels(axes, levels, styles)
    axes.set(xlabel="forgetting FG (nats; left is better)", ylabel="average perplexity LC (down is better)")
    _legend(figure, axes)
    told = _list_means(groups, x="forgetting", y="perplexity") + off
    return png(figure, told=f"Forgetting (nats) and average perplexity, means over runs. {told}", marks=marks)


def pareto(
    points: Mapping[str, tuple[Values, Values]],
    *,
    x: str,
    y: str,
    logarithmic: bool,
    places: Places | None = None,
    marks: Marks | None = None,
) -> bytes:
    """A group's mean of x against that of y, small its runs, and the front: the groups than which none is
    lower in both. x and y are the axes' labels; lower is better. `logarithmic`: x, whose values of 0 or less
    are left out. A group so far off that the others would be pressed together stands at the border."""
    figure, axes = _open_plane(len(points))
    pairs = {name: _pair_known(values, positive=logarithmic) for name, values in points.items()}
    there = {name: each for name, each in pairs.items() if each[0].size}
    if logarithmic and there:
        axes.set_xscale("log")
    off = _scatter(axes, there, assign_styles(points, places), logarithmic=logarithmic)
    means = {name: (each[0].mean(), each[1].mean()) for name, each in there.items()}
    front = pareto_front(means)
    _staircase(axes, [means[name] for name in front])
    if logarithmic and there:
        drawing.plain_logarithm(axes.xaxis, np.array(axes.get_xlim()))
    axes.set(xlabel=x, ylabel=y)
    _legend(figure, axes)
    told = f"The front: {', '.join(front) or 'no group'}. {_list_means(points, x='x', y='y')}{off}"
    return png(figure, told=f"{y} against {x}; lower is better for both. {told}", marks=marks)


def pareto_front(means: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names than which no other is lower in one and no higher in the other, by ascending x."""
    front, lowest = [], (np.inf, np.inf)
    for name in sorted(means, key=means.get):
        if means[name][1] < lowest[1] or means[name] == lowest:
            front.append(name)
            lowest = means[name]
    return front


def curves(
    groups: Mapping[str, Sequence[Scores]], *, places: Places | None = None, marks: Marks | None = None
) -> bytes:
    """Perplexity over the stages, a mean over the domains learned so far; a group's mean and range over its
    runs. A model that learned no sequence is a line at its mean over all domains."""
    figure, axes = _open_plane(min(len(groups), 2 * FEW))
    axes.set_yscale("log")
    styles, lines, levels = assign_styles(groups, places), {}, {}
    for name, runs in groups.items():
        each = [_so_far(scores) for scores in runs if scores.learned]
        last = [_last(scores) for scores in runs if scores.rows and not scores.learned]
        if any(np.isfinite(line).any() for line in each):
            lines[name] = pandas.DataFrame(
                map(pandas.Series, each)
            )  # [run, stage], nan where a run has no more
        elif np.isfinite(last).any():
            levels[name] = float(np.nanmean(last))
    highest = {name: runs.mean().dropna().to_numpy() for name, runs in lines.items()}
    window = find_window({name: each.max(keepdims=True) for name, each in highest.items()}, logarithmic=True)
    _each_curve(axes, lines, styles, top=window[1] if window else np.inf)
    axes.set_ylim(top=window[1] if window else None)
    _draw_levels(axes, levels, styles)
    drawing.plain_logarithm(axes.yaxis, np.concatenate([[*levels.values()], *map(np.ravel, lines.values())]))
    axes.set(xlabel="stages learned", ylabel="mean perplexity over the domains so far (log scale)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, axes)
    ends = [f"{name} {perplexity(value)}" for name, value in (_end_curves(lines) | levels).items()]
    return png(
        figure, told=f"Mean perplexity over the domains so far, at the end. {list_told(ends)}", marks=marks
    )


def assign_styles(names: Iterable[str], places: Places | None) -> dict[str, dict[str, str]]:
    """Colour, marker and dashes of each group."""
    own = places or {name: place for place, name in enumerate(names)}
    return {name: drawing.style(own[name]) for name in names}


def _open_plane(groups: int) -> tuple[Figure, Axes]:
    """A figure that is high enough for a legend of so many groups, and its axes."""
    figure = drawing.figure((8.5, max(4.8, 0.23 * groups + 0.8)))
    axes = figure.add_subplot()
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    return figure, axes


def _to_array(values: Values) -> np.ndarray:
    return np.array(list(values), dtype=float)


def _pair_known(values: tuple[Values, Values], *, positive: bool = False) -> np.ndarray:
    """The pairs of which both are there, [2, n]; `positive`: whose first is above 0."""
    pairs = np.stack([_to_array(each) for each in values])
    there = np.isfinite(pairs).all(0)
    return pairs[:, there & (pairs[0] > 0) if positive else there]


def _name_group(name: str, *, runs: int) -> str:
    return literal(name, width=44) + f" ({runs})" * (runs > 1)


def _scatter(axes: Axes, points: Mapping[str, np.ndarray], styles: Styles, *, logarithmic: bool) -> str:
    """Every group's runs, [2, run], and its mean; gives what has to be said of those at the border."""
    axes.margins(0.12)
    x = find_window({name: each[0] for name, each in points.items()}, logarithmic=logarithmic)
    y = find_window({name: each[1] for name, each in points.items()}, logarithmic=False)
    off = []
    for name, runs in points.items():
        mean = runs.mean(1)
        shown = np.array([m if w is None else np.clip(m, *w) for m, w in zip(mean, (x, y), strict=True)])
        label = _name_group(name, runs=runs[0].size)
        if (shown == mean).all():
            drawn = _points(axes, *runs, label=label, style=styles[name])
        else:
            off.append(f"{name} ({mean[0]:.4g}, {mean[1]:.4g})")
            label = f"{label}: off the axes, {mean[0]:.4g}, {mean[1]:.4g}"
            drawn = _point_off(axes, shown, label=label, style=styles[name])
        name_marks(name, drawn)
    hold(axes.xaxis, x)
    hold(axes.yaxis, y)
    return f" Off the axes, drawn at the border: {'; '.join(off)}." if off else ""


def _points(
    axes: Axes, x: np.ndarray, y: np.ndarray, *, label: str, style: Mapping[str, str]
) -> list[Artist]:
    """The runs of a group, and their mean as a large hollow mark."""
    many, mark = x.size > 5, {"color": style["color"], "marker": style["marker"]}
    runs = axes.scatter(
        x, y, s=12 if many else 24, alpha=0.4 if many else 0.7, linewidths=0, zorder=2, **mark
    )
    hollow = {"facecolors": "none", "edgecolors": style["color"], "linewidths": 2, "zorder": 3}
    return [runs, axes.scatter(x.mean(), y.mean(), s=130, marker=style["marker"], label=label, **hollow)]


def _point_off(axes: Axes, shown: np.ndarray, *, label: str, style: Mapping[str, str]) -> list[Artist]:
    """A group's mark at the border that its mean lies beyond, with a grey centre."""
    filled = {"facecolors": "0.8", "edgecolors": style["color"], "linewidths": 2, "zorder": 4}
    where = {"marker": style["marker"], "clip_on": False}
    return [axes.scatter(*shown, s=130, label=label, **filled, **where)]


def _staircase(axes: Axes, front: Sequence[tuple[float, float]]) -> None:
    """The border of what some group of the front is at least as good as."""
    if front:
        x, y = np.array(front).T
        right, top = axes.get_xlim()[1], axes.get_ylim()[1]
        corners = {"color": "0.35", "linewidth": 1.2, "linestyle": "--", "zorder": 0}
        axes.step([x[0], *x, right], [top, *y, y[-1]], where="post", label="Pareto front", **corners)


def _draw_levels(axes: Axes, levels: Mapping[str, float], styles: Styles) -> None:
    """A line per level; one that would press the points together is only named."""
    heights = list(levels.values()) or [0.0]
    drawn = axes.collections or axes.lines
    low, high = axes.get_ylim() if drawn else (min(heights), max(heights))
    bottom, top = low - 0.6 * (high - low), high + 0.6 * (high - low)
    for name, level in levels.items():
        label = f"{literal(name, width=30)}: {perplexity(level)}"
        style = {"color": styles[name]["color"], "linewidth": 1.4, "linestyle": "-."}
        if bottom <= level <= top:
            name_marks(name, [axes.axhline(level, label=label, **style)])
        else:
            name_marks(name, axes.plot([], [], label=f"{label} (off the axis)", **style))


def _legend(figure: Figure, axes: Axes) -> None:
    sources = axes.get_legend_handles_labels()[0]
    if sources:
        how = {"frameon": False, "fontsize": 8, "markerscale": 0.7, "labelspacing": 0.8}
        legend = figure.legend(loc="outside right upper", **how)
        for source, *shown in zip(sources, legend.legend_handles, legend.get_texts(), strict=True):
            for each in shown:
                each.set_gid(source.get_gid())


def _so_far(scores: Scores) -> np.ndarray:
    """After each stage the mean perplexity over the domains learned so far, [stage]."""
    places = [scores.domains.index(name) for name in scores.learned]
    rows = perplexities(scores)[1:]
    means = np.array([row[places[: number + 1]].mean() for number, row in enumerate(rows)])
    return np.where(np.isfinite(means), means, np.nan)


def _last(scores: Scores) -> float:
    """The mean perplexity of the last model over all domains."""
    there = [name != GENERAL for name in scores.domains]
    mean = perplexities(scores)[-1][there].mean()
    return float(mean) if np.isfinite(mean) else np.nan


def _end_curves(lines: Mapping[str, pandas.DataFrame]) -> dict[str, float]:
    """The mean over runs at the last stage that any of them reached."""
    return {name: float(runs.mean().dropna().iloc[-1]) for name, runs in lines.items()}


def _each_curve(axes: Axes, lines: Mapping[str, pandas.DataFrame], styles: Styles, *, top: float) -> None:
    """A curve per group; of many, those that end lowest are told apart and the others grey. What leaves the
    picture at its top says so."""
    ends = _end_curves(lines)
    marked = sorted(ends, key=ends.get)[: HIGHLIGHTED if len(lines) > FEW else None]
    for name in [name for name in lines if name not in marked]:
        name_marks(name, axes.plot(lines[name].columns + 1, lines[name].mean(), color="0.75", zorder=1))
    if len(marked) < len(lines):
        over = sum(float(lines[name].mean().max()) > top for name in lines if name not in marked)
        label = f"{len(lines) - len(marked)} others" + f" ({over} off the axis)" * (over > 0)
        axes.plot([], [], color="0.75", label=label)
    for name in marked:
        runs, stages = lines[name], lines[name].columns + 1
        style = {**styles[name], "markersize": 5, "markevery": -(-len(stages) // 20)}
        label = f"{_name_group(name, runs=len(runs))}: {perplexity(ends[name])}"
        label += " (off the axis)" * (float(runs.mean().max()) > top)
        drawn = axes.plot(stages, runs.mean(), label=label, zorder=3, linewidth=1.6, **style)
        faint = {"alpha": 0.15 if len(marked) <= HIGHLIGHTED else 0.06, "linewidth": 0}
        range_ = axes.fill_between(stages, runs.min(), runs.max(), color=style["color"], **faint)
        name_marks(name, [*drawn, range_])


def _list_means(groups: Mapping[str, tuple[Values, Values]], *, x: str, y: str) -> str:
    """Each group's means in words; of many groups the first."""
    each = []
    for name, values in groups.items():
        there = _pair_known(values)
        if there[0].size:
            each.append(f"{name}: {x} {there[0].mean():.4g}, {y} {there[1].mean():.4g}")
    return list_told(each)


def list_told(each: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    known = list(each)
    more = f"; and {len(known) - FEW} more" if len(known) > FEW else ""
    return f"{'; '.join(known[:FEW])}{more}." if known else "None."
