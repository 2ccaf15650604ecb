"""Figures of a comparison, as blocks of its page: Pareto planes, curves over stages or a setting, heat maps.

`places`: colour and marker of a group, the same in all of them; `marks`: what the group's marks stand for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pandas import DataFrame, Series

from cpt.core.schema import Number, fits, show
from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores
from cpt.reporting import drawing
from cpt.reporting.compare import (
    COST_MEASURES,
    MEASURES,
    format_spread,
    is_ranked,
    pareto_front,
    spread_values,
)
from cpt.reporting.drawing import FEW, literal, name_marks, png
from cpt.reporting.frames import perplexity
from cpt.reporting.load_runs import Run, RunGroup, RunSection
from cpt.reporting.overlap import measure_overlap
from cpt.reporting.page import Block, few

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = Sequence[float | None]
MAX_PANELS = 8  # heat maps side by side
HIGHLIGHTED = 6  # of more than FEW curves, those that end lowest
OUTLIERS = 5  # groups from which on one may be called an outlier
MARKED = ("LC/perplexity", "CPT/nats", "FG/nats", "endtask/MF1", "answers/AP", "cost/flops")
PLANES = (  # title, name, x, y, their labels, whether x is logarithmic
    ("Forgetting against learning", "forgetting_learning", "CPT/perplexity", "FG/nats")
    + ("learning CPT (perplexity)", "forgetting FG (nats)", True),
    ("Quality against compute", "quality_compute", "cost/flops", "LC/perplexity")
    + ("FLOPs of the whole run", "average perplexity LC", True),
    ("Average perplexity against forgetting", "perplexity_forgetting", "FG/nats", "LC/perplexity")
    + ("forgetting FG (nats)", "average perplexity LC", False),
)


class HeatMap(NamedTuple):
    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    group: str = ""
    framed: Sequence[tuple[int, int]] = ()


def build_figures(section: RunSection) -> list[Block]:
    """All figures for which there are numbers."""
    spreads, marks = spread_values(section), {}
    for group in section.groups:
        own = [(m, spreads[group.name].get(m.key)) for m in (*MEASURES, *COST_MEASURES) if m.key in MARKED]
        told = "; ".join(f"{m.title} {format_spread(each, m.show)}" for m, each in own if each)
        marks[group.name] = f"{group.name}, runs: {len(group.runs)}. {told}"
    how = {"places": section.places, "marks": marks}

    blocks = []
    for title, name, x, y, x_label, y_label, logarithmic in PLANES:
        points = {group.name: (group.of(x), group.of(y)) for group in section.groups if is_ranked(group, y)}
        if any(None not in pair for xs, ys in points.values() for pair in zip(xs, ys, strict=True)):
            picture = draw_plane(points, x=x_label, y=y_label, logarithmic=logarithmic, **how)
            line = "Small: runs; large: their means. Down and left is better."
            blocks.append(Block(title=title, lines=[line], picture=picture, name=name))
    runs = {group.name: [run.scores for run in group.runs] for group in section.groups}
    line = "Mean perplexity over the domains learned so far: mean and range over the runs of a group."
    picture = draw_stages(runs, **how)
    blocks.append(Block(title="Over the stages", lines=[line], picture=picture, name="stages"))

    baselines = {group.name for group in section.baselines.values()}
    shown = [group for group in section.groups if len(group.runs[0].scores.rows) > 1]
    shown = sorted(shown, key=lambda group: group.name not in baselines)[:MAX_PANELS]
    changes, overlaps = {}, {}
    for group in (group for group in section.groups if group in shown):
        run, scores = group.runs[0], group.runs[0].scores
        own = [(scores.rows.index(name), scores.domains.index(name)) for name in scores.learned]
        change = scores.matrix - scores.matrix[:1]
        changes[group.name] = HeatMap(change, scores.rows, scores.domains, group.name, own)
        for quantity, (names, values) in measure_overlap(run.folder, scores).items():
            overlaps[f"{group.name}: {quantity}"] = HeatMap(values, names, names, group.name)
    for title, name, maps, label, line in (
        ("Matrices side by side", "matrices", changes, "change in nats per token\n(blue: better than base)",
         "Change in nats against the base; frames: a domain's own stage."),
        ("Overlap of importances, masks and gates", "overlap", overlaps, "similarity of two domains",
         "Similarity between domains of what a method chose for each."),
    ):  # fmt: skip
        if maps := dict(list(maps.items())[:MAX_PANELS]):
            picture = draw_heat_maps(maps, label=label, change=name == "matrices", marks=marks)
            lines = [f"{line} The first run of each group, at most {MAX_PANELS}."]
            blocks.append(Block(title=title, lines=lines, picture=picture, name=name))
    return blocks


def draw_plane(
    groups: Mapping[str, tuple[Values, Values]],
    *,
    x: str,
    y: str,
    logarithmic: bool = False,
    lines: Sequence[Sequence[str]] = (),
    places: Mapping[str, int] | None = None,
    marks: Mapping[str, str] | None = None,
) -> bytes:
    """A group's mean of x against that of y, small its runs, and the Pareto front; lower is better. A group
    without x is a line at its mean y; outliers are named only. `logarithmic`: x, without values of 0
    or less; `lines` connect means."""
    own = places or {name: place for place, name in enumerate(groups)}
    styles = {name: drawing.style(own[name]) for name in groups}
    figure, axes = open_axes(len(groups))
    axes.margins(0.12)
    points, levels = {}, {}
    for name, values in groups.items():
        pairs = np.array([list(values[0]), list(values[1])], dtype=float)
        known = np.isfinite(pairs).all(0) & ((pairs[0] > 0) | (not logarithmic))
        if known.any():
            points[name] = pairs[:, known]
        elif not np.isfinite(pairs[0]).any() and np.isfinite(pairs[1]).any():
            levels[name] = float(np.nanmean(pairs[1]))
    if logarithmic and points:
        axes.set_xscale("log")
    means = {name: runs.mean(1) for name, runs in points.items()}
    windows = [
        find_window([runs[axis] for runs in points.values()], logarithmic=logarithmic and not axis)
        for axis in (0, 1)
    ]
    for name, runs in points.items():
        style, many = {"marker": styles[name]["marker"]}, runs.shape[1] > 5
        small = {"s": 12 if many else 24, "alpha": 0.4 if many else 0.7, "linewidths": 0, "zorder": 2}
        large = {"s": 130, "facecolors": "none", "linewidths": 2, "zorder": 3}
        label = literal(name, width=44) + f" ({runs.shape[1]})" * (runs.shape[1] > 1)
        mean = means[name].tolist()
        if any(w and not w[0] <= each <= w[1] for each, w in zip(mean, windows, strict=True)):
            label += f": off the axes, {mean[0]:.4g}, {mean[1]:.4g}"
        drawn = axes.scatter(*runs, color=styles[name]["color"], **small, **style)
        large["edgecolors"] = styles[name]["color"]
        name_marks(name, [drawn, axes.scatter(*mean, label=label, **large, **style)])
    for line in ([name for name in each if name in means] for each in lines):
        if line:
            axes.plot(*np.array([means[name] for name in line]).T, color=styles[line[0]]["color"], zorder=1)
    for limit, window in zip((axes.set_xlim, axes.set_ylim), windows, strict=True):
        if window:
            limit(*window)
    front = pareto_front({name: tuple(mean.tolist()) for name, mean in means.items()})
    if front:
        xs, ys = np.array([means[name] for name in front]).T
        line = {"color": "0.35", "linewidth": 1.2, "linestyle": "--", "zorder": 0, "label": "Pareto front"}
        right, top = axes.get_xlim()[1], axes.get_ylim()[1]
        axes.step([xs[0], *xs, right], [top, *ys, ys[-1]], where="post", **line)
    draw_levels(axes, levels, styles)
    if logarithmic and points:
        drawing.plain_logarithm(axes.xaxis, np.array(axes.get_xlim()))
    axes.set(xlabel=x, ylabel=y)
    add_legend(figure, axes)
    told = list_few(f"{name}: x {mean[0]:.4g}, y {mean[1]:.4g}" for name, mean in means.items())
    best = f"The front: {few(front, between=', ') or 'no group'}."
    return png(figure, told=f"{y} against {x}; lower is better for both. {best} {told}", marks=marks)


def draw_stages(
    groups: Mapping[str, Sequence[Scores]],
    *,
    places: Mapping[str, int] | None = None,
    marks: Mapping[str, str] | None = None,
) -> bytes:
    """Perplexity over the stages, a mean over the domains learned so far; a group's mean and range over its
    runs. A model that learned no sequence is a line at its mean over all domains. Of more than FEW groups,
    those that end lowest are told apart."""
    own = places or {name: place for place, name in enumerate(groups)}
    styles = {name: drawing.style(own[name]) for name in groups}
    figure, axes = open_axes(min(len(groups), 2 * FEW))
    axes.set_yscale("log")
    lines, levels = {}, {}
    for name, runs in groups.items():
        so_far, last = [], []
        for scores in (scores for scores in runs if scores.rows):
            with np.errstate(over="ignore"):
                cells = np.exp(scores.cells)
            columns = [scores.domains.index(domain) for domain in scores.learned]
            means = [row[columns[: stage + 1]].mean() for stage, row in enumerate(cells[1:]) if columns]
            so_far += [np.where(np.isfinite(means), means, np.nan)] if columns else []
            last += [] if columns else [cells[-1, [domain != GENERAL for domain in scores.domains]].mean()]
        table = DataFrame([Series(each) for each in so_far])  # [run, stage], nan where a run has no more
        if table.notna().any(axis=None):
            lines[name] = table
        elif np.isfinite(last).any():
            levels[name] = float(np.mean([each for each in last if np.isfinite(each)]))
    means = {name: table.mean() for name, table in lines.items()}
    ends = {name: float(mean.dropna().iloc[-1]) for name, mean in means.items()}
    marked = sorted(ends, key=lambda name: ends[name])[: HIGHLIGHTED if len(lines) > FEW else None]
    for name in (name for name in lines if name not in marked):
        name_marks(name, axes.plot(means[name].index + 1, means[name], color="0.75", zorder=1))
    if others := len(lines) - len(marked):
        axes.plot([], [], color="0.75", label=f"{others} others")
    for name in marked:
        stages, table = means[name].index + 1, lines[name]
        label = literal(name, width=44) + f" ({len(table)})" * (len(table) > 1)
        label += f": {perplexity(ends[name])}"
        style = {**styles[name], "markersize": 5, "markevery": -(-len(stages) // 20), "linewidth": 1.6}
        drawn = axes.plot(stages, means[name], label=label, zorder=3, **style)
        faint = {"alpha": 0.15 if len(marked) <= HIGHLIGHTED else 0.06, "linewidth": 0}
        band = axes.fill_between(stages, table.min(), table.max(), color=style["color"], **faint)
        name_marks(name, [*drawn, band])
    draw_levels(axes, levels, styles)
    known = [np.ravel(table.to_numpy()) for table in lines.values()]
    drawing.plain_logarithm(axes.yaxis, np.concatenate([[*levels.values()], *known]))
    axes.set(xlabel="stages learned", ylabel="mean perplexity over the domains so far (log scale)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    add_legend(figure, axes)
    told = list_few(f"{name} {perplexity(value)}" for name, value in (ends | levels).items())
    return png(figure, told=f"Mean perplexity over the domains so far, at the end. {told}", marks=marks)


def draw_heat_maps(
    maps: Mapping[str, HeatMap], *, label: str, change: bool = False, marks: Mapping[str, str] | None = None
) -> bytes:
    """Heat maps side by side on one colour scale: 0 to 1, or of a `change` around 0."""
    figure, grid = drawing.panels({title: each.values.shape for title, each in maps.items()}, each=0.4)
    how: dict[str, Any] = {"cmap": drawing.sequential(), "vmin": 0, "vmax": 1}
    if change:
        everything = np.concatenate([np.ravel(each.values) for each in maps.values()] or [np.zeros(1)])
        how = {"cmap": drawing.diverging(), **drawing.limits(everything)}
    image = None
    for (title, each), axes in zip(maps.items(), grid, strict=False):
        image = drawing.panel(axes, each.values, title=title, rows=each.rows, columns=each.columns, **how)
        strong = np.abs(each.values) > 0.6 * how["vmax"]
        drawing.write_numbers(axes, each.values, white=strong, most=8, sign="+" * change)
        drawing.frame_cells(axes, each.framed, width=2 if len(each.columns) <= FEW + 1 else 0.7)
        name_marks(each.group, [axes])
    if image is not None:
        shown = [axes for axes in figure.axes if axes.get_visible()]
        shrink = min(1.0, 3.2 / figure.get_figheight())
        figure.colorbar(image, ax=shown, label=label, aspect=24, shrink=shrink, anchor=(0, 1))
    cells = {title: each.values.copy() for title, each in maps.items()}
    for title, each in maps.items():
        if each.rows == each.columns:  # each is as itself
            np.fill_diagonal(cells[title], np.nan)
    means = {title: values[np.isfinite(values)] for title, values in cells.items()}
    told = list_few(f"{title} {values.mean():.2f}" for title, values in means.items() if values.size)
    return png(figure, told=f"Heat maps, {' '.join(label.split())}; means: {told}", marks=marks)


def build_setting_curve(section: RunSection, key: str) -> Block:
    """Learned against forgotten over a setting (`--curve`): a line through groups that differ in it alone,
    and groups without it; nothing where no two groups differ in it alone."""
    curves: dict[str, list[tuple[Any, RunGroup]]] = defaultdict(list)
    for group in section.groups:
        value = group.runs[0].settings.get(key)
        others = sorted(each for each in group.own if not each.startswith(f"{key}="))
        curves[group.name if value is None else " ".join([group.plain, *others])].append((value, group))
    curves = {name: points for name, points in curves.items() if len(points) > 1 or points[0][0] is None}
    if all(len(points) == 1 for points in curves.values()):
        return Block()
    cells, points, lines, places = [], {}, [], {}
    for name, own in sorted(curves.items(), key=lambda each: len(each[1]) == 1):
        own.sort(key=lambda x: (not fits(x[0], Number), x[0] if fits(x[0], Number) else str(x[0])))
        lines.append([])
        for value, group in own:
            called = name if value is None else f"{name} {show(value)}"
            points[called] = group.of("CPT/nats"), group.of("FG/nats")
            places[called] = section.places[own[0][1].name]
            lines[-1].append(called)
            pairs = zip(group.of("ZS/nats"), group.of("CPT/nats"), strict=True)
            learned = [base - after for base, after in pairs if None not in (base, after)]
            numbers = [fmean(learned) if learned else None, group.mean("FG/nats"), group.mean("LC/nats")]
            told = ["–" if each is None else f"{each:.4f}" for each in numbers]
            cells.append([name, "–" if value is None else show(value), str(len(group.runs)), *told])
    labels = {"x": "loss just after learning, CPT (nats)", "y": "forgetting FG (nats)"}
    return Block(
        title=f"Learned against forgotten over {key}",
        lines=["Learned: the base's loss minus that just after a domain was learned (ZS - CPT)."],
        picture=draw_plane(points, lines=lines, places=places, **labels),
        name="strengths",
        head=["method", key, "runs", "learned (nats)", "forgotten FG (nats)", "LC (nats)"],
        cells=cells,
    )


def check_curve(key: str, runs: Sequence[Run]) -> None:
    """Raises ValueError for a setting in which no two runs differ."""
    values: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for name, value in run.settings.items():
            values[name].add(str(value))
    differing = sorted(name for name, given in values.items() if len(given) > 1)
    if runs and key not in differing:
        listed = ", ".join(differing[:FEW]) + ", …" * (len(differing) > FEW)
        raise ValueError(f"--curve {key}; allowed: a setting in which runs differ: {listed or 'none'}")


def open_axes(groups: int) -> tuple[Figure, Axes]:
    """A figure that is high enough for a legend of so many groups."""
    figure = drawing.figure((8.5, max(4.8, 0.23 * groups + 0.8)))
    axes = figure.add_subplot()
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    return figure, axes


def find_window(values: Sequence[np.ndarray], *, logarithmic: bool) -> tuple[float, float] | None:
    """Limits of an axis without groups whose mean is an outlier (Tukey's outer fences), where the others
    would have less than 40 % of the axis; None where there is none."""
    means = np.array([each.mean() for each in values], dtype=float)
    scaled = np.log(means) if logarithmic and (means > 0).all() else means
    if len(scaled) < OUTLIERS or not np.isfinite(scaled).all():
        return None
    low, high = np.percentile(scaled, [25, 75])
    near = (scaled >= low - 3 * (high - low)) & (scaled <= high + 3 * (high - low))
    if near.all() or not 0 < np.ptp(scaled[near]) < 0.4 * np.ptp(scaled):
        return None
    runs = np.concatenate([each for each, inside in zip(values, near, strict=True) if inside])
    ends = np.log([runs.min(), runs.max()]) if logarithmic else np.array([runs.min(), runs.max()])
    ends = ends + 0.12 * np.ptp(ends) * np.array([-1, 1])
    bottom, top = (np.exp(ends) if logarithmic else ends).tolist()
    return bottom, top


def draw_levels(axes: Axes, levels: Mapping[str, float], styles: Mapping[str, Mapping[str, str]]) -> None:
    """A line per level; one that would press the points together is only named."""
    heights = list(levels.values()) or [0.0]
    low, high = axes.get_ylim() if axes.collections or axes.lines else (min(heights), max(heights))
    for name, level in levels.items():
        label = f"{literal(name, width=30)}: {perplexity(level)}"
        style = {"color": styles[name]["color"], "linewidth": 1.4, "linestyle": "-."}
        if low - 0.6 * (high - low) <= level <= high + 0.6 * (high - low):
            name_marks(name, [axes.axhline(level, label=label, **style)])
        else:
            name_marks(name, axes.plot([], [], label=f"{label} (off the axis)", **style))


def add_legend(figure: Figure, axes: Axes) -> None:
    """Right of the axes; its entries are marks of their groups."""
    if sources := axes.get_legend_handles_labels()[0]:
        how = {"frameon": False, "fontsize": 8, "markerscale": 0.7, "labelspacing": 0.8}
        legend = figure.legend(loc="outside right upper", **how)
        for source, *entry in zip(sources, legend.legend_handles, legend.get_texts(), strict=True):
            for each in entry:
                each.set_gid(source.get_gid())


def list_few(each: Iterable[str]) -> str:
    known = list(each)
    return f"{few(known, between='; ')}." if known else "None."
