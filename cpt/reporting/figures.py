"""The figures of a run, and of a comparison as blocks of its page.

Of a comparison `places` are colour and marker of each group."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from cpt.core.exceptions import format_value
from cpt.core.schema import Number, fits
from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores
from cpt.reporting import compare, drawing
from cpt.reporting.drawing import SERIES, HeatMap, Picture, draw_heat_maps, figure, literal, png
from cpt.reporting.frames import FEW, few, find_matrices, mean_so_far, perplexity, signed
from cpt.reporting.load_runs import RunGroup, RunSection, find_stages, name_orders, read_training
from cpt.reporting.overlap import Distribution, Overlap
from cpt.reporting.page import PICTURES, Block, show_picture

CURVES = {"lm": "loss (nats)", "grad_norm": "gradient norm", "lr": "learning rate"}
CURVES |= {"tokens_per_s": "tokens/s"}
CHANGE: dict[str, Any] = {"label": "change in nats per token\n(blue: better than base)", "change": True}
MAX_PANELS = 8  # heat maps side by side
MAX_ORDERS = 4  # panels of training curves
UNITS_DRAWN = 200  # of a layer
HIGHLIGHTED = 6  # of more than FEW curves, those that end lowest

PLANES = {  # x, y, their labels, whether x is logarithmic
    "forgetting_learning": ("CPT/perplexity", "FG/nats")
    + ("just learned CPT (perplexity)", "forgetting FG (nats)", True),
    "quality_compute": ("cost/flops", "LC/perplexity")
    + ("FLOPs of the whole run", "final LC (perplexity)", True),
    "perplexity_forgetting": ("FG/nats", "LC/perplexity")
    + ("forgetting FG (nats)", "final LC (perplexity)", False),
}


def map_change(scores: Scores, *, numbers: np.ndarray | None = None) -> HeatMap:
    """The change in nats against the base model; a domain's own stage is framed."""
    own = [(scores.rows.index(name), scores.domains.index(name)) for name in scores.learned]
    return HeatMap(scores.matrix - scores.matrix[:1], scores.rows, scores.domains, own, numbers)


def draw_matrix(scores: Scores) -> Picture:
    """The matrix of perplexities, coloured by the change against the base model."""
    perplexities = find_matrices(scores)["perplexity"].to_numpy()
    pairs = zip(scores.domains, perplexities[0].tolist(), perplexities[-1].tolist(), strict=True)
    ends = [f"{text} {perplexity(first)} to {perplexity(last)}" for text, first, last in pairs]
    told = f"Perplexity from {scores.rows[0]} to {scores.rows[-1]}: {drawing.list_few(ends)}"
    names = ("test text", "model after stage")
    maps = {"": map_change(scores, numbers=perplexities)}
    return draw_heat_maps(maps, told=told, names=names, show=perplexity, **CHANGE)


def draw_text_curves(scores: Scores) -> Picture:
    """Perplexity on each test text over the stages; of many domains their median."""
    losses = find_matrices(scores)["perplexity"].replace(np.inf, np.nan).to_numpy().T
    domains = [name for name in scores.domains if name != GENERAL]
    many, dot, own = len(domains) > FEW, "." if len(scores.rows) == 1 else "", losses[: len(domains)]
    drawn = figure((8.5, 4.8))
    axes = drawn.add_subplot(yscale="log")
    if many:
        axes.plot(own.T, color="0.6", linewidth=0.4, alpha=0.5, marker=dot)
        how: dict[str, Any] = {"color": SERIES[0], "linewidth": 2.5, "zorder": 4, "marker": dot}
        medians = np.median(own, axis=0)
        whole = np.flatnonzero(np.isfinite(medians))  # the rows in which all were measured
        axes.plot(whole, medians[whole], label=f"median of {len(domains)}", **how)
    for place in [] if many else np.argsort(-own[:, -1]):  # the legend as the lines end
        how = {"linestyle": drawing.DASHES[place // 6], "label": literal(domains[place], width=30)}
        axes.plot(own[place], color=SERIES[place % 6], marker=".", **how)
    if GENERAL in scores.domains:
        how = {"color": "black", "linestyle": "-.", "linewidth": 1.8, "marker": dot, "zorder": 3}
        axes.plot(losses[-1], label=GENERAL, **how)
    if learned := [(scores.rows.index(name), scores.domains.index(name)) for name in scores.learned]:
        xs, ys = np.array([(row, losses[column, row]) for row, column in learned]).T
        ring: dict[str, Any] = {"facecolors": "none", "edgecolors": "black", "label": "own stage"}
        axes.scatter(xs, ys, zorder=5, s=5 if many else 70, linewidths=0.7 if many else 1.8, **ring)
    drawing.plain_logarithm(axes.yaxis, losses)
    axes.set(xlabel="after stage", ylabel="perplexity (log scale)")
    if len(scores.rows) <= FEW + 1:
        drawing.ticks(axes.xaxis, scores.rows, few=True, rotation=35)
    axes.grid(axis="y", color="0.9")
    drawn.legend(loc="outside right upper", frameon=False, fontsize=9)
    mean = own.mean(0)
    told = f"Mean perplexity over {len(domains)} domains: {perplexity(mean[0])} at the base, "
    return png(drawn, told=f"{told}{perplexity(mean[-1])} after {len(mean) - 1} stages.")


def draw_training(stages: Mapping[str, DataFrame], borders: Mapping[str, tuple[float, float]]) -> Picture:
    """A panel for each of CURVES over the tokens of the whole run; `borders`: ends of each stage."""
    shown = [term for term in CURVES if any(term in curves for curves in stages.values())]
    drawn = figure((10, 1.2 + 1.7 * len(shown)))
    grid = drawn.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for term, axes in zip(shown, grid, strict=True):
        curves = [each[term].dropna() for each in stages.values() if term in each]
        for curve in curves:
            axes.plot(curve.index, curve, color=SERIES[0], linewidth=1.1, marker="." * (len(curve) < 3))
        if term == "grad_norm" and all((curve > 0).all() for curve in curves):
            axes.set_yscale("log")
            drawing.plain_logarithm(axes.yaxis, np.concatenate([curve.to_numpy() for curve in curves]))
        axes.set_ylabel(CURVES[term], fontsize=9)
        name_stages(axes, borders, named=axes is grid[0])
    grid[-1].set_xlabel("tokens read by the optimizer steps, all stages")
    ends = [f"{name} {each['lm'].dropna().iloc[-1]:.3f}" for name, each in stages.items() if "lm" in each]
    return png(drawn, told=f"Loss at the last point of each stage: {drawing.list_few(ends)}")


def draw_curves(section: RunSection) -> Picture | None:
    """Training loss over the tokens of the whole run: a panel for each order, at most MAX_ORDERS, and a line
    for each group, the mean over its seeds, shaded from the lowest to the highest. Of more than FEW groups,
    those that end lowest. None without curves."""
    names, borders = name_orders(section.runs), {}
    orders: dict[str, dict[str, list[Series]]] = defaultdict(lambda: defaultdict(list))
    for group, run in ((each, run) for each in section.groups for run in each.runs):
        stages = read_training(run.folder / "metrics.csv", run.scores).values()
        if curves := [each["lm"].dropna() for each in stages if "lm" in each]:
            orders[names[run.pair[0]]][group.name].append(pandas.concat(curves))
            borders[names[run.pair[0]]] = find_stages(run.scores)
    if not orders:
        return None
    ends: dict[str, list[float]] = defaultdict(list)
    for name, runs in (pair for groups in orders.values() for pair in groups.items()):
        ends[name] += [float(run.iloc[-1]) for run in runs]
    marked = sorted(ends, key=lambda name: np.mean(ends[name]))[: HIGHLIGHTED if len(ends) > FEW else None]
    shown, styles = [*orders][:MAX_ORDERS], style_groups(ends, section.places)
    drawn = figure((11, max(0.8 + 3.2 * len(shown), 0.23 * len(marked) + 0.8)))
    grid = drawn.subplots(len(shown), 1, squeeze=False)[:, 0]
    for order, axes in zip(shown, grid, strict=True):
        for name in (name for name in marked if name in orders[order]):
            runs, colour = orders[order][name], styles[name]["color"]
            losses = np.stack([np.interp(runs[0].index, run.index, run) for run in runs])
            label = literal(name, width=44) + f" ({len(ends[name])})" * (len(ends[name]) > 1)
            axes.plot(runs[0].index, losses.mean(0), color=colour, linewidth=1.2, label=label)
            axes.fill_between(runs[0].index, losses.min(0), losses.max(0), color=colour, alpha=0.2, lw=0)
        name_stages(axes, borders[order])
        axes.set_ylabel("training loss (nats)", fontsize=9)
        axes.set_title(f"order {literal(order, width=60)}" * (len(names) > 1), fontsize=10)
    grid[-1].set_xlabel("tokens read by the optimizer steps, all stages")
    lines = {line.get_label(): line for axes in grid for line in axes.get_legend_handles_labels()[0]}
    drawn.legend(lines.values(), lines.keys(), loc="outside right upper", frameon=False, fontsize=8)
    told = drawing.list_few(f"{name} {np.mean(ends[name]):.3f}" for name in marked)
    return png(drawn, told=f"Training loss at the last point, means over runs: {told}")


def name_stages(axes: Axes, borders: Mapping[str, tuple[float, float]], *, named: bool = True) -> None:
    """A line where each stage begins, and the names of the stages above the axes, of many every few."""
    axes.grid(axis="y", color="0.92")
    for begin, _ in borders.values():
        axes.axvline(begin, color="0.75", linewidth=0.8, zorder=0)
    if named:
        above, step = axes.secondary_xaxis("top"), -(-len(borders) // FEW)
        labels = [literal(name, width=18) for name in list(borders)[::step]]
        above.set_xticks([sum(each) / 2 for each in borders.values()][::step], labels, fontsize=8)
        above.tick_params(length=0)


def find_kept(stage: Mapping[str, Any]) -> int:
    """The place of the evaluation of the weights that a monitored stage kept: the last, or the best."""
    return stage["steps"].index(stage["kept"]) if stage.get("kept") in stage["steps"] else -1


def draw_monitor(scores: Scores) -> Picture:
    """The change of validation losses since each stage's first evaluation, the stages one after another."""
    drawn = figure((11, 4.2))
    axes = drawn.add_subplot()
    styles: dict[str, dict[str, Any]] = {
        "the domain itself": {"color": SERIES[0], "linewidth": 1.4, "linestyle": "--"},
        "past domains": {"color": SERIES[1], "linewidth": 0.9, "alpha": 0.7},
        "general text": {"color": "black", "linewidth": 1.6},
    }
    begin, middles, told = 0, [], []
    for name, stage in scores.monitor.items():
        steps = begin + np.array(stage["steps"])
        losses = {text: np.array(values, float) for text, values in stage["nll"].items()}  # nan: not finite
        lines = {text: values - values[0] for text, values in losses.items()}
        own = {name} if name in lines else set(lines) - {GENERAL}
        for text, line in lines.items():
            kind = "the domain itself" if text in own else "past domains"
            kind = "general text" if text == GENERAL else kind
            axes.plot(steps, line, label=kind, **styles[kind])
        if GENERAL in lines:
            low, high = np.array(stage["rise"][GENERAL], float).T
            axes.fill_between(steps, low, high, color="black", alpha=0.15, linewidth=0)
            told.append(f"{name} {signed(lines[GENERAL][find_kept(stage)])}")
        axes.axvline(steps[-1], color="0.7", linewidth=0.8, linestyle=":" if stage["ended"] else "-")
        middles.append((steps[0] + steps[-1]) / 2)
        begin = int(steps[-1])
    axes.axhline(0, color="0.6", linewidth=0.8)
    step = 1 if len(middles) <= FEW else -(-len(middles) // 30)
    names = [literal(name, width=18) for name in list(scores.monitor)[::step]]
    axes.set_xticks(middles[::step], names, rotation=30, ha="right", fontsize=9 if step == 1 else 7)
    axes.set_ylabel("change in nats per token\nsince the stage's first evaluation")
    axes.set_xlabel("steps of the stage")
    shown = {line.get_label(): line for line in axes.get_legend_handles_labels()[0]}  # one of each kind
    axes.legend(shown.values(), map(str, shown), loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    title = "Change of the general text's loss while each domain was learned, nats"
    return png(drawn, told=f"{title}: {drawing.list_few(told)}")


def draw_modules(scores: Scores) -> Picture:
    """The weight of each of the model's modules, the base first, in the last model's score of each text."""
    modules, last = ["base", *scores.learned], scores.modules[-1]
    weights = np.array([[last.get(text, {}).get(name, 0.0) for name in modules] for text in scores.domains])
    rows = zip(scores.domains, weights, strict=True)
    heaviest = [f"{text}: {modules[row.argmax()]} {row.max():.2f}" for text, row in rows if row.any()]
    told = f"Heaviest module of the last model for each text. {drawing.list_few(heaviest)}"
    how: dict[str, Any] = {"names": ("module of", "test text"), "margin": 3.2, "label": "mean weight"}
    return draw_heat_maps({"": HeatMap(weights, scores.domains, modules)}, told=told, **how)


def draw_tasks(scores: Scores, kind: str) -> Picture:
    """`answers` or `endtasks` in %, of the rows that were measured; a task's own stage is framed."""
    table = 100 * find_matrices(scores)[kind].dropna(how="all")
    rows, tasks = list(table.index), list(table.columns)
    last = [f"{task} {score:.1f} %" for task, score in table.iloc[-1].items() if score == score]
    about = "End-task scores" if kind == "endtasks" else "Scores"
    told = f"{about} of {len(rows)} models; after {rows[-1]}: {few(last, between=', ')}"
    framed = [(rows.index(task), column) for column, task in enumerate(tasks) if task in rows]
    maps = {"": HeatMap(table.to_numpy(), rows, tasks, framed=framed)}
    how: dict[str, Any] = {"names": ("task", "model after stage"), "show": "{:.1f}".format}
    return draw_heat_maps(maps, label="score, % (dark: better)", told=told, vmin=None, vmax=None, **how)


def draw_overlap(shared: Mapping[str, Overlap]) -> Picture:
    """A heat map by quantity, over all layers; the scale begins at 0, or where all are alike at the least."""
    least = min((float(np.nanmin(each.whole, initial=1)) for each in shared.values()), default=0)
    maps = {title: HeatMap(each.whole, each.names, each.names) for title, each in shared.items()}
    return draw_heat_maps(maps, vmin=least if least > 0.8 else 0, label="similarity")


def draw_layers(shown: Mapping[str, Overlap]) -> Picture:
    """A panel by quantity: the mean similarity of two domains over the blocks, a line per kind of layer."""
    drawn, told = figure((8.5, 0.8 + 2.6 * len(shown))), []
    grid = drawn.subplots(len(shown), 1, squeeze=False)[:, 0]
    for (title, overlap), axes in zip(shown.items(), grid, strict=True):
        pairs = np.triu_indices(len(overlap.names), 1)
        kinds: dict[str, dict[int, np.ndarray]] = defaultdict(dict)  # similarities by kind and block
        for layer, values in overlap.layers.items():
            parted = re.fullmatch(r"(.*?)\.?(\d+)\.(.+)", layer)
            stack, number, kind = parted.groups() if parted else ("", "0", layer)
            sides = [each for each in ("encoder", "decoder") if each in stack.split(".")]
            kinds[" ".join([*sides, kind])][int(number)] = values[pairs]
        for place, (kind, blocks) in enumerate(kinds.items()):
            table, how = np.array([*blocks.values()]), drawing.style(place)
            known = table[:, np.isfinite(table).all(0)]
            if known.size:
                axes.plot([*blocks], known.mean(1), label=literal(kind, width=30), markersize=5, **how)
                faint = {"color": how["color"], "alpha": 0.12, "linewidth": 0}
                axes.fill_between([*blocks], known.min(1), known.max(1), **faint)
                told.append(f"{title}, {kind} {known.mean():.2f}")
        axes.set(ylim=(0, 1.02), ylabel="similarity of\ntwo domains", xlabel="block")
        axes.set_title(title, fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(color="0.92")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    return png(drawn, told=f"Mean similarity of two domains, over all blocks: {drawing.list_few(told)}")


def draw_distributions(distributions: Mapping[str, Distribution]) -> Picture:
    """A panel for each model: the share of each unit in the product magnitudes of a layer, a line per text.
    Units come in the order of the first model's means; of many, up to UNITS_DRAWN means of neighbours."""
    first = next(iter(distributions.values()))
    order = first.shares.mean(0).argsort()[::-1]
    drawn = figure((8.5, 0.8 + 2.6 * len(distributions)))
    grid = drawn.subplots(len(distributions), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for (row, each), axes in zip(distributions.items(), grid, strict=True):
        groups = np.array_split(order, min(len(order), UNITS_DRAWN))
        for place, (text, shares) in enumerate(zip(each.texts, each.shares, strict=True)):
            heights = [100 * shares[group].mean() for group in groups]
            ranks = np.cumsum([0, *map(len, groups[:-1])])
            axes.plot(ranks, heights, color=SERIES[place], linewidth=0.8, label=literal(text, width=30))
        axes.set(yscale="log", ylabel="share of the\nlayer's sum, %")
        drawing.plain_logarithm(axes.yaxis, 100 * first.shares)
        model = "base" if row == "base" else f"model after {literal(row, width=30)}"
        axes.set_title(f"{each.layer}, {model}", fontsize=9)
        axes.grid(axis="y", color="0.92")
    grid[-1].set_xlabel("unit, by its mean share in the first model")
    handles, labels = grid[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    tops = [f"{row} {100 * each.shares.max(1).mean():.2f} %" for row, each in distributions.items()]
    return png(drawn, told=f"Product magnitudes of {first.layer}, largest share: {drawing.list_few(tops)}")


def build_figures(section: RunSection) -> list[Block]:
    """All figures of a comparison for which there are numbers."""
    blocks, baselines = [], {group.name for group in section.baselines.values()}
    shown = [group for group in section.groups if len(group.runs[0].scores.rows) > 1]
    shown = sorted(shown, key=lambda group: group.name not in baselines)[:MAX_PANELS]
    first = {group.name: group.runs[0] for group in section.groups if group in shown}
    if changes := {name: map_change(run.scores) for name, run in first.items()}:
        picture = draw_heat_maps(changes, show="{:+.2f}".format, **CHANGE)
        caption = f"The first run of each group, at most {MAX_PANELS}. {PICTURES['matrix']['caption']}"
        blocks.append(show_picture("matrices", picture, caption=caption))
    runs = {group.name: [run.scores for run in group.runs] for group in section.groups}
    blocks.append(show_picture("averages", draw_stages(runs, places=section.places)))
    if curves := draw_curves(section):
        blocks.append(show_picture("curves", curves))
    for name, (x, y, x_label, y_label, logarithmic) in PLANES.items():
        ranked = [group for group in section.groups if compare.is_ranked(group, y)]
        points = {group.name: (group.of(x), group.of(y)) for group in ranked}
        if any(None not in pair for xs, ys in points.values() for pair in zip(xs, ys, strict=True)):
            labels: dict[str, Any] = {"x": x_label, "y": y_label, "logarithmic": logarithmic}
            picture = draw_plane(points, places=section.places, **labels)
            blocks.append(show_picture(name, picture))
    return blocks


def draw_plane(
    groups: Mapping[str, tuple[Sequence[float | None], Sequence[float | None]]],
    *,
    x: str,
    y: str,
    logarithmic: bool = False,
    lines: Sequence[Sequence[str]] = (),
    places: Mapping[str, int] | None = None,
) -> Picture:
    """A group's mean of x against that of y, small its runs, and the Pareto front; lower is better. A group
    without x is a line at its mean y. `logarithmic`: x, without values of 0 or less; `lines` connect
    means."""
    styles, (drawn, axes) = style_groups(groups, places), open_axes(len(groups))
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
    for name, runs in points.items():
        marker, colour, many = styles[name]["marker"], styles[name]["color"], runs.shape[1] > 5
        small: dict[str, Any] = {"s": 12 if many else 24, "alpha": 0.4 if many else 0.7, "zorder": 2}
        large: dict[str, Any] = {"s": 130, "facecolors": "none", "edgecolors": colour, "zorder": 3}
        label = literal(name, width=44) + f" ({runs.shape[1]})" * (runs.shape[1] > 1)
        axes.scatter(*runs, color=colour, marker=marker, linewidths=0, **small)
        axes.scatter(*means[name], label=label, marker=marker, linewidths=2, **large)
    for line in ([name for name in each if name in means] for each in lines):
        if line:
            axes.plot(*np.array([means[name] for name in line]).T, color=styles[line[0]]["color"], zorder=1)
    if front := compare.pareto_front({name: tuple(mean.tolist()) for name, mean in means.items()}):
        xs, ys = np.array([means[name] for name in front]).T
        dashed: dict[str, Any] = {"color": "0.35", "linewidth": 1.2, "linestyle": "--", "zorder": 0}
        right, top = axes.get_xlim()[1], axes.get_ylim()[1]
        axes.step([xs[0], *xs, right], [top, *ys, ys[-1]], where="post", label="Pareto front", **dashed)
    axes.set(xlabel=x, ylabel=y)
    name_levels(drawn, axes, levels, styles)
    if logarithmic and points:
        drawing.plain_logarithm(axes.xaxis, np.array(axes.get_xlim()))
    told = drawing.list_few(f"{name}: x {mean[0]:.4g}, y {mean[1]:.4g}" for name, mean in means.items())
    best = f"The front: {few(front, between=', ') or 'no group'}."
    return png(drawn, told=f"{y} against {x}; lower is better for both. {best} {told}")


def draw_stages(
    groups: Mapping[str, Sequence[Scores]], *, places: Mapping[str, int] | None = None
) -> Picture:
    """Perplexity over the stages, a mean over the domains learned so far; a group's mean and range over its
    runs. A model that learned no sequence is a line at its mean over all domains. Of more than FEW groups,
    those that end lowest are named."""
    styles, (drawn, axes) = style_groups(groups, places), open_axes(min(len(groups), 2 * FEW))
    axes.set_yscale("log")
    lines, levels = {}, {}
    for name, runs in groups.items():
        so_far, last = [], []
        for scores in (scores for scores in runs if scores.rows):
            if scores.learned:
                means = [mean_so_far(scores, row) for row in range(1, len(scores.rows))]
                so_far.append(Series(np.where(np.isfinite(means), means, np.nan)))
            else:
                with np.errstate(over="ignore"):
                    own = scores.cells[-1, [domain != GENERAL for domain in scores.domains]]
                    last.append(np.exp(own).mean())
        table = DataFrame(so_far)  # [run, stage], nan where a run has no more
        if table.notna().any(axis=None):
            lines[name] = table
        elif np.isfinite(last).any():
            levels[name] = float(np.mean([each for each in last if np.isfinite(each)]))
    ends = {name: float(table.mean().dropna().iloc[-1]) for name, table in lines.items()}
    marked = sorted(ends, key=lambda name: ends[name])[: HIGHLIGHTED if len(ends) > FEW else None]
    for name in (name for name in lines if name not in marked):
        axes.plot(lines[name].columns + 1, lines[name].mean(), color="0.75", zorder=1)
    if others := len(lines) - len(marked):
        axes.plot([], [], color="0.75", label=f"{others} others")
    for name in marked:
        table, stages = lines[name], lines[name].columns + 1
        label = literal(name, width=44) + f" ({len(table)})" * (len(table) > 1)
        how: dict[str, Any] = {"markersize": 5, "markevery": -(-len(stages) // 20), "lw": 1.6, "zorder": 3}
        axes.plot(stages, table.mean(), label=f"{label}: {perplexity(ends[name])}", **how | styles[name])
        shade, colour = 0.15 if len(marked) <= HIGHLIGHTED else 0.06, styles[name]["color"]
        axes.fill_between(stages, table.min(), table.max(), color=colour, alpha=shade, linewidth=0)
    axes.set(xlabel="stages trained", ylabel="mean perplexity over the domains so far (log scale)")
    axes.locator_params("x", integer=True)
    name_levels(drawn, axes, levels, styles)
    known = [np.ravel(table.to_numpy()) for table in lines.values()]
    drawing.plain_logarithm(axes.yaxis, np.concatenate([[*levels.values()], *known]))
    told = drawing.list_few(f"{name} {perplexity(value)}" for name, value in (ends | levels).items())
    return png(drawn, told=f"Mean perplexity over the domains so far, at the end. {told}")


def build_setting_curve(sections: Sequence[RunSection], section: RunSection, key: str) -> Block:
    """Learned against forgotten over a setting (`--curve`): a line through groups that differ in it alone,
    and groups without it; nothing where no two groups differ in it alone. Raises ValueError for a setting in
    which no two runs of the sections differ."""
    values: dict[str, set[str]] = defaultdict(set)
    for run in (run for each in sections for run in each.runs):
        for name, value in run.settings.items():
            values[name].add(str(value))
    if len(values[key]) < 2:
        differing = few(sorted(name for name, given in values.items() if len(given) > 1), between=", ")
        raise ValueError(f"--curve {key} is invalid. Allowed: {differing or 'no setting differs'}")
    curves: dict[str, list[tuple[Any, RunGroup]]] = defaultdict(list)
    several = len({group.model for group in section.groups}) > 1
    for group in section.groups:
        value = group.runs[0].settings.get(key)
        names = (key, key.removeprefix("method."))  # as a variant has it
        others = sorted(each for each in group.own if each.partition("=")[0] not in names)
        others += [group.model] * several + [f"order {group.orders[0]}"] * (group.order is not None)
        curves[group.name if value is None else " ".join([group.plain, *others])].append((value, group))
    curves = {name: points for name, points in curves.items() if len(points) > 1 or points[0][0] is None}
    if all(len(points) == 1 for points in curves.values()):
        return Block()
    points, lines, places = {}, [], {}
    for name, own in sorted(curves.items(), key=lambda each: len(each[1]) == 1):
        own.sort(key=lambda x: (not fits(x[0], Number), x[0] if fits(x[0], Number) else str(x[0])))
        lines.append([name if value is None else f"{name} {format_value(value)}" for value, _ in own])
        for called, (_, group) in zip(lines[-1], own, strict=True):
            points[called] = group.of("CPT/nats"), group.of("FG/nats")
            places[called] = section.places[own[0][1].name]
    labels: dict[str, Any] = {"x": "just learned CPT (nats)", "y": "forgetting FG (nats)"}
    picture = draw_plane(points, lines=lines, places=places, **labels)
    return show_picture("strengths", picture, title=f"Learned against forgotten over {key}")


def style_groups(groups: Iterable[str], places: Mapping[str, int] | None) -> dict[str, dict[str, str]]:
    """The style of each group by its place; by the order of the groups where none are given."""
    own = places or {name: place for place, name in enumerate(groups)}
    return {name: drawing.style(own[name]) for name in groups}


def open_axes(groups: int) -> tuple[Figure, Axes]:
    """A figure that is high enough for the legend of its groups."""
    drawn = figure((8.5, max(4.8, 0.23 * groups + 0.8)))
    axes = drawn.add_subplot(axisbelow=True)
    axes.grid(color="0.9")
    return drawn, axes


def name_levels(
    drawn: Figure, axes: Axes, levels: Mapping[str, float], styles: Mapping[str, Mapping[str, str]]
) -> None:
    """A line per level, or only its name if it lies far off; and right of the axes the legend."""
    there = bool(axes.collections or axes.lines)
    low, high = axes.get_ylim()
    for name, level in levels.items():
        label = f"{literal(name, width=30)}: {perplexity(level)}"
        how: dict[str, Any] = {"color": styles[name]["color"], "linewidth": 1.4, "linestyle": "-."}
        if not there or low - 0.6 * (high - low) <= level <= high + 0.6 * (high - low):
            axes.axhline(level, label=label, **how)
        else:
            axes.plot([], [], label=f"{label} (off the axis)", **how)
    if axes.get_legend_handles_labels()[0]:
        how = {"frameon": False, "fontsize": 8, "markerscale": 0.7, "labelspacing": 0.8}
        drawn.legend(loc="outside right upper", **how)
