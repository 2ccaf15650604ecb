"""The pictures of one run, as PNG bytes that say in words what they show: see cpt.reporting.drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores
from cpt.reporting import drawing
from cpt.reporting.drawing import DASHES, FEW, SERIES, png, ticks
from cpt.reporting.frames import perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@np.errstate(over="ignore")
def perplexities(scores: Scores) -> np.ndarray:
    """The matrix as perplexities, [row, column]."""
    return np.exp(scores.matrix)


def heatmap(scores: Scores) -> bytes:
    """The matrix, coloured by the change in nats against the base model; a domain's own row is marked."""
    change = scores.matrix - scores.matrix[:1]
    columns, few, scale = len(scores.domains), len(scores.domains) <= FEW + 1, drawing.limits(change)
    figure, axes = drawing.draw_heat(
        change,
        rows=scores.rows,
        columns=scores.domains,
        few=few,
        label="change in nats per token\n(blue: better than base)",
        extend="both" if np.nanmax(np.abs(change), initial=0) > scale["vmax"] else "neither",
        cmap=drawing.diverging(),
        **scale,
    )
    axes.set(xlabel="test text", ylabel="model after stage")
    if few:
        _annotate(axes, scores=scores, strong=0.6 * scale["vmax"])
    mark_own(axes, scores=scores, columns=scores.domains)
    if GENERAL in scores.domains:
        axes.axvline(columns - 1.5, color="black", linewidth=1.5 if few else 0.8)
    return png(figure, told=_changes(scores))


def stages(scores: Scores) -> bytes:
    """Perplexity on each test text over the stages; a domain's own stage is marked."""
    figure = drawing.figure((8.5, 4.8))
    axes = figure.add_subplot()
    losses = perplexities(scores).T
    losses = np.where(np.isfinite(losses), losses, np.nan)
    axes.set_yscale("log")
    domains = [name for name in scores.domains if name != GENERAL]
    ends = _crowd(axes, losses[: len(domains)]) if len(domains) > FEW else _each(axes, losses, names=domains)
    _own_stages(axes, scores=scores, losses=losses, large=len(domains) <= FEW)
    if GENERAL in scores.domains:
        style = {"linestyle": "-.", "linewidth": 1.8, "marker": _dot(losses)}
        axes.plot(losses[-1], color="black", zorder=3, **style)
        ends[GENERAL] = (losses[-1], "black")
    drawing.plain_logarithm(axes.yaxis, losses)
    axes.set(xlabel="stages learned", ylabel="perplexity (log scale)")
    if len(scores.rows) <= FEW + 1:
        ticks(axes.xaxis, names=scores.rows, few=True, rotation=35)
    axes.grid(axis="y", color="0.9")
    drawing.direct_labels(axes, ends)
    return png(figure, told=_describe_means(scores))


def mixtures(scores: Scores) -> bytes:
    """The weight of each part in the last model's score of each text."""
    names, weights = part_weights(scores)
    few = max(weights.shape) <= FEW + 1
    how = {"cmap": "Blues", "vmin": 0, "vmax": 1, "few": few, "margin": 3.2, "label": "mean weight"}
    figure, axes = drawing.draw_heat(weights, rows=scores.domains, columns=names, **how)
    axes.set(xlabel="part of", ylabel="test text")
    for (row, column), value in np.ndenumerate(weights if few else weights[:0]):
        axes.text(
            column, row, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.6 else "black"
        )
    return png(figure, told=heaviest(scores))


def similarities(scores: Scores) -> bytes:
    """How alike the texts of any two domains are, both in the order learned; last with the general text."""
    told = scores.similarity
    names, values = told["names"], np.column_stack([told["matrix"], told["general"]])
    few = len(names) <= FEW
    others = values[:, :-1][~np.eye(len(names), dtype=bool)]
    bound = float(np.abs(np.append(others, values[:, -1])).max(initial=0)) or 1.0
    np.fill_diagonal(values, np.nan)  # each is as itself
    how = {"cmap": drawing.diverging(), "vmin": -bound, "vmax": bound, "few": few}
    label = "cosine of mean embeddings, centred\n(red: alike)"
    figure, axes = drawing.draw_heat(values, rows=names, columns=[*names, GENERAL], label=label, **how)
    axes.set(xlabel="domain, in the order learned", ylabel="domain, in the order learned")
    axes.axvline(len(names) - 0.5, color="black", linewidth=1.5 if few else 0.8)
    drawing.write_numbers(axes, values, white=np.abs(values) > 0.6 * bound, most=FEW + 1)
    return png(figure, told=describe_similarity(scores))


def describe_similarity(scores: Scores) -> str:
    """In words: how alike neighbours in the order are, against any two domains."""
    matrix = np.array(scores.similarity["matrix"])
    if len(matrix) < 2:
        return "One domain: there is nothing to compare it with."
    neighbours = np.diagonal(matrix, 1).mean()
    pairs = matrix[~np.eye(len(matrix), dtype=bool)].mean()
    return (
        f"Mean cosine of domains learned one after another: {neighbours:.2f}; of any two: {pairs:.2f}."
    ).replace("-", "−")


def part_weights(scores: Scores) -> tuple[list[str], np.ndarray]:
    """The parts, the base first, and their weights in the last model's score, [text, part]; 0 where a text
    was scored without a part."""
    names, last = ["base", *scores.learned], scores.parts[-1] if scores.parts else {}
    weights = [[last.get(text, {}).get(name, 0.0) for name in names] for text in scores.domains]
    return names, np.array(weights, dtype=float)


def heaviest(scores: Scores) -> str:
    """The heaviest part of each text in words, where parts scored it; of many texts the first."""
    names, weights = part_weights(scores)
    each = [
        f"{text}: {names[row.argmax()]} {row.max():.2f}"
        for text, row in zip(scores.domains, weights, strict=True)
        if row.any()
    ]
    more = f"; and {len(each) - FEW} more" if len(each) > FEW else ""
    return f"Heaviest part of the last model for each text. {'; '.join(each[:FEW])}{more}."


def mark_own(axes: Axes, *, scores: Scores, columns: Sequence[str]) -> None:
    """A frame round each domain's own row: what is below it was measured after the domain was learned."""
    cells = [(scores.rows.index(name), columns.index(name)) for name in scores.learned]
    drawing.frame_cells(axes, cells, width=2 if len(columns) <= FEW + 1 else 0.7)


def _changes(scores: Scores) -> str:
    """Where the last model's perplexity stands against the base's, text by text; of many texts the first."""
    before, after = perplexities(scores)[0].tolist(), perplexities(scores)[-1].tolist()
    each = [
        f"{name} {perplexity(old)} to {perplexity(new)}"
        for name, old, new in zip(scores.domains, before, after, strict=True)
    ]
    more = f"; and {len(each) - FEW} more" if len(each) > FEW else ""
    return f"Perplexity from {scores.rows[0]} to {scores.rows[-1]}: {'; '.join(each[:FEW])}{more}."


def _describe_means(scores: Scores) -> str:
    """The mean perplexity over the domains at the first and the last stage."""
    columns = [place for place, name in enumerate(scores.domains) if name != GENERAL]
    mean = perplexities(scores)[:, columns].mean(1)
    return (
        f"Mean perplexity over {len(columns)} domains: {perplexity(mean[0])} at the base, "
        f"{perplexity(mean[-1])} after {len(mean) - 1} stages."
    )


def _annotate(axes: Axes, *, scores: Scores, strong: float) -> None:
    change = scores.matrix - scores.matrix[:1]
    for (row, column), value in np.ndenumerate(perplexities(scores)):
        colour = "white" if abs(change[row, column]) > strong else "black"
        if np.isnan(value):  # not measured
            continue
        axes.text(column, row, perplexity(value), ha="center", va="center", fontsize=9, color=colour)


def _each(axes: Axes, losses: np.ndarray, *, names: Sequence[str]) -> dict[str, tuple[np.ndarray, str]]:
    """A line per domain; gives what the labels at their ends need."""
    ends = {}
    for place, name in enumerate(names):
        colour, dashes = SERIES[place % 6], DASHES[place // 6]
        axes.plot(losses[place], color=colour, linestyle=dashes, marker=".", linewidth=1.6)
        ends[name] = (losses[place], colour)
    return ends


def _crowd(axes: Axes, losses: np.ndarray) -> dict[str, tuple[np.ndarray, str]]:
    """Thin grey lines and, where all are measured, their median."""
    axes.plot(losses.T, color="0.6", linewidth=0.4, alpha=0.5, marker=_dot(losses))
    middle = np.median(losses, axis=0)
    axes.plot(middle, color=SERIES[0], linewidth=2.5, zorder=4, marker=_dot(losses))
    return {f"median of {len(losses)}": (middle, SERIES[0])}


def _dot(losses: np.ndarray) -> str:
    """A marker where there is a single stage and hence no line."""
    return "." if losses.shape[1] == 1 else ""


def _own_stages(axes: Axes, *, scores: Scores, losses: np.ndarray, large: bool) -> None:
    for place, name in enumerate(scores.learned):
        column, row = scores.domains.index(name), scores.rows.index(name)
        label = "own stage" if place == 0 else None
        style = {"s": 70, "linewidths": 1.8} if large else {"s": 5, "linewidths": 0.7}
        axes.scatter(
            row, losses[column, row], facecolors="none", edgecolors="black", zorder=5, label=label, **style
        )
    if scores.learned:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, markerscale=1 if large else 2)
