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
from cpt.reporting.figures import heaviest, mark_own, part_weights, perplexities
from cpt.reporting.formatting import perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = Sequence[float | None]
Places = Mapping[str, int]
Styles = Mapping[str, Mapping[str, str]]
HIGHLIGHTED = 6  # of more than FEW curves, so many are told apart: those that end lowest


def trade_off(groups: Mapping[str, tuple[Values, Values]], *, places: Places | None = None) -> bytes:
    """Forgetting (nats) against average perplexity, a point per run; large: the mean of a group.

    A group is two sequences, forgetting and perplexity by run. One without forgetting (joint training,
    zero-shot) is a line at its mean perplexity.
    """
    figure, axes = _open_plane(len(groups))
    styles, levels = assign_styles(groups, places), {}
    for name, values in groups.items():
        x, y = _pair_known(values)
        y_alone = _to_array(values[1])
        if x.size:
            _points(axes, x, y, label=_name_group(name, runs=x.size), style=styles[name])
        elif np.isfinite(y_alone).any():
            levels[name] = float(y_alone[np.isfinite(y_alone)].mean())
    axes.margins(0.12)
    _draw_levels(axes, levels, styles)
    axes.set(xlabel="forgetting FG (nats; left is better)", ylabel="average perplexity LC (down is better)")
    _legend(figure, axes)
    told = _list_means(groups, x="forgetting", y="perplexity")
    return png(figure, told=f"Forgetting (nats) and average perplexity, means over runs. {told}")


def pareto(
    points: Mapping[str, tuple[Values, Values]],
    *,
    x: str,
    y: str,
    logarithmic: bool,
    places: Places | None = None,
) -> bytes:
    """A group's mean of x against that of y, small its runs, and the front: the groups than which none is
    lower in both. x and y are the axes' labels; lower is better. `logarithmic`: x, whose values of 0 or less
    are left out."""
    figure, axes = _open_plane(len(points))
    styles, means = assign_styles(points, places), {}
    for name, values in points.items():
        there = _pair_known(values, positive=logarithmic)
        if there[0].size:
            means[name] = there[0].mean(), there[1].mean()
            _points(axes, *there, label=_name_group(name, runs=there[0].size), style=styles[name])
    if logarithmic and means:
        axes.set_xscale("log")
    axes.margins(0.12)
    front = pareto_front(means)
    _staircase(axes, [means[name] for name in front])
    axes.set(xlabel=x, ylabel=y)
    _legend(figure, axes)
    told = f"The front: {', '.join(front) or 'no group'}. {_list_means(points, x='x', y='y')}"
    return png(figure, told=f"{y} against {x}; lower is better for both. {told}")


def pareto_front(means: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names than which no other is lower in one and no higher in the other, by ascending x."""
    front, lowest = [], (np.inf, np.inf)
    for name in sorted(means, key=means.get):
        if means[name][1] < lowest[1] or means[name] == lowest:
            front.append(name)
            lowest = means[name]
    return front


def curves(groups: Mapping[str, Sequence[Scores]], *, places: Places | None = None) -> bytes:
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
    _each_curve(axes, lines, styles)
    _draw_levels(axes, levels, styles)
    drawing.plain_logarithm(axes.yaxis, np.concatenate([[*levels.values()], *map(np.ravel, lines.values())]))
    axes.set(xlabel="stages learned", ylabel="mean perplexity over the domains so far (log scale)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, axes)
    ends = [f"{name} {perplexity(value)}" for name, value in (_end_curves(lines) | levels).items()]
    return png(figure, told=f"Mean perplexity over the domains so far, at the end. {_listed(ends)}")


def matrices(runs: Mapping[str, Scores]) -> bytes:
    """The runs' matrices side by side, coloured on one scale by the change in nats against the base model; a
    domain's own stage is framed. A run that learned nothing is left out."""
    shown = {name: scores for name, scores in runs.items() if len(scores.rows) > 1}
    changes = {name: scores.matrix - scores.matrix[:1] for name, scores in shown.items()}
    figure, grid = drawing.panels({name: each.shape for name, each in changes.items()}, each=0.36)
    everything = np.concatenate([np.ravel(each) for each in changes.values()] or [np.zeros(1)])
    scale = drawing.limits(everything)
    for (name, scores), axes in zip(shown.items(), grid, strict=False):
        how = {"cmap": drawing.diverging(), **scale}
        names = {"rows": scores.rows, "columns": scores.domains}
        image = drawing.panel(axes, changes[name], title=name, **names, **how)
        strong = np.abs(changes[name]) > 0.6 * scale["vmax"]
        if len(shown) <= FEW:
            drawing.write_numbers(axes, changes[name], white=strong, most=8, sign="+")
        mark_own(axes, scores=scores, columns=scores.domains)
    _scale(figure, image if shown else None, label="change in nats per token\n(blue: better than base)")
    domains = {name: [text != GENERAL for text in scores.domains] for name, scores in shown.items()}
    ends = [f"{name} {changes[name][-1, domains[name]].mean():+.2f}" for name in shown]
    return png(figure, told=f"Change in nats of the last model, mean over domains. {_listed(ends)}")


def overlaps(matrices: Mapping[str, tuple[list[str], np.ndarray]]) -> bytes:
    """How far domains share what each uses, side by side: names [n] and similarities [n, n] in 0..1."""
    shapes = {name: values.shape for name, (_, values) in matrices.items()}
    figure, grid = drawing.panels(shapes, each=0.42)
    image, ends = None, []
    for (title, (names, values)), axes in zip(matrices.items(), grid, strict=False):
        how = {"cmap": drawing.sequential(), "vmin": 0, "vmax": 1}
        image = drawing.panel(axes, values, title=title, rows=names, columns=names, **how)
        drawing.write_numbers(axes, values, white=values > 0.6, most=9)
        others = values[~np.eye(len(names), dtype=bool)]
        if np.isfinite(others).any():
            ends.append(f"{title} {np.nanmean(others):.2f}")
    _scale(figure, image, label="similarity of two domains")
    return png(figure, told=f"Similarity between domains, mean over pairs. {_listed(ends)}")


def posteriors(groups: Mapping[str, Scores]) -> bytes:
    """The weights of the parts in the last models' scores of each text, side by side."""
    shown = {name: part_weights(scores) for name, scores in groups.items()}
    figure, grid = drawing.panels({name: weights.shape for name, (_, weights) in shown.items()}, each=0.42)
    image = None
    for (title, (parts, weights)), axes in zip(shown.items(), grid, strict=False):
        how = {"cmap": drawing.sequential(), "vmin": 0, "vmax": 1}
        texts = groups[title].domains
        image = drawing.panel(axes, weights, title=title, rows=texts, columns=parts, **how)
        drawing.write_numbers(axes, weights, white=weights > 0.6, most=9)
    _scale(figure, image, label="mean weight of a part (column)\nin the score of a text (row)")
    told = [f"{name}: {heaviest(scores)}" for name, scores in list(groups.items())[:FEW]]
    return png(figure, told=" ".join(told) or "No group.")


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


def _points(axes: Axes, x: np.ndarray, y: np.ndarray, *, label: str, style: Mapping[str, str]) -> None:
    """The runs of a group, and their mean as a large hollow mark."""
    many, mark = x.size > 5, {"color": style["color"], "marker": style["marker"]}
    axes.scatter(x, y, s=12 if many else 24, alpha=0.4 if many else 0.7, linewidths=0, zorder=2, **mark)
    hollow = {"facecolors": "none", "edgecolors": style["color"], "linewidths": 2, "zorder": 3}
    axes.scatter(x.mean(), y.mean(), s=130, marker=style["marker"], label=label, **hollow)


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
            axes.axhline(level, label=label, **style)
        else:
            axes.plot([], [], label=f"{label} (off the axis)", **style)


def _legend(figure: Figure, axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        how = {"frameon": False, "fontsize": 8, "markerscale": 0.7, "labelspacing": 0.8}
        figure.legend(loc="outside right upper", **how)


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


def _each_curve(axes: Axes, lines: Mapping[str, pandas.DataFrame], styles: Styles) -> None:
    """A curve per group; of many, those that end lowest are told apart and the others grey."""
    ends = _end_curves(lines)
    marked = sorted(ends, key=ends.get)[: HIGHLIGHTED if len(lines) > FEW else None]
    for name in [name for name in lines if name not in marked]:
        axes.plot(lines[name].columns + 1, lines[name].mean(), color="0.75", linewidth=0.8, zorder=1)
    if len(marked) < len(lines):
        axes.plot([], [], color="0.75", label=f"{len(lines) - len(marked)} others")
    for name in marked:
        runs, stages = lines[name], lines[name].columns + 1
        style = {**styles[name], "markersize": 5, "markevery": -(-len(stages) // 20)}
        label = f"{_name_group(name, runs=len(runs))}: {perplexity(ends[name])}"
        axes.plot(stages, runs.mean(), label=label, zorder=3, linewidth=1.6, **style)
        faint = 0.15 if len(marked) <= HIGHLIGHTED else 0.06
        axes.fill_between(stages, runs.min(), runs.max(), color=style["color"], alpha=faint, linewidth=0)


def _scale(figure: Figure, image: object, *, label: str) -> None:
    """One colour scale beside all panels; none where there is no panel."""
    if image is not None:
        shown = [axes for axes in figure.axes if axes.get_visible()]
        how = {"aspect": 24, "shrink": min(1.0, 3.2 / figure.get_figheight()), "anchor": (0, 1)}
        figure.colorbar(image, ax=shown, label=label, **how)


def _list_means(groups: Mapping[str, tuple[Values, Values]], *, x: str, y: str) -> str:
    """Each group's means in words; of many groups the first."""
    each = []
    for name, values in groups.items():
        there = _pair_known(values)
        if there[0].size:
            each.append(f"{name}: {x} {there[0].mean():.4g}, {y} {there[1].mean():.4g}")
    return _listed(each)


def _listed(each: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    known = list(each)
    more = f"; and {len(known) - FEW} more" if len(known) > FEW else ""
    return f"{'; '.join(known[:FEW])}{more}." if known else "None."
