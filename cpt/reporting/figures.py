"""The figures of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.lines import Line2D
from pandas import DataFrame

from cpt.data.sources.base import GENERAL
from cpt.evaluation import task_metrics
from cpt.evaluation.scores import Scores
from cpt.reporting.drawing import (
    DASHES,
    FEW,
    SERIES,
    Picture,
    diverging,
    draw_heat,
    figure,
    limits,
    literal,
    plain_logarithm,
    png,
    sequential,
    ticks,
)
from cpt.reporting.frames import perplexity, shorten
from cpt.reporting.page import few

CURVES = {
    "lm": "loss (nats)",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_s": "tokens/s",
}


def draw_matrix(scores: Scores) -> Picture:
    """The matrix of perplexities, coloured by the change in nats against the base model; a domain's own stage
    is framed."""
    change, scale = scores.matrix - scores.matrix[:1], limits(scores.matrix - scores.matrix[:1])
    with np.errstate(over="ignore"):
        perplexities = np.exp(scores.matrix)
    ends = zip(scores.domains, perplexities[0].tolist(), perplexities[-1].tolist(), strict=True)
    ends = [f"{text} {perplexity(first)} to {perplexity(last)}" for text, first, last in ends]
    told = f"Perplexity from {scores.rows[0]} to {scores.rows[-1]}: {few(ends, between='; ')}."
    label = {"label": "change in nats per token\n(blue: better than base)", "cmap": diverging(), **scale}
    label["extend"] = "both" if np.nanmax(np.abs(change), initial=0) > scale["vmax"] else "neither"
    cells = {"numbers": perplexities, "show": perplexity, "white": np.abs(change) > 0.6 * scale["vmax"]}
    cells["framed"] = [(scores.rows.index(name), scores.domains.index(name)) for name in scores.learned]
    axes = {"x": "test text", "y": "model after stage", "last_apart": GENERAL in scores.domains}
    return draw_heat(change, rows=scores.rows, columns=scores.domains, told=told, **label, **cells, **axes)


def draw_text_curves(scores: Scores) -> Picture:
    """Perplexity on each test text over the stages; of many domains their median. A domain's own stage is
    marked."""
    with np.errstate(over="ignore"):
        losses = np.exp(scores.matrix).T
    losses[~np.isfinite(losses)] = np.nan
    domains = [name for name in scores.domains if name != GENERAL]
    many, dot = len(domains) > FEW, "." if len(scores.rows) == 1 else ""
    drawn = figure((8.5, 4.8))
    axes = drawn.add_subplot(yscale="log")
    if many:
        axes.plot(losses[: len(domains)].T, color="0.6", linewidth=0.4, alpha=0.5, marker=dot)
        median, label = np.median(losses[: len(domains)], axis=0), f"median of {len(domains)}"
        axes.plot(median, color=SERIES[0], linewidth=2.5, zorder=4, marker=dot, label=label)
    for place in [] if many else np.argsort(-losses[: len(domains), -1]):  # the legend as the lines end
        how = {"color": SERIES[place % 6], "linestyle": DASHES[place // 6], "marker": ".", "linewidth": 1.6}
        axes.plot(losses[place], label=literal(domains[place], width=30), **how)
    if GENERAL in scores.domains:
        how = {"color": "black", "linestyle": "-.", "linewidth": 1.8, "marker": dot, "zorder": 3}
        axes.plot(losses[-1], label=GENERAL, **how)
    own = [(scores.rows.index(name), scores.domains.index(name)) for name in scores.learned]
    if own:
        points = np.array([(row, losses[column, row]) for row, column in own]).T
        ring = {"facecolors": "none", "edgecolors": "black", "zorder": 5, "label": "own stage"}
        axes.scatter(*points, s=5 if many else 70, linewidths=0.7 if many else 1.8, **ring)
    plain_logarithm(axes.yaxis, losses)
    axes.set(xlabel="stages learned", ylabel="perplexity (log scale)")
    if len(scores.rows) <= FEW + 1:
        ticks(axes.xaxis, names=scores.rows, few=True, rotation=35)
    axes.grid(axis="y", color="0.9")
    drawn.legend(loc="outside right upper", frameon=False, fontsize=9)
    mean = losses[: len(domains)].mean(0)
    told = f"Mean perplexity over {len(domains)} domains: {perplexity(mean[0])} at the base, "
    return png(drawn, told=f"{told}{perplexity(mean[-1])} after {len(mean) - 1} stages.")


def draw_training(stages: Mapping[str, DataFrame], borders: Mapping[str, tuple[float, float]]) -> Picture:
    """A panel for each of CURVES over the tokens of the whole run, the index of the frames; `borders`: where
    each stage begins and ends."""
    shown = [term for term in CURVES if any(term in curves for curves in stages.values())]
    drawn = figure((10, 1.2 + 1.7 * len(shown)))
    grid = drawn.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for term, axes in zip(shown, grid, strict=True):
        curves = [each[term].dropna() for each in stages.values() if term in each]
        for curve in curves:
            axes.plot(curve.index, curve, color=SERIES[0], linewidth=1.1, marker="." * (len(curve) < 3))
        if term == "grad_norm" and all((curve > 0).all() for curve in curves):
            axes.set_yscale("log")
        axes.set_ylabel(CURVES[term], fontsize=9)
        axes.grid(axis="y", color="0.92")
        for begin, _ in borders.values():
            axes.axvline(begin, color="0.75", linewidth=0.8, zorder=0)
    above, step = grid[0].secondary_xaxis("top"), -(-len(borders) // FEW)
    labels = [literal(name, width=18) for name in list(borders)[::step]]
    above.set_xticks([sum(each) / 2 for each in borders.values()][::step], labels, fontsize=8)
    above.tick_params(length=0)
    grid[-1].set_xlabel("tokens read by the optimizer steps, all stages")
    ends = [f"{name} {each['lm'].dropna().iloc[-1]:.3f}" for name, each in stages.items() if "lm" in each]
    return png(drawn, told=f"Loss at the last point of each stage: {few(ends, between='; ')}.")


def draw_monitor(scores: Scores) -> Picture:
    """The change of validation losses since each stage's first evaluation, the stages one after another."""
    drawn = figure((11, 4.2))
    axes = drawn.add_subplot()
    begin, middles, told, bound = 0, [], [], False
    for name, stage in scores.monitor.items():
        steps = begin + np.array(stage["steps"])
        lines = {text: np.array(values) - values[0] for text, values in stage["nll"].items()}
        own = {name} if name in lines else set(lines) - {GENERAL}
        for text, line in lines.items():
            if text in own:
                axes.plot(steps, line, color=SERIES[0], linewidth=1.4, linestyle="--")
            elif text != GENERAL:
                axes.plot(steps, line, color=SERIES[1], linewidth=0.9, alpha=0.7)
        if GENERAL in lines:
            low, high = np.array(stage["rise"][GENERAL], float).T
            axes.plot(steps, lines[GENERAL], color="black", linewidth=1.6)
            axes.fill_between(steps, low, high, color="black", alpha=0.15, linewidth=0)
            told.append(f"{name} {lines[GENERAL][-1]:+.3f}".replace("-", "−"))
        budget = stage.get("budget") or {"drift": {}}
        for text, seen in budget["drift"].items():
            if seen[0][0] is not None:
                height, colour = (
                    budget["allowed"][text] - seen[0][0],
                    "black" if text == GENERAL else SERIES[1],
                )
                axes.plot(steps[[0, -1]], [height] * 2, color=colour, linewidth=1.2, linestyle=":")
                bound = True
        axes.axvline(steps[-1], color="0.7", linewidth=0.8, linestyle=":" if stage["ended"] else "-")
        middles.append((steps[0] + steps[-1]) / 2)
        begin = int(steps[-1])
    axes.axhline(0, color="0.6", linewidth=0.8)
    step = 1 if len(middles) <= FEW else -(-len(middles) // 30)
    names = [literal(name, width=18) for name in list(scores.monitor)[::step]]
    axes.set_xticks(middles[::step], names, rotation=30, ha="right", fontsize=9 if step == 1 else 7)
    axes.set(
        ylabel="change in nats per token\nsince the stage's first evaluation", xlabel="steps of the stage"
    )
    kinds = {
        "the domain itself": (SERIES[0], "--"),
        "past domains": (SERIES[1], "-"),
        "general text": ("black", "-"),
    }
    kinds |= {"what a budget allows": ("black", ":")} if bound else {}
    lines = [Line2D([], [], color=colour, linestyle=dashes) for colour, dashes in kinds.values()]
    axes.legend(lines, list(kinds), loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    title = "Change of the general text's loss while each domain was learned, nats"
    return png(drawn, told=f"{title}: {few(told, between='; ')}.")


def draw_parts(scores: Scores) -> Picture:
    """The weight of each of the model's parts, the base first, in the last model's score of each text."""
    names, last = ["base", *scores.learned], scores.parts[-1]
    weights = np.array([[last.get(text, {}).get(name, 0.0) for name in names] for text in scores.domains])
    heaviest = [
        f"{text}: {names[row.argmax()]} {row.max():.2f}"
        for text, row in zip(scores.domains, weights, strict=True)
        if row.any()
    ]
    told = f"Heaviest part of the last model for each text. {few(heaviest, between='; ')}."
    axes = {"x": "part of", "y": "test text", "margin": 3.2, "white": weights > 0.6}
    scale = {"label": "mean weight", "cmap": sequential(), "vmin": 0, "vmax": 1}
    return draw_heat(weights, rows=scores.domains, columns=names, told=told, **axes, **scale)


def draw_similarity(scores: Scores, told: str) -> Picture:
    """The similarity of the texts of any two domains in the order learned, and with the general text."""
    names = scores.similarity["names"]
    values = np.column_stack([scores.similarity["matrix"], scores.similarity["general"]]).astype(float)
    np.fill_diagonal(values, np.nan)
    bound = float(np.nanmax(np.abs(values), initial=0)) or 1.0
    axes = dict.fromkeys(("x", "y"), "domain, in the order learned") | {"last_apart": True}
    scale = {"label": "cosine of mean embeddings, centred\n(red: alike)", "vmin": -bound, "vmax": bound}
    how = {"cmap": diverging(), "white": np.abs(values) > 0.6 * bound, **axes, **scale}
    return draw_heat(values, rows=names, columns=[*names, GENERAL], told=told, **how)


def draw_endtasks(scores: Scores) -> Picture:
    """Each end task in its own metric, a mean over seeds."""
    matrix = task_metrics.over_seeds(task_metrics.headline(scores.endtasks))
    return draw_tasks(matrix, scores.rows, scores.endtasks["tasks"], kind="End-task scores")


def draw_answers(scores: Scores) -> Picture:
    """Each task in the measure that it is known by."""
    return draw_tasks(
        task_metrics.matrix_of(scores.answers), scores.rows, list(scores.answers["tasks"]), kind="Scores"
    )


def draw_tasks(matrix: np.ndarray, rows: Sequence[str], tasks: Sequence[str], *, kind: str) -> Picture:
    """Scores [row, task], shares of 1, in %, of the rows that were measured; a task's own stage is framed."""
    measured = np.flatnonzero(np.isfinite(matrix).any(1))
    matrix, rows = matrix[measured], [rows[row] for row in measured]
    last = [
        f"{task} {100 * score:.1f} %" for task, score in zip(tasks, matrix[-1], strict=True) if score == score
    ]
    told = f"{kind} of {len(rows)} models; after {rows[-1]}: {few(last, between=', ')}"
    axes = {"x": "task", "y": "model after stage", "label": "score, % (dark: better)", "cmap": sequential()}
    cells = {"show": "{:.1f}".format, "white": (np.nanmin(matrix) + np.nanmax(matrix)) / 2 < matrix}
    cells["framed"] = [(rows.index(task), column) for column, task in enumerate(tasks) if task in rows]
    return draw_heat(100 * matrix, rows=rows, columns=tasks, told=told, **axes, **cells)


def draw_diagnostics(means: DataFrame, title: str) -> Picture:
    """Means of what a method keeps, [part of the model, stage]."""
    values = means.to_numpy()
    first, last = (f"{means[name].mean():.3f} after {name}" for name in means.columns[[0, -1]])
    told, rows = f"{title}: mean {first}, {last}.", [part.removeprefix("model.") for part in means.index]
    names = {"rows": [shorten(part, width=34) for part in rows], "columns": list(means)}
    how = {"label": "mean", "x": "after stage", "margin": 4.2, "cmap": sequential(), "vmin": 0}
    return draw_heat(values, told=told, white=values > 0.6 * np.nanmax(values), **names, **how)
