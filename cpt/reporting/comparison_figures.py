"""The figures of a comparison, as blocks of its page. Colour and marker of a group are the same in all."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pandas import DataFrame, Series

from cpt.core.exceptions import format_value
from cpt.core.messages import count_noun
from cpt.core.schema import Number, fits
from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores
from cpt.reporting.contrasts import find_pareto_front, is_ranked
from cpt.reporting.drawing import (
    HeatMap,
    Picture,
    SeriesStyle,
    choose_series_style,
    draw_heat_maps,
    escape_label,
    label_logarithm,
    list_descriptions,
    make_figure,
    make_png,
    scale_around_zero,
)
from cpt.reporting.formats import MAX_LISTED, format_perplexity, list_names
from cpt.reporting.frames import average_so_far
from cpt.reporting.page import PICTURES, Block, build_picture_block
from cpt.reporting.run_figures import CHANGE_LABEL, map_change, mark_stages, name_stages
from cpt.reporting.sections import RunGroup, RunSection, name_orders
from cpt.reporting.svg import PageFigure, add_spots, assign_front, assign_group, share_groups
from cpt.reporting.training_curves import Borders, find_stages, read_training

MAX_PANELS = 8  # heat maps side by side
MAX_ORDERS = 4  # panels of training curves
NUM_HIGHLIGHTED = 6  # of more than MAX_LISTED curves, those that end lowest

Values = Sequence[float | None]  # by run


@dataclass(frozen=True)
class Plane:
    """Two measures that are drawn against each other; lower is better in both."""

    x: str  # key of a value
    y: str
    x_label: str
    y_label: str
    is_logarithmic: bool  # in x


PLANES = {  # by key of pictures.yaml
    "forgetting_learning": Plane(
        "CPT/perplexity", "FG/nats", "just learned CPT (perplexity)", "forgetting FG (nats)", True
    ),
    "quality_compute": Plane(
        "cost/flops", "LC/perplexity", "FLOPs of the whole run", "final LC (perplexity)", True
    ),
    "perplexity_forgetting": Plane(
        "FG/nats", "LC/perplexity", "forgetting FG (nats)", "final LC (perplexity)", False
    ),
}


def build_figures(section: RunSection) -> list[Block]:
    """All figures of a comparison for which there are numbers."""
    blocks = []
    matrices = draw_matrices(section)
    if matrices is not None:
        caption = (
            f"Means over the runs of a group that have its most frequent order; at most {MAX_PANELS} groups. "
            f"{PICTURES['matrix']['caption']}"
        )
        blocks.append(build_picture_block("matrices", matrices, caption=caption))

    scores_by_group = {}
    for group in section.groups:
        scores_by_group[group.name] = [run.scores for run in group.runs]
    picture = draw_stages(scores_by_group, style_indices=section.style_indices)
    blocks.append(build_picture_block("averages", picture))
    curves = draw_curves(section)
    if curves is not None:
        blocks.append(build_picture_block("curves", curves))

    for key, plane in PLANES.items():
        points: dict[str, tuple[Values, Values]] = {}
        has_points = False
        for group in section.groups:
            if is_ranked(group, plane.y):
                xs = group.list_values(plane.x)
                ys = group.list_values(plane.y)
                points[group.name] = xs, ys
                has_points |= any(x is not None and y is not None for x, y in zip(xs, ys, strict=True))
        if has_points:
            picture = draw_plane(
                points,
                x_label=plane.x_label,
                y_label=plane.y_label,
                is_logarithmic=plane.is_logarithmic,
                style_indices=section.style_indices,
            )
            blocks.append(build_picture_block(key, picture))
    return blocks


def draw_matrices(section: RunSection) -> Picture | None:
    """Heat maps of the mean changes of each group, in the order of the groups. If there are more than
    MAX_PANELS, the baselines and the first others are shown. None without a trained stage."""
    baseline_names = {baseline.name for baseline in section.baselines.values()}
    trained_groups = [group for group in section.groups if len(group.runs[0].scores.rows) > 1]
    baselines_first = sorted(trained_groups, key=lambda group: group.name not in baseline_names)
    selected_groups = baselines_first[:MAX_PANELS]

    maps = {}
    for group in trained_groups:
        if group in selected_groups:
            maps[group.name] = map_mean_change(group)
    if not maps:
        return None
    return draw_heat_maps(
        maps,
        label=CHANGE_LABEL,
        format_value="{:+.2f}".format,
        scale=scale_around_zero(maps),
        are_groups=True,
    )


def map_mean_change(group: RunGroup) -> HeatMap:
    """The mean change in nats against the base model, over the runs with the rows and texts that most runs of
    the group have: those of its most frequent order. A cell that one of them lacks is empty."""
    layouts = Counter(list_layout(run.scores) for run in group.runs)
    layout, _ = layouts.most_common(1)[0]
    same_layout = [run.scores for run in group.runs if list_layout(run.scores) == layout]
    changes = np.stack([map_change(scores).values for scores in same_layout])  # [run, row, text]
    return replace(map_change(same_layout[0]), values=changes.mean(axis=0))


def list_layout(scores: Scores) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the rows and of the texts of a matrix."""
    return tuple(scores.rows), tuple(scores.domains)


@dataclass(frozen=True)
class OrderCurves:
    """The training losses over an order of domains: those of each run by group, over its tokens."""

    losses: dict[str, list[Series]]
    stages: Mapping[str, Borders]  # of the last run


def collect_curves(section: RunSection) -> dict[str, OrderCurves]:
    """The training losses by the name of the order; without orders that have none."""
    order_names = name_orders(section.runs)
    losses: dict[str, dict[str, list[Series]]] = defaultdict(lambda: defaultdict(list))
    stages = {}
    for group in section.groups:
        for run in group.runs:
            training = read_training(run.folder / "metrics.csv", run.scores)
            curves = [table["lm"].dropna() for table in training.values() if "lm" in table]
            if curves:
                order = order_names[run.pair[0]]
                losses[order][group.name].append(pandas.concat(curves))
                stages[order] = find_stages(run.scores)
    return {order: OrderCurves(losses[order], stages[order]) for order in losses}


def draw_curves(section: RunSection) -> Picture | None:
    """Training loss over the tokens of the whole run: a panel for each order, at most MAX_ORDERS, and a line
    for each group, the mean over its seeds, shaded from the lowest to the highest. If there are more than
    MAX_LISTED groups, those that end lowest are shown. None without curves."""
    orders = collect_curves(section)
    if not orders:
        return None
    last_losses: dict[str, list[float]] = defaultdict(list)  # by group, of all its runs
    for curves in orders.values():
        for group, losses in curves.losses.items():
            last_losses[group] += [float(run_losses.iloc[-1]) for run_losses in losses]
    highlighted = select_lowest({group: float(np.mean(losses)) for group, losses in last_losses.items()})
    styles = style_groups(last_losses, section.style_indices)

    shown_orders = list(orders)[:MAX_ORDERS]
    height = max(0.8 + 3.2 * len(shown_orders), 0.23 * len(highlighted) + 0.8)
    figure = make_figure((11, height))
    panels = figure.subplots(len(shown_orders), 1, squeeze=False)[:, 0]
    has_several_orders = len(name_orders(section.runs)) > 1
    for order, axes in zip(shown_orders, panels, strict=True):
        for group in highlighted:
            if group in orders[order].losses:
                label = label_group(group, num_runs=len(last_losses[group]))
                losses = orders[order].losses[group]
                draw_losses(axes, losses, group=group, label=label, colour=styles[group].colour)
        mark_stages(axes, orders[order].stages)
        name_stages(axes, orders[order].stages)
        axes.set_ylabel("training loss (nats)", fontsize=9)
        title = f"order {escape_label(order, width=60)}" if has_several_orders else ""
        axes.set_title(title, fontsize=10)

    panels[-1].set_xlabel("tokens read by the optimizer steps, all stages")
    lines = {}
    for axes in panels:
        for line in axes.get_legend_handles_labels()[0]:
            lines[line.get_label()] = line
    legend = figure.legend(lines.values(), lines.keys(), loc="outside right upper", frameon=False, fontsize=8)
    share_groups(legend, list(lines.values()))
    ends = list_descriptions(f"{group} {np.mean(last_losses[group]):.3f}" for group in highlighted)
    return make_png(figure, description=f"Training loss at the last point, means over runs: {ends}")


def draw_losses(axes: Axes, curves: Sequence[Series], *, group: str, label: str, colour: str) -> None:
    """The mean of several runs at the tokens of the first, shaded from the lowest to the highest."""
    tokens = curves[0].index
    losses = np.stack([np.interp(tokens, curve.index, curve) for curve in curves])  # [run, point]
    means = losses.mean(0)
    (line,) = axes.plot(tokens, means, color=colour, linewidth=1.2, label=label)
    band = axes.fill_between(tokens, losses.min(0), losses.max(0), color=colour, alpha=0.2, linewidth=0)
    assign_group([line, band], group)
    texts = [f"{group}, {x:,.0f} tokens: {y:.3f} nats" for x, y in zip(tokens, means, strict=True)]
    add_spots(axes, tokens, means, texts, group=group)


def select_lowest(ends: Mapping[str, float]) -> list[str]:
    """The names by ascending value; the first NUM_HIGHLIGHTED if they are more than MAX_LISTED."""
    names = sorted(ends, key=lambda name: ends[name])
    return names[:NUM_HIGHLIGHTED] if len(names) > MAX_LISTED else names


def label_group(name: str, *, num_runs: int) -> str:
    """The label of a group's line, with the number of its runs if there are several."""
    label = escape_label(name, width=44)
    return f"{label} ({num_runs})" if num_runs > 1 else label


def draw_plane(
    groups: Mapping[str, tuple[Values, Values]],
    *,
    x_label: str,
    y_label: str,
    is_logarithmic: bool = False,
    lines: Sequence[Sequence[str]] = (),
    style_indices: Mapping[str, int] | None = None,
) -> Picture:
    """A group's mean of x against that of y, small its runs, and the Pareto front; lower is better. A group
    without x is a line at its mean y. `is_logarithmic`: x, without values of 0 or less; `lines` connect
    means."""
    styles = style_groups(groups, style_indices)
    figure, axes = open_axes(len(groups))
    axes.margins(0.12)
    points: dict[str, np.ndarray] = {}  # [2, run]
    levels: dict[str, float] = {}
    for name, (x_values, y_values) in groups.items():
        values = np.array([list(x_values), list(y_values)], dtype=float)
        is_drawn = np.isfinite(values).all(0)
        if is_logarithmic:
            is_drawn &= values[0] > 0
        if is_drawn.any():
            points[name] = values[:, is_drawn]
        elif not np.isfinite(values[0]).any() and np.isfinite(values[1]).any():
            levels[name] = float(np.nanmean(values[1]))

    if is_logarithmic and points:
        axes.set_xscale("log")
    means = {name: runs.mean(1) for name, runs in points.items()}
    for name, runs in points.items():
        draw_group(axes, name, runs, means[name], styles[name])
    for names in lines:
        connected = [name for name in names if name in means]
        if connected:
            xs, ys = np.array([means[name] for name in connected]).T
            axes.plot(xs, ys, color=styles[connected[0]].colour, zorder=1)
    mean_points = {name: (float(mean[0]), float(mean[1])) for name, mean in means.items()}
    front = find_pareto_front(mean_points)
    if front:
        line = draw_front(axes, np.array([means[name] for name in front]))
        assign_front(line, mean_points)

    axes.set(xlabel=x_label, ylabel=y_label)
    draw_levels(axes, levels, styles)
    add_legend(figure, axes)
    if is_logarithmic and points:
        label_logarithm(axes.xaxis, np.array(axes.get_xlim()))
    described = list_descriptions(f"{name}: x {mean[0]:.4g}, y {mean[1]:.4g}" for name, mean in means.items())
    return make_png(
        figure,
        description=f"{y_label} against {x_label}; lower is better for both. "
        f"The front: {list_names(front) or 'no group'}. {described}",
    )


def draw_group(axes: Axes, name: str, runs: np.ndarray, mean: np.ndarray, style: SeriesStyle) -> None:
    """The runs of a group [2, run] as small marks, their mean as a large one."""
    num_runs = runs.shape[1]
    has_many = num_runs > 5
    run_marks = axes.scatter(
        runs[0],
        runs[1],
        color=style.colour,
        marker=style.marker,
        linewidths=0,
        s=12 if has_many else 24,
        alpha=0.4 if has_many else 0.7,
        zorder=2,
    )
    mean_mark = axes.scatter(
        mean[0],
        mean[1],
        label=label_group(name, num_runs=num_runs),
        marker=style.marker,
        linewidths=2,
        s=130,
        facecolors="none",
        edgecolors=style.colour,
        zorder=3,
    )
    assign_group([run_marks, mean_mark], name)
    xs, ys = np.column_stack([runs, mean]).tolist()
    texts = [f"{name}, one run"] * num_runs + [f"{name}, mean of {count_noun(num_runs, 'run')}"]
    for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
        texts[index] += f": {x:,.4g}, {y:,.4g}"
    add_spots(axes, xs, ys, texts, group=name)


def draw_front(axes: Axes, points: np.ndarray) -> Line2D:
    """The Pareto front through points [point, 2] by ascending x, to the ends of the axes."""
    xs, ys = points.T
    right = axes.get_xlim()[1]
    top = axes.get_ylim()[1]
    (line,) = axes.step(
        [xs[0], *xs, right],
        [top, *ys, ys[-1]],
        where="post",
        label="Pareto front",
        color="0.35",
        linewidth=1.2,
        linestyle="--",
        zorder=0,
    )
    return line


@dataclass(frozen=True)
class StageAverages:
    """Mean perplexities over the domains learned so far."""

    curves: dict[str, DataFrame]  # by group [run, stage]; nan where a run has no more
    levels: dict[str, float]  # of groups that learned no sequence: over all domains


def average_stages(groups: Mapping[str, Sequence[Scores]]) -> StageAverages:
    """The averages of each group over its runs: a curve by stage, or a level where no run learned a sequence.
    A group without a finite number has neither."""
    curves = {}
    levels = {}
    for name, runs in groups.items():
        measured_runs = [scores for scores in runs if scores.rows]
        table = DataFrame([average_by_stage(scores) for scores in measured_runs if scores.learned])
        last_means = [average_last_row(scores) for scores in measured_runs if not scores.learned]
        finite_means = [mean for mean in last_means if math.isfinite(mean)]
        if table.notna().any(axis=None):
            curves[name] = table
        elif finite_means:
            levels[name] = float(np.mean(finite_means))
    return StageAverages(curves, levels)


def average_by_stage(scores: Scores) -> Series:
    """After each stage, the mean perplexity over the domains learned so far; nan where it is not finite."""
    means = [average_so_far(scores, row) for row in range(1, len(scores.rows))]
    return Series(np.where(np.isfinite(means), means, np.nan))


def average_last_row(scores: Scores) -> float:
    """The mean perplexity of the last model over all domains."""
    is_domain = [text != GENERAL for text in scores.domains]
    with np.errstate(over="ignore"):
        return float(np.exp(scores.cells[-1, is_domain]).mean())


def draw_stages(
    groups: Mapping[str, Sequence[Scores]], *, style_indices: Mapping[str, int] | None = None
) -> Picture:
    """Perplexity over the stages, a mean over the domains learned so far; a group's mean and range over its
    runs. A model that learned no sequence is a line at its mean over all domains. If there are more than
    MAX_LISTED groups, those that end lowest are named."""
    styles = style_groups(groups, style_indices)
    averages = average_stages(groups)
    ends = {name: float(table.mean().dropna().iloc[-1]) for name, table in averages.curves.items()}
    highlighted = select_lowest(ends)
    grey_names = [name for name in averages.curves if name not in highlighted]

    figure, axes = open_axes(min(len(groups), 2 * MAX_LISTED))
    axes.set_yscale("log")
    for name in grey_names:
        table = averages.curves[name]
        assign_group(axes.plot(table.columns + 1, table.mean(), color="0.75", zorder=1), name)
    if grey_names:
        axes.plot([], [], color="0.75", label=count_noun(len(grey_names), "other"))
    for name in highlighted:
        table = averages.curves[name]
        label = f"{label_group(name, num_runs=len(table))}: {format_perplexity(ends[name])}"
        shade = 0.15 if len(highlighted) <= NUM_HIGHLIGHTED else 0.06
        draw_average(axes, table, styles[name], group=name, label=label, shade=shade)

    axes.set(xlabel="stages trained", ylabel="mean perplexity over the domains so far (log scale)")
    axes.locator_params("x", integer=True)
    draw_levels(axes, averages.levels, styles)
    add_legend(figure, axes)
    values = [np.array(list(averages.levels.values()))]
    values += [np.ravel(table.to_numpy()) for table in averages.curves.values()]
    label_logarithm(axes.yaxis, np.concatenate(values))
    described = list_descriptions(
        f"{name} {format_perplexity(value)}" for name, value in (ends | averages.levels).items()
    )
    return make_png(figure, description=f"Mean perplexity over the domains so far, at the end. {described}")


def draw_average(
    axes: Axes, table: DataFrame, style: SeriesStyle, *, group: str, label: str, shade: float
) -> None:
    """The mean over the runs of a table [run, stage], shaded from the lowest to the highest."""
    stages = table.columns + 1
    means = table.mean()
    (line,) = axes.plot(
        stages,
        means,
        label=label,
        markersize=5,
        markevery=math.ceil(len(stages) / 20),
        linewidth=1.6,
        zorder=3,
        color=style.colour,
        marker=style.marker,
        linestyle=style.dashes,
    )

    lows = table.min()
    highs = table.max()
    band = axes.fill_between(stages, lows, highs, color=style.colour, alpha=shade, linewidth=0)
    assign_group([line, band], group)

    texts = []
    for stage, mean, low, high in zip(stages, means, lows, highs, strict=True):
        text = f"{group} after {count_noun(stage, 'stage')}: {format_perplexity(mean)}"
        if len(table) > 1:
            text += f" ({format_perplexity(low)} to {format_perplexity(high)})"
        texts.append(text)
    add_spots(axes, stages, means, texts, group=group)


def build_setting_curve(sections: Sequence[RunSection], section: RunSection, key: str) -> Block:
    """Learned against forgotten over a setting (`--curve`): a line through groups that differ in it alone,
    and groups without it; nothing where no two groups differ in it alone. Raises ValueError for a setting in
    which no two runs of the sections differ."""
    check_curve(sections, key)
    curves = find_setting_curves(section, key)
    if all(len(points) == 1 for points in curves.values()):
        return Block()

    groups: dict[str, tuple[Values, Values]] = {}
    lines = []
    style_indices = {}
    for name, points in sorted(curves.items(), key=lambda curve: len(curve[1]) == 1):
        points.sort(key=rank_point)
        first_group = points[0].group
        line = []
        for point in points:
            label = name if point.value is None else f"{name} {format_value(point.value)}"
            line.append(label)
            groups[label] = point.group.list_values("CPT/nats"), point.group.list_values("FG/nats")
            style_indices[label] = section.style_indices[first_group.name]
        lines.append(line)
    picture = draw_plane(
        groups,
        x_label="just learned CPT (nats)",
        y_label="forgetting FG (nats)",
        lines=lines,
        style_indices=style_indices,
    )
    return build_picture_block("strengths", picture, title=f"Learned against forgotten over {key}")


def check_curve(sections: Sequence[RunSection], key: str) -> None:
    """Raises ValueError for a setting in which no two runs of the sections differ."""
    values: dict[str, set[str]] = defaultdict(set)
    for section in sections:
        for run in section.runs:
            for name, value in run.settings.items():
                values[name].add(str(value))
    if len(values[key]) < 2:
        differing = sorted(name for name, texts in values.items() if len(texts) > 1)
        raise ValueError(
            f"--curve {key} is invalid. Allowed: {list_names(differing) or 'no setting differs'}"
        )


@dataclass(frozen=True)
class CurvePoint:
    """A group with its value of the setting; None without it."""

    value: Any
    group: RunGroup


def rank_point(point: CurvePoint) -> tuple[bool, Any]:
    """Numbers by size, then other values as text."""
    is_number = fits(point.value, Number)
    return not is_number, point.value if is_number else str(point.value)


def find_setting_curves(section: RunSection, key: str) -> dict[str, list[CurvePoint]]:
    """The groups that differ in a setting alone, by what they share; and each group without the setting."""
    names_in_variant = (key, key.removeprefix("method."))
    has_several_models = len({group.model for group in section.groups}) > 1
    curves: dict[str, list[CurvePoint]] = defaultdict(list)
    for group in section.groups:
        value = group.runs[0].settings.get(key)
        if value is None:
            curves[group.name].append(CurvePoint(None, group))
            continue
        parts = [group.label]
        parts += sorted(
            setting for setting in group.distinctions if setting.partition("=")[0] not in names_in_variant
        )
        if has_several_models:
            parts.append(group.model)
        if group.order is not None:
            parts.append(f"order {group.orders[0]}")
        curves[" ".join(parts)].append(CurvePoint(value, group))
    return {name: points for name, points in curves.items() if len(points) > 1 or points[0].value is None}


def style_groups(groups: Iterable[str], indices: Mapping[str, int] | None) -> dict[str, SeriesStyle]:
    """The style of each group by its index; by the order of the groups where none are given."""
    indices = indices or {name: index for index, name in enumerate(groups)}
    return {name: choose_series_style(indices[name]) for name in groups}


def open_axes(num_groups: int) -> tuple[PageFigure, Axes]:
    """A figure that is high enough for the legend of its groups."""
    figure = make_figure((8.5, max(4.8, 0.23 * num_groups + 0.8)))
    axes = figure.add_subplot(axisbelow=True)
    axes.grid(color="0.9")
    return figure, axes


def draw_levels(axes: Axes, levels: Mapping[str, float], styles: Mapping[str, SeriesStyle]) -> None:
    """A line per level, or only its name if it lies far off."""
    is_empty = not axes.collections and not axes.lines
    low, high = axes.get_ylim()
    margin = 0.6 * (high - low)
    for name, level in levels.items():
        label = f"{escape_label(name, width=30)}: {format_perplexity(level)}"
        colour = styles[name].colour
        if is_empty or low - margin <= level <= high + margin:
            line = axes.axhline(level, label=label, color=colour, linewidth=1.4, linestyle="-.")
        else:
            label += " (off the axis)"
            (line,) = axes.plot([], [], label=label, color=colour, linewidth=1.4, linestyle="-.")
        assign_group([line], name)


def add_legend(figure: Figure, axes: Axes) -> None:
    """Adds the legend, right of the axes."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        legend = figure.legend(
            handles,
            labels,
            loc="outside right upper",
            frameon=False,
            fontsize=8,
            markerscale=0.7,
            labelspacing=0.8,
        )
        share_groups(legend, handles)
