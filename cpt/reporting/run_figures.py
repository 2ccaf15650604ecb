"""The figures of a run page."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter
from pandas import DataFrame, Series

from cpt.core.messages import count_noun
from cpt.data.sources.base import GENERAL
from cpt.evaluation.monitor import BASE_ANSWERS, CHAT_LOSSES
from cpt.evaluation.scores import Scores
from cpt.reporting.drawing import (
    DASHES,
    SERIES,
    ColourScale,
    HeatMap,
    Picture,
    choose_apart,
    choose_series_style,
    draw_heat_maps,
    escape_label,
    label_logarithm,
    list_descriptions,
    make_figure,
    make_png,
    scale_around_zero,
    set_ticks,
)
from cpt.reporting.formats import MAX_LISTED, format_or_dash, format_perplexity, format_signed, list_names
from cpt.reporting.monitoring import MonitoredStage
from cpt.reporting.overlap import Distribution, Overlap
from cpt.reporting.svg import add_spots
from cpt.reporting.training_curves import Borders

CURVES = {  # the terms of metrics.csv that are drawn, and their labels
    "lm": "loss (nats)",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_s": "tokens/s",
}
PART_PREFIX = "lm_"  # of the terms that are losses on parts of a mixture
CHANGE_LABEL = "change in nats per token\n(blue: better than base)"
MAX_UNITS = 200  # points of a layer
HIGH_SIMILARITY = 0.8  # of all domains: on a scale from 0 they would all have one colour
MAX_GREY = 60  # curves of a run over more domains: more of them look the same, and fill a page
# Inches: of the axes of training and of the monitor, of a letter of their labels, and between oblique labels.
TRAINING_WIDTH = 9.0
MONITOR_WIDTH = 8.5
INCHES_OF_LETTER = 0.07
OBLIQUE_DISTANCE = 0.28
NUM_COLOURS = 6  # of lines of texts, before another kind of dashes


def map_change(scores: Scores, *, numbers: np.ndarray | None = None) -> HeatMap:
    """The change in nats against the base model; a domain's own stage is framed."""
    return HeatMap(
        values=scores.matrix - scores.matrix[:1],
        rows=scores.rows,
        columns=scores.domains,
        framed=find_own_cells(scores),
        numbers=numbers,
    )


def find_own_cells(scores: Scores) -> list[tuple[int, int]]:
    """The cell (row, column) of each learned domain just after its stage."""
    return [(scores.rows.index(name), scores.domains.index(name)) for name in scores.learned]


def draw_matrix(scores: Scores, perplexities: DataFrame) -> Picture:
    """The matrix of perplexities, coloured by the change against the base model."""
    base = perplexities.iloc[0].tolist()
    last = perplexities.iloc[-1].tolist()
    ends = []
    for text, base_perplexity, last_perplexity in zip(scores.domains, base, last, strict=True):
        shown_base = format_or_dash(base_perplexity, format_perplexity)
        ends.append(f"{text} {shown_base} to {format_or_dash(last_perplexity, format_perplexity)}")
    description = f"Perplexity from {scores.rows[0]} to {scores.rows[-1]}: {list_descriptions(ends)}"

    maps = {"": map_change(scores, numbers=perplexities.to_numpy())}
    return draw_heat_maps(
        maps,
        label=CHANGE_LABEL,
        description=description,
        format_value=format_perplexity,
        axis_names=("test text", "model after stage"),
        scale=scale_around_zero(maps),
    )


def draw_text_curves(scores: Scores, perplexities: DataFrame) -> Picture:
    """Perplexity on each test text over the stages; of many domains their median."""
    curves = perplexities.replace(np.inf, np.nan).to_numpy().T  # [text, row]
    domains = [name for name in scores.domains if name != GENERAL]
    domain_curves = curves[: len(domains)]
    has_many = len(domains) > MAX_LISTED
    point_marker = "." if len(scores.rows) == 1 else ""  # a single row makes no line
    texts = describe_points(scores, curves)
    figure = make_figure((8.5, 4.8))
    axes = figure.add_subplot(yscale="log")

    if has_many:
        draw_median(axes, domain_curves, point_marker)
    else:
        for index in np.argsort(-domain_curves[:, -1]):  # the legend as the lines end
            axes.plot(
                domain_curves[index],
                color=SERIES[index % NUM_COLOURS],
                marker=".",
                linestyle=DASHES[index // NUM_COLOURS],
                label=escape_label(domains[index], width=30),
            )
            add_spots(axes, range(len(scores.rows)), domain_curves[index], texts[index])
    if GENERAL in scores.domains:
        axes.plot(
            curves[-1],
            label=GENERAL,
            color="black",
            linestyle="-.",
            linewidth=1.8,
            marker=point_marker,
            zorder=3,
        )
        add_spots(axes, range(len(scores.rows)), curves[-1], texts[-1])
    own_cells = find_own_cells(scores)
    if own_cells:
        axes.scatter(
            [row for row, _ in own_cells],
            [curves[column, row] for row, column in own_cells],
            zorder=5,
            s=5 if has_many else 70,
            linewidths=0.7 if has_many else 1.8,
            facecolors="none",
            edgecolors="black",
            label="own stage",
        )

    label_logarithm(axes.yaxis, curves)
    axes.set(xlabel="after stage", ylabel="perplexity (log scale)")
    if len(scores.rows) <= MAX_LISTED + 1:
        set_ticks(axes.xaxis, scores.rows, is_small=True, rotation=35)
    axes.grid(axis="y", color="0.9")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    means = domain_curves.mean(0)
    description = (
        f"Mean perplexity over {count_noun(len(domains), 'domain')}: "
        f"{format_or_dash(means[0], format_perplexity)} at the base, "
        f"{format_or_dash(means[-1], format_perplexity)} after {count_noun(len(means) - 1, 'stage')}."
    )
    return make_png(figure, description=description)


def describe_points(scores: Scores, curves: np.ndarray) -> list[list[str]]:
    """`networkx after sympy: 72.19` for each point of the curves [text, row]."""
    texts = []
    for text, curve in zip(scores.domains, curves.tolist(), strict=True):
        texts.append(
            [
                f"{text} after {row}: {format_perplexity(value)}"
                for row, value in zip(scores.rows, curve, strict=True)
            ]
        )
    return texts


def draw_median(axes: Axes, curves: np.ndarray, marker: str) -> None:
    """Curves [text, row] in grey, at most MAX_GREY from the first to the last, and the median of all curves
    in the rows in which all were measured."""
    num_grey = min(len(curves), MAX_GREY)
    chosen = np.linspace(0, len(curves) - 1, num_grey).round().astype(int)
    # One line with gaps: an element for each would fill a page.
    xs = np.tile([*range(curves.shape[1]), math.nan], num_grey)
    ys = np.column_stack([curves[chosen], np.full(num_grey, math.nan)]).ravel()
    label = "domains"
    if num_grey < len(curves):
        label = f"{num_grey} of {count_noun(len(curves), 'domain')}"
    axes.plot(xs, ys, color="0.6", linewidth=0.4, alpha=0.5, marker=marker, label=label)
    medians = np.median(curves, axis=0)
    rows = np.flatnonzero(np.isfinite(medians))
    axes.plot(
        rows,
        medians[rows],
        label=f"median of {len(curves)}",
        color=SERIES[0],
        linewidth=2.5,
        zorder=4,
        marker=marker,
    )
    texts = [f"median after stage {row}: {format_perplexity(medians[row])}" for row in rows.tolist()]
    add_spots(axes, rows, medians[rows], texts)


def draw_training(training: Mapping[str, DataFrame], stages: Mapping[str, Borders]) -> Picture:
    """A panel for each of CURVES over the tokens of the whole run; both arguments by stage."""
    measured_terms: set[str] = set()
    for table in training.values():
        measured_terms |= set(table.columns)
    terms = [term for term in CURVES if term in measured_terms]
    # The losses of single parts of the batch share a panel below the loss of the whole.
    part_terms = sorted(term for term in measured_terms if term.startswith(PART_PREFIX))
    if part_terms:
        terms.insert(1, PART_PREFIX)
    figure = make_figure((10, 1.2 + 1.7 * len(terms)))
    panels = figure.subplots(len(terms), 1, sharex=True, squeeze=False)[:, 0]
    for term, axes in zip(terms, panels, strict=True):
        if term == PART_PREFIX:
            draw_parts(axes, part_terms, training)
        else:
            curves = {name: table[term].dropna() for name, table in training.items() if term in table}
            draw_term(axes, term, curves)
        mark_stages(axes, stages)
        if axes is panels[0]:
            name_stages(axes, stages)
    panels[-1].set_xlabel("tokens read by the optimizer steps, all stages")
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=" "))  # 100 k

    ends = []
    for name, table in training.items():
        if "lm" in table:
            ends.append(f"{name} {table['lm'].dropna().iloc[-1]:.3f}")
    return make_png(figure, description=f"Loss at the last point of each stage: {list_descriptions(ends)}")


def draw_parts(axes: Axes, terms: Sequence[str], training: Mapping[str, DataFrame]) -> None:
    """The losses on the parts of a mixture, a colour each."""
    for number, term in enumerate(terms):
        xs: list[float] = []  # of one line with gaps
        ys: list[float] = []
        for table in training.values():
            if term in table:
                curve = table[term].dropna()
                xs += [*curve.index, math.nan]
                ys += [*curve, math.nan]
        label = escape_label(term.removeprefix(PART_PREFIX), width=18)
        axes.plot(xs, ys, color=SERIES[number % len(SERIES)], linewidth=1.1, marker=".", label=label)
    axes.legend(fontsize=7, loc="upper right")
    axes.set_ylabel("loss by part (nats)", fontsize=9)


def draw_term(axes: Axes, term: str, curves: Mapping[str, Series]) -> None:
    """The curves of all stages by their names; gradient norms on a logarithmic scale."""
    texts = []
    xs: list[float] = []  # of one line with gaps: hundreds of lines would fill a page
    ys: list[float] = []
    for stage, curve in curves.items():
        xs += [*curve.index, math.nan]
        ys += [*curve, math.nan]
        texts += [f"{stage}, {tokens:,.0f} tokens: {value:,.4g}" for tokens, value in curve.items()]
    marker = "." if min(len(curve) for curve in curves.values()) < 3 else ""
    axes.plot(xs, ys, color=SERIES[0], linewidth=1.1, marker=marker)

    points = pandas.concat(list(curves.values()))
    add_spots(axes, points.index, points, texts)

    if term == "grad_norm" and (points > 0).all():
        axes.set_yscale("log")
        label_logarithm(axes.yaxis, points.to_numpy())
    axes.set_ylabel(CURVES[term], fontsize=9)


def mark_stages(axes: Axes, stages: Mapping[str, Borders]) -> None:
    """A line where each stage begins."""
    axes.grid(axis="y", color="0.92")
    xs: list[float] = []  # of one line with gaps
    ys: list[float] = []  # 0 is the bottom of the axes, 1 the top
    for begin, _ in stages.values():
        xs += [begin, begin, math.nan]
        ys += [0, 1, math.nan]
    axes.plot(xs, ys, color="0.75", linewidth=0.8, zorder=0, transform=axes.get_xaxis_transform())


def name_stages(axes: Axes, stages: Mapping[str, Borders]) -> None:
    """The names of the stages above the axes, at most MAX_LISTED of them at equal steps; oblique where names
    are longer than their stages, and without those of stages that are too short for one."""
    step = math.ceil(len(stages) / MAX_LISTED)
    labels = [escape_label(name, width=18) for name in list(stages)[::step]]
    middles = [sum(borders) / 2 for borders in stages.values()][::step]
    ends = [end for _, end in stages.values()]
    inches = [TRAINING_WIDTH * middle / max(ends) for middle in middles]

    longest_label = INCHES_OF_LETTER * max(map(len, labels))
    top_axis = axes.secondary_xaxis("top")
    top_axis.tick_params(length=0)
    if len(choose_apart(inches, distance=longest_label)) == len(labels):
        top_axis.set_xticks(middles, labels, fontsize=8)
        return
    chosen = choose_apart(inches, distance=OBLIQUE_DISTANCE)
    top_axis.set_xticks(
        [middles[index] for index in chosen],
        [labels[index] for index in chosen],
        fontsize=8,
        rotation=30,
        ha="left",
        rotation_mode="anchor",
    )


def draw_monitor(stages: Sequence[MonitoredStage]) -> Picture:
    """The change of validation losses since each stage's first evaluation, the stages one after another."""
    figure = make_figure((11, 4.2))
    axes = figure.add_subplot()
    begin = 0
    middles = []
    general_changes = []
    for stage in stages:
        steps = begin + stage.steps
        for text, changes in stage.changes.items():
            draw_change(axes, stage, text, steps, changes)
            texts = []
            for step, change in zip(stage.steps.tolist(), changes.tolist(), strict=True):
                texts.append(f"{text}, step {step} of {stage.name}: {format_signed(change)} nats")
            add_spots(axes, steps, changes, texts)
        if GENERAL in stage.intervals:
            low, high = stage.intervals[GENERAL].T
            axes.fill_between(steps, low, high, color="black", alpha=0.15, linewidth=0)
            general_changes.append(f"{stage.name} {format_signed(stage.change(GENERAL))}")
        axes.axvline(steps[-1], color="0.7", linewidth=0.8, linestyle=":" if stage.reason_ended else "-")
        middles.append((steps[0] + steps[-1]) / 2)
        begin = int(steps[-1])

    axes.axhline(0, color="0.6", linewidth=0.8)
    inches = [MONITOR_WIDTH * middle / max(1, begin) for middle in middles]
    chosen = choose_apart(inches, distance=OBLIQUE_DISTANCE)
    axes.set_xticks(
        [middles[index] for index in chosen],
        [escape_label(stages[index].name, width=18) for index in chosen],
        rotation=30,
        ha="right",
        rotation_mode="anchor",
        fontsize=9 if len(stages) <= MAX_LISTED else 7,
    )
    axes.set_ylabel("change in nats per token\nsince the stage's first evaluation")
    axes.set_xlabel("steps of the stage")
    lines = {str(line.get_label()): line for line in axes.get_legend_handles_labels()[0]}  # one of each kind
    axes.legend(lines.values(), list(lines), loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return make_png(
        figure,
        description="Change of the general text's loss while each domain was learned, nats: "
        f"{list_descriptions(general_changes)}",
    )


def draw_change(axes: Axes, stage: MonitoredStage, text: str, steps: np.ndarray, changes: np.ndarray) -> None:
    """The line of a text, in the style of its kind."""
    if text == GENERAL:
        axes.plot(steps, changes, label="general text", color="black", linewidth=1.6)
    elif text in CHAT_LOSSES:
        linestyle = "-." if text == BASE_ANSWERS else "-"
        axes.plot(steps, changes, label=text, color=SERIES[2], linewidth=1.4, linestyle=linestyle)
    elif text in stage.own_texts:
        axes.plot(steps, changes, label="the domain itself", color=SERIES[0], linewidth=1.4, linestyle="--")
    else:
        axes.plot(steps, changes, label="past domains", color=SERIES[1], linewidth=0.9, alpha=0.7)


def draw_modules(scores: Scores) -> Picture:
    """The weight of each of the model's modules, the base first, in the last model's score of each text."""
    modules = ["base", *scores.learned]
    weights_by_text = scores.modules[-1]
    weights = np.zeros((len(scores.domains), len(modules)))
    for row, text in enumerate(scores.domains):
        for column, module in enumerate(modules):
            weights[row, column] = weights_by_text.get(text, {}).get(module, 0.0)

    heaviest = []
    for text, text_weights in zip(scores.domains, weights, strict=True):
        if text_weights.any():
            heaviest.append(f"{text}: {modules[text_weights.argmax()]} {text_weights.max():.2f}")
    return draw_heat_maps(
        {"": HeatMap(weights, scores.domains, modules)},
        label="mean weight",
        description=f"Heaviest module of the last model for each text. {list_descriptions(heaviest)}",
        axis_names=("module of", "test text"),
        margin=3.2,
    )


def draw_tasks(kind: str, shares: DataFrame) -> Picture:
    """`answers` or `endtasks` in %, of the rows that were measured; a task's own stage is framed."""
    table = 100 * shares.dropna(how="all")
    rows = list(table.index)
    tasks = list(table.columns)
    last_scores = []
    for task, score in table.iloc[-1].items():
        if not math.isnan(score):
            last_scores.append(f"{task} {score:.1f} %")
    title = "End-task scores" if kind == "endtasks" else "Scores"
    model_count = count_noun(len(rows), "model")
    framed = [(rows.index(task), column) for column, task in enumerate(tasks) if task in rows]
    return draw_heat_maps(
        {"": HeatMap(table.to_numpy(), rows, tasks, framed=framed)},
        label="score, % (dark: better)",
        description=f"{title} of {model_count}; after {rows[-1]}: {list_names(last_scores)}",
        format_value="{:.1f}".format,
        axis_names=("task", "model after stage"),
        scale=ColourScale(low=None, high=None),
    )


def draw_chat_losses(scores: Scores) -> Picture:
    """Two bars for each row in which chats were measured, and are finite: the loss on the chats' own answers
    and on the base's, with the interval of the rise since the base. A long run has bars for the base and the
    last rows."""
    chats = scores.chats
    measured_rows = [row for row, loss in enumerate(chats["nll"]) if loss is not None and math.isfinite(loss)]
    shown_rows = [*measured_rows[:1], *measured_rows[1:][-MAX_LISTED:]]
    figure = make_figure((7.0, 1.2 + 0.5 * len(shown_rows)))
    axes = figure.add_subplot()

    kinds = (
        ("nll", "rise", "the chats' answers"),
        ("base_answer_nll", "base_answer_rise", "the base's answers"),
    )
    for index, (nll_key, rise_key, label) in enumerate(kinds):
        losses_by_row = {row: chats[nll_key][row] for row in shown_rows}
        rows = [row for row, loss in losses_by_row.items() if loss is not None and math.isfinite(loss)]
        bar_positions = [shown_rows.index(row) + 0.35 * index for row in rows]
        losses = [losses_by_row[row] for row in rows]
        axes.barh(bar_positions, losses, height=0.32, color=SERIES[index], label=label)
        for position, loss, row in zip(bar_positions, losses, rows, strict=True):
            rise = chats[rise_key][row]
            if rise is not None and None not in rise:
                mean, low, high = rise
                errors = [[mean - low], [high - mean]]
                axes.errorbar(loss, position, xerr=errors, color="black", capsize=3, linewidth=1)
        texts = [
            f"{label} after {scores.rows[row]}: {loss:.3f} nats"
            for row, loss in zip(rows, losses, strict=True)
        ]
        add_spots(axes, losses, bar_positions, texts)
    set_ticks(axes.yaxis, [scores.rows[row] for row in shown_rows], is_small=True, rotation=0)
    axes.invert_yaxis()
    axes.set(xlabel="loss (nats per token)")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    descriptions = [f"{scores.rows[row]} {chats['nll'][row]:.3f}" for row in shown_rows]
    return make_png(figure, description=f"Loss on chats, nats per token: {list_names(descriptions)}.")


def draw_similarity(
    similarities: np.ndarray, domains: Sequence[str], columns: Sequence[str], description: str
) -> Picture:
    """The similarity of the domains' texts."""
    maps = {"": HeatMap(similarities, domains, columns)}
    return draw_heat_maps(
        maps,
        label="cosine of mean embeddings, centred\n(red: alike)",
        description=description,
        axis_names=("domain, in the order learned", "domain, in the order learned"),
        scale=scale_around_zero(maps),
    )


def draw_overlap(overlaps: Mapping[str, Overlap]) -> Picture:
    """A heat map for each quantity, of the mean similarity of each two domains over all layers. The maps
    share one colour scale up to 1. It begins at 0, or, where all similarities are above HIGH_SIMILARITY, at
    the smallest of them."""
    maps = {}
    min_similarity = 1.0
    for title, overlap in overlaps.items():
        maps[title] = HeatMap(overlap.similarities, overlap.names, overlap.names)
        min_similarity = min(min_similarity, float(np.nanmin(overlap.similarities, initial=1)))
    scale_begin = min_similarity if min_similarity > HIGH_SIMILARITY else 0
    return draw_heat_maps(maps, label="similarity", scale=ColourScale(low=scale_begin, high=1.0))


def draw_layers(overlaps: Mapping[str, Overlap]) -> Picture:
    """A panel by quantity: the mean similarity of two domains over the blocks, a line per kind of layer."""
    figure = make_figure((8.5, 0.8 + 2.6 * len(overlaps)))
    panels = figure.subplots(len(overlaps), 1, squeeze=False)[:, 0]
    descriptions = []
    for (title, overlap), axes in zip(overlaps.items(), panels, strict=True):
        for index, (kind, blocks) in enumerate(group_similarities(overlap).items()):
            similarities = np.array(list(blocks.values()))  # [block, pair of domains]
            similarities = similarities[:, np.isfinite(similarities).all(0)]
            if similarities.size == 0:
                continue

            numbers = list(blocks)
            means = similarities.mean(1)  # by block
            style = choose_series_style(index)
            axes.plot(
                numbers,
                means,
                label=escape_label(kind, width=30),
                markersize=5,
                color=style.colour,
                marker=style.marker,
                linestyle=style.dashes,
            )

            texts = []
            for number, mean in zip(numbers, means, strict=True):
                texts.append(f"{kind}, block {number}: {mean:.2f}")
            add_spots(axes, numbers, means, texts)
            axes.fill_between(
                numbers,
                similarities.min(1),
                similarities.max(1),
                color=style.colour,
                alpha=0.12,
                linewidth=0,
            )
            descriptions.append(f"{title}, {kind} {similarities.mean():.2f}")

        axes.set(ylim=(0, 1.02), ylabel="similarity of\ntwo domains", xlabel="block")
        axes.set_title(title, fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(color="0.92")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)

    return make_png(
        figure,
        description=f"Mean similarity of two domains, over all blocks: {list_descriptions(descriptions)}",
    )


def group_similarities(overlap: Overlap) -> dict[str, dict[int, np.ndarray]]:
    """The similarities [pair of domains] by kind of layer and number of the block."""
    pairs = np.triu_indices(len(overlap.names), 1)
    kinds: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for layer, similarities in overlap.by_layer.items():
        parts = re.fullmatch(r"(.*?)\.?(\d+)\.(.+)", layer)
        if parts is None:
            kinds[layer][0] = similarities[pairs]
            continue
        stack, number, kind = parts.groups()
        for side in ("decoder", "encoder"):
            if side in stack.split("."):
                kind = f"{side} {kind}"
        kinds[kind][int(number)] = similarities[pairs]
    return kinds


def draw_distributions(distributions: Mapping[str, Distribution]) -> Picture:
    """A panel for each model: the share of each unit in the product magnitudes of a layer, a line per text.
    Units come in the order of the first model's means; many units are drawn as up to MAX_UNITS means of
    neighbours."""
    first = next(iter(distributions.values()))
    order = first.shares.mean(0).argsort()[::-1]
    neighbours = np.array_split(order, min(len(order), MAX_UNITS))
    ranks = np.cumsum([0, *(len(units) for units in neighbours[:-1])])

    figure = make_figure((8.5, 0.8 + 2.6 * len(distributions)))
    panels = figure.subplots(len(distributions), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    largest = []
    for (row, distribution), axes in zip(distributions.items(), panels, strict=True):
        texts = zip(distribution.texts, distribution.shares, strict=True)
        for index, (text, shares) in enumerate(texts):
            heights = [100 * shares[units].mean() for units in neighbours]
            label = escape_label(text, width=30)
            axes.plot(ranks, heights, color=SERIES[index], linewidth=0.8, label=label)
        axes.set(yscale="log", ylabel="share of the\nlayer's sum, %")
        label_logarithm(axes.yaxis, 100 * first.shares)
        model = "base" if row == "base" else f"model after {escape_label(row, width=30)}"
        axes.set_title(f"{distribution.layer}, {model}", fontsize=9)
        axes.grid(axis="y", color="0.92")
        largest.append(f"{row} {100 * distribution.shares.max(1).mean():.2f} %")

    panels[-1].set_xlabel("unit, by its mean share in the first model")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return make_png(
        figure,
        description=f"Product magnitudes of {first.layer}, largest share: {list_descriptions(largest)}",
    )
